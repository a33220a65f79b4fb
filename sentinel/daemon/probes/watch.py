"""Run one probe: when it is due, in a thread of its own, and no longer once it keeps failing.

A probe may hang for ever in a call of the system, as on a network file system or in a driver. Then its thread hangs,
which ends with the process; what it said last grows stale and is shown no more, and all else goes on.
"""

import threading
import time
from collections.abc import Callable

import structlog

from sentinel.daemon.probes.probe import Probe, Reading

MOST_FAILURES = 3  # in a row
COST_SHARE = 0.05  # of the time that one probe may take
IDLE_FACTOR = 10  # how much more rarely it is called while nobody trains here
STALE_FACTOR = 1.5 * IDLE_FACTOR  # after so many cadences what it said says nothing about now
HANGS_SECONDS = 30.0

_log = structlog.get_logger()


class Watched:
    """A probe, what it said last, and how it fares. `tick` is for one thread, `readings` for any."""

    def __init__(self, probe: Probe, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe = probe
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._began = float("-inf")
        self._spacing = probe.every_seconds
        self._said: tuple[float, list[Reading]] = (float("-inf"), [])
        self._failures = 0
        self._told_hanging = False
        self.off = False

    def tick(self, idle: bool = False) -> None:
        """Start it if it is due and not under way."""
        now = self._clock()
        if self._thread is not None and self._thread.is_alive():
            self._tell_if_hanging(now)
            return
        if self.off or now < self._began + self._spacing * (IDLE_FACTOR if idle else 1):
            return
        self._began, self._told_hanging = now, False
        self._thread = threading.Thread(target=self._read, name=f"sentinel-{self._probe.name}", daemon=True)
        self._thread.start()

    def readings(self) -> list[Reading]:
        """What it said last, unless that is too long ago."""
        when, said = self._said
        return said if self._clock() - when <= self._spacing * STALE_FACTOR else []

    def _read(self) -> None:
        try:
            said = self._probe.read()
        except Exception as error:  # noqa: BLE001 - the boundary of a probe: whatever it raises is counted
            self._failed(error)
            return
        self._failures = 0
        ended = self._clock()
        self._spacing = max(self._probe.every_seconds, (ended - self._began) / COST_SHARE)
        self._said = (ended, said)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.off = self._failures >= MOST_FAILURES
        if self.off:
            _log.error(
                "a probe of this machine keeps failing and is switched off",
                probe=self._probe.name,
                failures=self._failures,
                error=f"{type(error).__name__}: {error}",
            )

    def _tell_if_hanging(self, now: float) -> None:
        if now - self._began > HANGS_SECONDS and not self._told_hanging:
            self._told_hanging = True
            _log.error("a probe of this machine hangs", probe=self._probe.name, seconds=round(now - self._began))
