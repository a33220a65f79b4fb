"""What is known of one update attempt while it goes on, and the record that it becomes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sentinel.client.guard import Measure
from sentinel.client.probes.loss import Objective, Reported, Value
from sentinel.client.probes.memory import DeviceMemory
from sentinel.records import StepRecord
from sentinel.vocabulary import UpdateResult

Fields = dict[str, Any]


class Attempt:
    """Filled in by the loop's hooks from the first backward of an attempt to its last optimizer's step."""

    __slots__ = (
        "backward_seconds",
        "backwards",
        "clip_max_norm",
        "communication_source",
        "communication_wait_seconds",
        "data_position",
        "data_wait_seconds",
        "ended_at",
        "generation",
        "hook_seconds",
        "loss_scale",
        "lrs",
        "measures",
        "memory",
        "objective",
        "optimizer_seconds",
        "reported",
        "result",
        "scaler",
        "step",
        "step_seconds",
        "thrown_away",
        "time",
    )

    def __init__(self) -> None:
        self.generation = 0
        self.step = 0
        self.time = 0.0
        self.objective = Objective()
        self.reported = Reported()
        self.thrown_away: tuple[Objective, Reported] | None = None  # of backwards whose gradients the loop took away
        self.backwards = 0
        self.backward_seconds = 0.0
        self.data_wait_seconds: float | None = None
        self.optimizer_seconds = 0.0
        self.communication_wait_seconds: float | None = None
        self.communication_source: str | None = None
        self.hook_seconds = 0.0
        self.measures: dict[str, Measure] = {}
        self.lrs: dict[str, Value] = {}
        self.clip_max_norm: float | None = None
        self.scaler: Any = None  # the GradScaler that scaled this attempt's loss
        self.loss_scale: Value | None = None
        self.memory = DeviceMemory()
        self.result = UpdateResult.APPLIED
        self.ended_at = 0.0
        self.step_seconds: float | None = None
        self.data_position: int | None = None

    def throw_away(self) -> None:
        """The loop cleared all gradients without a step: what was gathered so far is none of the update's."""
        if self.thrown_away is None:
            self.thrown_away = (Objective(), Reported())
        self.thrown_away[0].join(self.objective)
        self.thrown_away[1].join(self.reported)
        self.objective, self.reported = Objective(), Reported()
        self.measures.clear()
        self.clip_max_norm = None

    def take_back(self) -> None:
        """It had only put them aside, to combine them."""
        if self.thrown_away is not None:
            self.objective.join(self.thrown_away[0])
            self.reported.join(self.thrown_away[1])
            self.thrown_away = None

    @property
    def loss(self) -> Value | None:
        reported = self.reported.loss
        return self.objective.value if reported is None else reported

    def values(self) -> dict[str, Value | None]:
        """Every number that may still live on a device, by name; see `record`."""
        found: dict[str, Value | None] = {
            "loss": self.loss,
            "loss_scale": self.loss_scale,
            "tokens": self.reported.tokens,
            "samples": self.reported.samples,
        }
        for name, measure in self.measures.items():
            found |= {
                f"{flag}.{name}": value
                for flag, value in (("nonfinite", measure.nonfinite), ("overflow", measure.overflow))
                if isinstance(value, Tensor)
            }
        found |= {f"norm.{name}": measure.norm for name, measure in self.measures.items()}
        found |= {f"lr.{name}": lr for name, lr in self.lrs.items()}
        found |= {f"reported.{name}": value for name, value in self.reported.others.items()}
        return found

    def record(
        self, numbers: dict[str, float | None], applied: int, skipped: int, fields: Mapping[str, Any]
    ) -> StepRecord:
        """The record, from `values()` as floats, the Run's counters after this attempt, and the probes' fields."""
        norms = {name: numbers[f"norm.{name}"] for name in self.measures}
        norm, part, source = self._norm(norms)
        lrs = [numbers[f"lr.{name}"] for name in self.lrs]
        others = {name: numbers[f"reported.{name}"] for name in self.reported.others}
        return StepRecord(
            seq=0,
            generation=self.generation,
            step=self.step,
            time=self.time,
            result=self.result,
            loss=numbers["loss"],
            grad_norm=norm,
            grad_norm_source=source,
            lr=lrs[0] if lrs else None,
            loss_scale=numbers["loss_scale"],
            step_seconds=self.step_seconds,
            data_wait_seconds=self.data_wait_seconds,
            backward_seconds=self.backward_seconds if self.backwards else None,
            optimizer_seconds=self.optimizer_seconds,
            applied=applied,
            skipped=skipped,
            tokens=numbers["tokens"],
            samples=numbers["samples"],
            memory_allocated_bytes=self.memory.allocated_bytes,
            memory_reserved_bytes=self.memory.reserved_bytes,
            memory_peak_bytes=self.memory.peak_bytes,
            data_position=self.data_position,
            hook_seconds=self.hook_seconds,
            clip_max_norm=self.clip_max_norm,
            grad_norm_local=part,
            optimizers=self._per_optimizer(norms, numbers) if len(self.lrs) > 1 else None,
            reported={name: value for name, value in others.items() if value is not None} or None,
            **fields,
        )

    def _norm(self, norms: dict[str, float | None]) -> tuple[float | None, float | None, str | None]:
        """(global norm, this rank's part of it, source): over all optimizers; one of the two is known, or none."""
        known = [(norm, self.measures[name]) for name, norm in norms.items() if norm is not None]
        sources = {measure.source for _, measure in known if measure.source}
        ranks = max((measure.ranks for _, measure in known), default=1)
        if ranks == 1:
            source = sources.pop() if len(sources) == 1 else ("own" if sources else None)
            return (math.hypot(*(norm for norm, _ in known)) if known else None), None, source
        # What is no part is the same on every rank.
        parts = (norm if measure.ranks > 1 else norm / math.sqrt(ranks) for norm, measure in known)
        return None, math.hypot(*parts), "part" if "part" in sources else "local"

    def _per_optimizer(
        self, norms: dict[str, float | None], numbers: dict[str, float | None]
    ) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for name in self.lrs:
            measure = self.measures.get(name)
            norm = "grad_norm" if measure is None or measure.ranks == 1 else "grad_norm_local"
            pair = {"lr": numbers[f"lr.{name}"], norm: norms.get(name)}
            table[name] = {key: value for key, value in pair.items() if value is not None}
        return table
