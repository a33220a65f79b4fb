"""What is known of one update attempt while it goes on, and the record that it becomes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sentinel.client.guard import Measure
from sentinel.client.probes.loss import Objective, Reported, Value
from sentinel.client.probes.memory import ABSENT, DeviceMemory
from sentinel.records import StepRecord
from sentinel.vocabulary import UpdateResult

Numbers = Mapping[str, Any]  # what `values` named, read from the device


class Attempt:
    """Filled in by the loop's hooks from the first backward of an attempt to its last optimizer's step."""

    # Defaults stand in the class: an attempt is made in every step, and most of it stays as it is.
    generation = 0
    step = 0
    time = 0.0
    thrown_away: tuple[Objective, Reported] | None = None  # of backwards whose gradients the loop took away
    backwards = 0
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    communication_wait_seconds: float | None = None
    communication_source: str | None = None
    hook_seconds = 0.0
    clip_max_norm: float | None = None
    clip_fraction: float | None = None
    scaler: Any = None  # the GradScaler that scaled this attempt's loss
    loss_scale: Value | None = None
    memory: DeviceMemory = ABSENT
    result = UpdateResult.APPLIED
    data_position: int | None = None
    drawn: int | None = 0  # samples of the batches that run.batches handed out for it; None: that is not known
    evaluations: int | None = None
    gradients_absent: int | None = None
    scheduler_steps: int | None = None

    def __init__(self) -> None:
        self.objective = Objective()
        self.reported = Reported()
        self.measures: dict[str, Measure] = {}
        self.clips: list[Value] = []  # the norm by which it was clipped over the most that it may be
        self.lrs: dict[str, Value] = {}

    def throw_away(self) -> None:
        """The loop cleared all gradients without a step: what was gathered so far is none of the update's."""
        if self.thrown_away is None:
            self.thrown_away = (Objective(), Reported())
        self.thrown_away[0].join(self.objective)
        self.thrown_away[1].join(self.reported)
        self.objective, self.reported = Objective(), Reported()
        self.measures.clear()
        self.clips.clear()
        self.clip_max_norm = None

    def take_back(self) -> None:
        """It had only put them aside, to combine them."""
        if self.thrown_away is not None:
            self.objective.join(self.thrown_away[0])
            self.reported.join(self.thrown_away[1])
            self.thrown_away = None

    def draw(self, samples: int | None) -> None:
        """A batch was handed out for it; None where nobody knows how many samples it holds."""
        self.drawn = None if samples is None or self.drawn is None else self.drawn + samples

    @property
    def loss(self) -> Value | None:
        reported = self.reported.loss
        return self.objective.value if reported is None else reported

    @property
    def samples(self) -> Value | None:
        """As reported; else as many as were drawn by index, where that is known of every batch."""
        return self.reported.samples if self.reported.samples is not None else (self.drawn or None)

    def values(self) -> dict[str, Value | None]:
        """The numbers that live on a device, by name, for `record`. Empty where there is none: the common case."""
        reported = self.reported
        named: list[tuple[str, Any]] = [
            ("loss", self.loss),
            ("loss_scale", self.loss_scale),
            ("tokens", reported.tokens),
            ("samples", reported.samples),
            ("flops", reported.flops),
        ]
        for name, measure in self.measures.items():
            named.append((f"norm.{name}", measure.norm))
            if measure.nonfinite is not False or measure.overflow is not False:
                named += ((f"nonfinite.{name}", measure.nonfinite), (f"overflow.{name}", measure.overflow))
        named += [(f"lr.{name}", lr) for name, lr in self.lrs.items()]
        named += [(f"clip.{place}", ratio) for place, ratio in enumerate(self.clips)]
        named += [(f"reported.{name}", value) for name, value in reported.others.items()]
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def record(self, numbers: Numbers, applied: int, skipped: int, fields: Mapping[str, Any]) -> StepRecord:
        """The record, from the numbers that `values` named, the Run's counters after it, and the probes' fields."""
        norm, part, source = self._norm(numbers)
        memory = self.memory
        return StepRecord(
            seq=0,
            generation=self.generation,
            step=self.step,
            time=self.time,
            result=self.result,
            loss=known("loss", self.loss, numbers),
            grad_norm=norm,
            grad_norm_source=source,
            lr=next((known(f"lr.{name}", lr, numbers) for name, lr in self.lrs.items()), None),
            loss_scale=known("loss_scale", self.loss_scale, numbers),
            step_seconds=self.step_seconds,
            data_wait_seconds=self.data_wait_seconds,
            backward_seconds=self.backward_seconds,
            optimizer_seconds=self.optimizer_seconds,
            applied=applied,
            skipped=skipped,
            tokens=known("tokens", self.reported.tokens, numbers),
            samples=known("samples", self.samples, numbers),
            memory_allocated_bytes=memory.allocated_bytes,
            memory_reserved_bytes=memory.reserved_bytes,
            memory_peak_bytes=memory.peak_bytes,
            data_position=self.data_position,
            hook_seconds=self.hook_seconds,
            clip_max_norm=self.clip_max_norm,
            optimizers=self._per_optimizer(numbers) if len(self.lrs) > 1 else None,
            reported=self._others(numbers) if self.reported.others else None,
            forward_seconds=self.forward_seconds,
            grad_norm_local=part,
            clip_fraction=self.clip_fraction,
            scheduler_steps=self.scheduler_steps,
            evaluations=self.evaluations,
            gradients_absent=self.gradients_absent,
            **fields,
        )

    def norm_of(self, name: str, numbers: Numbers) -> float | None:
        """Of one optimizer's gradients, as measured."""
        return known(f"norm.{name}", self.measures[name].norm, numbers)

    def _norm(self, numbers: Numbers) -> tuple[float | None, float | None, str | None]:
        """(global norm, this rank's part of it, source): over all optimizers; one of the two is known, or none."""
        found = [(self.norm_of(name, numbers), measure) for name, measure in self.measures.items()]
        known_ones = [(norm, measure) for norm, measure in found if norm is not None]
        if len(known_ones) == 1 and known_ones[0][1].ranks == 1:
            return known_ones[0][0], None, known_ones[0][1].source
        sources = {measure.source for _, measure in known_ones if measure.source}
        ranks = max((measure.ranks for _, measure in known_ones), default=1)
        if ranks == 1:
            source = sources.pop() if len(sources) == 1 else ("own" if sources else None)
            return (math.hypot(*(norm for norm, _ in known_ones)) if known_ones else None), None, source
        # What is no part is the same on every rank.
        parts = (norm if measure.ranks > 1 else norm / math.sqrt(ranks) for norm, measure in known_ones)
        return None, math.hypot(*parts), "part" if "part" in sources else "local"

    def _others(self, numbers: Numbers) -> dict[str, float] | None:
        others = ((name, known(f"reported.{name}", value, numbers)) for name, value in self.reported.others.items())
        return {name: value for name, value in others if value is not None} or None

    def _per_optimizer(self, numbers: Numbers) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for name, lr in self.lrs.items():
            measure = self.measures.get(name)
            norm = "grad_norm" if measure is None or measure.ranks == 1 else "grad_norm_local"
            pair = {
                "lr": known(f"lr.{name}", lr, numbers),
                norm: None if measure is None else self.norm_of(name, numbers),
            }
            table[name] = {key: value for key, value in pair.items() if value is not None}
        return table


def known(name: str, value: Value | None, numbers: Numbers) -> float | None:
    """A number that was at hand, or has been read from the device under this name since."""
    return numbers[name] if isinstance(value, Tensor) else value
