"""Take the norm that the loop's own clipping computed: it is free, and the one before clipping."""

import math

from torch import Tensor

from sentinel.client import scaling
from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.guard import measure
from sentinel.client.interception import Norm
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probing import Probing


class Clipping:
    """Called on both sides of a clipping, on the loop's thread, inside the shield."""

    def __init__(self, attempts: Attempts) -> None:
        self.probes = Probing()
        self._attempts = attempts
        self._meant: list[tuple[WatchedOptimizer, Attempt]] = []  # by the clipping that goes on

    def before(self, parameters: list[Tensor], max_norm: float, norm: Norm | None) -> None:
        """These parameters' gradients are about to be clipped; `norm` is theirs, if torch computed it just now."""
        self._meant.clear()
        for watched in self._attempts.watched:
            overlap = watched.overlap(parameters)
            if overlap == "none":
                continue
            attempt = self._attempts.of(watched)
            self._meant.append((watched, attempt))
            inside = watched is self._attempts.stepping.evaluating  # in a closure the last evaluation counts
            earlier = attempt.measures.get(watched.name)
            if earlier is not None and not inside and earlier.marks == watched.marks():
                continue  # another part of the same gradients is clipped now
            taken = norm.value if norm is not None and overlap == "exactly" else None
            divisor = scaling.carried(attempt.scaler, watched.ids)
            attempt.measures[watched.name] = measure(watched, divisor, taken)
            self.probes.gradients(watched, attempt, divisor)
            attempt.clip_max_norm = max_norm if math.isfinite(max_norm) else None  # Trainer clips to inf for the norm

    def after(self) -> None:
        """Clipping writes to the gradients itself; only what is written after it voids the measure."""
        for watched, attempt in self._meant:
            taken = attempt.measures.get(watched.name)
            if taken is not None:
                attempt.measures[watched.name] = taken._replace(marks=watched.marks())
        self._meant.clear()
