"""FSDP2 on two gloo ranks and on one: the same series, against torch's own global norm; no collective of ours."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance
from tests.end_to_end.scripts.sharded_ranks import NAN_AT, STEPS

SCENARIOS = ("plain", "mixed", "replicated", "clipped", "nan")
SOURCES = {"clipped": {"clip"}}
WORLDS = (1, 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("sharded")) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(home: Home) -> dict[int, list[Job]]:
    started: dict[int, list[Job]] = {}
    for world in WORLDS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = [home.start("sharded_ranks", str(rank), str(world), port, *SCENARIOS) for rank in range(world)]
        for job in ranks:
            job.finish(120)
        started[world] = ranks
    return started


def series(home: Home, run_id: str, rank: int) -> list[dict[str, Any]]:
    home.ended(run_id)
    rows = [row for row in home.steps(run_id) if row["rank"] == rank]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_norm_is_torchs_own_on_every_rank(home, jobs, scenario: str, world: int) -> None:
    truth = jobs[world][0].said(f"{scenario}-{world}")
    for rank in range(world):
        rows = series(home, f"{scenario}-{world}", rank)
        assert [row["grad_norm"] for row in rows] == pytest.approx(truth, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("scenario", ["plain", "mixed", "replicated"])
def test_one_rank_and_two_tell_the_same_of_the_same_global_batch(home, jobs, scenario: str) -> None:
    one, two = (series(home, f"{scenario}-{world}", 0) for world in WORLDS)
    for row in two:
        assert row["grad_norm_source"] == "local"
        assert 0.0 < row["grad_norm_local"] < row["grad_norm"]
    assert all(row["grad_norm_local"] is None for row in one)
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-5)


def test_a_loop_that_clips_has_gathered_the_global_norm_already(home, jobs) -> None:
    rows = series(home, "clipped-2", 1)
    assert {row["grad_norm_source"] for row in rows} == {"clip"}
    assert {row["grad_norm_local"] for row in rows} == {None}


def test_a_nan_in_one_ranks_shard_is_certain_and_names_the_rank(home, jobs) -> None:
    assert str(jobs[2][0].said("nan-2")[NAN_AT - 1]) == "nan", "the NaN did not fire"
    incidents = home.ended("nan-2")["incidents"]
    of_gradient = [one for one in incidents if one["kind"] == "nonfinite_gradient" and one["ranks"] == [1]]
    assert [(one["tier"], one["first_step"]) for one in of_gradient] == [("T0", NAN_AT)]
    rows = series(home, "nan-2", 1)
    assert str(rows[NAN_AT - 1]["grad_norm_local"]) == "nan"


def test_export_tells_the_global_norm_and_the_books_balance(home, jobs) -> None:
    found = home.ended("plain-2")
    must_balance(found, dropped=0)
    lines = [json.loads(line) for line in home.cli("export", "plain-2").stdout.splitlines()]
    assert len(lines) == 2 * STEPS
    truth = dict(enumerate(jobs[2][0].said("plain-2"), 1))
    assert all(line["grad_norm"] == pytest.approx(truth[line["step"]], rel=1e-5) for line in lines)
