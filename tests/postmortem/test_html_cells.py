"""Where time went, who waited, how gradients were distributed: as the page draws them, and only where recorded."""

import random
from pathlib import Path
from typing import Any

import pytest

from sentinel.postmortem.cells import MOST_CELLS
from sentinel.postmortem.html_cells import cell_figures
from sentinel.postmortem.html_page import page
from sentinel.postmortem.series import Series, gather
from sentinel.sample import HISTOGRAM_EDGES
from sentinel.store.timeline import segments
from tests.postmortem.pages import crowded_run, full_run, quiet_run
from tests.postmortem.test_diagnosis import row
from tests.postmortem.test_html_page import MOST_BYTES, Found, page_of

TIMES = {"data_wait_seconds": 0.01, "forward_seconds": 0.02, "backward_seconds": 0.05, "optimizer_seconds": 0.01}
WAITED = {"communication_wait_seconds": 0.03, "communication_source": "ddp"}
BUCKETS = len(HISTOGRAM_EDGES) + 1


def series(
    rows: list[dict[str, Any]], *, back_to: int | None = None, of_machine: tuple[dict[str, Any], ...] = ()
) -> Series:
    known = [{"attempt": 1, "generation": 0, "target_step": 0}]
    known += [{"attempt": 1, "generation": 1, "target_step": back_to}] if back_to is not None else []
    return gather(segments(known), rows, of_machine)


def figures(found: Series) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in cell_figures(found)}


def column(figure: dict[str, Any], number: int) -> dict[str, float | None]:
    return {name: values[number] for name, values in zip(figure["rows"], figure["z"], strict=True)}


# ---------------------------------------------------------------- the parts of a step, and who waited


def test_parts_are_a_mean_over_the_ranks_and_add_up_to_a_mean_step():
    ranks = [
        row(1, rank=0, **TIMES, **WAITED),
        row(1, rank=1, **TIMES | {"backward_seconds": 0.02}, step_seconds=0.1),
    ]
    parts = column(figures(series(ranks))["parts"], 0)
    expected = {"data wait": 0.01, "forward": 0.02, "backward": 0.02, "communication wait": 0.015, "optimizer": 0.01}
    assert parts == pytest.approx({**expected, "other": 0.025})
    assert sum(parts.values()) == pytest.approx(0.1)


def test_of_a_long_run_the_parts_are_means_of_neighbouring_steps():
    rows = [row(step, **TIMES, step_seconds=0.1 if step % 2 else 0.3) for step in range(1, 5001)]
    figure = figures(series(rows))["parts"]
    assert MOST_CELLS <= len(figure["x"]) <= 2 * MOST_CELLS
    assert figure["x"][0][0] == 0.5
    assert figure["x"][-1][1] == 5000.5
    assert sum(column(figure, 3).values()) == pytest.approx(0.2, rel=0.01)


def test_each_rank_has_its_row_and_the_late_one_waits_least():
    ranks = [row(1, rank=0, **WAITED), row(1, rank=1, **WAITED | {"communication_wait_seconds": 0.001})]
    assert column(figures(series(ranks))["waits"], 0) == {"rank 0": 0.03, "rank 1": 0.001}


def test_neighbours_of_very_many_ranks_share_a_row():
    ranks = [
        row(1, rank=rank, communication_wait_seconds=float(rank), communication_source="ddp") for rank in range(200)
    ]
    figure = figures(series(ranks))["waits"]
    assert len(figure["rows"]) == 50
    assert column(figure, 0)["ranks 0 to 3"] == 3.0


def test_what_was_taken_back_is_in_cells_of_its_own():
    rows = [row(step, **TIMES) for step in range(1, 9)] + [row(step, 1, **TIMES) for step in range(5, 11)]
    figure = figures(series(rows, back_to=4))["parts"]
    assert figure["live"] == [1] * 4 + [0] * 4 + [1] * 6
    assert figure["steps"][8] == [4.5, 5.5]
    assert figure["x"][8] == [8.5, 9.5]


# ---------------------------------------------------------------- sampled


def sampled(step: int, generation: int = 0, rank: int = 0, **sample: Any) -> dict[str, Any]:
    return row(step, generation, rank, sampled=sample)


def test_a_sample_stands_until_the_next_one_of_its_generation():
    rows = [sampled(step, group_norms={"a": float(step)}) if step in {3, 6} else row(step) for step in range(1, 9)]
    figure = figures(series([*rows, row(9, 1), sampled(10, 1, group_norms={"a": 10.0})], back_to=8))["groups"]
    assert figure["x"] == [[2.5, 5.5], [5.5, 8.5], [9.5, 10.5]]
    assert figure["z"] == [[3.0, 6.0, 10.0]]


def test_values_are_shares_whatever_the_number_of_ranks_and_samples():
    counts = [0] * BUCKETS
    counts[10], counts[12] = 100, 300
    rows = [sampled(step, rank=rank, histogram=counts, zeros=400) for step in (1, 2) for rank in (0, 1)]
    found = series(rows)
    figure = figures(found)["histogram"]
    assert figure["rows"] == ["to 1e-07", "to 3e-07", "to 1e-06"]
    assert [values[0] for values in figure["z"]] == [0.25, 0.0, 0.75]
    assert found.columns["zeros_ratio"].at(0) == 0.5


def test_shards_of_which_some_did_not_sample_have_no_norm():
    one = {"grad_norm_local": 1.0, "grad_norm": 5.0}
    whole = [sampled(1, rank=rank, group_norms={"a": 3.0 + rank}) | one for rank in (0, 1)]
    part = [sampled(2, group_norms={"a": 5.0}) | one, row(2, rank=1) | one]
    figure = figures(series([*whole, *part]))["groups"]
    assert figure["z"] == [[5.0]]


