"""Decide before an update whether its gradients may reach the weights (the reflex of design section 4)."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sentinel.client import reading
from sentinel.client.collectives import world_size
from sentinel.client.optimizer import Marks, WatchedOptimizer
from sentinel.client.probes.gradients import exact_norm, is_sharded, local, shard_norm, spread
from sentinel.client.probes.loss import Value, plain


class Measure(NamedTuple):
    """What is known of one optimizer's gradients before its step."""

    norm: Value | None  # before clipping, unscaled; None: there were no gradients
    source: str | None  # as `StepRecord.grad_norm_source`
    nonfinite: bool | Tensor = False  # a bool tensor of shape () where the device is read later
    overflow: bool | Tensor = False  # GradScaler skips this update by itself: normal under AMP
    ranks: int = 1  # more than one: the norm is this rank's part, and over so many ranks the squares add up
    marks: Marks | None = None  # when it was taken; the measure holds while they do


ABSENT = Measure(None, None)


def measure(watched: WatchedOptimizer, divisor: Tensor | None = None, taken: Tensor | None = None) -> Measure:
    """Look at the gradients as they are now; changes nothing.

    `divisor` is the loss scale that they still carry, `taken` a total norm somebody already computed of exactly
    these gradients. On a CPU the answer is final; on another device it stays there, unsynced.
    """
    watched.follow()  # looked up before anything else: only then it is known whether they are sharded
    if watched.sharded:
        return _measure_shards(watched, divisor, taken)
    norm = watched.norm() if taken is None else taken
    if norm is None:
        return ABSENT
    source = "own" if taken is None else "clip"
    if not reading.is_free(norm):
        return Measure(_unscaled(norm, divisor).float(), source, ~torch.isfinite(norm.detach()))
    value = float(norm) if divisor is None else float(_unscaled(norm, divisor))
    if math.isfinite(value):
        return Measure(value, source)
    # The norm itself may have overflowed although every gradient is finite.
    value = watched.exact(1.0 if divisor is None else float(divisor))
    return Measure(value, source, not math.isfinite(value))


def _measure_shards(watched: WatchedOptimizer, divisor: Tensor | None, taken: Tensor | None) -> Measure:
    """The global norm where the user's clipping has gathered it, else this rank's part: we start no collective.

    On a device nothing is flagged as not finite: the reflex may not act on one rank's part, the norm itself tells.
    """
    gradients = watched.gradients
    if not gradients:
        return ABSENT
    if taken is not None and is_sharded(taken) and all(one.is_replicate() for one in cast("Any", taken).placements):
        known = _unscaled(local(taken), divisor)
        value = plain(known)
        return Measure(value, "clip", isinstance(value, float) and not math.isfinite(value))
    lie = spread(gradients, watched.flat_shards)
    whole = lie.adds_up and lie.ranks == world_size()
    source = "own" if lie.ranks == 1 else "local" if whole else "part"
    part = _unscaled(shard_norm(gradients, lie), divisor)
    if not reading.is_free(part):
        return Measure(part.float(), source, ranks=lie.ranks)
    value = float(part)
    if not math.isfinite(value):
        value = exact_norm(gradients, lie.copies) / (1.0 if divisor is None else float(divisor))
    return Measure(value, source, not math.isfinite(value), ranks=lie.ranks)


def _unscaled(norm: Tensor, divisor: Tensor | None) -> Tensor:
    wide = norm.detach().double()
    return wide if divisor is None else wide / divisor.to(wide.device)


def amp_overflow(optimizer: Any) -> bool | Tensor | None:
    """Will `found_inf`, which GradScaler hands to a fused optimizer, skip this step? On a device the answer stays
    there. None: GradScaler is not driving this step.
    """
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, Tensor):
        return None
    known = plain(found)
    return known > 0.0 if isinstance(known, float) else known


def evidence(watched: WatchedOptimizer, names: dict[int, str], norm: float) -> dict[str, Any]:
    """The first bad parameter's name and how many are bad; walks all gradients, for the rare case only."""
    place, count = watched.nonfinite()
    parameter = watched.parameters[place] if place >= 0 else None
    name = names.get(id(parameter), f"parameter {place}") if parameter is not None else ""
    return {"first_parameter": name, "bad_parameters": count, "optimizer": watched.name, "grad_norm": norm}
