"""Combine what the ranks of a run sampled at one step into one value for the run, with and without sharding. Pure.

Where every rank holds all weights, any rank's gradient is the run's; under sharding squares add up, so that a step
that misses a rank would be wrong. Numbers that are not finite are left out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sentinel.sample import HISTOGRAM_EDGES, Sample

MOST_GROUPS = 64  # layer groups that are told; the rest is left out
MOST_ROUTERS = 64
_SAME = 0.05  # a norm in half precision is the same up to so much


class Told(NamedTuple):
    """What the ranks told of a step beside their samples."""

    ranks: int = 1  # how many there are, sampling or not
    a_part: bool = False  # a rank said that its gradient norm is of its own shards
    grad_norm: float | None = None  # the global one


def are_shards(samples: Sequence[Sample], told: Told) -> bool:
    """Whether each rank speaks of its own part of the weights only.

    Where no rank said so the global norm decides (a loop's own clipping tells it under sharding too): it is the root
    of all ranks' squares, or it is that of any rank.

    >>> halves = [Sample(group_norms={"all": 3.0}), Sample(group_norms={"all": 4.0})]
    >>> [are_shards(halves, Told(ranks=2, grad_norm=norm)) for norm in (5.0, 4.0)]
    [True, False]
    """
    totals = [math.hypot(*sample.group_norms.values()) for sample in samples if sample.group_norms]
    norm = told.grad_norm
    if told.a_part or told.ranks < 2 or not totals or norm is None or not all(map(math.isfinite, (*totals, norm))):
        return told.a_part
    if len(totals) == 1:
        return not math.isclose(totals[0], norm, rel_tol=_SAME)
    return abs(math.hypot(*totals) - norm) < abs(max(totals) - norm)


def group_norms(samples: Sequence[Sample], told: Told) -> dict[str, float]:
    """L2 norm by layer group, in the order of the model; empty where shards do not add up to the global norm."""
    sharded = are_shards(samples, told)
    found: dict[str, list[float]] = {}
    for sample in samples:
        for group, norm in (sample.group_norms or {}).items():
            if group in found or len(found) < MOST_GROUPS:
                found.setdefault(group, []).append(norm)
    combine: Callable[[list[float]], float] = (lambda norms: math.hypot(*norms)) if sharded else max
    combined = {group: combine(norms) for group, norms in found.items() if all(map(math.isfinite, norms))}
    whole = math.hypot(*combined.values())
    if sharded and told.grad_norm is not None and not math.isclose(whole, told.grad_norm, rel_tol=_SAME):
        return {}  # a rank is missing
    return {group: norm for group, norm in combined.items() if math.isfinite(norm)}


def histogram(samples: Sequence[Sample]) -> tuple[int, ...] | None:
    """Counts by HISTOGRAM_EDGES, of all ranks together: where they hold the same, the shares are that of each."""
    told = [sample.histogram for sample in samples if sample.histogram and _fits(sample)]
    return tuple(map(sum, zip(*told, strict=True))) if told else None


def zeros_ratio(samples: Sequence[Sample]) -> float | None:
    """Share of the gradient's values that are exactly 0."""
    told = [sample for sample in samples if sample.zeros is not None and _fits(sample)]
    zeros = sum(sample.zeros or 0 for sample in told)
    values = zeros + sum(sum(sample.histogram or ()) for sample in told)
    return zeros / values if values else None


def update_ratio(samples: Sequence[Sample]) -> float | None:
    """L2 norm of the update over that of the weights. Squares add up; of ranks that hold the same both grow alike."""
    pairs = [(sample.update_norm, sample.weight_norm) for sample in samples]
    told = [(update, weight) for update, weight in pairs if update is not None and weight is not None]
    update, weight = (math.hypot(*norms) for norms in zip(*told, strict=True)) if told else (0.0, 0.0)
    return update / weight if 0.0 < weight < math.inf and math.isfinite(update) else None


def expert_load(samples: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    """Router -> share of the choices per expert: the mean of the ranks, each of which sees its own tokens."""
    found: dict[str, list[list[float]]] = {}
    for sample in samples:
        for router, load in (sample.expert_load or {}).items():
            if router in found or len(found) < MOST_ROUTERS:
                found.setdefault(router, []).append(load)
    means: dict[str, tuple[float, ...]] = {}
    for router, loads in found.items():
        same = [load for load in loads if len(load) == len(loads[0])]
        mean = tuple(sum(shares) / len(same) for shares in zip(*same, strict=True))
        if mean and all(map(math.isfinite, mean)):
            means[router] = mean
    return means


def imbalance(load: Iterable[float]) -> float | None:
    """Variance of an expert's load relative to a uniform one: 0 is even, experts - 1 is everything to one.

    The squared coefficient of variation of N. Shazeer et al., "Outrageously large neural networks" (2017), section 4.

    >>> imbalance([0.25, 0.25, 0.25, 0.25]), imbalance([1.0, 0.0, 0.0, 0.0])
    (0.0, 3.0)
    """
    shares = tuple(load)
    total = sum(shares)
    if not shares or not 0.0 < total < math.inf:
        return None
    return sum((share * len(shares) / total - 1.0) ** 2 for share in shares) / len(shares)


def is_finite(sample: Sample) -> bool:
    """Whether every number in it is."""
    loads = [share for load in (sample.expert_load or {}).values() for share in load]
    single = (sample.update_norm, sample.weight_norm, sample.local_grad_norm)
    many = (*(sample.group_norms or {}).values(), *loads)
    return all(value is None or math.isfinite(value) for value in (*single, *many))


def _fits(sample: Sample) -> bool:
    return len(sample.histogram or ()) == len(HISTOGRAM_EDGES) + 1