def test_few_experts_are_shown_each_and_many_by_how_uneven_their_router_is():
    few = series([sampled(1, expert_load={"gate": [0.75, 0.25]})])
    assert column(figures(few)["experts"], 0) == {"gate 0": 0.75, "gate 1": 0.25}
    assert few.columns["expert_imbalance"].at(0) == 0.25
    many = series([sampled(1, expert_load={f"layers.{layer}": [1.0, *[0.0] * 7] for layer in range(20)})])
    assert "experts" not in figures(many)
    assert set(column(figures(many)["imbalance"], 0).values()) == {7.0}


def test_throughput_is_what_all_ranks_did_over_the_time_of_the_slowest():
    ranks = [row(1, rank=rank, tokens=100.0, samples=2.0, step_seconds=0.1 + rank * 0.1) for rank in (0, 1)]
    columns = series(ranks).columns
    assert columns["tokens_per_second"].at(0) == pytest.approx(1000.0)
    assert columns["samples_per_second"].at(0) == pytest.approx(20.0)


# ---------------------------------------------------------------- the page


def test_every_signal_has_its_plot_below_a_heading(tmp_path: Path):
    full_run(tmp_path)
    found = Found(page_of(tmp_path))
    drawn = {figure["name"] for figure in found.data["figures"]}
    assert drawn >= {
        "histogram",
        "groups",
        "update_ratio",
        "clip",
        "zeros",
        "parts",
        "waits",
        "tokens",
        "samples",
        "mfu",
    }
    assert drawn >= {"experts", "uneven", "timeline", "loss", "grad_norm", "lr", "step_time", "memory"}
    headings = [
        name for name in ("Learning", "Gradients and updates", "Time", "Machine", "Experts") if name in found.text
    ]
    assert len(headings) == 5


def test_what_is_absent_has_no_plot(tmp_path: Path):
    quiet_run(tmp_path)
    found = Found(page_of(tmp_path))
    drawn = [figure["name"] for figure in found.data["figures"]]
    assert drawn == ["timeline", "parts", "loss", "grad_norm", "lr", "loss_scale", "step_time", "memory"]
    assert "Experts" not in found.text
    boxes = [
        given["id"] for tag, given in found.elements if tag == "div" and (given.get("id") or "").startswith("plot-")
    ]
    assert sorted(boxes) == sorted(f"plot-{name}" for name in drawn)


def test_a_sampled_line_goes_from_sample_to_sample(tmp_path: Path):
    full_run(tmp_path, steps=100, every=20)
    (figure,) = [one for one in Found(page_of(tmp_path)).data["figures"] if one["name"] == "update_ratio"]
    live = figure["traces"][-1]
    assert [step for step in live["steps"] if step is not None] == [20, 40, 60, 80, 100]
    assert None not in live["y"][:4]


def test_a_long_run_of_many_ranks_with_noise_in_every_signal_and_hundreds_of_incidents_fits():
    plotly = pytest.importorskip("plotly.offline").get_plotlyjs()
    chance = random.Random(0)
    rows = [noisy(chance, step, rank) for step in range(1, 3001) for rank in range(16)]
    told = crowded_run(3000, incidents=400, snapshots=3000)
    measured = tuple(busy(chance, second) for second in range(1, 3001))
    text = page(told._replace(series=series(rows, of_machine=measured)), plotly)
    assert len(text.encode()) <= MOST_BYTES
    drawn = {figure["name"]: figure for figure in Found(text.replace(plotly, "")).data["figures"]}
    assert drawn.keys() >= {"gpu", "heat", "power", "cpu", "room", "network", "retransmits"}
    assert (len(drawn["waits"]["rows"]), len(drawn["groups"]["rows"]), len(drawn["experts"]["rows"])) == (16, 64, 64)


def noisy(chance: random.Random, step: int, rank: int) -> dict[str, Any]:
    """Every signal with noise in all its digits."""
    names = (
        "loss",
        "grad_norm",
        "lr",
        "loss_scale",
        "clip_fraction",
        "mfu_ratio",
        "tokens",
        "samples",
        *TIMES,
        *WAITED,
    )
    memory = ("host_memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes")
    values: dict[str, Any] = {name: chance.random() for name in names} | {
        name: 1e10 * chance.random() for name in memory
    }
    values |= {"communication_source": "ddp", "step_seconds": 10 + chance.random(), "time": float(step)}
    if step % 5 == 0 and rank < 2:
        load = [chance.random() for _ in range(64)]
        values["sampled"] = {
            "group_norms": {f"transformer.layers.{number}": 10 * chance.random() for number in range(64)},
            "histogram": [chance.randrange(10**6) for _ in range(BUCKETS)],
            "zeros": chance.randrange(10**6),
            "update_norm": chance.random(),
            "weight_norm": chance.random(),
            "expert_load": {"gate": [share / sum(load) for share in load]},
        }
    return row(step, rank=rank, **values)


def busy(chance: random.Random, second: int) -> dict[str, Any]:
    """A sample of a machine whose numbers never stand still."""
    ratios = ("gpu_utilization_ratio{0}", "gpu_utilization_ratio{1}", "cpu_utilization_ratio")
    large = ("gpu_power_watts{0}", "gpu_temperature_celsius{0}", "machine_memory_bytes{available}")
    large += ("disk_free_bytes{home}", "disk_free_bytes{cwd}")
    counters = ("network_bytes{eth0,sent}", "network_bytes{eth0,received}", "tcp_retransmits")
    values = {name: chance.random() for name in ratios} | {name: 1e10 * chance.random() for name in large}
    values |= {name: 1e9 * (second + chance.random() / 2) for name in counters}
    return {"attempt": 1, "rank": 0, "time": float(second), "sample": values}
