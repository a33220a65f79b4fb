"""Wait for a condition with a deadline, instead of sleeping and hoping."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL = threading.Event()  # never set; its wait is the pause between two looks


def until(condition: Callable[[], T], seconds: float = 10.0, what: str = "") -> T:
    """The first truthy value of `condition`, looked at every 10 ms; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {seconds} s: {what or condition}; last value {value!r}")
        _POLL.wait(0.01)
