"""Keep what the judge must get back with a snapshot: the detectors' memory and the place in the data."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sentinel.records import SnapshotNote
from sentinel.vocabulary import Quality

MOST_SAVED = 64  # more than any ring has slots
RECENT_STEPS = 32  # a snapshot's note may be so late: it is verified in the background


class Learner(Protocol):
    """What has to go back with a snapshot: a detector, as `sentinel.detect.detector` describes it."""

    @property
    def name(self) -> str: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Saved(NamedTuple):
    """The judge's side of one snapshot."""

    step: int
    quality: Quality
    states: dict[str, dict[str, Any]]  # by detector
    position: int | None  # batches handed out when the snapshot's step was done


class Rewind:
    """Detector states by snapshot step, and the state before the first observation for everything older."""

    def __init__(self, detectors: Sequence[Learner]) -> None:
        self._detectors = detectors
        self._saved: dict[int, Saved] = {}
        self._awaited: dict[int, Quality] = {}  # notes that came before the record of their step
        self._recent: deque[Saved] = deque(maxlen=RECENT_STEPS)  # for notes that come after it
        self._fresh = self._capture(-1, 0)
        self._recent.append(self._fresh)

    def note(self, note: SnapshotNote) -> None:
        """A snapshot was taken, judged or dropped. Its state is that after its own step, never a later one."""
        if not note.kept or note.quality is Quality.BAD:
            self._saved.pop(note.step, None)
            self._awaited.pop(note.step, None)
        elif note.step in self._saved:
            self._saved[note.step] = self._saved[note.step]._replace(quality=note.quality)
        elif note.step > self._recent[-1].step:
            self._awaited[note.step] = note.quality
        else:
            self._keep_recent(note.step, note.quality)

    def handled(self, step: int, position: int | None) -> None:
        """The record of `step` was handled by every detector."""
        self._recent.append(self._capture(step, position))
        for awaited in [known for known in self._awaited if known <= step]:
            self._keep_recent(awaited, self._awaited.pop(awaited))

    def restore(self, target_step: int) -> None:
        """Put every detector back to where it was at the snapshot; the nearest older one if that was not seen."""
        older = [step for step in self._saved if step <= target_step]
        chosen = self._saved[max(older)] if older else self._fresh
        for detector in self._detectors:
            detector.restore(chosen.states[detector.name])
        self._saved = {step: saved for step, saved in self._saved.items() if step <= target_step}
        self._awaited.clear()
        self._recent.clear()
        self._recent.append(chosen._replace(step=target_step))

    def position_before(self, step: int, *, pending_ok: bool) -> int | None:
        """Batches handed out at the snapshot that a rollback to before `step` would choose."""
        fit = (Quality.GOOD, Quality.PENDING) if pending_ok else (Quality.GOOD,)
        steps = [known for known, saved in self._saved.items() if known < step and saved.quality in fit]
        return self._saved[max(steps)].position if steps else self._fresh.position

    def _keep_recent(self, step: int, quality: Quality) -> None:
        older = [saved for saved in self._recent if saved.step <= step]
        if not older:
            return  # too late: what is known by now is not what was known then
        newest = max(older, key=lambda saved: saved.step)
        self._saved[step] = newest._replace(step=step, quality=quality)
        while len(self._saved) > MOST_SAVED:
            self._saved.pop(min(self._saved))

    def _capture(self, step: int, position: int | None) -> Saved:
        return Saved(step, Quality.PENDING, {each.name: each.state() for each in self._detectors}, position)
