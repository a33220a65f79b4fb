"""Switch off what keeps failing: a detector or a sink that raises three times is disabled, and says so once."""

from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from sentinel.detect.detector import Detector
from sentinel.records import Finding, Observation

MOST_FAILURES = 3

T = TypeVar("T")
_log = structlog.get_logger()


class Fuse:
    """The exception boundary around one rank's detectors and sinks."""

    def __init__(self, blown: Callable[[str, Exception], None]) -> None:
        self._blown = blown
        self._failures: dict[str, int] = {}

    def guard(self, name: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """The result of `call`; None when it raised or is switched off."""
        failures = self._failures.get(name, 0)
        if failures >= MOST_FAILURES:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - this is the boundary: whatever a part raises is counted
            self._failures[name] = failures + 1
            _log.exception("a part of the pipeline failed", part=name, failures=failures + 1)
            if failures + 1 == MOST_FAILURES:
                self._blown(name, error)
            return None


class Guarded:
    """A detector behind a fuse."""

    def __init__(self, detector: Detector, fuse: Fuse) -> None:
        self._detector = detector
        self._fuse = fuse
        self.name = detector.name

    def observe(self, seen: Observation) -> Finding | None:
        return self._fuse.guard(f"detector {self.name}", self._detector.observe, seen)

    def state(self) -> dict[str, Any]:
        return self._detector.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._detector.restore(state)
