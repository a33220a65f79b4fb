"""Take the sampled signals at the steps that are due, and fill StepRecord.sampled with them."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.deferred import MOST_WAITING
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value
from sentinel.client.probes.probe import Probe
from sentinel.client.sampling.budget import Budget
from sentinel.client.sampling.expert_load import REPORTED, shares
from sentinel.client.sampling.replicas import Replicas
from sentinel.client.sampling.signal import Signal, Take
from sentinel.client.shield import describe
from sentinel.sample import Sample

FAILURES_BEFORE_OFF = 3  # of one signal; the others go on
PREFIX = "sampling"  # of the names of its values
REPORTED_LOAD = f"{PREFIX}.{REPORTED}"


class _Shot:
    """One attempt that is sampled."""

    __slots__ = ("attempt", "step", "takes")

    def __init__(self, step: int, takes: dict[str, Take]) -> None:
        self.step = step
        self.takes = takes
        self.attempt: Attempt | None = None  # not known before its gradients are


class Sampling(Probe):
    """Field sampled. On a step that is not sampled it costs a few comparisons."""

    def __init__(
        self, signals: Iterable[Signal], budget: Budget, watched: list[WatchedOptimizer], replicas: Replicas
    ) -> None:
        self._signals = {signal.name: signal for signal in signals}
        self._budget = budget
        self._watched = watched
        self._replicas = replicas
        self._expected = 0  # number of the attempt that comes next
        self._live: _Shot | None = None  # armed, or being filled
        self._told: dict[Attempt, _Shot] = {}  # whose record is still to be sent
        self._failures: dict[str, int] = {}

    # ------------------------------------------------------------ points of an attempt

    def arm(self, step: int) -> None:
        self._expected = step
        self._leave()
        if self._budget.begins(step):
            self._begin(step, armed=True)

    def after_backward(self, attempt: Attempt, returned: float) -> None:
        del attempt, returned
        self._replicas.after_backward()

    def gradients(self, watched: WatchedOptimizer, attempt: Attempt, divisor: Tensor | None) -> None:
        shot = self._shot(attempt)
        if shot is not None:
            self._each(shot, "gradients", watched, divisor, attempt)

    def before_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        self._replicas.before_update()
        shot = self._shot(attempt)
        self._expected = attempt.step + 1
        if shot is not None:
            self._each(shot, "before_update", watched, attempt)

    def after_update(self, watched: WatchedOptimizer, attempt: Attempt) -> None:
        shot = self._live
        if shot is not None and shot.attempt is attempt:
            self._each(shot, "after_update", watched, attempt)

    def values(self, attempt: Attempt) -> Mapping[str, Value | None]:
        shot, load = self._told.get(attempt), attempt.reported.expert_load
        found: dict[str, Value | None] = {} if load is None else {REPORTED_LOAD: load}
        if shot is not None:
            attempt.hook_seconds += sum(take.inside_seconds for take in shot.takes.values())
            for name, take in shot.takes.items():
                found |= {f"{PREFIX}.{name}.{key}": value for key, value in take.values.items()}
        return found

    def fields(self, attempt: Attempt, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        if attempt.step_seconds is not None:
            self._budget.stepped(attempt.step_seconds)
        shot = self._told.pop(attempt, None)
        found, seconds = ({}, 0.0) if shot is None else self._sample(shot, attempt, numbers)
        load = shares(numbers.get(REPORTED_LOAD, ()))
        if load is not None:
            found["expert_load"] = found.get("expert_load", {}) | {REPORTED: load}
        return {"sampled": Sample(**found, seconds=seconds)} if found else {}

    def _sample(self, shot: _Shot, attempt: Attempt, numbers: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Fields of the sample, and what it cost; the account of each signal is kept."""
        found: dict[str, Any] = {}
        seconds = 0.0
        for name, take in list(shot.takes.items()):
            prefix = f"{PREFIX}.{name}."
            mine = {key.removeprefix(prefix): value for key, value in numbers.items() if key.startswith(prefix)}
            found |= self._call(shot, name, "fields", mine, attempt) or {}
            cost = take.seconds
            seconds += cost
            self._say(self._budget.took(name, cost))
        return found, seconds

    def close(self) -> None:
        self._leave()  # what was taken is still told: the last records follow
        self._replicas.close()
        for signal in self._signals.values():
            signal.close()

    # ------------------------------------------------------------ which attempt

    def _shot(self, attempt: Attempt) -> _Shot | None:
        """Of this attempt, if it is sampled. Several optimizers may begin one that nobody armed."""
        step = attempt.step or self._expected
        live = self._live
        if live is not None:
            if live.attempt is attempt and live.step == step:
                return live
            if live.attempt is None and live.step == step:
                return self._bind(live, attempt)
            if live.attempt is attempt:  # a turn went back in between: it was another step's number
                self._told.pop(attempt, None)
                self._leave()
                return None
            if live.attempt is not None and step > live.step:  # nothing more comes of that one
                self._leave()
        if not self._budget.begins(step) or attempt in self._told:
            return None
        self._leave()
        late = self._begin(step, armed=False)
        return None if late is None else self._bind(late, attempt)

    def _begin(self, step: int, *, armed: bool) -> _Shot | None:
        possible = [
            name for name, signal in self._signals.items() if signal.applies() and (armed or not signal.from_forward)
        ]
        due = self._budget.due(step, possible)
        if not due:
            return None
        on_cuda = any(one.is_cuda for watched in self._watched for one in watched.parameters[:1])
        shot = self._live = _Shot(step, {name: Take(on_cuda=on_cuda) for name in due})
        if armed:
            self._each(shot, "arm")
        return shot

    def _bind(self, shot: _Shot, attempt: Attempt) -> _Shot:
        shot.attempt = attempt
        self._told[attempt] = shot
        if len(self._told) > MOST_WAITING + 2:  # attempts that a turn took back are never sent
            del self._told[next(iter(self._told))]
        return shot

    def _leave(self) -> None:
        shot, self._live = self._live, None
        if shot is not None:
            self._each(shot, "end")

    # ------------------------------------------------------------ calling the signals

    def _each(self, shot: _Shot, point: str, *arguments: Any) -> None:
        for name in list(shot.takes):
            self._call(shot, name, point, *arguments)

    def _call(self, shot: _Shot, name: str, point: str, *arguments: Any) -> Any:
        signal, take = self._signals[name], shot.takes[name]
        try:
            with take.timed():
                return getattr(signal, point)(take, *arguments)
        except Exception as error:  # noqa: BLE001 -- part of the boundary: one signal must not cost the others
            del shot.takes[name]
            if point != "end":
                self._call(_Shot(shot.step, {name: take}), name, "end")
            self._failed(name, point, error)
            return None

    def _failed(self, name: str, point: str, error: Exception) -> None:
        self._failures[name] = self._failures.get(name, 0) + 1
        text = f"the sampled signal {name} failed in {point}: {describe(error)}"
        if self._failures[name] == FAILURES_BEFORE_OFF:
            self._budget.close(name)
            text += " (it is switched off; training goes on)"
        self._say(text)

    def _say(self, text: str | None) -> None:
        if text is not None and self.trouble is not None:
            self.trouble("probe", text)
