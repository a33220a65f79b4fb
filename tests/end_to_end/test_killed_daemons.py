"""A daemon that is killed again and again, at random moments, in turns and in reflexes: the books stay exact."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.conftest import SEED
from tests.daemon.daemon_process import DaemonProcess
from tests.end_to_end.jobs import Home, Job, must_balance, must_be_whole
from tests.waiting import until

KILLS = 50
AGAIN_SECONDS = 10.0  # for records to flow again after the next daemon is started
MOST_WAIT_SECONDS = 0.8  # between a flow and the next kill
STEP_SECONDS = 1.5  # a prepared rank holds at most a second for a word that never comes
MORE = 30


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path, SENTINEL_DAEMON__AUTOSTART="false", SENTINEL_SNAPSHOT__EVERY_STEPS="20") as opened:
        yield opened


@pytest.mark.long
def test_every_record_is_there_once_and_every_decision_has_an_end(
    home: Home, repetitions: Callable[[int], int], record_property
) -> None:
    chance = random.Random(int(os.environ.get(SEED, "0")))
    job = home.start("steady", "--break-every", "70")
    job.said("trains")
    asked: list[bool] = []
    slowest = 0.0
    with _Daemons(home) as daemons:
        for number in range(repetitions(KILLS)):
            before = home.stored()
            began = time.monotonic()
            daemons.start()
            until(lambda before=before: home.stored() > before + MORE, AGAIN_SECONDS, "records flow again")
            slowest = max(slowest, time.monotonic() - began)
            turn = _ask_for_a_rollback(home, asked) if number % 2 else None
            threading.Event().wait(chance.uniform(0.0, MOST_WAIT_SECONDS))
            daemons.kill()
            if turn is not None:
                turn.join(30)
        daemons.start()
        end = _finish(job, record_property)
        daemons.kill()  # whether or not it could close the books
        daemons.start()
        found = home.ended()
    record_property("slowest seconds until records flow", slowest)
    _judge(home, found, end)
    assert len(asked) == repetitions(KILLS) // 2, "no turn was under way"


class _Daemons:
    """One after another on the same home, each killed."""

    def __init__(self, home: Home) -> None:
        self._process = DaemonProcess(home.path)
        self._process.environ = home.environ

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.end()

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()


def _ask_for_a_rollback(home: Home, asked: list[bool]) -> threading.Thread:
    """From another thread, so that the kill may come before, within or after the turn."""

    def ask() -> None:
        reply = home.ask("rollback")
        asked.append(reply is not None and reply.ok)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def _finish(job: Job, record_property: Any) -> Any:
    job.tell("stop")
    end = job.finish()
    for name in ("steps", "median_seconds", "max_seconds"):
        record_property(name, end[name])
    assert "Traceback" not in job.errors
    assert end["max_seconds"] < STEP_SECONDS, end
    assert end["finite"]
    return end


def _judge(home: Home, found: dict[str, Any], end: dict[str, Any]) -> None:
    must_balance(found, dropped=0)
    rows = home.steps()
    must_be_whole(rows)
    assert found["run"]["status"] == "completed"
    assert found["run"]["steps"] == end["step"] == max(row["step"] for row in rows if row["live"])
    decisions = [*found["requests"], *(one for incident in found["incidents"] for one in incident["actions"])]
    assert "pending" not in {decision["outcome"] for decision in decisions}
    rolled_back = [one for one in found["requests"] if one["outcome"] == "applied"]
    assert found["run"]["generations"] == len(rolled_back) + 1
    skipped = [one["applied_step"] for one in decisions if one["action"] == "skip_update"]
    # Where a turn set the gradients aside they reached nobody, and there was nothing to skip.
    turns = Counter(row["step"] for row in rows if row["result"] == "turn")
    lost = Counter(end["broken"]) - Counter(skipped)
    assert Counter(skipped) <= Counter(end["broken"])
    assert lost <= turns, "a reflex was lost"
    assert "open" not in {incident["status"] for incident in found["incidents"]}
