"""The numbers of one rank as Prometheus shall see them. Written on every record, so plain attributes only."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from sentinel.daemon.samples import Samples
from sentinel.detect.combining import is_finite
from sentinel.detect.step_parts import StepTimes, parts_of
from sentinel.records import Gap, Heartbeat, Reflex, SnapshotNote, StepRecord, Trouble
from sentinel.vocabulary import DropReason, Kind, Quality, UpdateResult

# From fast toy loops to minutes per step at scale.
STEP_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NONFINITE = ("loss", "gradient", "state", "other")
SOURCES = ("ddp", "work", "other")
TROUBLES = ("probe", "spool", "snapshot", "data", "boundary", "other")
MEMORY = ("allocated", "reserved", "peak")


class RankSeries:
    """Counters grow for the daemon's life, whatever generation or attempt the rank is in; gauges are the latest."""

    def __init__(self, run_id: str, rank: int, samples: Samples) -> None:
        self.labels = (run_id, str(rank))
        self._rank = rank
        self._samples = samples  # of the whole run
        self.up = True
        self.scrapes_since_end = 0
        self.gauges: dict[str, float] = {}
        self.parts: Mapping[str, float] = {}
        self.communication_source = ""
        self.memory: dict[str, int] = {}
        self.gpu = ""
        self.updates = dict.fromkeys(UpdateResult, 0)
        self.nonfinite = dict.fromkeys(NONFINITE, 0)
        self.dropped = dict.fromkeys(DropReason, 0)
        self.troubles = dict.fromkeys(TROUBLES, 0)
        self.buckets = [0] * (len(STEP_BUCKETS_SECONDS) + 1)
        self.step_seconds_sum = 0.0
        self.hook_seconds = 0.0
        self._hook_seconds_of_attempt = 0.0
        self._reflex_step = (-1, -1)
        self._takes: dict[type, Callable[[Any], None]] = {
            StepRecord: self.step,
            Reflex: self.reflex,
            SnapshotNote: self.snapshot,
            Gap: self.gap,
            Heartbeat: self.beat,
            Trouble: self.trouble,
        }

    def begin(self) -> None:
        """The rank is here (again)."""
        self.up = True
        self.scrapes_since_end = 0
        self._samples.begin(self._rank)

    def new_attempt(self, gpu: str) -> None:
        """A new process, whose totals start again."""
        self.gpu = gpu
        self._hook_seconds_of_attempt = 0.0

    def end(self) -> None:
        self.up = False
        self.gauges = {}
        self.parts = {}
        self.communication_source = ""
        self.memory = {}
        self._samples.end(self._rank)

    def take(self, message: object) -> None:
        """Called for every message; most kinds have no number to show."""
        take = self._takes.get(type(message))
        if take is not None:
            take(message)

    def step(self, record: StepRecord) -> None:
        self.updates[record.result] += 1
        self._gauge("step", record.step)
        self._gauge("generation", record.generation)
        self._gauge("host_memory_bytes", record.host_memory_bytes)
        good_loss = self._gauge("loss", record.loss)
        good_gradient = self._norm(record)
        known = self._reflex_step == (record.generation, record.step)
        self.nonfinite["loss"] += not good_loss
        self.nonfinite["gradient"] += not good_gradient and not known
        # What follows from a bad loss or gradient is not counted again.
        self.nonfinite["other"] += not self._others(record) and good_loss and good_gradient and not known
        self._times(record)
        self._samples.take(self._rank, record)
        if record.memory_allocated_bytes is not None:
            values = (record.memory_allocated_bytes, record.memory_reserved_bytes, record.memory_peak_bytes)
            self.memory = {kind: value for kind, value in zip(MEMORY, values, strict=True) if value is not None}

    def global_norm(self, norm: float | None) -> None:
        """Under sharding: the ranks' parts of a step together, or None where one of them will never come."""
        self._gauge("grad_norm", norm)

    def reflex(self, reflex: Reflex) -> None:
        """The step's own record follows and must not count the same gradient again."""
        if reflex.kind is Kind.NONFINITE_GRADIENT:
            self.nonfinite["gradient"] += 1
            self._reflex_step = (reflex.generation, reflex.step)
        elif reflex.kind is Kind.NONFINITE_STATE:
            self.nonfinite["state"] += 1

    def snapshot(self, note: SnapshotNote) -> None:
        if note.quality is Quality.BAD and not note.verified and note.kept:
            self.nonfinite["state"] += 1

    def gap(self, gap: Gap) -> None:
        self.dropped[gap.reason] += gap.count

    def trouble(self, trouble: Trouble) -> None:
        self.troubles[trouble.what if trouble.what in self.troubles else "other"] += 1

    def beat(self, heartbeat: Heartbeat) -> None:
        grown = heartbeat.hook_seconds - self._hook_seconds_of_attempt
        if grown > 0:
            self.hook_seconds += grown
            self._hook_seconds_of_attempt = heartbeat.hook_seconds

    def _norm(self, record: StepRecord) -> bool:
        """False for a gradient that is not finite. A part of the norm is shown by `global_norm`, with the others."""
        part = record.grad_norm_local
        return self._gauge("grad_norm", record.grad_norm) if part is None else math.isfinite(part)

    def _others(self, record: StepRecord) -> bool:
        """The rest of the gauges. False where one of their values is not finite."""
        seconds, lead = record.step_seconds, None
        if record.scheduler_steps is not None:
            lead = record.scheduler_steps - record.applied
        values = {
            "learning_rate": record.lr,
            "loss_scale": record.loss_scale,
            "communication_wait_seconds": record.communication_wait_seconds,
            "clip_fraction_ratio": record.clip_fraction,
            "scheduler_lead_steps": lead,
            "gradients_absent": record.gradients_absent,
            "tokens_per_second": _rate(record.tokens, seconds),
            "samples_per_second": _rate(record.samples, seconds),
            "mfu_ratio": record.mfu_ratio,
        }
        finite = [self._gauge(name, value) for name, value in values.items()]
        return all(finite) and (record.sampled is None or is_finite(record.sampled))

    def _times(self, record: StepRecord) -> None:
        seconds = record.step_seconds
        if seconds is not None and math.isfinite(seconds):
            self.buckets[bisect_left(STEP_BUCKETS_SECONDS, seconds)] += 1
            self.step_seconds_sum += seconds
        source = record.communication_source
        waited = "communication_wait_seconds" in self.gauges
        self.communication_source = (source if source in SOURCES else "other") if source and waited else ""
        times = StepTimes(
            seconds,
            record.data_wait_seconds,
            record.forward_seconds,
            record.backward_seconds,
            record.optimizer_seconds,
            record.communication_wait_seconds,
            source,
        )
        self.parts = parts_of(times)

    def _gauge(self, name: str, value: float | None) -> bool:
        """Absent and non-finite values are not shown. False for a non-finite one."""
        if value is None:
            self.gauges.pop(name, None)
            return True
        if not math.isfinite(value):
            self.gauges.pop(name, None)
            return False
        self.gauges[name] = value
        return True


def _rate(count: float | None, seconds: float | None) -> float | None:
    return count / seconds if count is not None and seconds else None
