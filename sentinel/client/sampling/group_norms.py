"""The L2 norm of the gradients of each layer group: which part of the model a spike or a silence comes from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import FULL_PRECISION, local, spread
from sentinel.client.sampling.groups import Groups
from sentinel.client.sampling.signal import Signal, Take


class GroupNorms(Signal):
    """Before clipping, unscaled, a tied weight once. Under sharding of this rank's shards: squares add up."""

    name = "group_norms"

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def gradients(self, take: Take, watched: WatchedOptimizer, divisor: Tensor | None, attempt: Attempt) -> None:
        del attempt
        holders = [one for one in watched.parameters if one.grad is not None]
        gradients = [one.grad for one in holders if one.grad is not None]
        lie = spread(gradients)
        take.values.pop(watched.name, None)
        if not gradients or not lie.adds_up:
            return
        norms = each_norm(gradients)
        take.values[watched.name] = norms if divisor is None else norms / divisor.to(norms.device)
        take.notes[watched.name] = self._groups.of(holders), lie.copies

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        del attempt
        found: dict[str, float] = {}
        for name, (groups, copies) in take.notes.items():
            for group, held, norm in zip(groups, copies, numbers.get(name, ()), strict=False):
                found[group] = math.hypot(found.get(group, 0.0), norm / math.sqrt(held))
        return {"group_norms": found} if found else {}

    def close(self) -> None:
        self._groups.close()


@torch.no_grad()
def each_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of what this rank holds of each, shape (n,), float64, on the first one's device."""
    mine = [local(one) for one in tensors]
    ordinary = [one for one in mine if _is_ordinary(one)]
    quick = iter(torch._foreach_norm(ordinary) if ordinary else ())
    norms = [next(quick) if _is_ordinary(one) else _norm(one) for one in mine]
    device = norms[0].device
    if any(norm.device != device or norm.dtype != torch.float64 for norm in norms):
        norms = [norm.to(device, torch.float64) for norm in norms]
    return torch.stack(norms)


def _is_ordinary(tensor: Tensor) -> bool:
    return tensor.dtype in FULL_PRECISION


def _norm(tensor: Tensor) -> Tensor:
    # A norm of float16 values overflows at 65504.
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm
