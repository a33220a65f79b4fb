"""Two ranks that come to differ: one incident for the run, nothing done, and no cry while they agree."""

from collections.abc import Iterator
from typing import Any

import pytest

from sentinel.records import Mark
from sentinel.sample import Sample
from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("comparing") / "home") as running:
        yield running


def two(daemon: DaemonProcess, run_id: str) -> list[WireClient]:
    ranks = [WireClient(daemon.places.socket, run_id, rank, 2) for rank in (0, 1)]
    for rank in ranks:
        rank.connect()
    for rank in ranks:
        rank.start()
    return ranks


def sample(rank: WireClient, step: int, bits: int = 7) -> None:
    rank.step(step, sampled=Sample(fingerprint={"layer": bits}))


def incidents(daemon: DaemonProcess, run_id: str) -> list[dict[str, Any]]:
    with History(daemon.database) as history:
        return history.incidents(run_id)


def end(daemon: DaemonProcess, ranks: list[WireClient], step: int) -> None:
    for rank in ranks:
        rank.end(step)
        rank.all_stored()
        rank.close()
    with History(daemon.database) as history:
        until(lambda: history.run(ranks[0].run_id)["status"] == "completed")


def test_one_incident_for_the_run_names_both_and_only_observes(daemon: DaemonProcess) -> None:
    ranks = two(daemon, "differ")
    for step in range(1, 61):
        for rank in ranks:
            if step % 10:
                rank.step(step)
            else:
                sample(rank, step, bits=8 if rank.rank == 1 and step >= 30 else 7)
    for rank in ranks:
        rank.all_stored()
        assert rank.expect(Mark).since_step == 21
    (incident,) = until(lambda: incidents(daemon, "differ"))
    assert (incident["kind"], incident["tier"], incident["ranks"]) == ("rank_desync", "T0", [0, 1])
    assert (incident["first_step"], incident["onset_step"]) == (30, 21)
    assert incident["evidence"]["groups"] == ["layer"]
    end(daemon, ranks, 60)
    (incident,) = incidents(daemon, "differ")
    assert (incident["status"], incident["last_step"]) == ("gave_up", 60)
    with History(daemon.database) as history:
        assert {(row["action"], row["reason"]) for row in history.actions("differ")} == {("none", "several_ranks")}


def test_ranks_that_agree_again_end_the_incident(daemon: DaemonProcess) -> None:
    ranks = two(daemon, "again")
    for step in range(1, 9):
        for rank in ranks:
            sample(rank, step, bits=8 if rank.rank == 1 and step == 3 else 7)
    for rank in ranks:
        rank.all_stored()
    until(lambda: [one["status"] for one in incidents(daemon, "again")] == ["resolved"])
    end(daemon, ranks, 8)


def test_a_daemon_that_comes_later_knows_that_the_ranks_agreed(tmp_path) -> None:
    with DaemonProcess(tmp_path / "home") as daemon:
        ranks = two(daemon, "learnt")
        for rank in ranks:
            sample(rank, 1)
            rank.all_stored()
        daemon.end()
        daemon.start()
        for rank in ranks:
            rank.connect()
        for rank in ranks:
            sample(rank, 2, bits=8 + rank.rank)
            rank.all_stored()
        (incident,) = until(lambda: incidents(daemon, "learnt"))
        assert (incident["kind"], incident["onset_step"]) == ("rank_desync", 2)
        end(daemon, ranks, 2)
