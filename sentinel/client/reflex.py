"""What the loop does by itself before an update: skip it when a gradient is not finite, and say so."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.guard import Measure, amp_overflow, evidence, measure
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.config import ReflexSettings
from sentinel.records import Reflex
from sentinel.vocabulary import Action, Kind, Outcome, UpdateResult


class Reflexes:
    """The reflex of one Run. On the loop's thread, inside the shield."""

    def __init__(
        self, settings: ReflexSettings, send: Callable[[Reflex], object], names: Callable[[], dict[int, str]]
    ) -> None:
        """`names` maps a parameter's id to its name; asked only when something is wrong."""
        self.acts = False  # set by the Run from its mode and the roster
        self._settings = settings
        self._send = send
        self._names = names
        self._consecutive = 0
        self._counted = (0, 0)  # generation and step of the latest attempt that counts as bad

    def judge(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """Measure the gradients that are about to be applied, and set them aside if they are not finite."""
        found = attempt.measures.get(watched.name)
        if found is None or (found.marks is not None and found.marks != watched.marks()):
            again = measure(watched, getattr(watched.target, "grad_scale", None))
            # A norm from before clipping stays the reported one; what was written since decides the reflex.
            found = again if found is None else found._replace(nonfinite=again.nonfinite)
        attempt.measures[watched.name] = found
        overflow = amp_overflow(watched.target)
        if overflow is not None:  # GradScaler decides
            attempt.measures[watched.name] = found._replace(nonfinite=False, overflow=overflow)
            if overflow is True:
                attempt.result = UpdateResult.OVERFLOW
        elif not self._allowed(watched):
            return
        elif isinstance(found.nonfinite, Tensor):
            self._judge_on_device(watched, attempt, found, found.nonfinite)
        elif found.nonfinite:
            self._skip(watched, attempt, found)

    def read_from_device(
        self, attempt: Attempt, numbers: dict[str, float | None], watched: list[WatchedOptimizer]
    ) -> bool:
        """What the device says of an attempt, one step later. True: its update must be undone."""
        if attempt.result is not UpdateResult.APPLIED:
            return False
        if any(numbers[name] for name in numbers if name.startswith("overflow.")):
            attempt.result = UpdateResult.OVERFLOW
            return False
        if not any(numbers[name] for name in numbers if name.startswith("nonfinite.")):
            return False
        if not self.acts or not self._settings.nonfinite_gradient:
            return False
        norm = next((taken.norm for taken in attempt.measures.values()), None)
        details = {"grad_norm": norm, "guard": "deferred"}
        if all(one.fused_skip for one in watched):
            attempt.result = UpdateResult.REFLEX
            self._report(attempt, Action.SKIP_UPDATE, details)
            return False
        self._report(attempt, Action.ROLLBACK, details)
        return True

    def applied(self) -> None:
        """An update went through: the row of bad gradients is broken."""
        self._consecutive = 0

    def _allowed(self, watched: WatchedOptimizer) -> bool:
        # One rank's shard may be bad alone; a local verdict would split the ranks.
        return self.acts and self._settings.nonfinite_gradient and not watched.sharded

    def _judge_on_device(self, watched: WatchedOptimizer, attempt: Attempt, found: Measure, flag: Tensor) -> None:
        if self._settings.guard == "sync":
            known = found._replace(nonfinite=bool(flag))
            attempt.measures[watched.name] = known
            if known.nonfinite:
                self._skip(watched, attempt, known)
        elif watched.fused_skip:
            watched.skip_on_device(flag)

    def _skip(self, watched: WatchedOptimizer, attempt: Attempt, found: Measure) -> None:
        attempt.result = UpdateResult.REFLEX
        norm = float(found.norm) if found.norm is not None else float("nan")
        details = evidence(watched, self._names(), norm)
        watched.set_aside()
        self._report(attempt, Action.SKIP_UPDATE, details)

    def _report(self, attempt: Attempt, action: Action, details: dict[str, Any]) -> None:
        place = attempt.generation, attempt.step
        self._consecutive += place != self._counted  # once, however many optimizers step in it
        self._counted = place
        self._send(
            Reflex(
                seq=0,
                time=time.time(),
                generation=attempt.generation,
                step=attempt.step,
                kind=Kind.NONFINITE_GRADIENT,
                action=action,
                outcome=Outcome.APPLIED,
                consecutive=self._consecutive,
                evidence=details,
            )
        )
