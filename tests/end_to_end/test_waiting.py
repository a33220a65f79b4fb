"""Three gloo ranks, one of them late: the others say how long they waited, each kind of loop by its best source."""

import socket
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job
from tests.end_to_end.scripts.waiting_ranks import LATE, LATE_SECONDS, PIECES, STEPS

SCENARIOS = {  # name -> (where the wait is seen, how long it is, steps that cannot tell)
    "hook": ("ddp", LATE_SECONDS, 0),
    "unused": ("ddp", LATE_SECONDS, 0),
    "recomputed": ("ddp", LATE_SECONDS, 1),  # the first backward of a static graph
    "accumulated": ("ddp", PIECES * LATE_SECONDS, 0),
    "wrapped_later": ("ddp", LATE_SECONDS, 0),
    "fsdp2": ("work", LATE_SECONDS, 1),
    "own": ("work", LATE_SECONDS, 1),
}
WORLD = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("waiting")) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(home: Home) -> list[Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [home.start("waiting_ranks", str(rank), str(WORLD), port, *SCENARIOS) for rank in range(WORLD)]
    for job in started:
        job.finish(180)
    return started


def of_rank(home: Home, scenario: str) -> list[list[dict[str, Any]]]:
    home.ended(scenario)
    rows = home.steps(scenario)
    return [[row for row in rows if row["rank"] == rank] for rank in range(WORLD)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_punctual_ranks_wait_as_long_as_the_late_one_is_late(home: Home, jobs: list[Job], scenario: str) -> None:
    source, late_seconds, untold = SCENARIOS[scenario]
    delays = [job.said(scenario)["delays"] for job in jobs]
    assert delays[LATE] == STEPS * (PIECES if scenario == "accumulated" else 1), "the delay did not fire"
    for rank, rows in enumerate(of_rank(home, scenario)):
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        known = [row for row in rows if row["communication_wait_seconds"] is not None]
        assert len(known) == STEPS - untold
        assert {row["communication_source"] for row in known} == {source}
        median = statistics.median(row["communication_wait_seconds"] for row in known)
        if rank == LATE:
            assert median < 0.5 * late_seconds
        else:
            assert 0.8 * late_seconds < median < 1.6 * late_seconds


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_wait_is_a_part_of_its_step(home: Home, jobs: list[Job], scenario: str) -> None:
    for row in (row for rows in of_rank(home, scenario) for row in rows):
        if row["communication_wait_seconds"] is not None and row["step_seconds"] is not None:
            assert 0.0 <= row["communication_wait_seconds"] <= row["step_seconds"]


def test_the_users_own_communication_hook_goes_on_working(jobs: list[Job]) -> None:
    assert [job.said("hook")["hook_calls"] for job in jobs] == [STEPS] * WORLD
