"""Gather a run's step records as columns, in the order in which the updates were tried.

After a rollback step numbers repeat, so a place in a run is an index into these columns, never a step alone. Of
several ranks the loss is the mean and every other signal the highest; a number that is not finite on any rank is
kept beside the column with its word, because a mean or a maximum would hide it. What needs more than one signal or
more than one number of a step (`together.py`) is gathered in the same pass.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from sentinel.postmortem import machine, together
from sentinel.postmortem.cells import Cells
from sentinel.store.history import History
from sentinel.store.timeline import Segment, segments
from sentinel.store.values import word_of
from sentinel.vocabulary import UpdateResult

SIGNALS = (
    *("loss", "grad_norm", "lr", "loss_scale", "step_seconds", "data_wait_seconds", "host_memory_bytes"),
    *("memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes", "data_position"),
    *("clip_fraction", "mfu_ratio"),
)

_ABSENT = math.nan


class Span(NamedTuple):
    """The records of one generation of one attempt: `start` to before `end`, its steps rising."""

    attempt: int
    generation: int
    start: int
    end: int
    live_end: int  # from here on its records are history


@dataclass(frozen=True, slots=True)
class Column:
    """One signal. `values` holds NaN where `at` is None; `nonfinite` says where that is not for lack of a record."""

    values: "array[float]" = field(default_factory=lambda: array("d"))
    nonfinite: dict[int, str] = field(default_factory=dict)  # index -> nan, inf or -inf

    def at(self, index: int) -> float | None:
        """The finite value there, else None."""
        value = self.values[index]
        return None if math.isnan(value) else value

    def finite(self, start: int, end: int) -> list[float]:
        """The finite values of a stretch."""
        return [value for value in self.values[max(0, start) : max(0, end)] if not math.isnan(value)]

    @property
    def is_recorded(self) -> bool:
        return bool(self.nonfinite) or any(not math.isnan(value) for value in self.values)


@dataclass(frozen=True, slots=True)
class Series:
    """Everything that was recorded of the updates of one run."""

    steps: "array[int]"
    spans: tuple[Span, ...]
    columns: Mapping[str, Column]
    not_applied: Mapping[int, str]  # index -> overflow, reflex or turn
    cells: Mapping[str, Cells]  # of `together.empty_cells`

    def __len__(self) -> int:
        return len(self.steps)

    def span(self, attempt: int, generation: int) -> Span | None:
        return next((one for one in self.spans if one[:2] == (attempt, generation)), None)

    def index_of(self, attempt: int, generation: int, step: int) -> int | None:
        """Where that step of that generation stands; the nearest later one, else the last. None: no record of it."""
        span = self.span(attempt, generation)
        if span is None or span.start == span.end:
            return None
        return min(bisect_left(self.steps, step, span.start, span.end), span.end - 1)


def series_of(history: History, run_id: str) -> Series:
    """Read all step records of a run once, history included."""
    known = segments(history.generations(run_id))
    return gather(known, history.steps(run_id, live_only=False), history.machine_samples(run_id))


def gather(
    known: Sequence[Segment], rows: Iterable[Mapping[str, Any]], of_machine: Iterable[Mapping[str, Any]] = ()
) -> Series:
    """`rows`: step records in order of attempt, generation, step, rank; `of_machine`: its samples. Pure."""
    limits = {(one.attempt, one.generation): one for one in known}
    steps, columns = array("q"), {name: Column() for name in (*SIGNALS, *together.DERIVED)}
    cells, times = together.empty_cells(), array("d")
    not_applied: dict[int, str] = {}
    spans: list[Span] = []
    for (attempt, generation), of_span in groupby(rows, key=lambda row: (row["attempt"], row["generation"])):
        start, segment = len(steps), limits.get((attempt, generation))
        live_end = start
        for step, of_step in groupby(of_span, key=lambda row: row["step"]):
            ranks = list(of_step)
            # A generation that began after `known` was read is the newest, so it counts.
            is_live = segment is None or segment.is_live(step)
            samples = together.samples_of(ranks)
            _add(columns, len(steps), ranks)
            for name, value in together.derived(ranks, samples).items():
                _append(columns[name], len(steps), value)
            together.add(cells, (len(steps), step, (len(spans), is_live)), ranks, samples)
            skipped = [row["result"] for row in ranks if row["result"] != UpdateResult.APPLIED]
            if skipped:
                not_applied[len(steps)] = str(skipped[0])
            steps.append(step)
            times.append(max(times[-1] if times else -math.inf, ranks[0]["time"] or -math.inf))
            live_end = len(steps) if is_live else live_end
        spans.append(Span(attempt, generation, start, len(steps), live_end))
    columns |= {name: Column(values) for name, values in machine.columns_of(of_machine, times).items()}
    return Series(steps, tuple(spans), columns, not_applied, cells)


def _add(columns: Mapping[str, Column], index: int, ranks: Sequence[Mapping[str, Any]]) -> None:
    for name in SIGNALS:
        given = [row[name] for row in ranks if row[name] is not None]
        bad = next((value for value in given if not math.isfinite(value)), None)
        value = bad
        if bad is None and given:
            value = sum(given) / len(given) if name == "loss" else max(given)
        _append(columns[name], index, value)


def _append(column: Column, index: int, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        column.nonfinite[index] = word_of(value)
    column.values.append(value if value is not None and math.isfinite(value) else _ABSENT)
