"""A process that vanishes: what it left is taken in, what it never sent is counted, its run is ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
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
