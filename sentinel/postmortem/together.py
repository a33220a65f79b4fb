"""Make of the records of all ranks at one step what is drawn beside its plain signals. Pure.

The parts of a step are means over the ranks, so that they add up to a mean step. Throughput is that of all ranks
together: what they did, over the time of the slowest. What is sampled is combined as `detect/combining.py` says.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sentinel.detect import combining
from sentinel.detect.step_parts import PARTS, StepTimes, parts_of
from sentinel.postmortem.cells import Cells
from sentinel.sample import Sample

DERIVED = ("tokens_per_second", "samples_per_second", "update_ratio", "zeros_ratio", "expert_imbalance")
MOST_RANKS = 64  # with a row of their own; of more, neighbours share one
MOST_EXPERTS = 64  # over all routers; of more, each router is one row

Row = Mapping[str, Any]
_TIMES = ("data_wait", "forward", "backward", "optimizer", "communication_wait")


def empty_cells() -> dict[str, Cells]:
    """What is gathered over a whole run."""
    return {
        "parts": Cells(operator.add),
        "waits": Cells(max),
        "histogram": Cells(operator.add),
        "groups": Cells(max),
        "experts": Cells(operator.add),
        "imbalance": Cells(max),
    }


def derived(ranks: Sequence[Row], samples: Sequence[Sample]) -> dict[str, float | None]:
    """The values of DERIVED at one step."""
    uneven = [combining.imbalance(load) for load in combining.expert_load(samples).values()]
    return {
        "tokens_per_second": _per_second(ranks, "tokens"),
        "samples_per_second": _per_second(ranks, "samples"),
        "update_ratio": combining.update_ratio(samples),
        "zeros_ratio": combining.zeros_ratio(samples),
        "expert_imbalance": max((one for one in uneven if one is not None), default=None),
    }


def samples_of(ranks: Iterable[Row]) -> list[Sample]:
    """What the ranks sampled; empty on most steps."""
    return [msgspec.convert(row["sampled"], Sample) for row in ranks if row["sampled"] is not None]


def add(
    cells: Mapping[str, Cells], where: tuple[int, int, tuple[int, bool]], ranks: Sequence[Row], samples: list[Sample]
) -> None:
    """`where`: index, step, and the stretch it belongs to."""
    found: dict[str, Mapping[str, float]] = {"parts": _parts(ranks), "waits": _waits(ranks)}
    if samples:
        found |= _sampled(ranks, samples)
    for name, values in found.items():
        if values:
            cells[name].add(*where, values)


def _parts(ranks: Sequence[Row]) -> dict[str, float]:
    each = [parts for row in ranks if (parts := parts_of(_times(row)))]
    told = [name for name in PARTS if any(name in parts for parts in each)]
    return {name: sum(parts.get(name, 0.0) for parts in each) / len(each) for name in told}


def _times(row: Row) -> StepTimes:
    measured = {name: row[f"{name}_seconds"] for name in _TIMES}
    return StepTimes(row["step_seconds"], **measured, communication_source=row["communication_source"])


def _waits(ranks: Sequence[Row]) -> dict[str, float]:
    told = {row["rank"]: row["communication_wait_seconds"] for row in ranks}
    each = math.ceil((max(told) + 1) / MOST_RANKS)
    found: dict[str, float] = {}
    for rank, seconds in sorted(told.items()):
        if seconds is not None and math.isfinite(seconds):
            first = rank - rank % each
            name = f"rank {rank}" if each == 1 else f"ranks {first} to {first + each - 1}"
            found[name] = max(found.get(name, 0.0), seconds)
    return found


def _sampled(ranks: Sequence[Row], samples: list[Sample]) -> dict[str, Mapping[str, float]]:
    told = combining.Told(
        len(ranks),
        any(row["grad_norm_local"] is not None for row in ranks),
        next((row["grad_norm"] for row in ranks if row["grad_norm"] is not None), None),
    )
    counts = combining.histogram(samples) or ()
    loads = combining.expert_load(samples)
    experts = {f"{router} {number}": share for router, load in loads.items() for number, share in enumerate(load)}
    uneven = {router: value for router, load in loads.items() if (value := combining.imbalance(load)) is not None}
    missing = told.a_part and sum(sample.group_norms is not None for sample in samples) < len(ranks)
    return {
        "histogram": {str(number): float(count) for number, count in enumerate(counts)} if any(counts) else {},
        "groups": {} if missing else combining.group_norms(samples, told),
        "experts": experts if len(experts) <= MOST_EXPERTS else {},
        "imbalance": uneven if len(experts) > MOST_EXPERTS else {},
    }


def _per_second(ranks: Sequence[Row], name: str) -> float | None:
    told = [row[name] for row in ranks if row[name] is not None]
    seconds = max((row["step_seconds"] for row in ranks if row["step_seconds"] is not None), default=None)
    return sum(told) / seconds if told and seconds else None
