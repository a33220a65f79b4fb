"""Put the global gradient norm into rows of steps whose ranks told their parts of it. Pure.

Under sharding a rank stores `grad_norm_local`, with the source "local". Squares add up over the ranks, so the norm is
known once all of them are there; a step of which a record was dropped has none. It is worked out whenever rows are
read, so that nothing has to be written twice, and a row may be read before the others have come.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

Row = dict[str, Any]

PART = "local"  # the grad_norm_source of a part that adds up


def with_global_norms(rows: Iterable[Row], world_sizes: Mapping[int, int]) -> Iterator[Row]:
    """The same rows, in their order: attempt, generation, step, rank. `world_sizes` by attempt."""
    for (attempt, _, _), ranks in groupby(rows, key=lambda row: (row["attempt"], row["generation"], row["step"])):
        together = list(ranks)
        parts = [row["grad_norm_local"] for row in together if row["grad_norm_source"] == PART]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(together) == world_sizes.get(attempt):
            for row in together:
                row["grad_norm"] = combined(known)
        yield from together


def combined(parts: Iterable[float]) -> float:
    """L2 norm of all gradients from those of the ranks' parts; NaN if one is NaN."""
    told = list(parts)
    return math.nan if any(map(math.isnan, told)) else math.hypot(*told)
