"""Divide the time of a step into parts that add up to it: where did it go.

What the loop measures overlaps in one place: waiting for other ranks happens inside another part. Here it is a part
of its own and the others are what is left, so that a stack of the parts is as high as the step is long. Pure.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

PARTS = ("data_wait", "forward", "backward", "communication_wait", "optimizer", "other")

# Where a wait lies. DDP waits in its finalizer, inside backward; what runs over is of the loop's own collectives. A
# wait inside `Work.wait` may lie anywhere: it is taken from the shortest part that may hold it first, because then
# no part is wrong by more than that. For a loop that averages by hand `other` is also the true one.
_WITHIN = {"ddp": ("backward", "other", "forward")}
_ANYWHERE = ("other", "backward", "forward")


class StepTimes(NamedTuple):
    """What a record tells of the time of its step; seconds. What is absent is None; what is not finite counts so."""

    step: float | None
    data_wait: float | None = None
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    communication_wait: float | None = None
    communication_source: str | None = None


def parts_of(times: StepTimes) -> Mapping[str, float]:
    """Seconds by part, in the order of PARTS; empty where only the whole is known. A part not measured is absent.

    >>> parts_of(StepTimes(1.0, forward=0.25, backward=0.5, communication_wait=0.125, communication_source="ddp"))
    {'forward': 0.25, 'backward': 0.375, 'communication_wait': 0.125, 'other': 0.25}
    """
    measured = zip(("data_wait", "forward", "backward", "optimizer"), times[1:5], strict=True)
    parts = {name: seconds for name, seconds in measured if _is_known(seconds)}
    if not _is_known(times.step) or not (parts or _is_known(times.communication_wait)):
        return {}
    parts["other"] = max(0.0, times.step - sum(parts.values()))
    if _is_known(times.communication_wait):
        parts["communication_wait"] = _take_out(parts, times.communication_wait, times.communication_source)
    return {name: parts[name] for name in PARTS if name in parts}


def _is_known(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and math.isfinite(seconds)


def _take_out(parts: dict[str, float], wait: float, source: str | None) -> float:
    """Shorten what holds the wait. Returns how much of it there was room for: parts are never negative."""
    left = wait
    for name in _WITHIN.get(source or "", _ANYWHERE):
        taken = min(left, parts.get(name, 0.0))
        if taken > 0.0:
            parts[name] -= taken
            left -= taken
    return wait - left
