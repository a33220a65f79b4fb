"""Keep verified copies of the state in memory: which to take, which to keep, which may be returned to."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sentinel.client.probes.host import available_bytes
from sentinel.client.shield import describe
from sentinel.client.state import Pool, State, capture, foreign, live_tensors, restore
from sentinel.client.subject import Subject
from sentinel.client.verify import digest, first_nonfinite
from sentinel.config import SnapshotSettings
from sentinel.records import SnapshotNote
from sentinel.vocabulary import Quality

BASE = "attach"  # program point of the state at attach, or right after the user's own load
NEVER = 1 << 62
FAILURES_BEFORE_OFF = 3  # snapshots in a row that could not be copied; then there are none any more


class Counters(NamedTuple):
    """What the Run itself must put back."""

    step: int
    applied: int
    skipped: int
    data_position: int


class Snapshot(NamedTuple):
    step: int
    generation: int
    program_point: str  # "batches", "step" or BASE: where it was taken and must be restored
    quality: Quality
    reason: str
    state: State
    counters: Counters
    digest: str
    seconds: float
    names: frozenset[str]  # of the tensors that the digest covers
    pinned: bool = False


class Ring:
    """Snapshots of one Run, oldest first. Used by the loop's thread only; `note` tells the daemon."""

    def __init__(
        self,
        settings: SnapshotSettings,
        subject: Subject,
        note: Callable[[SnapshotNote], object],
        local_ranks: int = 1,
    ) -> None:
        self._settings = settings
        self._subject = subject
        self._note = note
        self._pool = Pool()
        self._budget_bytes = int(available_bytes() * settings.memory_ratio / max(1, local_ranks))
        self._untrained: set[str] = set()  # names of tensors that nobody trains, seen so far
        self._infinite: set[str] = set()  # those of them that held infinities when first seen: masks
        self._failing = 0
        self._cost_seconds = 0.0
        self._trouble_step = -1
        self.snapshots: list[Snapshot] = []
        self.capacity = settings.slots
        self.next_step = NEVER  # set by the first one; the loop compares one integer a step
        self.step_seconds = 0.0
        self.wants_base = settings.enabled  # the state at attach, or after the user's own load, is still to be copied
        self.unavailable = ""  # why there can be no snapshot at all

    def observe_step(self, seconds: float) -> None:
        """Learn how long a step takes, for the cadence."""
        self.step_seconds = seconds if not self.step_seconds else 0.9 * self.step_seconds + 0.1 * seconds

    def take(self, scaler: Any, generation: int, program_point: str, counters: Counters) -> None:
        """Copy the state as it is now, if there is room; judge it; plan the next one."""
        if self._subject.unmaterialized:
            return  # a lazy module has not seen its first batch
        self.wants_base = False
        self.promote(counters.step)
        self._expect_failure(counters.step)
        started = time.perf_counter()
        live = live_tensors(self._subject)
        if self._fits(live, program_point):
            bad = first_nonfinite(live, self._exempt(live, program_point))
            if bad:
                self._refuse(generation, program_point, counters.step, bad, time.perf_counter() - started)
            elif self._make_room():
                self._copy(live, scaler, generation, program_point, counters)
            self.unavailable = ""
        self._failing = 0

    def _copy(
        self, live: dict[str, Any], scaler: Any, generation: int, program_point: str, counters: Counters
    ) -> None:
        started = time.perf_counter()
        state = capture(self._subject, scaler, self._pool)
        quality, reason = (Quality.GOOD, "state at attach") if program_point == BASE else (Quality.PENDING, "new")
        proof = digest(live)
        seconds = time.perf_counter() - started
        self._cost_seconds = seconds if program_point == BASE else 0.5 * self._cost_seconds + 0.5 * seconds
        self.snapshots.append(
            Snapshot(
                counters.step,
                generation,
                program_point,
                quality,
                reason,
                state,
                counters,
                proof,
                seconds,
                frozenset(live),
            )
        )
        self._tell(self.snapshots[-1])
        self.next_step = counters.step + self.every_steps

    def _expect_failure(self, step: int) -> None:
        """What holds if the copying raises: another try later, and none after three in a row."""
        self._failing += 1
        self.next_step = step + self._settings.min_steps
        if self._failing >= FAILURES_BEFORE_OFF:
            self.next_step = NEVER
            self.unavailable = f"{FAILURES_BEFORE_OFF} snapshots in a row could not be copied; no rollback"

    @property
    def every_steps(self) -> int:
        """Distance to the next snapshot: fixed by the settings, or such that the cost stays in its share."""
        if self._settings.every_steps:
            return self._settings.every_steps
        if not self.step_seconds:
            return self._settings.min_steps
        wanted = self._cost_seconds / (self._settings.cost_ratio * self.step_seconds)
        return max(self._settings.min_steps, int(wanted) + 1)

    def trouble(self, step: int) -> None:
        """Something was wrong at this step: clean steps are counted anew from here."""
        self._trouble_step = max(self._trouble_step, step)

    def promote(self, step: int) -> None:
        """PENDING becomes GOOD after `good_after_steps` clean steps."""
        for place, one in enumerate(self.snapshots):
            clean = step - max(one.step, self._trouble_step)
            if one.quality is Quality.PENDING and clean >= self._settings.good_after_steps:
                self._change(place, Quality.GOOD, f"{clean} clean steps")

    def mark(self, since_step: int, *, clear: bool) -> None:
        """An incident: what was taken at or after `since_step` is SUSPECT, the newest GOOD is pinned. Or its end."""
        for place, one in enumerate(self.snapshots):
            if clear and one.quality is Quality.SUSPECT:
                self._change(place, Quality.PENDING, "the incident ended by itself")
            elif not clear and one.step >= since_step and one.quality in {Quality.GOOD, Quality.PENDING}:
                self._change(place, Quality.SUSPECT, f"an incident began at step {since_step}")
        good = [place for place, one in enumerate(self.snapshots) if one.quality is Quality.GOOD]
        for place, one in enumerate(self.snapshots):
            pinned = not clear and bool(good) and place == good[-1]
            if one.pinned is not pinned:
                self.snapshots[place] = one._replace(pinned=pinned)

    def candidates(self, program_point: str) -> list[tuple[int, Quality, str]]:
        """What a turn at this program point may return to, newest first."""
        fitting = [one for one in self.snapshots if one.program_point in {program_point, BASE}]
        return [(one.step, one.quality, one.digest) for one in reversed(fitting) if one.quality is not Quality.BAD]

    def restore(self, target_step: int, program_point: str, scaler: Any) -> Snapshot | None:
        """Put the state of `target_step` back, or of the next older one if that fails its check; None if all fail."""
        fitting = [one for one in self.snapshots if one.program_point in {program_point, BASE}]
        for one in sorted(fitting, key=lambda snapshot: -snapshot.step):
            if one.step > target_step or one.quality is Quality.BAD:
                continue
            if one.step < target_step and one.quality is not Quality.GOOD:
                continue
            trouble = self._unusable(one) or self._put_back(one, scaler)
            if not trouble:
                return one
            self._change(self.snapshots.index(one), Quality.BAD, trouble)
        return None

    def _unusable(self, one: Snapshot) -> str:
        """Why it cannot be restored, told before anything is written; "" if it can."""
        name = foreign(one.state, self._subject)
        if name:
            return f"{name} is gone, or has another shape or type now"
        copies = {name: one.state.tensors[name] for name in one.names}
        return "" if digest(copies) == one.digest else "its digest no longer matches"

    def _put_back(self, one: Snapshot, scaler: Any) -> str:
        try:
            restore(one.state, self._subject, scaler)
        except Exception as error:  # noqa: BLE001 -- a user's own load_state_dict may raise anything; the turn goes on
            return f"it could not be restored: {describe(error)}"
        live = live_tensors(self._subject)
        restored = {name: live[name] for name in one.names if name in live}
        return "" if digest(restored) == one.digest else "its digest no longer matches"

    def rolled_back(self, snapshot: Snapshot) -> None:
        """What is newer than the restored snapshot is history."""
        for one in [other for other in self.snapshots if other.step > snapshot.step]:
            self._drop(one, "newer than the snapshot that was returned to")
        self._trouble_step = min(self._trouble_step, snapshot.step)
        self.next_step = snapshot.step + self.every_steps

    def invalidate(self, reason: str) -> None:
        """All older snapshots are of another state; the next boundary takes a new base."""
        for place in reversed(range(len(self.snapshots))):
            self._change(place, Quality.BAD, reason)
            self._drop(self.snapshots[place], reason)
        self.wants_base = self._settings.enabled and not self.unavailable

    def clear(self) -> None:
        self.snapshots.clear()
        self._pool.clear()
        self.next_step = NEVER

    @property
    def oldest_position(self) -> int | None:
        return self.snapshots[0].counters.data_position if self.snapshots else None

    def _fits(self, live: dict[str, Any], program_point: str) -> bool:
        """Bring the capacity up to date with the state's size, which grows as optimizers make theirs."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in live.values())
        if program_point == BASE and not any(name.startswith("optimizer.0.") for name in live):
            size *= 3  # Adam adds two moments to every parameter at its first step
        self.capacity = min(self._settings.slots, self._budget_bytes // max(1, size))
        if self.capacity >= 2:
            return True
        self.unavailable = (
            f"two snapshots of about {size / 2**20:.0f} MiB do not fit the {self._budget_bytes / 2**20:.0f} MiB "
            f"that snapshot.memory_ratio leaves; no {'further snapshots' if self.snapshots else 'rollback'}"
        )
        self.next_step = NEVER
        return False

    def _exempt(self, live: dict[str, Any], program_point: str) -> set[str]:
        """Buffers and frozen parameters that were infinite when they first appeared are so by design (masks)."""
        if program_point == BASE:
            self._untrained.clear()
            self._infinite.clear()
        fresh = {name for name in self._subject.untrained() if name in live} - self._untrained
        self._untrained |= fresh
        self._infinite |= {name for name in fresh if first_nonfinite({name: live[name]})}
        return self._infinite

    def _make_room(self) -> bool:
        """Drop snapshots until one more fits: never the newest GOOD, the oldest PENDING, a pinned or the last one."""
        while len(self.snapshots) >= self.capacity:
            victim = self._victim()
            if victim is None:
                return False
            self._drop(victim, "made room")
        return True

    def _victim(self) -> Snapshot | None:
        bad = next((one for one in self.snapshots if one.quality is Quality.BAD), None)
        if bad is not None:
            return bad
        good = [one for one in self.snapshots if one.quality is Quality.GOOD]
        pending = [one for one in self.snapshots if one.quality is Quality.PENDING]
        kept = {id(one) for one in (*good[-1:], *pending[:1], self.snapshots[-1])}
        now = self.snapshots[-1].step + 1
        best, least = None, float("inf")
        for place, one in enumerate(self.snapshots):
            if id(one) in kept or one.pinned:
                continue
            newer = self.snapshots[place + 1].step
            older = self.snapshots[place - 1].step if place else 2 * one.step - newer
            # A small hole relative to its age is missed least: what stays is spaced 1x, 4x, 16x ...
            hole = (newer - older) / (now - one.step)
            if hole < least:
                best, least = one, hole
        return best

    def _drop(self, one: Snapshot, why: str) -> None:
        self.snapshots.remove(one)
        self._pool.give(one.state)
        self._tell(one._replace(reason=why), kept=False)

    def _change(self, place: int, quality: Quality, reason: str) -> None:
        self.snapshots[place] = self.snapshots[place]._replace(quality=quality, reason=reason)
        self._tell(self.snapshots[place])

    def _refuse(self, generation: int, program_point: str, step: int, bad: str, seconds: float) -> None:
        self.trouble(step)
        self.next_step = step + self._settings.min_steps
        self._note(
            SnapshotNote(
                0,
                time.time(),
                generation,
                step,
                "ram",
                Quality.BAD,
                False,
                bad,
                program_point,
                0,
                seconds,
                kept=False,
            )
        )

    def _tell(self, one: Snapshot, *, kept: bool = True) -> None:
        self._note(
            SnapshotNote(
                seq=0,
                time=time.time(),
                generation=one.generation,
                step=one.step,
                tier="ram",
                quality=one.quality,
                verified=one.quality is not Quality.BAD,
                reason=one.reason,
                program_point=one.program_point,
                size_bytes=one.state.size_bytes,
                seconds=one.seconds,
                digest=one.digest,
                kept=kept,
            )
        )
