"""Two gloo ranks under DDP: both are watched through the adapters, and the reflex skips the same update on both."""

import socket
import sys
from collections.abc import Iterator

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance
from tests.hooks.frameworks import FRAMEWORKS
from tests.hooks.scripts.frameworks_ranks import NAN_UPDATE, UPDATES


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("framework-ranks"), HF_HUB_OFFLINE="1") as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(home: Home) -> Iterator[list[Job]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in ("0", "1"):
        folder = home.folder / f"rank-{rank}"
        command = [sys.executable, "-m", "tests.hooks.scripts.frameworks_ranks", str(folder), rank, port]
        started.append(Job([*command, *FRAMEWORKS], folder, home.environ))
    try:
        for job in started:
            job.finish(180)
        yield started
    finally:
        for job in started:
            job.end()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_update_of_both_ranks_is_stored_and_the_nan_is_skipped_on_both(home: Home, jobs, name: str) -> None:
    ends = [job.said(name) for job in jobs]
    assert ends[0]["nan_fired"] == 1
    assert ends[0]["digest"] == ends[1]["digest"]
    assert {end["updates"] for end in ends} == {UPDATES}
    found, rows = home.ended(name), home.steps(name)
    assert (found["run"]["status"], found["run"]["world_size"]) == ("completed", 2)
    by_rank = [[row for row in rows if row["rank"] == rank] for rank in (0, 1)]
    for mine in by_rank:
        assert [row["step"] for row in mine] == list(range(1, UPDATES + 1))
        assert [row["step"] for row in mine if row["result"] == "reflex"] == [NAN_UPDATE]
    pairs = [pair for pair in zip(*by_rank, strict=True) if pair[0]["step"] != NAN_UPDATE]
    assert all(one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6) for one, other in pairs)
    assert all(one["loss"] != other["loss"] for one, other in pairs)
    must_balance(found, dropped=0)


def test_only_rank_0_greets(jobs) -> None:
    greetings = [[line for line in job.told if "turn off:" in line] for job in jobs]
    assert [len(lines) for lines in greetings] == [len(FRAMEWORKS), 0]
