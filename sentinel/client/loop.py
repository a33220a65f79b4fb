"""Turn what happens in the user's loop into update attempts. Every public method is called by torch or the user.

An attempt opens when an optimizer steps, or when GradScaler skips one's step (`attempts`). Its record is sent when
the next backward begins, so that a report made after `optimizer.step()` still belongs to it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from sentinel.client import interception, scaling
from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.boundaries import Boundaries
from sentinel.client.clipping import Clipping
from sentinel.client.deferred import DeviceReader
from sentinel.client.guard import measure
from sentinel.client.handle import Handle
from sentinel.client.judgement import Judgement
from sentinel.client.markers import Markers
from sentinel.client.optimizer import WatchedOptimizer, watch
from sentinel.client.probes.loss import SCALED_BY, scalar_roots
from sentinel.client.probes.memory import device_memory
from sentinel.client.probing import Probing
from sentinel.client.reflex import Reflexes
from sentinel.client.sharding import flat_shards, gathers_apart
from sentinel.client.shield import shielded
from sentinel.client.subject import Subject
from sentinel.client.timing import Timing
from sentinel.config import Settings
from sentinel.records import Reflex, StepRecord
from sentinel.vocabulary import UpdateResult

MOST_COMPLAINTS = 20  # about wrong reports


class Loop:
    """The loop's side of one Run. Runs on the user's thread; everything is shielded."""

    def __init__(
        self, subject: Subject, settings: Settings, send: Callable[[StepRecord | Reflex], object], step: int
    ) -> None:
        self.subject = subject
        self.settings = settings
        self.applied = 0
        self.skipped = 0
        self.phase = "train"
        self.dead = False
        self.hook_seconds = 0.0
        self.shield_depth = 0
        self.timing = Timing()
        self.boundaries: Boundaries | None = None
        self.on_failure: Callable[[str, Exception], None] = lambda _where, _error: None
        self.on_trouble: Callable[[str, str], None] = lambda _what, _text: None
        self.data_position: Callable[[], int | None] = lambda: None
        self.batches_active: Callable[[], bool] = lambda: False
        self.step_ended: Callable[[int, float | None, UpdateResult], None] = lambda _step, _seconds, _result: None
        self.scaler: Any = subject.scaler
        self.probes = Probing()
        self._send = send
        self.reflexes = Reflexes(settings.reflex, send, self._names)
        self.watched = watch(subject.optimizers, subject.wrappers, flat_shards(subject.model))
        self._reader = DeviceReader()
        self._markers = Markers(self)
        self._attempts = Attempts(self.watched, self._markers, step)
        self._stepping = self._attempts.stepping
        self._clipping = Clipping(self._attempts)
        self._judgement = Judgement(self._attempts, self._markers, self.reflexes)
        self._thread = 0  # in which the last step ran
        self._complaints: set[str] = set()
        self._hook_seconds_before = 0.0
        self._hook_fired = False

    @property
    def step(self) -> int:
        """Attempts so far."""
        return self._attempts.step

    @property
    def generation(self) -> int:
        return self._attempts.generation

    # ------------------------------------------------------------ set up and taken down by the Run

    def use(self, probes: Probing) -> None:
        """Called once, before `hook`."""
        self.probes = self._clipping.probes = self._judgement.probes = probes

    def hook(self) -> None:
        for watched in self.watched:
            watched.hook(self.before_step, self.after_step)
        self._markers.place(self.watched)
        self.probes.arm(self.step + 1)

    def unhook(self) -> None:
        for watched in self.watched:
            try:
                watched.unhook()
            except ReferenceError:
                continue
        self._markers.remove()
        self.probes.close()

    def release(self) -> None:
        """After the end: whoever keeps the Run keeps no parameter alive with it."""
        for watched in self.watched:
            watched.release()
        self._attempts.forget()

    def failed(self, where: str, error: Exception) -> None:
        self.on_failure(where, error)

    # ------------------------------------------------------------ called by the seams in torch

    @shielded
    def before_backward(self, arrived: float) -> None:
        self._markers.begin()
        self._attempts.backward_begins()
        self.timing.begins(arrived, known=False)  # what came before is no part of the first step
        if self._attempts.complete and self._thread == threading.get_ident():
            self.flush()

    @shielded
    def after_backward(self, outputs: Sequence[Any], arrived: float, started: float, returned: float) -> None:
        alone = len(interception.observers()) == 1
        if not self._markers.reached(alone=alone, apart=self._apart):
            return
        self._attempts.void.clear()
        self._markers.end()
        attempt = self._attempts.of_backward()
        attempt.backwards += 1
        self.timing.backward(arrived, started, returned)
        self._attempts.latest = attempt
        self.probes.after_backward(attempt, returned)
        roots = scalar_roots(outputs)
        for root in roots:
            reference = getattr(root, SCALED_BY, None)
            if reference is not None:
                attempt.scaler = reference()
        if not self.settings.loss.capture or (self._stepping.evaluating and self._stepping.evaluations > 1):
            return
        for root in roots:
            attempt.objective.add(root, scaling.scale_of(attempt.scaler))

    def _apart(self) -> bool:
        return gathers_apart(self.subject.model)

    @shielded
    def before_clip(self, parameters: list[Tensor], clip: interception.Clip) -> None:
        self._clipping.before(parameters, clip)

    @shielded
    def after_clip(self) -> None:
        self._clipping.after()

    @shielded
    def before_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        if self._attempts.find(optimizer) is not None:
            self.scaler = Handle(scaler)
            self._hook_fired = False
            self.timing.scaler_steps(clock())

    @shielded
    def after_scaler_step(self, _scaler: Any, optimizer: Any) -> None:
        """GradScaler fires no hook when it skips an unfused step; that attempt ends here."""
        watched = self._attempts.find(optimizer)
        if watched is None or watched in self._attempts.void or self._hook_fired or not _scaler._enabled:
            return
        self.timing.scaler_skipped(clock())
        attempt = self._open(watched)
        attempt.result = UpdateResult.OVERFLOW
        if watched.name not in attempt.measures:  # as fused ones tell it: not finite
            attempt.measures[watched.name] = measure(watched)
        self._close(watched, attempt)

    @shielded
    def state_loaded(self, target: Any) -> None:
        """Somebody called load_state_dict outside a turn. If it is ours, older snapshots are of another state."""
        ours = self._attempts.find(target) is not None or any(
            target is module for module in self.subject.model.modules()
        )
        inside = any(module is self.subject.model for module in getattr(target, "modules", list)())
        if (ours or inside) and self.boundaries is not None:
            self.boundaries.state_loaded()

    # ------------------------------------------------------------ the optimizer's step hooks

    @shielded
    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watched = self._attempts.find(optimizer)
        if watched is None:
            return None
        self._hook_fired = True
        self.timing.step_enters(clock())
        if self._stepping.repeats(watched):
            return None
        if watched in self._attempts.void:
            watched.set_aside()
            return None
        self._thread = threading.get_ident()
        self._attempts.forget_broken_step()
        watched.look_again()
        if self.boundaries is not None and self.boundaries.needs_base:
            self._take_base()
        attempt = self._open(watched)
        if not attempt.backwards and watched.gradients and torch._C._current_graph_task_id() == -1:
            self._markers.place(self.watched)
        self._stepping.enter(watched)
        opens = len(self._attempts.stepped) == 1
        if (
            opens
            and self.boundaries is not None
            and not self.batches_active()
            and self.boundaries.wants_step(self.step)
        ):
            attempt.result = UpdateResult.TURN
            watched.set_aside()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):
            wrapped = self._stepping.watch(
                closure, self.timing.evaluates, lambda: self._after_evaluation(watched, attempt)
            )
            replaced = (
                ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})
            )
        else:
            replaced = None
            if attempt.result is not UpdateResult.TURN:
                self._judgement.before_step(watched, attempt)
        self.probes.before_update(watched, attempt)
        self.timing.step_starts()
        return replaced

    @shielded
    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        ended = clock()
        watched = self._attempts.find(optimizer)
        if watched is None or not self._stepping.leave():
            return
        self.timing.step_ends(ended)
        watched.give_back()
        watched.end_device_skip()
        attempt = self._attempts.current
        if attempt is None or watched in self._attempts.void:
            return
        if self._stepping.evaluations:
            attempt.evaluations = (attempt.evaluations or 0) + self._stepping.evaluations
        self.probes.after_update(watched, attempt)
        self._close(watched, attempt)

    # ------------------------------------------------------------ called by the Run

    @shielded
    def report(self, loss: Any, tokens: Any, samples: Any, others: dict[str, Any]) -> None:
        for text in self._attempts.of_report().reported.add(loss, tokens, samples, others):
            if text not in self._complaints and len(self._complaints) < MOST_COMPLAINTS:
                self._complaints.add(text)
                self.on_trouble("report", text)

    @shielded
    def got_batch(self, started: float, ended: float, samples: int | None) -> None:
        """`run.batches` fetched one, of so many samples where that is known."""
        self.timing.waited(started, ended)
        self._attempts.gathering.draw(samples)

    @shielded
    def loader_waited(self, started: float, ended: float) -> None:
        """A DataLoader of torch gave a batch to this thread, which trains or is not known to."""
        if self._thread in {0, threading.get_ident()}:
            self.timing.waited(started, ended)

    def end_attempt(self) -> None:
        """The top of run.batches: whatever was open is complete."""
        self.timing.begins(clock(), known=True)
        self._attempts.forget_broken_step()
        self.flush()
        self._attempts.stepped.clear()

    @property
    def between_attempts(self) -> bool:
        """No gradients are being gathered: nothing is lost if the state changes now."""
        return self._attempts.between

    def flush(self) -> None:
        """Send the record of the last attempt. Numbers that are still on a device follow in order."""
        attempt = self._attempts.take()
        if attempt is None:
            self._reader.poll()
            return
        values = attempt.values()
        values |= self.probes.values(attempt)
        self._reader.read(values, lambda numbers: self._emit(attempt, numbers))

    def finish(self) -> None:
        """At the end of the Run: everything is sent, waiting for the device if need be."""
        self._attempts.forget_broken_step()
        self.flush()
        self._reader.poll(wait=True)

    def rewound(self, step: int, applied: int, skipped: int) -> None:
        """A turn restored an older state: the numbers go back with it, the history grows a generation."""
        self.finish()
        self.applied, self.skipped = applied, skipped
        self._attempts.rewound(step)
        self.reflexes.applied()

    # ------------------------------------------------------------ attempts

    @shielded
    def _take_base(self) -> None:
        """On its own, so that a state which cannot be copied does not keep the reflex from looking."""
        if self.boundaries is not None and not self.batches_active():
            self.boundaries.take_base()

    def _open(self, watched: WatchedOptimizer) -> Attempt:
        if self._attempts.begins_with(watched):
            self.flush()
            self.timing.opens()
        return self._attempts.open(watched)

    def _close(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        """After each optimizer's step: what is known now. The attempt stays open for others and for reports."""
        attempt.time = time.time()
        attempt.memory = device_memory()
        attempt.data_position = self.data_position()
        lr = watched.lr
        if lr is not None:
            attempt.lrs[watched.name] = lr
        if self.scaler is not None:
            attempt.loss_scale = scaling.value_of(self.live_scaler)
        self.timing.closes(attempt, clock())
        stepped = self._attempts.stepped
        if len(stepped) == len(self.watched) or len(self.watched) == 1:
            self.probes.arm(self.step + 1)
        if attempt.result is not UpdateResult.TURN:
            self.step_ended(self.step, attempt.step_seconds, attempt.result)
        attempt.hook_seconds = self.hook_seconds - self._hook_seconds_before
        self._hook_seconds_before = self.hook_seconds
        if len(stepped) == 1 and self.boundaries is not None and not self.batches_active():
            self.boundaries.after_step(nothing_applied=attempt.result is UpdateResult.OVERFLOW)

    def _emit(self, attempt: Attempt, numbers: dict[str, float | None]) -> None:
        if numbers:
            attempt.settle(numbers)
        undoing = self.boundaries is not None and self.boundaries.undo_pending
        must_undo = not undoing and self.reflexes.read_from_device(attempt, numbers, self.watched)
        if must_undo and self.boundaries is not None:
            self.boundaries.undo(attempt.step)
        if attempt.result is UpdateResult.APPLIED:
            self.applied += 1
            self.reflexes.applied()
        else:
            self.skipped += 1
        attempt.clip_fraction = self._clipping.fraction(attempt) if attempt.clips else None
        fields = self.probes.fields(attempt, numbers)
        self._send(attempt.record(self.applied, self.skipped, fields))

    @shielded
    def _after_evaluation(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        started = clock()
        self._judgement.after_evaluation(watched, attempt)
        self.timing.aside(clock() - started)

    @property
    def norm_seconds(self) -> float:
        """The part of `hook_seconds` that went into gradient norms of our own."""
        return sum(watched.norm_seconds for watched in self.watched)

    @property
    def live_scaler(self) -> Any:
        """The GradScaler in use, None without one or when it is disabled."""
        return scaling.live(self.scaler)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.subject.model.named_parameters()}
