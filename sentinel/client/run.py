"""A Run: what `sentinel.attach` returns, and the only object of ours that a training loop touches."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from sentinel.client import interception, loading
from sentinel.client.data import Batches, Cursor, Source, samples_of
from sentinel.client.inbox import Inbox
from sentinel.client.link import Link
from sentinel.client.loop import Loop
from sentinel.client.outbox import Outbox
from sentinel.client.rank import current
from sentinel.client.ring import Ring
from sentinel.client.shield import FAILURES_BEFORE_OFF, describe
from sentinel.client.subject import Subject
from sentinel.client.turns import BATCHES, STEP, Turns
from sentinel.client.voice import say
from sentinel.config import Settings
from sentinel.records import (
    Command,
    Heartbeat,
    Mark,
    PhaseNote,
    Roster,
    RunEnd,
    Trouble,
    Welcome,
    Word,
)
from sentinel.vocabulary import Action, Mode, Quality, Reason, UpdateResult

Batch = TypeVar("Batch")

TRAINING = ("train", "paused")  # phases in which batches are training data
CLOSE_SECONDS = 1.5  # most that the end of training waits for the daemon
TURNS = (Action.ROLLBACK, Action.PAUSE, Action.STOP)  # what this version can carry out in the loop


class Run:
    """One attached model. Made by `sentinel.attach`; after that nothing here raises into the loop.

    Members: `step` (update attempts so far), `run_id`, `url` (of the daemon, "" until it is known), `mode`.
    """

    def __init__(self, run_id: str, mode: Mode, step: int) -> None:
        """For `attach` and for mode "off", in which a Run does nothing and counts nothing."""
        self.run_id = run_id
        self.mode = mode
        self.url = ""
        self.detached = False
        self._first_step = step

    @property
    def step(self) -> int:
        """Update attempts so far; goes back with a rollback."""
        return self._first_step

    def report(self, *, loss: Any = None, tokens: Any = None, samples: Any = None, **others: Any) -> None:
        """Say what the loop knows about the attempt whose backward ran last, before or after `optimizer.step()`.

        `loss`: a number or a tensor of one element (never synced); several calls in one attempt give the mean,
        weighted by `tokens` or `samples` where given. `flops`: floating point operations of the step on this rank,
        for `mfu_ratio`. Other keywords are stored by name.
        """

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """One pass over `loader` that can be rewound, and can skip. Raises MisuseError for a bare iterator."""
        return iter(loader)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`with run.phase("eval"):` -- a stall in here is not a hang, and no turn happens."""
        del name
        yield

    def detach(self, error: BaseException | None = None) -> None:
        """End the Run: say so to the daemon, leave no hook, thread, socket or file behind. May be called twice.

        `error`: what ended training; the run is then stored as failed, not as completed.
        """
        del error
        self.detached = True


