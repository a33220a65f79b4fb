"""Compare the ranks of one run: the detectors that see all of them, and the judge of what they find."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sentinel.config import Settings
from sentinel.daemon.fuse import Fuse
from sentinel.detect import catalogue
from sentinel.detect.run_detector import Comparison, RunDetector
from sentinel.records import Finding, Observation, Origin, StepRecord
from sentinel.respond.judge import Judge, Ruling, Situation

HEALTHY_COMPARISONS = 3  # so many end an incident; they are rare, unlike the steps that detect.resolve_steps counts


class Comparing:
    """One per attempt of a run of several ranks. Lives in the event loop; bounded by its detectors."""

    def __init__(self, origin: Origin, world_size: int, settings: Settings, new_id: Callable[[], str]) -> None:
        """`origin`: under whose name what is found is stored; the ranks that are meant stand in the finding."""
        self.attempt = origin.attempt
        detectors = catalogue.build_for_run(settings.detect, world_size)
        self._seats = [_Seat(detector) for detector in detectors]
        patience = replace(settings, detect=replace(settings.detect, resolve_steps=HEALTHY_COMPARISONS))
        self._judge = Judge(origin, self._seats, patience, new_id)

    def learn(self, rank: int, records: Iterable[StepRecord]) -> None:
        """What an earlier daemon judged."""
        for record in records:
            for seat in self._seats:
                seat.detector.observe(rank, record)

    def observe(self, rank: int, seen: Observation, situation: Callable[[], Situation], fuse: Fuse) -> Ruling | None:
        """Called with everything that every rank says. None: nothing was compared."""
        if not isinstance(seen, StepRecord) or seen.sampled is None:
            return None
        compared = [seat.compare(rank, seen, fuse) for seat in self._seats]
        return fuse.guard("judge of the run", self._judge.observe, seen, situation()) if any(compared) else None

    def end(self, situation: Situation, fuse: Fuse) -> Ruling | None:
        """The last rank is over."""
        return fuse.guard("judge of the run", self._judge.end, situation)


class _Seat:
    """A detector of runs where the judge asks for one that sees a single row of observations."""

    def __init__(self, detector: RunDetector) -> None:
        self.detector = detector
        self.name = detector.name
        self._comparison: Comparison | None = None

    def compare(self, rank: int, seen: StepRecord, fuse: Fuse) -> bool:
        """True if this record completed a comparison."""
        self._comparison = fuse.guard(f"detector {self.name}", self.detector.observe, rank, seen)
        return self._comparison is not None

    def observe(self, seen: Observation) -> Finding | None:
        del seen
        return self._comparison.finding if self._comparison is not None else None

    def state(self) -> dict[str, Any]:
        return self.detector.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.detector.restore(state)
