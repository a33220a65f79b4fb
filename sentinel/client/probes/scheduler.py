"""Count the steps of the learning rate schedulers, so that one that runs ahead of skipped updates is seen (O53)."""

from collections.abc import Mapping
from typing import Any

from sentinel.client.attempt import Attempt
from sentinel.client.handle import Handle
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value
from sentinel.client.probes.probe import Probe
from sentinel.client.subject import Subject
from sentinel.config import Settings


def scheduler_steps(
    subject: Subject, _watched: list[WatchedOptimizer], _settings: Settings
) -> "SchedulerSteps | None":
    """None without a scheduler: neither handed over nor found at attach."""
    handles = [extra.handle for extra in subject.extras if extra.name.split(".")[0] == "scheduler"]
    return SchedulerSteps(handles) if handles else None


class SchedulerSteps(Probe):
    """Reads their own counters and changes nothing; of several schedulers the one that stepped most often counts.

    A rollback that restores a scheduler takes the number back, as it does with the applied updates.
    """

    def __init__(self, schedulers: list[Handle]) -> None:
        self._schedulers = schedulers
        self._begun: dict[int, int] = {}  # place -> its counter before the first update

    def after_backward(self, attempt: Attempt, returned: float) -> None:
        del attempt, returned
        self._begin()

    def before_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """For loops whose gradients come without a backward."""
        del watched, attempt
        self._begin()

    def values(self, attempt: Attempt) -> Mapping[str, Value | None]:
        """Asked when the attempt's record is made: the scheduler has stepped by then, after the optimizer."""
        counts = [steps_of(handle()) for handle in self._schedulers]
        taken = [
            count - self._begun[place]
            for place, count in enumerate(counts)
            if count is not None and place in self._begun
        ]
        attempt.scheduler_steps = max(taken) if taken else None
        return {}

    def _begin(self) -> None:
        """Not at attach: a loop that resumes may load the scheduler's state after it."""
        if self._begun:
            return
        for place, handle in enumerate(self._schedulers):
            count = steps_of(handle())
            if count is not None:
                self._begun[place] = count


def steps_of(scheduler: Any) -> int | None:
    """How often it has stepped in its life; None where it does not tell.

    `last_epoch` is what all of torch's count (not all keep `_step_count`); ChainedScheduler leaves it to its parts,
    Accelerate's wrapper to the one inside.
    """
    count = getattr(scheduler, "last_epoch", None)
    if isinstance(count, int | float):
        return int(count)
    parts = getattr(scheduler, "_schedulers", None)
    inside = parts if isinstance(parts, list | tuple) else [getattr(scheduler, "scheduler", None)]
    counts = [steps_of(one) for one in inside if one is not None and one is not scheduler]
    return max((one for one in counts if one is not None), default=None)
