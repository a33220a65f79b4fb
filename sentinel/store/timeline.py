"""Decide which steps of a run count, after rollbacks and restarts made it take some of them again. Pure.

A generation continues from the finished state of its `target_step`, an attempt from the step it started at. What
earlier generations and attempts did after that step is history: kept, but not what the weights went through.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """One generation of one attempt."""

    attempt: int
    generation: int
    live_until: int | None  # later steps of it are history; None: all are live

    def is_live(self, step: int) -> bool:
        return self.live_until is None or step <= self.live_until


def segments(generations: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """In order of time. The rows have attempt, generation, target_step; one that is not known (None) cuts nothing."""
    ordered = sorted(generations, key=lambda row: (row["attempt"], row["generation"]))
    limit: int | None = None
    found = []
    for row in reversed(ordered):
        found.append(Segment(row["attempt"], row["generation"], limit))
        target = row["target_step"]
        if target is not None:
            limit = target if limit is None else min(limit, target)
    return found[::-1]
