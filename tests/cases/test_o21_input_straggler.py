"""O21, input straggler: one rank's loader is slow, and the others are not blamed (dlrover#678, marin#7681)."""

import socket
import statistics
from collections.abc import Iterator

import pytest

from tests.end_to_end.jobs import Home
from tests.end_to_end.scripts.waiting_ranks import LOADER_SECONDS, SLOW_LOADER, STEPS

WORLD = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("o21")) as opened:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        jobs = [opened.start("waiting_ranks", str(rank), str(WORLD), port, "loader") for rank in range(WORLD)]
        for job in jobs:
            job.finish(120)
        opened.ended("loader")
        yield opened


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_slow_loader_is_data_wait_on_its_rank_and_communication_wait_on_the_others(home: Home, rank: int) -> None:
    rows = [row for row in home.steps("loader") if row["rank"] == rank]
    assert len(rows) == STEPS
    waits = statistics.median(row["communication_wait_seconds"] for row in rows)
    data = statistics.median(row["data_wait_seconds"] for row in rows)
    if rank == SLOW_LOADER:
        assert data >= LOADER_SECONDS, "the slow loader did not fire"
        assert waits < 0.3 * LOADER_SECONDS
    else:
        assert data < 0.3 * LOADER_SECONDS
        assert 0.7 * LOADER_SECONDS < waits < 1.6 * LOADER_SECONDS
