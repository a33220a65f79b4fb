"""Carry out what may only be done between two attempts: snapshots, rollbacks, pauses, the stop.

The boundary is the top of `run.batches` where the loop stands inside it, else the optimizer's step. There a rollback
sets the gradients of the coming update aside before the step and restores after it, because snapshots are taken after
a step too: the loop's following `scheduler.step()` then lands where it did in the clean run (design section 8).
"""

import time
from collections.abc import Callable
from typing import Any

from sentinel.client.data import Cursor
from sentinel.client.inbox import Inbox, Turn
from sentinel.client.loop import Loop
from sentinel.client.ring import BASE, Counters, Ring, Snapshot
from sentinel.client.voice import say
from sentinel.config import Settings
from sentinel.errors import RunStopped
from sentinel.records import Ack, Command, Word
from sentinel.vocabulary import Action, Reason

BATCHES, STEP = "batches", "step"  # program points
LOOK_SECONDS = 0.2  # how often a paused loop looks for other commands


class Turns:
    """The boundaries of one Run. Loop's thread only, inside the shield."""

    def __init__(self, loop: Loop, ring: Ring, cursor: Cursor, inbox: Inbox, settings: Settings) -> None:
        self.stopped = ""  # the reason, once the run has been stopped
        self.on_stop: Callable[[str], object] | None = None  # told of it in place of RunStopped
        self._loop = loop
        self._ring = ring
        self._cursor = cursor
        self._inbox = inbox
        self._settings = settings
        self._committed: tuple[Turn, Word] | None = None
        self._undo_step: int | None = None
        self._restoring = False

    # ------------------------------------------------------------ boundaries

    def top_of_batches(self) -> bool:
        """Before the next batch is fetched; False: the loop shall end."""
        self._loop.end_attempt()
        if self._loop.between_attempts and self._undo_step is not None:
            self._undo_now(BATCHES)
        elif self._loop.between_attempts:
            self._meet(BATCHES, may_restore=True)
        return not self.stopped

    def wants_step(self, step: int) -> bool:
        if self._undo_step is not None:
            return True
        turn = self._inbox.turn
        if turn is None or turn.command.action is not Action.ROLLBACK or step < turn.command.apply_at:
            return False
        word = turn.verdict()
        if not word.commit:
            self._abort(turn, word)
            return False
        self._committed = (turn, word)
        return True

    def after_step(self, *, nothing_applied: bool = False) -> None:
        """After the step of the optimizer that opened the attempt. May raise RunStopped, and nothing else."""
        if self._undo_step is not None:
            self._undo_now(STEP)
        elif self._committed is not None:
            turn, word = self._committed
            self._committed = None
            self._roll_back(turn, word, STEP)
        else:
            self._meet(STEP, may_restore=nothing_applied)
        if self.stopped and self.on_stop is None:
            raise RunStopped(self.stopped)

    def _meet(self, point: str, *, may_restore: bool) -> None:
        """One boundary: a due turn first, else a due snapshot. After an applied update no older state may come back:
        its loop goes on as if the update had been another.
        """
        turn = self._inbox.turn
        due = turn is not None and self._loop.step >= turn.command.apply_at
        if turn is not None and due and (may_restore or turn.command.action is not Action.ROLLBACK):
            self._carry_out(turn, point)
        elif self.needs_base and point == BATCHES:
            self.take_base()
        elif self._loop.step >= self._ring.next_step and not (point == STEP and may_restore):
            # Not where GradScaler skipped: the `update` that follows lowers the scale, after a restore it would not.
            self._snapshot(point)

    # ------------------------------------------------------------ snapshots

    @property
    def needs_base(self) -> bool:
        return self._ring.wants_base

    def take_base(self) -> None:
        self._snapshot(BASE)

    def state_loaded(self) -> None:
        """The user loaded a checkpoint: what was copied before is the state of another run."""
        if not self._restoring:
            self._ring.invalidate("the loop loaded another state")

    def _snapshot(self, point: str) -> None:
        loop = self._loop
        started = time.perf_counter()
        counters = Counters(loop.step, loop.applied, loop.skipped, self._cursor.position)
        could = not self._ring.unavailable
        try:
            self._ring.take(loop.live_scaler, loop.generation, point, counters)
        finally:
            if could and self._ring.unavailable:
                say(self._ring.unavailable)
        self._cursor.trim(self._ring.oldest_position)
        loop.timing.paused(_since(started))

    # ------------------------------------------------------------ turns

    def _carry_out(self, turn: Turn, point: str) -> None:
        word = turn.verdict()
        if not word.commit:
            self._abort(turn, word)
        elif turn.command.action is Action.ROLLBACK:
            self._roll_back(turn, word, point)
        elif turn.command.action is Action.PAUSE:
            self._pause(turn, point)
        else:
            self._stop(turn.command, Reason.REQUESTED)

    def _abort(self, turn: Turn, word: Word) -> None:
        self._inbox.take()
        self._reply(turn.command, "aborted", word.reason)

    def _roll_back(self, turn: Turn, word: Word, point: str) -> None:
        command, loop = turn.command, self._loop
        started, from_step = time.perf_counter(), loop.step
        snapshot = self._restore(word.target_step if word.target_step is not None else from_step, point)
        self._inbox.take()
        if snapshot is None:
            self._reply(
                command, "failed", Reason.NOT_VERIFIED, "no snapshot passed its check", seconds=_since(started)
            )
            say(f"rollback at step {from_step} failed: no snapshot passed its check")
            return
        skipped = self._rewind_data(command, snapshot, from_step)
        self._history(snapshot)
        seconds = _since(started)
        loop.timing.paused(seconds)
        self._reply(
            command,
            "applied",
            Reason.OK,
            target_step=snapshot.step,
            skipped_batches=skipped,
            seconds=seconds,
            lr_aligned=self._lr_aligned(snapshot, point),
        )
        say(
            f"rolled back from step {from_step} to {snapshot.step} in {seconds:.2f} s, "
            f"{skipped} batches left out ({command.reason})"
        )

    def _restore(self, target_step: int, point: str) -> Snapshot | None:
        self._restoring = True
        try:
            return self._ring.restore(target_step, point, self._loop.live_scaler)
        finally:
            self._restoring = False

    def _history(self, snapshot: Snapshot) -> None:
        counters = snapshot.counters
        self._loop.rewound(counters.step, counters.applied, counters.skipped)
        self._ring.rolled_back(snapshot)
        self._cursor.rolled_back(counters.step)

    def _rewind_data(self, command: Command, snapshot: Snapshot, from_step: int) -> int:
        """Batches left out. A loop without run.batches goes on with its next data: all since the target are gone."""
        cursor, position = self._cursor, snapshot.counters.data_position
        if not cursor.active:
            return from_step - snapshot.step
        if not cursor.can_rewind_to(position):
            return cursor.position - position
        if command.data == "replay":
            return cursor.rewind(position)
        if command.skip_batches is not None:
            return cursor.rewind(position, skip=command.skip_batches)
        onset = command.onset_step if command.onset_step is not None else snapshot.step + 1
        bad_from = cursor.position_after(onset - self._settings.rollback.margin_steps - 1)
        return cursor.rewind(position, skip_from=max(position, bad_from if bad_from is not None else position))

    def _lr_aligned(self, snapshot: Snapshot, point: str) -> bool:
        """Will the loop's next lr be that of the clean run? False when a scheduler is not in our hands."""
        subject = self._loop.subject
        if snapshot.program_point == BASE and point == STEP:
            return not subject.has_scheduler and not _scheduled(subject.optimizers)
        return subject.has_scheduler or not _scheduled(subject.optimizers)

    def _pause(self, turn: Turn, point: str) -> None:
        command, started = turn.command, time.perf_counter()
        limit = command.limit_seconds or self._settings.pause.limit_seconds
        inbox, loop = self._inbox, self._loop
        inbox.released.clear()
        inbox.pause_id = command.id
        inbox.take()
        phase, loop.phase = loop.phase, "paused"
        self._reply(command, "applied", Reason.OK)
        say(f"paused at step {loop.step} ({command.reason}); `sentinel ctl {command.run_id} resume` goes on")
        while not inbox.released.wait(LOOK_SECONDS) and not self.stopped and not inbox.closed:
            other = inbox.turn
            if other is not None:
                self._carry_out(other, point)
            if _since(started) > limit:
                self._stop(command, Reason.LIMIT_REACHED)
        inbox.pause_id = ""
        loop.phase = phase
        seconds = _since(started)
        loop.timing.paused(seconds)
        if not self.stopped:
            self._reply(command, "released", Reason.REQUESTED, seconds=seconds)
            say(f"resumed at step {loop.step} after {seconds:.1f} s")

    def _stop(self, command: Command, reason: Reason) -> None:
        self.stopped = command.reason or reason.value
        self._inbox.take()
        if command.action is Action.STOP:
            self._reply(command, "applied", Reason.OK)
        else:
            self._reply(command, "released", reason)
        say(f"stopped at step {self._loop.step} ({self.stopped})")
        if self.on_stop is not None:
            self.on_stop(self.stopped)

    # ------------------------------------------------------------ undo of an update that the device found bad late

    @property
    def undo_pending(self) -> bool:
        return self._undo_step is not None

    def undo(self, step: int) -> None:
        self._undo_step = step

    def _undo_now(self, point: str) -> None:
        """Back to the newest snapshot before the bad update; the batches from there on are left out."""
        started, from_step, bad = time.perf_counter(), self._loop.step, self._undo_step
        assert bad is not None
        older = [one for one, _, _ in self._ring.candidates(point) if one < bad]
        snapshot = self._restore(older[0], point) if older else None
        if snapshot is None:
            self._undo_step = None
            say(f"step {bad} had a non-finite gradient and no snapshot is older; its update stays")
            return
        position = snapshot.counters.data_position
        if self._cursor.can_rewind_to(position):
            bad_from = self._cursor.position_after(bad - 1)
            self._cursor.rewind(position, skip_from=max(position, bad_from if bad_from is not None else position))
        self._history(snapshot)
        self._undo_step = None
        say(f"step {bad} had a non-finite gradient: went back from {from_step} to {snapshot.step}")
        self._loop.timing.paused(_since(started))

    def _reply(self, command: Command, state: str, reason: Reason, text: str = "", **more: Any) -> None:
        self._inbox.answer(
            Ack(
                seq=0,
                time=time.time(),
                command_id=command.id,
                state=state,
                reason=reason,
                text=text,
                generation=self._loop.generation,
                step=self._loop.step,
                **more,
            )
        )


def _scheduled(optimizers: list[Any]) -> bool:
    """LRScheduler replaces `step` on the optimizer it drives."""
    return any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers)


def _since(started: float) -> float:
    return time.perf_counter() - started
