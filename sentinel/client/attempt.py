"""What is known of one update attempt while it goes on, and the record that it becomes."""

import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, cast

import msgspec
from torch import Tensor

from sentinel.client.guard import ABSENT as NOTHING
from sentinel.client.guard import Measure
from sentinel.client.probes.loss import Objective, Reported, Value
from sentinel.client.probes.memory import ABSENT, DeviceMemory
from sentinel.records import StepRecord
from sentinel.vocabulary import UpdateResult

Numbers = Mapping[str, Any]  # what `Attempt.values` named, read from the device
ON_HOST = frozenset({float, int, bool, str, NoneType})  # types of what needs no reading
SCALARS = ("loss", "loss_scale", "tokens", "samples", "flops")


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
    loss: Value | None = None  # this and the next are set by `values`; what was said of them until then is in
    tokens: Value | None = None  # `objective` and `reported`
    samples: Value | None = None
    flops: Value | None = None  # and the next: a probe's business
    mfu_ratio: float | None = None
    whole = False  # `step_seconds` is of the whole attempt: its beginning was seen
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

    def values(self) -> dict[str, Value | None]:
        """It is over. The numbers that still live on a device, by name, for `settle`; none in the common case."""
        reported = self.reported
        loss = reported.loss
        self.loss = self.objective.value if loss is None else loss
        self.tokens, self.flops = reported.tokens, reported.flops
        self.samples = reported.samples if reported.samples is not None else (self.drawn or None)
        scalars = (self.loss, self.loss_scale, self.tokens, self.samples, self.flops)
        measured = [number for measure in self.measures.values() for number in measure[:4]]
        everything = (*scalars, *measured, *self.lrs.values(), *self.clips, *reported.others.values())
        if ON_HOST.issuperset(map(type, everything)):
            return {}
        named: list[tuple[str, Any]] = list(zip(SCALARS, scalars, strict=True))
        for name, measure in self.measures.items():
            named.append((f"norm.{name}", measure.norm))
            named += ((f"nonfinite.{name}", measure.nonfinite), (f"overflow.{name}", measure.overflow))
        named += [(f"lr.{name}", lr) for name, lr in self.lrs.items()]
        named += [(f"clip.{place}", ratio) for place, ratio in enumerate(self.clips)]
        named += [(f"reported.{name}", value) for name, value in reported.others.items()]
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def settle(self, numbers: Numbers) -> None:
        """Put what was read from the device in its place; its flags are the reflex's business."""
        for name in SCALARS:
            if name in numbers:
                setattr(self, name, numbers[name])
        for name, measure in self.measures.items():
            norm = numbers.get(f"norm.{name}", measure.norm)
            self.measures[name] = measure._replace(norm=norm)
        for what, table in (("lr.", self.lrs), ("reported.", self.reported.others)):
            for name in table:
                table[name] = numbers.get(what + name, table[name])
        self.clips = [numbers.get(f"clip.{place}", ratio) for place, ratio in enumerate(self.clips)]

    def record(self, applied: int, skipped: int, fields: Mapping[str, Any]) -> StepRecord:
        """The record, when every number is at hand: with the Run's counters after it, and the probes' fields."""
        norm, part, source = self._norm()
        memory, lrs = self.memory, self.lrs
        settled: Any = self  # no tensors any more
        record = StepRecord(  # in the order of its fields: by name it costs three times as much
            0,
            self.generation,
            self.step,
            self.time,
            self.result,
            settled.loss,
            norm,
            source,
            next(iter(settled.lrs.values())) if lrs else None,
            settled.loss_scale,
            self.step_seconds,
            self.data_wait_seconds,
            self.backward_seconds,
            self.optimizer_seconds,
            applied,
            skipped,
            settled.tokens,
            settled.samples,
            memory.allocated_bytes,
            memory.reserved_bytes,
            memory.peak_bytes,
            None,  # host_memory_bytes is filled in by the daemon
            self.data_position,
            self.hook_seconds,
            self.clip_max_norm,
            self._per_optimizer() if len(lrs) > 1 else None,
            dict(settled.reported.others) if self.reported.others else None,
            self.forward_seconds,
            None,  # communication_wait_seconds and communication_source are a probe's
            None,
            part,
            self.clip_fraction,
            self.scheduler_steps,
            self.evaluations,
            self.gradients_absent,
            settled.flops,
            self.mfu_ratio,
        )
        return msgspec.structs.replace(record, **fields) if fields else record

    def _norm(self) -> tuple[float | None, float | None, str | None]:
        """(global norm, this rank's part of it, source): over all optimizers; one of the two is known, or none."""
        known = [measure for measure in self.measures.values() if measure.norm is not None]
        if len(known) == 1 and known[0].ranks == 1:
            return cast("float", known[0].norm), None, known[0].source
        sources = {measure.source for measure in known if measure.source}
        norms = [(cast("float", measure.norm), measure.ranks) for measure in known]
        ranks = max((each for _, each in norms), default=1)
        if ranks == 1:
            source = sources.pop() if len(sources) == 1 else ("own" if sources else None)
            return (math.hypot(*(norm for norm, _ in norms)) if norms else None), None, source
        # What is no part is the same on every rank.
        parts = (norm if each > 1 else norm / math.sqrt(ranks) for norm, each in norms)
        return None, math.hypot(*parts), "part" if "part" in sources else "local"

    def _per_optimizer(self) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for name, lr in self.lrs.items():
            measure = self.measures.get(name, NOTHING)
            pair = {"lr": lr, "grad_norm" if measure.ranks == 1 else "grad_norm_local": measure.norm}
            table[name] = {key: cast("float", value) for key, value in pair.items() if value is not None}
        return table
