"""What a scraper sees of where time went, of throughput, of counters and of what is sampled."""

import math
import shutil
import subprocess
from typing import Any

import pytest

from sentinel.daemon.metrics import Metrics
from sentinel.daemon.sample_metrics import MOST_EXPERTS
from sentinel.daemon.samples import MOST_OPEN
from sentinel.detect.combining import MOST_GROUPS
from sentinel.records import StepRecord
from sentinel.sample import HISTOGRAM_EDGES, Sample
from sentinel.vocabulary import UpdateResult
from tests.daemon.test_metrics import OF_RANK, record, reflex, scrape, value

NAN = math.nan
BUCKETS = len(HISTOGRAM_EDGES) + 1
EVERYTHING: dict[str, Any] = {
    "communication_wait_seconds": 0.05,
    "communication_source": "ddp",
    "clip_fraction": 0.25,
    "scheduler_steps": 7,
    "applied": 5,
    "gradients_absent": 0,
    "tokens": 100.0,
    "samples": 10.0,
    "step_seconds": 0.5,
    "mfu_ratio": 0.4,
}
SAMPLE = Sample(
    group_norms={"embed": 0.5, "layers.0": 2.0},
    histogram=[1, 2, *[0] * (BUCKETS - 3), 3],
    zeros=6,
    update_norm=0.01,
    weight_norm=2.0,
    expert_load={"layers.0.gate": [0.5, 0.5, 0.0, 0.0]},
)


@pytest.fixture
def metrics() -> Metrics:
    return of_ranks(1)


def of_ranks(count: int) -> Metrics:
    made = Metrics()
    for rank in range(count):
        made.rank("r", rank).begin()
    return made


