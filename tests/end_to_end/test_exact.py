"""Sentinel leaves no trace in the weights: not in a healthy run, and not in one that was rolled back and replayed."""

import json
import time
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance, must_be_whole
from tests.end_to_end.scripts.exact import BROKEN_AFTER, SETTINGS, STEPS
from tests.waiting import until

EVERY_STEPS = SETTINGS["snapshot"]["every_steps"]
LEAVE_SECONDS = 10.0  # for a daemon after its last run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("exact")) as opened:
        yield opened


@pytest.fixture(scope="module")
def job(home: Home) -> Job:
    return home.start("exact")


def test_a_healthy_run_is_bit_identical_with_and_without_sentinel(home: Home, job: Job) -> None:
    assert job.said("healthy") == job.said("clean")
    found = home.ended("healthy")
    assert found["run"]["steps"] == STEPS
    assert found["incidents"] == []
    assert len(found["checkpoints"]) >= STEPS // EVERY_STEPS, "no snapshots were taken"
    must_balance(found, dropped=0)
    must_be_whole(home.steps("healthy"))


def test_a_run_that_lost_steps_and_replayed_them_is_bit_identical_to_the_clean_one(home: Home, job: Job) -> None:
    assert job.said("broken") == BROKEN_AFTER
    target = BROKEN_AFTER - BROKEN_AFTER % EVERY_STEPS
    asked = _ctl_while(home, "replayed", "rollback", "--to", str(target), then=lambda: job.tell("go on"))
    assert asked["returncode"] == 0, asked
    assert (asked["outcome"], asked["target_step"]) == ("applied", target)
    assert asked["applied_step"] > BROKEN_AFTER
    assert job.said("replayed") == job.said("clean")
    found = home.ended("replayed")
    (request,) = found["requests"]
    assert (request["action"], request["outcome"], request["target_step"]) == ("rollback", "applied", target)
    assert request["skipped_batches"] == 0
    assert (found["run"]["steps"], found["run"]["generations"]) == (STEPS, 2)
    must_balance(found, dropped=0)
    must_be_whole(home.steps("replayed"))


def test_a_person_steers_a_run_and_every_answer_has_its_exit_code(home: Home, job: Job) -> None:
    job.said("endless")
    until(lambda: home.highest_step("endless") > 40, 30.0, "the endless run trains")
    assert _ctl(home, "forever", "status")["returncode"] == 0
    assert _ctl(home, "endless", "pause")["returncode"] == 0
    paused = home.ask("status", "endless")
    assert paused is not None
    assert paused.body["status"] == "paused"
    again = _ctl(home, "endless", "pause")
    assert (again["returncode"], again["reason"]) == (1, "busy")
    resumed = _ctl(home, "endless", "resume")
    assert (resumed["returncode"], resumed["outcome"]) == (0, "applied")
    checkpoint = _ctl(home, "endless", "checkpoint")
    assert (checkpoint["returncode"], checkpoint["reason"]) == (1, "no_disk_tier")
    far = _ctl(home, "endless", "rollback", "--to", "100000")
    assert (far["returncode"], far["reason"]) == (1, "no_snapshot")
    assert _ctl(home, "nobody", "pause")["returncode"] == 4
    assert home.cli("ctl", "endless", "dance").returncode == 2


def test_a_run_can_be_looked_at_while_it_is_going(home: Home, job: Job) -> None:
    assert job.process.poll() is None
    runs = {run["run_id"]: run for run in json.loads(home.cli("runs", "--json").stdout)}
    assert runs["endless"]["status"] == "running"
    going = json.loads(home.cli("postmortem", "endless", "--json").stdout)
    assert going["run"]["status"] == "running"
    assert [request["action"] for request in going["requests"]][:1] == ["pause"]
    told = home.cli("postmortem", "endless")
    assert told.returncode == 0
    assert "endless" in told.stdout


def test_a_stop_ends_the_loop_and_then_the_daemon_which_leaves_nothing_behind(home: Home, job: Job) -> None:
    assert len(home.daemons()) == 1
    assert _ctl(home, "endless", "stop")["returncode"] == 0
    job.finish()
    ended = home.ended("endless")
    assert (ended["run"]["status"], ended["run"]["error"]) == ("completed", "rank 0: stopped: requested")
    assert ended["run"]["steps"] == job.said("stopped")
    must_balance(ended, dropped=0)
    began = time.monotonic()
    until(lambda: not home.daemons(), LEAVE_SECONDS, "the daemon leaves")
    assert time.monotonic() - began < LEAVE_SECONDS
    assert list(home.places.runtime.iterdir()) == []
    assert not home.places.targets.exists()
    assert list(home.places.spools.iterdir()) == []
    assert _ctl(home, "endless", "pause")["returncode"] == 5


def _ctl(home: Home, *words: str) -> dict[str, Any]:
    done = home.cli("ctl", *words, "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    return {**told, "returncode": done.returncode, "stderr": done.stderr}


def _ctl_while(home: Home, run: str, *words: str, then: Callable[[], None]) -> dict[str, Any]:
    """Ask while the loop holds, and let it go on once the command is prepared."""
    answers: list[dict[str, Any]] = []
    asking = Thread(target=lambda: answers.append(_ctl(home, run, *words)))
    asking.start()
    until(lambda: _in_flight(home, run), 60.0, "the command is under way")
    then()
    asking.join(60)
    (answer,) = answers
    return answer


def _in_flight(home: Home, run: str) -> bool:
    reply = home.ask("status", run)
    return reply is not None and bool(reply.body["command_in_flight"])
