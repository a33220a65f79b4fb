"""What a sampled signal may do at the points of an attempt, and what it holds of one attempt until it is told."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value


class Take:
    """What one signal took of one attempt, and what that cost."""

    __slots__ = ("_spans", "_timed_on_device", "host_seconds", "inside_seconds", "notes", "values")

    def __init__(self, *, on_cuda: bool) -> None:
        self.values: dict[str, Value] = {}  # may live on a device; tensors of shape () or (n,)
        self.notes: dict[str, Any] = {}  # what is known on the host
        self.host_seconds = 0.0
        self.inside_seconds = 0.0  # the part of them in hooks of its own, which nobody else counts
        self._timed_on_device = on_cuda
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The host's time, and on CUDA the device's, which is read when `seconds` is: nothing waits."""
        begin = self._event()
        started = time.perf_counter()
        try:
            yield
        finally:
            self.host_seconds += time.perf_counter() - started
            end = self._event()
            if begin is not None and end is not None:
                self._spans.append((begin, end))

    def inside(self, seconds: float) -> None:
        self.host_seconds += seconds
        self.inside_seconds += seconds

    @property
    def seconds(self) -> float:
        """The dearer of host and device, once the device has answered: one hides behind the other."""
        on_device: float = sum(begin.elapsed_time(end) for begin, end in self._spans if end.query()) / 1000
        return max(self.host_seconds, on_device)

    def _event(self) -> torch.cuda.Event | None:
        if not self._timed_on_device:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Signal:
    """One of the sampled signals. Every method runs on the loop's thread; none may sync a device or change a tensor.

    The order within one attempt: arm, gradients, before_update, after_update (these three once per optimizer), end,
    and when the device has answered, fields. An attempt may break off anywhere; end always comes.
    """

    name = ""
    from_forward = False  # True: needs `arm`, so it is taken only where the attempt was known before its forward

    def applies(self) -> bool:
        """Can it be had in this run, as far as one sees now? Asked at the steps at which it may be due."""
        return True

    def arm(self, take: Take) -> None:
        """The attempt that is sampled comes next; hooks put on now are removed in `end`."""

    def gradients(self, take: Take, watched: WatchedOptimizer, divisor: Tensor | None, attempt: Attempt) -> None:
        """Complete and not clipped yet; may come again in one attempt, then the last call counts."""

    def before_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None: ...

    def after_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None: ...

    def end(self, take: Take) -> None:
        """Nothing more comes of this attempt: leave no hook behind and no copy of a parameter."""

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        """Fields of `Sample`; `numbers`: the take's values as floats and lists of floats. Empty: absent."""
        raise NotImplementedError

    def close(self) -> None:
        """The Run ends: hold no parameter any more."""
