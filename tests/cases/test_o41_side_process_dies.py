"""O41: the side process is killed or stopped, and training neither notices nor waits (wandb#6449, #6201)."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance, must_be_whole
from tests.waiting import until

AGAIN_SECONDS = 10.0  # for records to flow again
EXIT_SECONDS = 2.0  # most delay of the trainer's exit
BLOCKED_SECONDS = 0.5  # far beyond a step of 3 ms, even on a machine with other work
MORE = 100  # messages that prove a flow


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path) as opened:
        yield opened


@pytest.fixture
def job(home: Home) -> Job:
    started = home.start("steady", "--break-every", "100")
    started.said("trains")
    home.daemon()
    until(lambda: home.highest_step() >= 50, 20.0, "records arrive")
    return started


def test_a_killed_daemon_is_replaced_and_nothing_is_lost(home: Home, job: Job, record_property) -> None:
    killed, before = _strike(home, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: home.stored() > before + MORE, AGAIN_SECONDS, "records flow again")
    record_property("seconds until records flow", time.monotonic() - began)
    (successor,) = home.daemons()
    assert successor.pid != killed.pid
    end = _finish(job, record_property)
    found = home.ended()
    assert found["run"]["status"] == "completed"
    assert found["run"]["steps"] == end["step"]
    must_balance(found, dropped=0)
    must_be_whole(home.steps())
    _reflexes_are_all_there(found, end)
    assert len([line for line in job.told if "ended by signal 9" in line]) == 1
    assert len(job.told) == 2, "one greeting and one word about the daemon"


def test_a_stopped_daemon_blocks_nobody_and_catches_up(home: Home, job: Job, record_property) -> None:
    stopped, _ = _strike(home, signal.SIGSTOP)
    assert stopped.status() == "stopped"
    went_on = job.process.pid
    steps_then = _produced_by(job)
    until(lambda: _produced_by(job) > steps_then + 20_000, 30.0, "training goes on")
    before = home.stored()
    stopped.send_signal(signal.SIGCONT)
    until(lambda: home.stored() > before + MORE, AGAIN_SECONDS, "records flow again")
    end = _finish(job, record_property)
    assert job.process.pid == went_on
    found = home.ended()
    assert found["run"]["status"] == "completed"
    must_balance(found, dropped=0)
    must_be_whole(home.steps())
    _reflexes_are_all_there(found, end)


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_training_is_not_held_up(home: Home, job: Job, strike: signal.Signals, record_property) -> None:
    struck, _ = _strike(home, strike)
    end = _finish(job, record_property)
    if strike is signal.SIGSTOP:
        struck.send_signal(signal.SIGCONT)
    else:
        _later_daemon(home)
    found = home.ended()
    assert found["run"]["status"] == "completed"
    must_balance(found)
    _reflexes_are_all_there(found, end)


def _strike(home: Home, number: signal.Signals) -> tuple[Any, int]:
    """Send a signal to the daemon; it and the number of messages stored by then."""
    (daemon,) = home.daemons()
    daemon.send_signal(number)
    if number is signal.SIGKILL:
        daemon.wait(10)
    else:
        until(lambda: daemon.status() == "stopped", 10.0, "the daemon is stopped")
    return daemon, home.stored()


def _finish(job: Job, record_property: Any) -> Any:
    """End the training, and judge how it went."""
    job.tell("stop")
    end = job.finish()
    left_seconds = job.said("left")
    for name in ("median_seconds", "max_seconds"):
        record_property(name, end[name])
    record_property("left_seconds", left_seconds)
    assert end["finite"]
    assert end["broken"], "no NaN was there"
    assert end["max_seconds"] < BLOCKED_SECONDS, end
    assert left_seconds < EXIT_SECONDS
    assert "Traceback" not in job.errors
    return end


def _produced_by(job: Job) -> int:
    """How far the script's own CPU time went, as a sign of life that needs no daemon; in 10 us."""
    import psutil

    times = psutil.Process(job.process.pid).cpu_times()
    return int(1e5 * (times.user + times.system))


def _later_daemon(home: Home) -> None:
    """One that somebody starts afterwards, if the trainer's own start did not come up in time."""
    if not home.daemons():
        home.start_daemon()


def _reflexes_are_all_there(found: dict[str, Any], end: dict[str, Any]) -> None:
    """Every skipped update of the script is an action in the database, whoever received it."""
    steps = [
        action["applied_step"]
        for incident in found["incidents"]
        for action in incident["actions"]
        if action["action"] == "skip_update"
    ]
    assert sorted(steps) == end["broken"]
