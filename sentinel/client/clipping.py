"""Take the norm that the loop's own clipping computed: it is free, and the one before clipping."""

import math

from torch import Tensor

from sentinel.client import scaling
from sentinel.client.attempts import Attempts
from sentinel.client.guard import measure
from sentinel.client.interception import Norm
from sentinel.client.probing import Probing


class Clipping:
    """Called on both sides of a clipping, on the loop's thread, inside the shield."""

    def __init__(self, attempts: Attempts) -> None:
        self.probes = Probing()
        self._attempts = attempts

    def before(self, parameters: list[Tensor], max_norm: float, norm: Norm | None) -> None:
        """These parameters' gradients are about to be clipped; `norm` is theirs, if torch computed it just now."""
        holding = [id(parameter) for parameter in parameters if parameter.grad is not None]
        holders = frozenset(holding)
        for watched in self._attempts.watched:
            overlap = watched.overlap(holders)
            if overlap == "none":
                continue
            attempt = self._attempts.of(watched)
            inside = watched is self._attempts.stepping.evaluating  # in a closure the last evaluation counts
            earlier = attempt.measures.get(watched.name)
            if earlier is not None and not inside and list(earlier.marks) == watched.gradient_marks:
                continue  # another part of the same gradients is clipped now
            exactly = overlap == "all" and len(holding) == len(holders)  # a tied weight may be named twice
            taken = norm.value if norm is not None and exactly else None
            divisor = scaling.carried(attempt.scaler, watched.ids)
            attempt.measures[watched.name] = measure(watched, divisor, taken)
            self.probes.gradients(watched, attempt, divisor)
            attempt.clip_max_norm = max_norm if math.isfinite(max_norm) else None  # Trainer clips to inf for the norm

    def after(self) -> None:
        """Clipping writes to the gradients itself; only what is written after it voids the measure."""
        for attempt in (self._attempts.gathering, self._attempts.current):
            for watched in self._attempts.watched:
                taken = attempt.measures.get(watched.name) if attempt is not None else None
                if attempt is not None and taken is not None:
                    attempt.measures[watched.name] = taken._replace(marks=tuple(watched.gradient_marks))
