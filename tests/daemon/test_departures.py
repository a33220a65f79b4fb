"""A process that vanishes: what it left is taken in, what it never sent is counted, its run is ended."""

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("departures") / "home") as running:
        yield running


def dying(daemon: DaemonProcess, run_id: str, mode: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.daemon.dying_rank"),
            *(str(daemon.places.socket), str(daemon.places.spools), run_id, mode),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    return process


def kill(process: subprocess.Popen) -> None:
    process.kill()
    assert process.wait(10) == -9
    process.stdin.close()
    process.stdout.close()


def lost(daemon: DaemonProcess, run_id: str) -> dict:
    with History(daemon.database) as history:
        until(lambda: history.run(run_id)["status"] == "lost")
        return history.conservation(run_id)[0]


def ended(daemon: DaemonProcess) -> dict[str, int]:
    """Ends of runs by status, as a scraper sees them."""
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
        found = re.findall(
            r'^sentinel_runs_ended_total{status="(\w+)"} (\d+)\.0$', reply.read().decode(), re.MULTILINE
        )
    assert [status for status, _ in found] == ["completed", "failed", "lost"]
    return {status: int(count) for status, count in found if count != "0"}


def test_a_killed_process_is_noticed_its_spool_taken_in_and_the_rest_counted(daemon):
    kill(dying(daemon, "killed", "connected"))
    books = lost(daemon, "killed")
    assert (books["produced"], books["stored"], books["in_flight"]) == (17, 12, 0)
    assert books["dropped_by_reason"] == {"process_died": 5}
    with History(daemon.database) as history:
        assert [row["kind"] for row in history.incidents("killed")] == ["nonfinite_gradient"]
    until(lambda: not list(daemon.places.spools.glob("killed.*")))


def test_a_forked_worker_that_keeps_the_socket_open_does_not_keep_the_run_alive(daemon):
    process = dying(daemon, "forked", "forked")
    process.kill()
    assert process.wait(10) == -9
    assert lost(daemon, "forked")["in_flight"] == 0
    process.stdin.close()  # and the worker ends
    process.stdout.close()


def test_a_process_that_died_while_no_daemon_listened_is_taken_in_at_the_next_start(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        process = dying(daemon, "unheard", "connected")
        daemon.kill()
        kill(process)
        daemon.start()
        books = lost(daemon, "unheard")
        assert (books["produced"], books["stored"], books["in_flight"]) == (17, 12, 0)


def test_a_process_that_no_daemon_ever_heard_of_is_known_by_its_spool(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        kill(dying(daemon, "stranger", "spool-only"))
        assert daemon.terminate() == 0
        # And files that are no spools do not keep the daemon from starting.
        (daemon.places.spools / "x.0.y.spool").write_bytes(b"\x00\x00\x00\x02no")
        (daemon.places.spools / "empty.0.y.spool").write_bytes(b"")
        daemon.start()
        books = lost(daemon, "stranger")
        assert (books["produced"], books["stored"]) == (17, 2)
        assert books["dropped_by_reason"] == {"process_died": 15}
        left = sorted(path.name for path in daemon.places.spools.iterdir())
        assert left == ["empty.0.y.unreadable", "x.0.y.unreadable"]


def test_the_metrics_tell_a_lost_run_from_a_failed_and_a_completed_one_and_count_each_once(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        assert ended(daemon) == {}
        kill(dying(daemon, "vanishes", "connected"))
        lost(daemon, "vanishes")
        assert ended(daemon) == {"lost": 1}
        for status in ("failed", "completed"):
            with WireClient(daemon.places.socket, status) as client:
                client.start()
                client.end(0, status)
                client.all_stored()
            with History(daemon.database) as history:
                until(lambda: history.run(status)["status"] == status)
        assert ended(daemon) == {"lost": 1, "failed": 1, "completed": 1}


def test_one_killed_rank_of_two_makes_the_run_lost_once_and_not_before_the_other_has_ended(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon, WireClient(daemon.places.socket, "two", 1, 2) as other:
        other.start()
        process = dying(daemon, "two", "connected")
        kill(process)
        until(lambda: "process_died" in _reasons(daemon, "two"), 10.0, "the death is noticed")
        assert ended(daemon) == {}
        other.end(0)
        other.all_stored()
        lost(daemon, "two")
        assert ended(daemon) == {"lost": 1}


def test_a_run_that_was_lost_while_no_daemon_listened_is_counted_by_the_next_one(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        process = dying(daemon, "unheard", "connected")
        assert ended(daemon) == {}
        daemon.kill()
        kill(process)
        daemon.start()
        lost(daemon, "unheard")
        assert ended(daemon) == {"lost": 1}
        assert daemon.terminate() == 0
        daemon.start()
        assert ended(daemon) == {}, "it was counted once; this daemon has seen no run end"


def _reasons(daemon: DaemonProcess, run_id: str) -> set[str]:
    with History(daemon.database) as history:
        return {reason for books in history.conservation(run_id) for reason in books["dropped_by_reason"]}