class AttachedRun(Run):
    """The Run of modes "protect" and "observe"."""

    def __init__(
        self, run_id: str, mode: Mode, *, loop: Loop, ring: Ring, outbox: Outbox, settings: Settings, world_size: int
    ) -> None:
        super().__init__(run_id, mode, loop.step)
        self._loop = loop
        self._ring = ring
        self._outbox = outbox
        self._settings = settings
        self._world_size = world_size
        self._cursor = Cursor(settings.data.tape_bytes)
        self._inbox = Inbox(run_id, outbox.push, self._position, self._candidates, self._refusal)
        self._turns = Turns(loop, ring, self._cursor, self._inbox, settings)
        self._link: Link | None = None
        self._failures = 0
        self._told_of_no_url = False
        self._alone_no_more = False
        self._marks: list[Mark] = []
        self._ending = threading.Lock()
        loop.reflexes.acts = mode is Mode.PROTECT and world_size == 1
        loop.boundaries = self._turns
        loop.on_failure = self._failed
        loop.on_trouble = self.on_trouble
        loop.data_position = self._data_position
        loop.batches_active = lambda: self._cursor.active
        loop.step_ended = self._step_ended

    def __reduce__(self) -> tuple[type[Run], tuple[str, Mode, int]]:
        """What holds a Run can be copied and saved, a model or a trainer: in the copy it does nothing."""
        return Run, (self.run_id, Mode.OFF, self.step)

    @property
    def step(self) -> int:
        return self._loop.step

    @property
    def subject(self) -> Subject:
        return self._loop.subject

    def begin(self, link: Link) -> None:
        """Called once by `attach`: from here on the loop is watched."""
        self._link = link
        try:
            self.subject.keep()
            self._loop.hook()
            interception.add(self._loop)
            self._compare_rates()
            link.start()
        except BaseException:
            interception.remove(self._loop)
            self._loop.unhook()
            self.subject.release()
            raise

    # ------------------------------------------------------------ for the loop

    def report(self, *, loss: Any = None, tokens: Any = None, samples: Any = None, **others: Any) -> None:
        self._loop.report(loss, tokens, samples, others)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        if self.detached or self._loop.dead or self._loop.phase not in TRAINING:
            return iter(loader)
        source = self._cursor.open(loader)
        self._cursor.source, self._cursor.active = source, True
        return Batches(self._pass(source), loader)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        loop = self._loop
        before, loop.phase = loop.phase, str(name)
        loop.timing.phase_entered()
        loop.probes.phase(loop.phase)
        self._note_phase(str(name), entered=True)
        try:
            yield
        finally:
            loop.phase = before
            loop.probes.phase(before)
            loop.timing.phase_left()
            self._note_phase(str(name), entered=False)

    def detach(self, error: BaseException | None = None) -> None:
        if error is None:
            self.end("completed", "")
        else:
            self.end("failed", describe(error))

    def on_stop(self, tell: Callable[[str], object] | None) -> None:
        """Called once by `attach`: whom a stop is told in place of RunStopped, None for nobody."""
        self._turns.on_stop = tell

    def end(self, status: str, error: str) -> None:
        """Detach and say how the run ended. From any thread; the second call does nothing."""
        with self._ending:
            if self.detached:
                return
            self.detached = True
        self._inbox.closed = True
        self._quietly(self._inbox.lost)
        interception.remove(self._loop)
        self._quietly(self._loop.unhook)
        self._quietly(self.subject.release)
        self._quietly(self._loop.finish)
        if self._turns.stopped:
            error = f"stopped: {self._turns.stopped}"
        loop = self._loop
        self._quietly(lambda: self._outbox.push(RunEnd(0, time.time(), loop.generation, loop.step, status, error)))
        loop.dead = True
        if self._link is not None:
            self._link.close(CLOSE_SECONDS)
        self._quietly(self._ring.clear)
        self._quietly(loop.release)
        self._cursor.source = None

    def abandon(self) -> None:
        """In a forked child: everything here is the parent's business."""
        self.detached = True
        self._loop.dead = True
        if self._link is not None:
            self._link.abandon()

    # ------------------------------------------------------------ for the link's thread

    def on_welcome(self, welcome: Welcome) -> None:
        if not welcome.url and not self._told_of_no_url:
            self._told_of_no_url = True
            say("the daemon found no free port, so there is no /metrics (the run is watched); set http.port")
        self.url = welcome.url
        self._inbox.attempt = welcome.attempt
        self._allow(welcome.may_act)

    def on_roster(self, roster: Roster) -> None:
        self._world_size = max(self._world_size, roster.world_size)
        self._allow(roster.may_act)

    def on_command(self, command: Command) -> None:
        self._inbox.command(command)

    def on_word(self, word: Word) -> None:
        self._inbox.word(word)

    def on_mark(self, mark: Mark) -> None:
        self._marks.append(mark)  # the ring belongs to the loop's thread

    def on_lost(self) -> None:
        self._inbox.lost()

    def on_trouble(self, what: str, text: str) -> None:
        say(text)
        self._outbox.push(Trouble(0, time.time(), self._loop.step, what, text))

    def heartbeat(self) -> Heartbeat:
        loop = self._loop
        if loop.subject.gone:
            # Cannot close the link from its own thread.
            threading.Thread(target=self.end, args=("completed", ""), name="sentinel-end", daemon=True).start()
        return Heartbeat(
            time.time(), loop.step, loop.phase, self._outbox.last_seq, dict(self._outbox.dropped), loop.hook_seconds
        )

    # ------------------------------------------------------------ inner life

    def _pass(self, source: Source) -> Iterator[Any]:
        cursor, loop = self._cursor, self._loop
        try:
            while True:
                if cursor.source is not source:  # another pass was begun inside this one, and is over
                    cursor.source, cursor.active = source, True
                if not self._at_top():
                    return
                started = time.perf_counter()
                try:
                    entry, batch = loading.fetch(source.next)
                except StopIteration:
                    return
                loop.got_batch(started, time.perf_counter(), samples_of(entry))
                self._quietly(functools.partial(cursor.hand_out, entry))
                yield batch
        finally:
            self._quietly(source.close)
            if cursor.source is source:
                cursor.active = False

    def _at_top(self) -> bool:
        """True to go on. Shielded like every other way from the loop into us."""
        loop = self._loop
        if loop.dead:
            return True
        started = time.perf_counter()
        try:
            return self._turns.top_of_batches()
        except Exception as error:  # noqa: BLE001 -- part of the same boundary as `shielded`
            self._failed("batches", error)
            return True
        finally:
            loop.hook_seconds += time.perf_counter() - started

    def _step_ended(self, step: int, seconds: float | None, result: UpdateResult) -> None:
        self._compare_rates()
        self._cursor.step_done(step)
        if step == self._first_step + 1:
            self._look_for_others()
        if result is UpdateResult.REFLEX:
            self._ring.trouble(step)
        if seconds is not None:
            self._ring.observe_step(seconds)
        while self._marks:
            mark = self._marks.pop(0)
            if mark.generation == self._loop.generation:
                self._ring.trouble(step)
                self._ring.mark(mark.since_step, clear=mark.clear)
        self._ring.promote(step)

    def _compare_rates(self) -> None:
        for watched in self._loop.watched:
            text = watched.wrappers.disagreement(watched.target) if watched.wrappers else None
            if text is not None:
                self.on_trouble("optimizer", text)

    def _look_for_others(self) -> None:
        """The process group may have come after `attach`, without a launcher's variables: then we act no more."""
        found = current(os.environ).world_size
        if found > self._world_size:
            self._world_size = found
            self._alone_no_more = True
            self._allow(may_act=False)
            text = f"the process group has {found} ranks, which was not known at attach: this run is only observed"
            say(text)
            self._outbox.push(Trouble(0, time.time(), self._loop.step, "ranks", text))

    def _allow(self, may_act: bool) -> None:
        may_act = may_act and not self._alone_no_more
        self._loop.reflexes.acts = may_act and self.mode is Mode.PROTECT

    def _data_position(self) -> int | None:
        return self._cursor.position or None

    def _position(self) -> tuple[int, int, str]:
        loop = self._loop
        phase = "train" if loop.phase == "paused" else loop.phase
        return loop.generation, loop.step, phase

    def _candidates(self) -> list[tuple[int, Quality, str]]:
        return self._ring.candidates(BATCHES if self._cursor.active else STEP)

    def _refusal(self, command: Command) -> Reason:
        if command.action not in TURNS:
            return Reason.LOOP_CANNOT
        if self.mode is not Mode.PROTECT:
            return Reason.OBSERVE_MODE
        if self._world_size > 1:
            return Reason.SEVERAL_RANKS
        if self._link is not None and not self._link.record_kept:
            return Reason.NO_RECORD
        if command.action is Action.ROLLBACK and not self._candidates():
            return Reason.NO_SNAPSHOT
        return Reason.OK

    def _note_phase(self, name: str, *, entered: bool) -> None:
        if not self._loop.dead:
            self._quietly(lambda: self._outbox.push(PhaseNote(0, time.time(), self._loop.step, name, entered)))

    def _failed(self, where: str, error: Exception) -> None:
        """One of our own errors, kept out of the loop. After too many the Run goes silent."""
        self._failures += 1
        if self._failures == 1:
            say(f"internal error in {where}: {describe(error)} (training goes on)")
        if self._failures <= FAILURES_BEFORE_OFF:
            with contextlib.suppress(Exception):  # if the outbox is what fails, nobody is left to tell
                self._outbox.push(Trouble(0, time.time(), self._loop.step, "probe", f"{where}: {describe(error)}"))
        if self._failures == FAILURES_BEFORE_OFF:
            say(f"{FAILURES_BEFORE_OFF} internal errors: this run is not watched any longer (training goes on)")
            self._loop.dead = True

    def _quietly(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 -- part of the boundary: phases and the end are called by the loop
            self._failed("run", error)


def exit_status() -> tuple[str, str]:
    """How this process is ending, as an atexit hook sees it: an uncaught exception leaves its trace in sys."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return ("failed", describe(error)) if error is not None else ("completed", "")
