"""How probes are run: by their own cadence, never twice at once, and off when they keep failing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from sentinel.daemon.probes.probe import Reading
from sentinel.daemon.probes.watch import COST_SHARE, HANGS_SECONDS, IDLE_FACTOR, MOST_FAILURES, STALE_FACTOR, Watched
from tests.waiting import until

SAID = [Reading("load_average", (), 1.0)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Counting:
    """A probe that says SAID, or fails, or hangs, or takes its time by the clock."""

    name = "counting"
    every_seconds = 1.0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls = 0
        self.failing = False
        self.takes_seconds = 0.0
        self.go = threading.Event()
        self.go.set()

    def read(self) -> list[Reading]:
        self.calls += 1
        self.go.wait(30)
        self.clock.now += self.takes_seconds
        if self.failing:
            raise RuntimeError("the counter is out of order")
        return SAID


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(clock: Clock) -> Counting:
    return Counting(clock)


def tick(watched: Watched, idle: bool = False) -> None:
    """And wait until what it started has ended."""
    watched.tick(idle)
    until(
        lambda: not any(thread.name == "sentinel-counting" for thread in threading.enumerate()), 10.0, "it has read"
    )


@contextmanager
def hanging(probe: Counting) -> Iterator[None]:
    probe.go.clear()
    yield
    probe.go.set()


def test_a_probe_is_called_by_its_cadence_and_more_rarely_while_nobody_trains(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    tick(watched)
    assert (probe.calls, watched.readings()) == (1, SAID)
    clock.now += 0.9
    tick(watched)
    assert probe.calls == 1
    clock.now += 0.2
    tick(watched, idle=True)
    assert probe.calls == 1
    clock.now += IDLE_FACTOR
    tick(watched, idle=True)
    assert probe.calls == 2
    assert watched.readings() == SAID, "what it said while idle is shown until it is called again"


def test_a_probe_that_takes_long_is_called_more_rarely(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    probe.takes_seconds = 0.5
    tick(watched)
    clock.now = 0.5 / COST_SHARE - 0.1
    tick(watched)
    assert probe.calls == 1
    clock.now = 0.5 / COST_SHARE
    tick(watched)
    assert probe.calls == 2


def test_a_probe_that_raises_is_isolated_and_switched_off_with_one_line(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    probe.failing = True
    with capture_logs() as logs:
        for _ in range(MOST_FAILURES + 2):
            tick(watched)
            clock.now += 2.0
    assert probe.calls == MOST_FAILURES
    assert watched.off
    assert watched.readings() == []
    (line,) = logs
    assert (line["probe"], line["error"]) == ("counting", "RuntimeError: the counter is out of order")


def test_failures_count_only_in_a_row(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    for attempt in range(4 * MOST_FAILURES):
        probe.failing = attempt % MOST_FAILURES != 0
        tick(watched)
        clock.now += 2.0
    assert probe.calls == 4 * MOST_FAILURES
    assert not watched.off


def test_a_probe_that_hangs_is_not_called_again_goes_stale_and_is_told_once(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    tick(watched)
    clock.now += 2.0
    with capture_logs() as logs, hanging(probe):
        watched.tick()
        until(lambda: probe.calls == 2, 10.0, "it hangs")
        for _ in range(3):
            clock.now += HANGS_SECONDS
            watched.tick()
        assert probe.calls == 2
        assert watched.readings() == []
    assert [line["event"] for line in logs] == ["a probe of this machine hangs"]
    tick(watched)
    clock.now += 1.0
    tick(watched)
    assert watched.readings() == SAID, "it came back"


def test_what_a_probe_said_long_ago_is_not_shown(clock: Clock, probe: Counting) -> None:
    watched = Watched(probe, clock)
    tick(watched)
    clock.now += STALE_FACTOR * probe.every_seconds + 0.1
    assert watched.readings() == []
