"""Know to which update attempt a backward, a clipping, a step or a report belongs.

An attempt gathers from its first backward on, opens when an optimizer steps, and with several optimizers goes on
until one that already stepped in it steps again, or to the top of `run.batches`.
"""

from typing import Any

from sentinel.client.attempt import Attempt
from sentinel.client.markers import Markers
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Objective
from sentinel.client.stepping import Stepping


class Attempts:
    """The attempts of one Run that are not over. On the loop's thread, inside the shield."""

    def __init__(self, watched: list[WatchedOptimizer], markers: Markers, step: int) -> None:
        self.step = step  # attempts so far
        self.generation = 0
        self.watched = watched
        self.stepping = Stepping()
        self.gathering = Attempt()  # from its first backward to its first step
        self.current: Attempt | None = None  # opened, not yet sent
        self.latest: Attempt | None = None  # whose backward ran last
        self.stepped: list[WatchedOptimizer] = []
        self.void: list[WatchedOptimizer] = []  # hold gradients of a state that a turn has replaced
        self._markers = markers
        self._by_id = {one: each for each in watched for one in each.ids}
        self._before_backward = step  # attempts that there were then

    # ------------------------------------------------------------ who is meant

    def find(self, optimizer: Any) -> WatchedOptimizer | None:
        found = self._by_id.get(id(optimizer))
        return found if found is not None and found.is_(optimizer) else None

    def backward_begins(self) -> None:
        self._before_backward = self.step

    def of_backward(self) -> Attempt:
        """Whose the backward that just returned is."""
        if self.stepping.evaluating and self.current is not None:
            return self.current
        if self.current is not None and len(self.watched) > 1:
            waiting = [n for n, watched in enumerate(self.watched) if watched not in self.stepped]
            stepped_inside = self.step > self._before_backward  # optimizers that step as soon as a gradient is there
            if stepped_inside or self._markers.touched.intersection(waiting):
                return self.current
        attempt, touched = self.gathering, self._markers.touched
        if attempt.backwards and self._markers.cleared:
            attempt.throw_away()
        if touched and self._markers.guessed:  # what ran before was another model's
            attempt.objective, self._markers.guessed = Objective(), 0
        for number in touched if attempt.measures else ():
            attempt.measures.pop(self.watched[number].name, None)  # more is added to what was clipped
        return attempt

    def of(self, watched: WatchedOptimizer) -> Attempt:
        """Whose gradients this optimizer holds now: the open attempt's if it has still to step in it."""
        if self.current is None:
            return self.gathering
        if watched is self.stepping.evaluating:
            return self.current
        return self.gathering if watched in self.stepped or not self.stepped else self.current

    def of_report(self) -> Attempt:
        """Whose backward ran last; the coming attempt where that one's record is gone already."""
        attempt = self.latest
        if attempt is None or (attempt is not self.current and attempt is not self.gathering):
            return self.gathering
        return attempt

    # ------------------------------------------------------------ how far it is

    @property
    def complete(self) -> bool:
        """Every optimizer has stepped in the open attempt, and none stands inside its step."""
        if self.current is None or len(self.stepped) < len(self.watched):
            return False
        return self.stepping.broken is None and self.stepping.evaluating is None

    @property
    def between(self) -> bool:
        """No gradients are being gathered: nothing is lost if the state changes now."""
        return self.gathering.backwards == 0

    def begins_with(self, watched: WatchedOptimizer) -> bool:
        """Will the step of this optimizer open an attempt?"""
        return watched in self.stepped or not self.stepped or self.current is None

    def open(self, watched: WatchedOptimizer) -> Attempt:
        """It steps now: in the open attempt, or in a new one, whose number this is. The caller took the old one."""
        if not self.begins_with(watched):
            assert self.current is not None
            self.stepped.append(watched)
            return self.current
        self.step += 1
        self.stepped = [watched]
        attempt, self.gathering = self.gathering, Attempt()
        attempt.generation, attempt.step = self.generation, self.step
        self.current = attempt
        return attempt

    def take(self) -> Attempt | None:
        """The open attempt, which is over."""
        attempt, self.current = self.current, None
        return attempt

    def forget_broken_step(self) -> None:
        """A step that raised, in a loop that goes on, was no attempt: the next one takes its number."""
        watched = self.stepping.broken
        if watched is None:
            return
        self.stepping.leave()
        watched.forget()
        if watched in self.stepped:
            self.stepped.remove(watched)
        if not self.stepped and self.current is not None:
            self.step, self.current = self.step - 1, None

    def rewound(self, step: int) -> None:
        """A turn restored an older state: the history grows a generation."""
        self.step = step
        self.generation += 1
        self.forget()
        # The optimizers that would still step in this attempt must not: theirs are gradients of the old state.
        self.void = [one for one in self.watched if self.stepped and one not in self.stepped]
        self.stepped.clear()

    def forget(self) -> None:
        self.gathering = Attempt()
        self.current = self.latest = None
