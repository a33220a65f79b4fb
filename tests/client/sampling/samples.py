"""The samples among records, and what they must be, computed from the tensors the long way."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sentinel.records import StepRecord
from sentinel.sample import HISTOGRAM_EDGES, Sample
from tests.client.sampling.conftest import EVERY


def samples(records: Iterable[StepRecord]) -> dict[int, Sample]:
    """By step. The first that may be sampled is."""
    found = {record.step: record.sampled for record in records if record.sampled is not None}
    assert EVERY in found, f"step {EVERY} was not sampled"
    assert all(step % EVERY == 0 for step in found)
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies, dense, in float64, each parameter once."""
    named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: (one.to_dense() if one.is_sparse else one).detach().double().clone() for name, one in named.items()}


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((one.abs() ** 2).sum()) for one in tensors))


def counted(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """The histogram and the zeros, value by value, in float32 as the edges are."""
    edges = torch.tensor(HISTOGRAM_EDGES, dtype=torch.float32).tolist()
    counts, zeros = [0] * (len(edges) + 1), 0
    for value in (abs(number) for one in tensors for number in one.float().flatten().tolist()):
        if value == 0.0:
            zeros += 1
        elif not math.isnan(value):
            counts[bisect_left(edges, value)] += 1
    return counts, zeros


def moved(one: Sequence[int], other: Sequence[int]) -> int:
    """How many values would have to change their bucket."""
    return sum(abs(left - right) for left, right in zip(one, other, strict=True)) // 2
