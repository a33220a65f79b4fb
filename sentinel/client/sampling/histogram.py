"""How the magnitudes of the gradient are distributed, and how many of its values are exactly 0."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import local
from sentinel.client.sampling.buckets import bucket_counts
from sentinel.client.sampling.signal import Signal, Take
from sentinel.client.sampling.strided import elements, plan, taken
from sentinel.sample import HISTOGRAM_EDGES


class Histogram(Signal):
    """Before clipping, unscaled; values that are not finite are in no bucket, infinities in the last.

    Exact up to `most` values; beyond, every nth of each large tensor is counted, and the counts are scaled to all of
    them. Under sharding of this rank's shards. A value that a sparse gradient does not name is a 0.
    """

    name = "histogram"

    def __init__(self, watched: list[WatchedOptimizer], most: int) -> None:
        self._watched = watched
        self._most = most
        self._edges: Tensor | None = None

    def gradients(self, take: Take, watched: WatchedOptimizer, divisor: Tensor | None, attempt: Attempt) -> None:
        del attempt
        gradients = [one.grad for one in watched.parameters if one.grad is not None]
        dense = [_real(local(one.detach())) for one in gradients]
        for key in [one for one in take.values if one.startswith(f"{watched.name}/")]:
            del take.values[key]
        held = [local(one.detach()).numel() for each in self._watched for one in each.parameters]
        chosen = plan(held, self._most)
        unnamed = sum(_unnamed(one, mine) for one, mine in zip(gradients, dense, strict=True))
        scales: dict[str, float] = {}
        take.notes[watched.name] = unnamed, scales
        for distance in {1, chosen.distance}:
            alike = [one for one in dense if one.numel() and chosen.of(one) == distance]
            if not alike:
                continue
            values = _magnitudes([taken(one, distance) for one in alike])
            edges = self._on(values)
            key = f"{watched.name}/{distance}"
            take.values[key] = bucket_counts(values, edges if divisor is None else edges * divisor.to(edges))
            scales[key] = elements(alike) / len(values)

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        del attempt
        if not numbers:
            return {}
        total: list[float] = [0.0] * (len(HISTOGRAM_EDGES) + 2)
        for unnamed, scales in take.notes.values():
            total[-1] += unnamed
            for key, scale in scales.items():
                total = [one + count * scale for one, count in zip(total, numbers[key], strict=True)]
        *buckets, zeros = map(round, total)
        return {"histogram": buckets, "zeros": zeros}

    def _on(self, values: Tensor) -> Tensor:
        if self._edges is None or self._edges.device != values.device or self._edges.dtype != values.dtype:
            edges = torch.tensor(HISTOGRAM_EDGES, dtype=values.dtype, device="cpu")
            # From pinned memory, so that nothing waits for the device.
            edges = edges.pin_memory() if values.is_cuda else edges
            self._edges = edges.to(values.device, non_blocking=True)
        return self._edges


def _magnitudes(pieces: list[Tensor]) -> Tensor:
    """Of all of them, one after another, in a type that holds them exactly."""
    wide = any(one.dtype == torch.float64 for one in pieces)
    return torch.cat([one.to(torch.float64 if wide else torch.float32) for one in pieces]).abs_()


def _real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _unnamed(gradient: Tensor, values: Tensor) -> int:
    return gradient.numel() - values.numel() if gradient.is_sparse else 0
