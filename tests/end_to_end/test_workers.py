"""Workers and forked children share the trainer's descriptors, and are not mistaken for it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.jobs import Home, must_balance, must_be_whole
from tests.end_to_end.scripts.workers import STEPS
from tests.waiting import until

NOTICED_SECONDS = 5.0
METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home(tmp_path) as opened:
        yield opened


def test_workers_of_every_kind_work_and_the_run_ends_although_a_child_lives_on(home: Home) -> None:
    job = home.start("workers", *METHODS)
    try:
        end = job.finish(120)
        found = home.ended(seconds=NOTICED_SECONDS)
        (child,) = _left_by(home)
        assert child.is_running()
    finally:
        job.tell("let go")
    assert end == {"step": len(METHODS) * STEPS, "finite": True}
    assert found["run"]["status"] == "completed"
    assert found["run"]["steps"] == len(METHODS) * STEPS
    must_balance(found, dropped=0)
    must_be_whole(home.steps())
    assert len(job.told) == 1, "children say nothing"
    child.wait(10)


def test_a_trainer_that_is_killed_among_its_workers_is_lost_within_seconds(home: Home) -> None:
    job = home.start("workers", "fork", "hold")
    pid = job.said("holds")
    workers = psutil.Process(pid).children()
    assert workers
    until(lambda: home.highest_step() >= STEPS // 2 - 1, 10.0, "its records are there")
    job.process.send_signal(signal.SIGKILL)
    job.wait(10)
    found = home.ended(seconds=NOTICED_SECONDS)
    assert found["run"]["status"] == "lost"
    assert found["run"]["steps"] >= STEPS // 2 - 1
    must_balance(found)
    until(lambda: not any(worker.is_running() for worker in workers), 30.0, "the workers notice, too")


def _left_by(home: Home) -> list[psutil.Process]:
    """Processes of this home's script that are still there, without its daemon."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(word.startswith(str(home.folder / "workers-")) for word in words):
                found.append(process)
        except psutil.Error:
            continue
    return found
