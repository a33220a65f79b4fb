"""Look at gradients before they are applied: once per step, and with a closure after each of its evaluations."""

from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.guard import Measure, measure
from sentinel.client.markers import Markers
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probing import Probing
from sentinel.client.reflex import Reflexes
from sentinel.vocabulary import UpdateResult


class Judgement:
    """Before the update of one optimizer. On the loop's thread, inside the shield."""

    def __init__(self, attempts: Attempts, markers: Markers, reflexes: Reflexes) -> None:
        self.probes = Probing()
        self._attempts = attempts
        self._markers = markers
        self._reflexes = reflexes

    def before_step(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """The gradients are there. Those that nobody clipped are shown to the probes now."""
        if attempt.thrown_away is not None and self._markers.replaced(watched):
            attempt.take_back()
        fresh = watched.name not in attempt.measures
        if fresh:
            divisor: Tensor | None = getattr(watched.target, "grad_scale", None)
            self.probes.gradients(watched, attempt, divisor)
        self._reflexes.judge(watched, attempt)
        attempt.gradients_absent = (attempt.gradients_absent or 0) + watched.absent
        if fresh:
            attempt.measures[watched.name] = self._labelled(attempt.measures[watched.name], watched)

    def after_evaluation(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """The closure has made gradients, inside the step."""
        if attempt.result is UpdateResult.TURN:
            watched.set_aside()
            return
        if self._attempts.stepping.evaluations == 1:
            self.before_step(watched, attempt)
            return
        taken = attempt.measures.get(watched.name)
        if taken is None or taken.marks != watched.marks():  # else it was clipped in the closure
            attempt.measures[watched.name] = self._labelled(measure(watched), watched)

    def _labelled(self, taken: Measure, watched: WatchedOptimizer) -> Measure:
        """Gradients that the loop itself wrote to after its backward are perhaps clipped: the norm says so."""
        changed = taken.source == "own" and self._markers.rewritten(watched)
        return taken._replace(source="changed") if changed else taken
