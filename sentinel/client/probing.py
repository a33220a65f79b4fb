"""Call the probes of a Run at the points of an attempt; one that fails again and again is left out, and said so."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value
from sentinel.client.probes.probe import Probe
from sentinel.client.shield import describe

FAILURES_BEFORE_OFF = 3  # of one probe; the others and the reflex go on


class Probing:
    """All probes of one Run. On the loop's thread, inside the shield; no method raises."""

    def __init__(self, probes: tuple[Probe, ...] = (), trouble: Callable[[str, str], object] | None = None) -> None:
        """`trouble(what, text)` is told of every failure that counts."""
        self._trouble = trouble
        self._failures: dict[str, int] = {}
        self._probes = probes
        for probe in probes:
            probe.trouble = trouble
        self._listen()

    def arm(self, step: int) -> None:
        for call in self._arm:
            self._call(call, step)

    def touched(self, parameter: Tensor) -> None:
        for call in self._touched:
            self._call(call, parameter)

    def after_backward(self, attempt: Attempt, returned: float) -> None:
        for call in self._after_backward:
            self._call(call, attempt, returned)

    def gradients(self, watched: WatchedOptimizer, attempt: Attempt, divisor: Tensor | None) -> None:
        for call in self._gradients:
            self._call(call, watched, attempt, divisor)

    def before_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        for call in self._before_update:
            self._call(call, watched, attempt)

    def after_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        for call in self._after_update:
            self._call(call, watched, attempt)

    def values(self, attempt: Attempt) -> dict[str, Value | None]:
        found: dict[str, Value | None] = {}
        for call in self._values:
            found |= self._call(call, attempt) or {}
        return found

    def fields(self, attempt: Attempt, numbers: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for call in self._fields:
            found |= self._call(call, attempt, numbers) or {}
        return found

    def phase(self, name: str) -> None:
        for call in self._phase:
            self._call(call, name)

    def close(self) -> None:
        for probe in self._probes:
            self._call(probe.close)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001 -- part of the boundary: a signal must not cost the reflex
            self._failed(cast("Any", method).__self__, method.__name__, error)
            return None

    def _failed(self, probe: Probe, method: str, error: Exception) -> None:
        name = type(probe).__name__
        self._failures[name] = self._failures.get(name, 0) + 1
        text = f"the probe {name} failed in {method}: {describe(error)}"
        if self._failures[name] >= FAILURES_BEFORE_OFF:
            self._probes = tuple(other for other in self._probes if other is not probe)
            self._listen()
            text += " (it is switched off; training goes on)"
        if self._trouble is not None:
            self._trouble("probe", text)

    def _listen(self) -> None:
        """Who overrides which method: a point that nobody listens to costs an empty loop."""
        self._arm = self._overriding("arm")
        self._touched = self._overriding("touched")
        self._after_backward = self._overriding("after_backward")
        self._gradients = self._overriding("gradients")
        self._before_update = self._overriding("before_update")
        self._after_update = self._overriding("after_update")
        self._values = self._overriding("values")
        self._fields = self._overriding("fields")
        self._phase = self._overriding("phase")

    def _overriding(self, method: str) -> tuple[Callable[..., Any], ...]:
        overriding = (one for one in self._probes if getattr(type(one), method) is not getattr(Probe, method))
        return tuple(getattr(one, method) for one in overriding)
