"""Choose which points of a long series to draw: every extreme, every stretch that is not finite. Pure."""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from sentinel.postmortem.series import Column

MOST_STRETCHES = 400  # drawn; beyond that, neighbours are drawn as one, with their count


class Stretch(NamedTuple):
    """Neighbouring indices on which a signal was not finite."""

    first: int
    last: int
    steps: int  # how many of them
    words: tuple[str, ...]  # of nan, inf, -inf


def thin(values: Sequence[float], start: int, end: int, bucket: int, keep: Collection[int]) -> list[int]:
    """Indices from `start` to before `end` to draw.

    Of every `bucket` the lowest and the highest finite value, what is in `keep`, and where nothing is finite one
    index, so that the line breaks there.

    >>> thin([1.0, 5.0, 2.0, 2.5, float("nan"), float("nan")], 0, 6, 2, {3})
    [0, 1, 2, 3, 4]
    """
    chosen: set[int] = set()
    for first in range(start, end, bucket):
        places = range(first, min(first + bucket, end))
        finite = [index for index in places if not math.isnan(values[index])]
        if not finite:
            chosen.add(first)
            continue
        chosen.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
        # A gap at the edge of a bucket breaks the line too; those inside are below what can be seen.
        chosen.update(index for index in (places[0], places[-1]) if math.isnan(values[index]))
    chosen.update(index for index in keep if start <= index < end)
    return sorted(chosen)


def stretches(column: Column, breaks: Collection[int], most: int = MOST_STRETCHES) -> list[Stretch]:
    """All of a column's non-finite places. None spans an index of `breaks`, where a generation starts."""
    found = list(_neighbours(column, breaks))
    gap = 2
    while len(found) > most:
        gap *= 2
        found = list(_merged(found, gap, breaks))
    return found


def _neighbours(column: Column, breaks: Collection[int]) -> Iterator[Stretch]:
    starts = sorted(breaks)

    def run_of(numbered: tuple[int, int]) -> tuple[int, int]:
        number, place = numbered
        return place - number, bisect_right(starts, place)

    for _, group in groupby(enumerate(sorted(column.nonfinite)), key=run_of):
        same = [index for _, index in group]
        words = tuple(sorted({column.nonfinite[index] for index in same}))
        yield Stretch(same[0], same[-1], len(same), words)


def _merged(found: Sequence[Stretch], gap: int, breaks: Collection[int]) -> Iterator[Stretch]:
    now = found[0]
    for following in found[1:]:
        crosses = gap < 2**40 and any(now.last < place <= following.first for place in breaks)
        if following.first - now.last <= gap and not crosses:
            words = tuple(sorted({*now.words, *following.words}))
            now = Stretch(now.first, following.last, now.steps + following.steps, words)
        else:
            yield now
            now = following
    yield now
