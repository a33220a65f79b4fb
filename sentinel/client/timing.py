"""Where did the time of an attempt go: waiting for data, forward, backward, optimizer. One definition in every loop.

Every moment of the loop is counted at most once, and belongs to the attempt that was closed next after it. So the
parts of an attempt never exceed its `step_seconds`; what they leave is "other". A definition of each part stands in
docs/signals.md. No module hooks: it holds under compilation, checkpointing and pickling alike.
"""

from time import perf_counter as clock

from sentinel.client.attempt import Attempt


class Timing:
    """Told on the loop's thread what begins and ends; moments are `time.perf_counter()`."""

    def __init__(self) -> None:
        self.pause_seconds = 0.0  # in all, of what is no part of any step: phases, turns, snapshots
        self._begun = 0.0  # when the attempt that goes on began; 0: what came before the first one is not counted
        self._begun_pause = 0.0  # and `pause_seconds` then
        self._whole = False  # it was not underway by then
        self._ended = 0.0  # when an optimizer's step last ended
        self._ended_pause = 0.0
        self._mark = 0.0  # from here on it is forward; 0: not known
        self._mark_pause = 0.0
        self._phases = 0  # depth
        self._phase_entered = 0.0
        self._phase_pause = 0.0  # `pause_seconds` then
        self._scaler_entered = 0.0
        self._step_started = 0.0
        self._step_pause = 0.0
        self._within_step = 0.0  # seconds of a step that were counted elsewhere
        self._data: float | None = None  # the parts since the last close
        self._forward: float | None = None
        self._backward: float | None = None
        self._optimizer: float | None = None

    # ------------------------------------------------------------ attempts

    def begins(self, now: float, *, known: bool) -> None:
        """A backward, a step, or with `known` the top of run.batches: the first attempt begins here at the latest."""
        if not self._begun:
            self._begun, self._begun_pause, self._whole = now, self.pause_seconds, known
            if known:
                self._set_mark(now)

    def opens(self) -> None:
        """A new attempt: it began when the last one ended."""
        if self._ended:
            self._begun, self._begun_pause, self._whole = self._ended, self._ended_pause, True

    def closes(self, attempt: Attempt, now: float) -> None:
        """An optimizer's step in it is over. With several of them the attempt may be closed again later."""
        if self._begun:
            attempt.whole = self._whole
            attempt.step_seconds = max(0.0, now - self._begun - (self.pause_seconds - self._begun_pause))
        attempt.data_wait_seconds = _sum(attempt.data_wait_seconds, self._data)
        attempt.forward_seconds = _sum(attempt.forward_seconds, self._forward)
        attempt.backward_seconds = _sum(attempt.backward_seconds, self._backward)
        attempt.optimizer_seconds = _sum(attempt.optimizer_seconds, self._optimizer)
        self._data = self._forward = self._backward = self._optimizer = None
        self._ended, self._ended_pause = now, self.pause_seconds
        self._set_mark(now)

    # ------------------------------------------------------------ parts

    def waited(self, started: float, ended: float) -> None:
        """The loop got a batch."""
        if self._begun and not self._phases:
            self._data = (self._data or 0.0) + (ended - started)
            self._within_step += ended - started
            self._set_mark(ended)

    def backward(self, arrived: float, started: float, returned: float) -> None:
        """A backward of ours. It was called at `arrived`; between that and `started` it was sentinel's."""
        if self._phases:
            return
        if self._mark:
            forward = max(0.0, arrived - self._mark - (self.pause_seconds - self._mark_pause))
            self._forward = (self._forward or 0.0) + forward
            self._within_step += forward
        self._backward = (self._backward or 0.0) + (returned - started)
        self._within_step += returned - started
        self._set_mark(returned)

    def scaler_steps(self, now: float) -> None:
        """GradScaler looks at the gradients, then lets the optimizer step, or not: all that is the optimizer's."""
        self.begins(now, known=False)
        self._scaler_entered = now

    def step_enters(self, now: float) -> None:
        """An optimizer's step is called; until `step_starts` it is sentinel's time."""
        self.begins(now, known=False)
        if self._scaler_entered:
            self._optimize(now - self._scaler_entered)
            self._scaler_entered = 0.0

    def step_starts(self) -> None:
        self._step_started, self._step_pause, self._within_step = clock(), self.pause_seconds, 0.0

    def evaluates(self) -> None:
        """The closure of the step that goes on is called: a forward begins."""
        self._set_mark(clock())

    def aside(self, seconds: float) -> None:
        """So much of the step that goes on was sentinel's."""
        self._within_step += seconds

    def step_ends(self, now: float) -> None:
        if self._step_started:
            elsewhere = self._within_step + self.pause_seconds - self._step_pause
            self._optimize(max(0.0, now - self._step_started - elsewhere))
            self._step_started = 0.0

    def scaler_skipped(self, now: float) -> None:
        """GradScaler let the optimizer not step."""
        self.step_enters(now)

    def _optimize(self, seconds: float) -> None:
        if not self._phases:
            self._optimizer = (self._optimizer or 0.0) + seconds

    def _set_mark(self, now: float) -> None:
        self._mark, self._mark_pause = now, self.pause_seconds

    # ------------------------------------------------------------ what is no part of any step

    def paused(self, seconds: float) -> None:
        """A turn or a snapshot took so long."""
        self.pause_seconds += seconds

    def phase_entered(self) -> None:
        if not self._phases:
            self._phase_entered, self._phase_pause = clock(), self.pause_seconds
        self._phases += 1

    def phase_left(self) -> None:
        """Attempts that ended or began in the phase, if any, count their own time, and their pauses."""
        self._phases -= 1
        if self._phases:
            return
        own = max((self._begun, self._begun_pause), (self._ended, self._ended_pause))
        since, before = max((self._phase_entered, self._phase_pause), own)
        self.pause_seconds = before + clock() - since


def _sum(one: float | None, other: float | None) -> float | None:
    if other is None:
        return one
    return other if one is None else one + other
