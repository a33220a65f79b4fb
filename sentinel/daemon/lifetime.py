"""Decide when an auto-started daemon leaves: soon after its last run ended, or when nobody ever came."""

import time
from collections.abc import Callable

from sentinel.daemon.rank import Fleet

NOBODY_SECONDS = 60.0  # for the first client to come


class Lifetime:
    """Asked about once a second. A daemon that a person started stays until it is told to leave."""

    def __init__(
        self,
        fleet: Fleet,
        leave_seconds: float,
        *,
        auto: bool,
        nobody_seconds: float = NOBODY_SECONDS,
        unfinished: Callable[[], bool] = lambda: False,
        stay_seconds: float = 0.0,
    ) -> None:
        """`unfinished`: whether work is left, such as alerts; for it we stay at most `stay_seconds` longer."""
        self._fleet = fleet
        self._leave_seconds = leave_seconds
        self._auto = auto
        self._nobody_seconds = nobody_seconds
        self._unfinished = unfinished
        self._stay_seconds = stay_seconds
        self._began = time.monotonic()

    def is_over(self, now: float) -> bool:
        if not self._auto or self._fleet.runs:
            return False
        if self._fleet.ever:
            idle_seconds = now - self._fleet.last_end - self._leave_seconds
        else:
            idle_seconds = now - self._began - self._nobody_seconds
        return idle_seconds >= (self._stay_seconds if self._unfinished() else 0.0)
