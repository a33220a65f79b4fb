"""The numbers of one rank as Prometheus shall see them. Written on every record, so plain attributes only."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from sentinel.records import Gap, Heartbeat, Reflex, SnapshotNote, StepRecord, Trouble
from sentinel.vocabulary import DropReason, Kind, Quality, UpdateResult

# From fast toy loops to minutes per step at scale.
STEP_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NONFINITE = ("loss", "gradient", "state")
PARTS = ("data_wait", "backward", "optimizer", "other")
TROUBLES = ("probe", "spool", "snapshot", "data", "boundary", "other")
MEMORY = ("allocated", "reserved", "peak")


class RankSeries:
    """Counters grow for the daemon's life, whatever generation or attempt the rank is in; gauges are the latest."""

    def __init__(self, run_id: str, rank: int) -> None:
        self.labels = (run_id, str(rank))
        self.up = True
        self.scrapes_since_end = 0
        self.gauges: dict[str, float] = {}
        self.parts: dict[str, float] = {}
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

    def new_attempt(self, gpu: str) -> None:
        """A new process, whose totals start again."""
        self.gpu = gpu
        self._hook_seconds_of_attempt = 0.0

    def end(self) -> None:
        self.up = False
        self.gauges = {}
        self.parts = {}
        self.memory = {}

    def take(self, message: object) -> None:
        """Called for every message; most kinds have no number to show."""
        take = self._takes.get(type(message))
        if take is not None:
            take(message)

    def step(self, record: StepRecord) -> None:
        self.updates[record.result] += 1
        self._gauge("step", record.step)
        self._gauge("generation", record.generation)
        self._gauge("learning_rate", record.lr)
        self._gauge("loss_scale", record.loss_scale)
        self._gauge("host_memory_bytes", record.host_memory_bytes)
        if not self._gauge("loss", record.loss):
            self.nonfinite["loss"] += 1
        if not self._gauge("grad_norm", record.grad_norm) and self._reflex_step != (record.generation, record.step):
            self.nonfinite["gradient"] += 1
        self._times(record)
        if record.memory_allocated_bytes is not None:
            values = (record.memory_allocated_bytes, record.memory_reserved_bytes, record.memory_peak_bytes)
            self.memory = {kind: value for kind, value in zip(MEMORY, values, strict=True) if value is not None}

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

    def _times(self, record: StepRecord) -> None:
        seconds = record.step_seconds
        if seconds is None or not math.isfinite(seconds):
            return
        self.buckets[bisect_left(STEP_BUCKETS_SECONDS, seconds)] += 1
        self.step_seconds_sum += seconds
        known = (record.data_wait_seconds, record.backward_seconds, record.optimizer_seconds)
        parts = {name: value for name, value in zip(PARTS, known, strict=False) if value is not None}
        if parts:
            parts["other"] = max(0.0, seconds - sum(parts.values()))
        self.parts = parts

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
