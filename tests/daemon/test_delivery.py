"""What a rank sends is stored once, acknowledged after that, and accounted for exactly."""

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from sentinel.records import Roster, Stored, Welcome
from sentinel.store.history import History
from sentinel.vocabulary import RunStatus
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("delivery") / "home") as running:
        yield running


def books(daemon: DaemonProcess, run_id: str) -> dict:
    with History(daemon.database) as history:
        return history.conservation(run_id)[0]


def status(daemon: DaemonProcess, run_id: str) -> str:
    with History(daemon.database) as history:
        return str(history.run(run_id)["status"])


def test_a_new_rank_is_welcomed_as_attempt_one_and_told_where_to_look(daemon):
    with WireClient(daemon.places.socket, "fresh") as client:
        assert client.welcome is not None
        assert client.welcome.attempt == 1
        assert client.welcome.stored_seq == 0
        assert client.welcome.may_act
        assert client.welcome.url == daemon.url


def test_stored_means_it_is_in_the_database(daemon):
    with WireClient(daemon.places.socket, "stored") as client:
        client.start()
        client.steps(1, 100)
        client.all_stored()
        found = books(daemon, "stored")
        assert (found["produced"], found["stored"], found["dropped"]) == (101, 101, 0)


def test_every_step_record_carries_the_host_memory_that_the_daemon_measured(daemon):
    with WireClient(daemon.places.socket, "memory") as client:
        client.start()
        client.steps(1, 3)
        client.all_stored()
        with History(daemon.database) as history:
            rows = list(history.steps("memory"))
    assert len(rows) == 3
    assert all(row["host_memory_bytes"] > 1_000_000 for row in rows)


def test_what_is_sent_twice_is_stored_once_and_acknowledged_again(daemon):
    with WireClient(daemon.places.socket, "twice") as client:
        client.start()
        record = client.step(1)
        client.all_stored()
        client.inbox.clear()
        client.put(record)
        assert client.expect(Stored).seq == client.seq
        assert books(daemon, "twice")["stored"] == 2


def test_a_gap_is_counted_by_its_reason(daemon):
    with WireClient(daemon.places.socket, "gap") as client:
        client.start()
        client.drop(7)
        client.step(9)
        client.all_stored()
        found = books(daemon, "gap")
        assert (found["produced"], found["stored"], found["dropped"]) == (9, 2, 7)
        assert found["dropped_by_reason"] == {"outbox_full": 7}


def test_a_hole_that_nobody_explains_is_counted_as_unexplained(daemon):
    with WireClient(daemon.places.socket, "hole") as client:
        client.start()
        client.seq += 3
        client.step(5)
        client.all_stored()
        assert books(daemon, "hole")["dropped_by_reason"] == {"unexplained": 3}


def test_the_same_process_comes_back_as_the_same_attempt_and_replaces_its_old_connection(daemon):
    with WireClient(daemon.places.socket, "back") as client:
        client.start()
        client.all_stored()
        old = client.socket
        client.socket = None
        client.connect()
        assert client.welcome is not None
        assert (client.welcome.attempt, client.welcome.stored_seq) == (1, 1)
        assert old is not None
        old.settimeout(10)
        assert old.recv(1 << 16) == b""
        old.close()
        client.step(1)
        client.all_stored()


def test_another_process_of_the_same_rank_is_the_next_attempt_and_reopens_the_run(daemon):
    with WireClient(daemon.places.socket, "again") as first:
        first.start()
        first.end(0)
        first.all_stored()
    until(lambda: status(daemon, "again") == RunStatus.COMPLETED)
    with WireClient(daemon.places.socket, "again") as second:
        assert second.welcome is not None
        assert second.welcome.attempt == 2
        second.start()
        second.all_stored()
        assert status(daemon, "again") == RunStatus.RUNNING


def test_a_process_that_missed_the_last_acknowledgement_hears_it_and_the_run_stays_ended(daemon):
    client = WireClient(daemon.places.socket, "late")
    client.connect()
    client.start()
    client.end(0)
    client.all_stored()
    until(lambda: status(daemon, "late") == RunStatus.COMPLETED)
    client.connect()
    assert client.welcome is not None
    assert client.welcome.stored_seq == client.seq
    client.close()
    assert status(daemon, "late") == RunStatus.COMPLETED


def test_an_exception_in_the_loop_makes_the_run_failed(daemon):
    with WireClient(daemon.places.socket, "raised") as client:
        client.start()
        client.end(3, status="failed")
        client.all_stored()
    assert until(lambda: status(daemon, "raised") == RunStatus.FAILED)


def test_a_second_living_process_takes_the_rank_over(daemon):
    first = WireClient(daemon.places.socket, "taken")
    first.connect()
    first.start()
    first.all_stored()
    with WireClient(daemon.places.socket, "taken") as second:
        assert second.welcome is not None
        assert second.welcome.attempt == 2
        assert first.is_cut_off()
        second.start()
        second.all_stored()
        assert status(daemon, "taken") == RunStatus.RUNNING
    first.close()


def test_every_rank_hears_how_many_of_the_world_are_there(daemon):
    with WireClient(daemon.places.socket, "world", rank=0, world_size=2) as one:
        assert one.expect(Roster) == Roster(1, 2, may_act=False)
        with WireClient(daemon.places.socket, "world", rank=1, world_size=2) as two:
            assert one.expect(Roster) == Roster(2, 2, may_act=True)
            assert two.expect(Roster) == Roster(2, 2, may_act=True)
        assert one.expect(Roster) == Roster(1, 2, may_act=False)


def test_a_daemon_that_was_stopped_for_a_while_goes_on_as_if_nothing_was(tmp_path: Path):
    with DaemonProcess(tmp_path / "home") as daemon:
        assert daemon.process is not None
        client = WireClient(daemon.places.socket, "stopped")
        client.connect()
        client.start()
        client.all_stored()
        daemon.process.send_signal(signal.SIGSTOP)
        assert until(lambda: psutil.Process(daemon.process.pid).status() == psutil.STATUS_STOPPED)
        client.steps(1, 40)  # as much as the socket holds
        with pytest.raises(AssertionError, match="no Stored"):
            client.expect(Stored, 0.3, seq=41)
        daemon.process.send_signal(signal.SIGCONT)
        client.all_stored()
        assert books(daemon, "stopped")["stored"] == 41
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50 if os.environ.get("SENTINEL_TEST_LONG") else 3))
def test_killed_at_a_random_moment_and_started_again_it_has_every_record_exactly_once(tmp_path: Path, seed):
    dice = random.Random(seed)
    with DaemonProcess(tmp_path / "home") as daemon:
        client = WireClient(daemon.places.socket, "killed")
        client.connect()
        client.start()
        for step in range(1, dice.randrange(20, 400)):
            client.step(step)
        client.inbox.clear()
        daemon.kill()
        acknowledged = client.stored_seq
        client.close()
        assert books(daemon, "killed")["stored"] >= acknowledged
        for step in range(400, 410):
            client.step(step)
        daemon.start()
        welcome: Welcome = client.connect()
        assert welcome.attempt == 1
        assert welcome.stored_seq >= acknowledged
        client.all_stored()
        found = books(daemon, "killed")
        assert (found["produced"], found["stored"], found["dropped"]) == (client.seq, client.seq, 0)
        client.close()
