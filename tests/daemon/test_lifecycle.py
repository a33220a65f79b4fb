"""Start, lock, drain, leave: the life of a daemon as its user sees it."""

import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request

import pytest

from sentinel.daemon import lifetime
from sentinel.daemon.lock import Lock
from sentinel.daemon.rank import Fleet, Identity, Rank
from sentinel.errors import DaemonRunningError
from sentinel.records import Origin
from sentinel.store.history import History
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


def test_one_home_has_one_daemon(tmp_path):
    with DaemonProcess(tmp_path / "home") as first:
        second = subprocess.run(
            [sys.executable, "-m", "sentinel.cli", "daemon"],
            env=first.environ,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert second.returncode == 3
        assert str(first.process.pid) in second.stderr
        with WireClient(first.places.socket) as client:
            assert client.welcome is not None


def test_a_lock_is_free_again_after_its_holder(tmp_path):
    lock = Lock(tmp_path / "lock")
    with pytest.raises(DaemonRunningError):
        Lock(tmp_path / "lock")
    lock.release()
    Lock(tmp_path / "lock").release()


def test_sigterm_stores_and_acknowledges_what_was_accepted(tmp_path):
    with DaemonProcess(tmp_path / "home", SENTINEL_STORE__BATCH_SECONDS="60.0") as daemon:
        client = WireClient(daemon.places.socket, "drained")
        client.connect()
        client.start()
        client.all_stored()
        client.steps(1, 50)
        client.beat(step=50)
        # Telemetry waits for its batch, so nothing of it is stored yet; a status tells that it was accepted.
        until(lambda: _accepted(daemon, "drained") == client.seq)
        assert client.stored_seq < client.seq
        assert daemon.terminate() == 0
        client.all_stored()
        assert not daemon.places.socket.exists()
        assert not daemon.places.targets.exists()
        with History(daemon.database) as history:
            assert history.conservation("drained")[0]["stored"] == 51
            assert history.run("drained")["status"] == "running"
        log = daemon.places.database.with_name("sentinel.db-wal")
        assert not log.exists() or log.stat().st_size == 0
        client.close()


def _accepted(daemon: DaemonProcess, run_id: str) -> int:
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    updates = [line for line in lines if line.startswith("sentinel_updates_total") and f'run_id="{run_id}"' in line]
    return 1 + int(sum(float(line.rpartition(" ")[2]) for line in updates))


def test_it_ends_cleanly_by_the_keyboard_too(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait(15) == 0


def test_an_auto_started_daemon_leaves_after_its_last_run(tmp_path):
    with DaemonProcess(tmp_path / "home", "--auto", SENTINEL_DAEMON__LEAVE_SECONDS="0.5") as daemon:
        client = WireClient(daemon.places.socket, "only")
        client.connect()
        client.start()
        client.all_stored()
        time_alive = time.monotonic()
        assert daemon.process.poll() is None
        client.end(0)
        client.all_stored()
        assert daemon.wait(10) == 0
        assert time.monotonic() - time_alive < 10
        client.close()


def test_a_daemon_whose_home_was_removed_leaves(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        shutil.rmtree(daemon.home)
        assert daemon.wait(10) == 0
        assert "the database was removed" in daemon.log_text()


def test_a_daemon_that_a_person_started_stays():
    life = lifetime.Lifetime(Fleet(), leave_seconds=0.1, auto=False)
    assert not life.is_over(time.monotonic() + 1_000_000)


def test_an_auto_started_daemon_that_nobody_uses_leaves_after_a_minute():
    fleet = Fleet()
    life = lifetime.Lifetime(fleet, leave_seconds=5.0, auto=True)
    now = time.monotonic()
    assert not life.is_over(now + 59)
    assert life.is_over(now + 61)
    run = fleet.admit(Rank(Origin("r", 1, 0), Identity("n", 1, 0.0), 1))
    assert not life.is_over(now + 10_000)
    fleet.forget(run)
    fleet.last_end = now + 100
    assert not life.is_over(now + 104)
    assert life.is_over(now + 106)


def test_a_database_of_a_newer_sentinel_is_left_alone(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        assert daemon.terminate() == 0
        with sqlite3.connect(daemon.places.database) as connection:
            changed = connection.execute("UPDATE alembic_version SET version_num = '9999_future'")
            assert changed.rowcount == 1
        connection.close()
        daemon.launch()
        assert daemon.process.stdout.readline() == ""
        assert daemon.wait(20) == 1
        assert "newer" in daemon.log_text().splitlines()[-1]


def test_a_home_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with_no_home = DaemonProcess(tmp_path / "file" / "home")
    with_no_home.log = tmp_path / "log"
    with pytest.raises(FileExistsError):
        with_no_home.launch()
    done = subprocess.run(
        [sys.executable, "-m", "sentinel.cli", "daemon"],
        env=with_no_home.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "SENTINEL_HOME" in done.stderr


def test_settings_that_cannot_be_used_end_it_with_the_key_and_code_two(tmp_path):
    process = DaemonProcess(tmp_path / "home", SENTINEL_HTTP__PRT="1")
    process.launch()
    assert process.wait(20) == 2
    assert "did you mean 'http.port'" in process.log_text()


def test_without_a_free_port_it_goes_on_without_http(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"SENTINEL_HTTP__PORT": str(port), "SENTINEL_HTTP__PORTS": "1"}
        with DaemonProcess(tmp_path / "home", **variables) as daemon:
            assert daemon.url == ""
            assert "no free port" in daemon.log_text()
            assert not daemon.places.targets.exists()
            with WireClient(daemon.places.socket, "quiet") as client:
                client.start()
                client.all_stored()


def test_a_home_of_two_hundred_characters_works(tmp_path):
    home = tmp_path / ("h" * 200)
    with DaemonProcess(home) as daemon, WireClient(daemon.places.socket, "long") as client:
        client.start()
        client.all_stored()
        assert json.loads(daemon.places.targets.read_text())[0]["targets"] == [daemon.url.removeprefix("http://")]


def test_the_daemon_loads_no_torch():
    code = (
        "import sys, sentinel.daemon.app, sentinel.cli.daemon; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False False"
