"""What the loop's own clipping tells: the norm before it, which is free, and how often it made gradients smaller."""

import math
from collections import deque
from typing import Any

from torch import Tensor

from sentinel.client import scaling
from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.guard import measure
from sentinel.client.interception import Clip
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value, plain
from sentinel.client.probing import Probing

REMEMBERED = 100  # clipped attempts that `clip_fraction` is about


class Clipping:
    """Called on both sides of a clipping, on the loop's thread, inside the shield."""

    def __init__(self, attempts: Attempts) -> None:
        self.probes = Probing()
        self._attempts = attempts
        self._meant: list[tuple[WatchedOptimizer, Attempt]] = []  # by the clipping that goes on
        self._smaller: deque[bool] = deque(maxlen=REMEMBERED)

    def before(self, parameters: list[Tensor], clip: Clip) -> None:
        """These parameters' gradients are about to be clipped."""
        self._meant.clear()
        for watched in self._attempts.watched:
            overlap = watched.overlap(parameters)
            if overlap == "none":
                continue
            attempt = self._attempts.of(watched)
            if not any(attempt is other for _, other in self._meant):
                _note(attempt, clip)
            self._meant.append((watched, attempt))
            inside = watched is self._attempts.stepping.evaluating  # in a closure the last evaluation counts
            earlier = attempt.measures.get(watched.name)
            if earlier is not None and not inside and earlier.marks == watched.marks():
                continue  # another part of the same gradients is clipped now
            taken = clip.norm if clip.exact and overlap == "exactly" else None
            divisor = scaling.carried(attempt.scaler, watched.ids)
            attempt.measures[watched.name] = measure(watched, divisor, taken)
            self.probes.gradients(watched, attempt, divisor)

    def after(self) -> None:
        """Clipping writes to the gradients itself; only what is written after it voids the measure."""
        for watched, attempt in self._meant:
            taken = attempt.measures.get(watched.name)
            if taken is not None:
                attempt.measures[watched.name] = taken._replace(marks=watched.marks())
        self._meant.clear()

    def fraction(self, attempt: Attempt) -> float | None:
        """Share of the last clipped attempts, this one included, whose gradients were made smaller; None if it was
        not clipped. Called once per attempt, in order, when its numbers are known.
        """
        finite = [float(ratio) for ratio in attempt.clips if math.isfinite(ratio)]
        if not finite:
            return None
        self._smaller.append(max(finite) > 1.0)
        return sum(self._smaller) / len(self._smaller)


def _note(attempt: Attempt, clip: Clip) -> None:
    most = plain(clip.most) if isinstance(clip.most, Tensor) else float(clip.most)
    if isinstance(most, float):
        attempt.clip_max_norm = most if math.isfinite(most) else None  # Trainer clips to inf to have the norm
        if not math.isfinite(most) or most <= 0.0:
            return
    norm = _value(clip.norm)
    if norm is not None:
        attempt.clips.append(norm / most)


def _value(norm: Any) -> Value | None:
    """A norm as a number, or unread on its device. Of a DTensor only what this rank holds whole: no collective."""
    if isinstance(norm, Tensor):
        if not hasattr(norm, "placements"):
            return plain(norm)
        return plain(norm.to_local()) if all(one.is_replicate() for one in norm.placements) else None  # type: ignore[attr-defined]
    return None if norm is None else float(norm)
