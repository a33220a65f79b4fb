"""What a signal's probe may hook into: points of an update attempt, each a no-op until a probe overrides it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value


class Probe:
    """Every method runs on the loop's thread, inside the shield, on every rank alike; none may sync a device.

    The order within one attempt: arm, after_backward (once per backward), gradients, before_update, after_update
    (these three once per optimizer), values, then, when the device has answered, fields.
    """

    trouble: Callable[[str, str], object] | None = None  # set by `Probing`: (what, text) for the Run's record

    def arm(self, step: int) -> None:
        """The attempt of this number comes next: called before its forward, once the last one's update is done."""

    def touched(self, parameter: Tensor) -> None:
        """Inside a backward: the gradient of one of the marked parameters (`Markers`) has just been accumulated."""

    def after_backward(self, attempt: Attempt, returned: float) -> None:
        """A backward of this attempt returned, at this `time.perf_counter()`."""

    def gradients(self, watched: WatchedOptimizer, attempt: Attempt, divisor: Tensor | None) -> None:
        """This optimizer's gradients are complete and not clipped yet. `divisor`: the loss scale they carry."""

    def before_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """Its step comes next; what it will apply is decided (`attempt.result`)."""

    def after_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """Its step is done."""

    def values(self, attempt: Attempt) -> Mapping[str, Value | None]:
        """Numbers for the record that may still live on a device, by name. Names of a probe begin with its own."""
        del attempt
        return {}

    def fields(self, attempt: Attempt, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of the StepRecord, from what `values` named, now as floats, or lists of them for shape (n,)."""
        del attempt, numbers
        return {}

    def phase(self, name: str) -> None:
        """The loop's phase is this one from now on: "train", or what `run.phase` was given."""

    def close(self) -> None:
        """The Run ends: leave nothing behind in torch or on the model."""
