"""`sentinel ctl`, as a person types it."""

import json
import re
import subprocess
import sys
import threading

import pytest

from sentinel.records import Command
from sentinel.vocabulary import Quality, Reason
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.wire_client import WireClient
from tests.waiting import until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with DaemonProcess(tmp_path_factory.mktemp("ctl") / "home") as running:
        yield running


@pytest.fixture(scope="module")
def loop(daemon):
    client = WireClient(daemon.places.socket, "abcdef")
    client.connect()
    client.start()
    client.snapshot(0)
    client.steps(1, 30)
    client.all_stored()
    yield client
    client.close()


def ctl(daemon: DaemonProcess, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sentinel.cli", "ctl", *words],
        env=daemon.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def meanwhile(obey) -> threading.Thread:
    thread = threading.Thread(target=obey)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["latest", "abcdef", "abc", "name-of-abcdef"])
def test_a_run_may_be_named_in_four_ways(daemon, loop, name):
    done = ctl(daemon, name, "status", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["run_id"], told["steps"], told["ranks_connected"]) == ("abcdef", 30, 1)


def test_a_rollback_waits_for_its_outcome_and_tells_it(daemon, loop):
    obeying = meanwhile(lambda: loop.obey([(20, Quality.GOOD, "d"), (0, Quality.GOOD, "d")]))
    done = ctl(daemon, "latest", "rollback", "--to", "20", "--skip", "3")
    obeying.join(10)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"rollback applied at step \d+: back to step 20, 3 batches left out\n", done.stdout)


def test_a_refusal_is_exit_code_one_with_the_reason(daemon, loop):
    def refuse() -> None:
        loop.ack(loop.expect(Command), "refused", Reason.LOOP_CANNOT, text="no boundary")

    refusing = meanwhile(refuse)
    done = ctl(daemon, "latest", "pause", "--json")
    refusing.join(10)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["ok"], told["reason"], told["outcome"]) == (False, "loop_cannot", "refused")


def test_a_checkpoint_is_refused_until_there_is_a_disk_tier(daemon, loop):
    done = ctl(daemon, "latest", "checkpoint")
    assert done.returncode == 1
    assert "no_disk_tier" in done.stderr


def test_no_such_run_is_exit_code_four(daemon, loop):
    done = ctl(daemon, "nobody", "pause")
    assert done.returncode == 4
    assert "nobody" in done.stderr


@pytest.mark.parametrize(
    "words", [("latest", "dance"), ("latest",), ("latest", "pause", "--to", "3"), ("latest", "rollback", "--to", "x")]
)
def test_wrong_usage_is_exit_code_two(daemon, loop, words):
    assert ctl(daemon, *words).returncode == 2


def test_without_a_daemon_it_is_exit_code_five_but_status_knows_what_was(tmp_path):
    with DaemonProcess(tmp_path / "home") as daemon:
        with WireClient(daemon.places.socket, "gone") as client:
            client.start()
            client.steps(1, 3)
            client.end(3)
            client.all_stored()
        assert until(lambda: json.loads(ctl(daemon, "gone", "status", "--json").stdout)["status"] == "completed")
        over = ctl(daemon, "gone", "pause")
        assert over.returncode == 1
        assert "run_ended" in over.stderr
        assert daemon.terminate() == 0
        done = ctl(daemon, "gone", "pause")
        assert done.returncode == 5
        assert "no daemon answers" in done.stderr
        known = ctl(daemon, "gone", "status", "--json")
        assert known.returncode == 0
        assert json.loads(known.stdout)["source"] == "database"
        assert ctl(daemon, "nobody", "status").returncode == 4