def series_of(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Value by labels but run_id and rank, in the order of their names."""
    return {
        tuple(text for label, text in labels if label not in OF_RANK): number
        for (found, labels), number in scrape(metrics).items()
        if found == name
    }


# ---------------------------------------------------------------- of every step


def test_every_number_of_a_step_is_shown(metrics):
    metrics.rank("r", 0).take(record(**EVERYTHING))
    expected = {
        "communication_wait_seconds": 0.05,
        "clip_fraction_ratio": 0.25,
        "scheduler_lead_steps": 2,
        "gradients_absent": 0,
        "tokens_per_second": 200.0,
        "samples_per_second": 20.0,
        "mfu_ratio": 0.4,
    }
    found = scrape(metrics)
    assert {name: found[f"sentinel_{name}", tuple(sorted(OF_RANK.items()))] for name in expected} == expected
    assert series_of(metrics, "sentinel_communication_source") == {("ddp",): 1}


def test_what_a_later_record_does_not_carry_is_gone(metrics):
    metrics.rank("r", 0).take(record(1, **EVERYTHING))
    metrics.rank("r", 0).take(record(2))
    left = {name for name, _ in scrape(metrics)}
    gone = ("communication_wait_seconds", "communication_source", "clip_fraction_ratio", "scheduler_lead_steps")
    gone = (*gone, "gradients_absent", "tokens_per_second", "samples_per_second", "mfu_ratio", "step_part_seconds")
    assert left.isdisjoint(f"sentinel_{name}" for name in gone)


def test_parts_of_a_step_add_up_to_it_and_hold_what_was_waited_once(metrics):
    times = {"data_wait_seconds": 0.1, "forward_seconds": 0.2, "backward_seconds": 0.5, "optimizer_seconds": 0.05}
    wait = {"communication_wait_seconds": 0.3, "communication_source": "ddp"}
    metrics.rank("r", 0).take(record(step_seconds=1.0, **times, **wait))
    parts = series_of(metrics, "sentinel_step_part_seconds")
    expected = {"data_wait": 0.1, "forward": 0.2, "backward": 0.2, "communication_wait": 0.3, "optimizer": 0.05}
    assert {part: seconds for (part,), seconds in parts.items()} == pytest.approx({**expected, "other": 0.15})
    assert sum(parts.values()) == pytest.approx(1.0)


def test_a_source_that_is_not_known_is_no_label_of_its_own(metrics):
    metrics.rank("r", 0).take(record(communication_wait_seconds=0.1, communication_source="x" * 100))
    assert series_of(metrics, "sentinel_communication_source") == {("other",): 1}


@pytest.mark.parametrize(
    "bad",
    [{"lr": NAN}, {"mfu_ratio": math.inf}, {"communication_wait_seconds": NAN}, {"sampled": Sample({"a": NAN})}],
)
def test_any_other_value_that_is_not_finite_is_counted_and_not_shown(metrics, bad):
    metrics.rank("r", 0).take(record(loss=1.0, **bad))
    assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what="other") == 1
    assert all(math.isfinite(number) for number in scrape(metrics).values())
    metrics.rank("r", 0).take(record(2, loss=1.0))
    assert value(metrics, "sentinel_nonfinite_total", **OF_RANK, what="other") == 1


@pytest.mark.parametrize("bad", [{"loss": NAN}, {"grad_norm": NAN}, {"result": UpdateResult.REFLEX}])
def test_what_follows_from_a_bad_loss_or_gradient_is_counted_once(metrics, bad):
    metrics.rank("r", 0).take(reflex(1)) if "result" in bad else None
    metrics.rank("r", 0).take(record(1, sampled=Sample({"a": NAN}), **bad))
    counts = series_of(metrics, "sentinel_nonfinite_total")
    assert counts[("other",)] == 0
    assert sum(counts.values()) == 1


# ---------------------------------------------------------------- sampled


def test_a_sample_is_shown_until_the_next_one(metrics):
    rank = metrics.rank("r", 0)
    rank.take(record(100, sampled=SAMPLE))
    rank.take(record(101))
    assert series_of(metrics, "sentinel_gradient_group_norm") == {("embed",): 0.5, ("layers.0",): 2.0}
    assert series_of(metrics, "sentinel_update_ratio") == {(): 0.005}
    assert series_of(metrics, "sentinel_gradient_zeros_ratio") == {(): 0.5}
    rank.take(record(200, sampled=Sample(group_norms={"embed": 0.25})))
    assert series_of(metrics, "sentinel_gradient_group_norm") == {("embed",): 0.25}
    assert series_of(metrics, "sentinel_update_ratio") == {(): 0.005}, "its own next sample has not come"


def test_gradient_values_are_buckets_that_add_up(metrics):
    metrics.rank("r", 0).take(record(100, sampled=SAMPLE))
    buckets = series_of(metrics, "sentinel_gradient_values_bucket")
    assert len(buckets) == BUCKETS
    by_edge = {float(edge): count for (edge,), count in buckets.items()}
    assert (by_edge[1e-12], by_edge[1e4], by_edge[math.inf]) == (1, 3, 6), "those that are 0 are in none"
    assert [by_edge[edge] for edge in sorted(by_edge)] == sorted(by_edge.values())


def test_a_histogram_of_another_length_is_not_shown(metrics):
    metrics.rank("r", 0).take(record(100, sampled=Sample(histogram=[1, 2], zeros=0)))
    assert series_of(metrics, "sentinel_gradient_values_bucket") == {}


def test_experts_have_their_load_and_how_uneven_it_is(metrics):
    metrics.rank("r", 0).take(record(100, sampled=SAMPLE))
    router = "layers.0.gate"
    loads = series_of(metrics, "sentinel_expert_load_ratio")
    assert loads == {("0", router): 0.5, ("1", router): 0.5, ("2", router): 0.0, ("3", router): 0.0}
    assert series_of(metrics, "sentinel_expert_imbalance") == {(router,): 1.0}


def test_however_many_layers_and_experts_there_are_the_series_are_bounded(metrics):
    many = {f"layers.{number}": 1.0 for number in range(1000)}
    routers = {name: [1 / 256] * 256 for name in many}
    metrics.rank("r", 0).take(record(100, sampled=Sample(group_norms=many, expert_load=routers)))
    assert len(series_of(metrics, "sentinel_gradient_group_norm")) == MOST_GROUPS
    assert len(series_of(metrics, "sentinel_expert_load_ratio")) == MOST_EXPERTS
    assert len(series_of(metrics, "sentinel_expert_imbalance")) == 64


# ---------------------------------------------------------------- of several ranks


def sampled(step: int, sample: Sample = SAMPLE, **more: Any) -> StepRecord:
    return record(step, sampled=sample, **more)


def test_a_run_has_one_value_however_many_ranks_hold_the_same_weights():
    metrics = of_ranks(3)
    for rank in range(3):
        metrics.rank("r", rank).take(sampled(100))
    assert series_of(metrics, "sentinel_gradient_group_norm") == {("embed",): 0.5, ("layers.0",): 2.0}
    assert series_of(metrics, "sentinel_update_ratio") == pytest.approx({(): 0.005})


def test_squares_of_shards_add_up():
    metrics = of_ranks(2)
    for rank, norm in enumerate((3.0, 4.0)):
        shard = Sample(group_norms={"all": norm}, update_norm=norm, weight_norm=10 * norm)
        metrics.rank("r", rank).take(sampled(100, shard, grad_norm_local=norm))
    assert series_of(metrics, "sentinel_gradient_group_norm") == {("all",): 5.0}
    assert series_of(metrics, "sentinel_update_ratio") == pytest.approx({(): 0.1})


def test_a_step_is_shown_when_every_rank_has_told_it():
    metrics = of_ranks(2)
    for step, norm in ((100, 1.0), (200, 2.0)):
        metrics.rank("r", 0).take(sampled(step, Sample(group_norms={"all": norm}), grad_norm_local=norm))
    metrics.rank("r", 1).take(sampled(100, Sample(group_norms={"all": 1.0}), grad_norm_local=1.0))
    assert series_of(metrics, "sentinel_gradient_group_norm") == {("all",): math.sqrt(2.0)}


def test_ranks_with_different_cadences_meet_at_the_coarsest():
    metrics = of_ranks(2)
    for step in range(10, 90, 10):
        metrics.rank("r", 0).take(sampled(step, Sample(update_norm=1.0, weight_norm=float(step))))
        if step % 40 == 0:
            metrics.rank("r", 1).take(sampled(step, Sample(update_norm=1.0, weight_norm=float(step))))
    assert series_of(metrics, "sentinel_update_ratio") == pytest.approx({(): 1 / 80})


def test_a_rank_that_does_not_sample_hides_the_others_only_for_a_few_samples():
    metrics = of_ranks(2)
    for step in range(1, MOST_OPEN + 1):
        metrics.rank("r", 0).take(sampled(step))
    assert series_of(metrics, "sentinel_update_ratio") == {}
    metrics.rank("r", 0).take(sampled(MOST_OPEN + 1))
    assert series_of(metrics, "sentinel_update_ratio") == {(): 0.005}


def test_records_that_come_in_batches_meet_all_the_same():
    metrics = of_ranks(2)
    for rank in range(2):
        for step in range(1, MOST_OPEN + 1):
            metrics.rank("r", rank).take(record(step, **local(1.2)))
    assert series_of(metrics, "sentinel_gradient_noise_scale") == pytest.approx({(): 3.52 / 0.56})


def test_shards_of_only_some_ranks_tell_nothing():
    metrics = of_ranks(2)
    for step in range(1, 50):
        metrics.rank("r", 0).take(sampled(step, grad_norm_local=1.0))
    assert series_of(metrics, "sentinel_update_ratio") == {}


def local(norm: float, **more: Any) -> dict[str, Any]:
    return {"grad_norm": 1.0, "samples": 4.0, "sampled": Sample(local_grad_norm=norm), **more}


def test_the_gradient_noise_scale_is_of_all_ranks_together():
    metrics = of_ranks(2)
    for step in range(1, 11):
        for rank in range(2):
            metrics.rank("r", rank).take(record(step, **local(2.0)))
    # Mean of the squares 4 = |G|^2 + S/4 and square of the mean 1 = |G|^2 + S/8: S = 24, |G|^2 = -2 tells nothing.
    assert series_of(metrics, "sentinel_gradient_noise_scale") == {}
    metrics = of_ranks(2)
    for step in range(1, 11):
        for rank in range(2):
            metrics.rank("r", rank).take(record(step, **local(1.2)))
    # 1.44 and 1: S = 3.52, |G|^2 = 0.56.
    assert series_of(metrics, "sentinel_gradient_noise_scale") == pytest.approx({(): 3.52 / 0.56})


def test_a_noise_scale_of_some_ranks_is_not_shown():
    metrics = of_ranks(2)
    metrics.run("r").info = {"name": "n", "mode": "protect", "world_size": "4"}
    for step in range(1, 30):
        for rank in range(2):
            metrics.rank("r", rank).take(record(step, **local(1.2)))
    assert series_of(metrics, "sentinel_gradient_noise_scale") == {}


def test_samples_go_with_the_last_rank():
    metrics = of_ranks(2)
    for rank in range(2):
        metrics.rank("r", rank).take(sampled(100))
    metrics.rank("r", 0).end()
    assert series_of(metrics, "sentinel_update_ratio") != {}
    metrics.rank("r", 1).end()
    assert series_of(metrics, "sentinel_update_ratio") == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(metrics):
    metrics.rank("r", 0).take(record(sampled=SAMPLE, **EVERYTHING))
    assert b"sentinel_gradient_values_bucket" in metrics.render()
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
