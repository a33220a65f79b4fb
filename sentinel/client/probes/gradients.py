"""Measure gradients: the global L2 norm, or this rank's part of it, and which of them are not finite."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

FULL_PRECISION = frozenset({torch.float32, torch.float64})
ORDINARY = (Parameter, Tensor)  # themselves, no subclass of theirs


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor: this rank holds a part of it, or a replica."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, as an ordinary dense tensor of values (sparse gradients coalesced)."""
    mine = cast("Any", tensor).to_local() if is_sharded(tensor) else tensor
    if mine.is_sparse:
        # An uncoalesced gradient lists an index twice, and the norm of its values is wrong (pytorch/pytorch#4829).
        mine = mine.coalesce().values()
    return cast("Tensor", mine)


class Spread(NamedTuple):
    """How gradients lie on the ranks of a mesh."""

    copies: list[int]  # of each gradient: so many ranks hold the same values
    ranks: int  # over so many the squares of `shard_norm` add up to the global norm's
    adds_up: bool  # False: a gradient is a sum that has still to be made (Partial), so nobody's part is known


def spread(gradients: Sequence[Tensor], flat_shards: int | None = None) -> Spread:
    """Read from the placements alone; no collective. A plain tensor beside DTensors is held by every rank.

    `flat_shards`: these are FSDP1's plain tensors, each split over so many ranks; 0: over some, nobody knows how.
    """
    if flat_shards is not None:
        return Spread([1] * len(gradients), max(flat_shards, 2), flat_shards > 0)
    meshes = [cast("Any", one).device_mesh if is_sharded(one) else None for one in gradients]
    ranks = max((mesh.size() for mesh in meshes if mesh is not None), default=1)
    copies, adds_up = [], True
    for gradient, mesh in zip(gradients, meshes, strict=True):
        held = ranks
        if mesh is not None:
            held //= mesh.size()
            for dimension, placement in enumerate(cast("Any", gradient).placements):
                held *= mesh.size(dimension) if placement.is_replicate() else 1
                adds_up = adds_up and not placement.is_partial()
        copies.append(held)
    return Spread(copies, ranks, adds_up)


@torch.no_grad()
def shard_norm(gradients: Sequence[Tensor], lie: Spread) -> Tensor:
    """This rank's part of the global L2 norm, shape (), float64: squares add up over the mesh (facts: FSDP2/TP norm).

    The square of each gradient is divided by the number of ranks that hold the same values.
    """
    mine = [local(one) for one in gradients]
    ordinary = [one for one in mine if one.dtype in FULL_PRECISION]
    quick = iter(torch._foreach_norm(ordinary) if ordinary else ())
    norms = [
        next(quick) if one.dtype in FULL_PRECISION else torch.linalg.vector_norm(one, dtype=_precision(one))
        for one in mine
    ]
    parts = [norm.to(norms[0].device, torch.float64) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_div(parts, [held**0.5 for held in lie.copies]))
    )
    return total


def are_alike(parameters: Sequence[Tensor]) -> bool:
    """Ordinary dense parameters of one precision and device: `quick_norm` may be tried on their gradients."""
    first = next(iter(parameters), None)
    return (
        first is not None
        and first.dtype in FULL_PRECISION
        and all(
            type(one) in ORDINARY
            and one.layout is torch.strided
            and one.dtype is first.dtype is (getattr(one, "grad_dtype", None) or one.dtype)
            and one.device == first.device
            for one in parameters
        )
    )


def quick_norm(gradients: list[Tensor]) -> Tensor | None:
    """As `global_norm`, for gradients of parameters that `are_alike`; None where they turn out to be of another kind.

    It looks at no gradient by itself, so that it costs what the one pass over their values costs.
    """
    with torch.no_grad():
        try:
            parts = torch.stack(torch._foreach_norm(gradients))
        except (RuntimeError, TypeError):  # sparse ones, or on several devices
            return None
        if type(parts) is not Tensor or parts.dtype not in FULL_PRECISION:
            return None
        return cast("Tensor", torch.linalg.vector_norm(parts, dtype=torch.float64))


@torch.no_grad()
def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all of them as one vector, shape (), float64, on the first gradient's device. Mutates nothing.

    The norms of the parts are combined in float64; a part itself overflows float32 beyond 1.8e19 an element, for
    which `exact_norm` is the second look.
    """
    ordinary = [one for one in gradients if type(one) is Tensor and not one.is_sparse and one.dtype in FULL_PRECISION]
    parts = list(torch._foreach_norm(ordinary)) if ordinary else []
    if len(ordinary) < len(gradients):
        plain = set(map(id, ordinary))
        special = [local(one) for one in gradients if id(one) not in plain]
        parts += [torch.linalg.vector_norm(one, dtype=_precision(one)) for one in special if one.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    if len({(part.device, part.dtype) for part in parts}) > 1:
        parts = [part.to(parts[0].device, torch.float64) for part in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts).double())
    return total


@torch.no_grad()
def exact_norm(gradients: Sequence[Tensor], copies: Sequence[int] | None = None) -> float:
    """The same in float64 throughout: finite whenever every gradient is. For the rare second look.

    With `copies` it is this rank's part, as `shard_norm` is.
    """
    total = 0.0
    for gradient, held in zip(gradients, copies or [1] * len(gradients), strict=True):
        mine = local(gradient)
        mine = (torch.view_as_real(mine.resolve_conj()) if mine.is_complex() else mine).double()
        largest = float(mine.abs().max()) if mine.numel() else 0.0
        if not math.isfinite(largest):
            return math.nan if bool(torch.isnan(mine).any()) else math.inf
        if largest > 0.0:
            total = math.hypot(total, largest * float(torch.linalg.vector_norm(mine / largest)) / math.sqrt(held))
    return total


@torch.no_grad()
def nonfinite_among(gradients: Sequence[Tensor]) -> list[int]:
    """Positions of the gradients that hold a NaN or an infinity."""
    return [place for place, gradient in enumerate(gradients) if not bool(torch.isfinite(local(gradient)).all())]


def _precision(tensor: Tensor) -> torch.dtype | None:
    # A norm of float16 values overflows at 65504.
    return None if tensor.dtype in FULL_PRECISION or tensor.is_complex() else torch.float32
