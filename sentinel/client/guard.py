"""Decide before an update whether its gradients may reach the weights (the reflex of design section 4)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.loss import Value


class Measure(NamedTuple):
    """What is known of one optimizer's gradients before its step."""

    norm: Value | None  # before clipping, unscaled; None: there were no gradients
    source: str | None  # "clip": the user's own clipping computed it; "own"; "local": this rank's shards
    nonfinite: bool | Tensor = False  # a bool tensor of shape () where the device is read later
    overflow: bool | Tensor = False  # GradScaler skips this update by itself: normal under AMP
    marks: tuple[int, ...] = ()  # gradient_marks when it was taken; the measure holds while they do


ABSENT = Measure(None, None)


def measure(watched: WatchedOptimizer, divisor: Tensor | None = None, taken: Tensor | None = None) -> Measure:
    """Look at the gradients as they are now; changes nothing.

    `divisor` is the loss scale that they still carry, `taken` a total norm somebody already computed of exactly
    these gradients. On a CPU the answer is final; on another device it stays there, unsynced.
    """
    norm = watched.norm() if taken is None else taken
    if norm is None:
        return ABSENT
    source = "local" if watched.sharded else "own" if taken is None else "clip"
    if hasattr(norm, "to_local"):
        # The full value of a DTensor norm is a collective, which we never start (facts: FSDP2).
        norm, source = norm.to_local(), "local"
    scaled = norm.detach().double()
    if divisor is not None:
        scaled = scaled / divisor.to(scaled.device)
    if scaled.device.type != "cpu":
        return Measure(scaled.float(), source, ~torch.isfinite(norm.detach()))
    value = float(scaled)
    if math.isfinite(value):
        return Measure(value, source)
    # The norm itself may have overflowed although every gradient is finite.
    value = watched.exact(1.0 if divisor is None else float(divisor))
    return Measure(value, source, not math.isfinite(value))


def amp_overflow(optimizer: Any) -> bool | Tensor | None:
    """Will `found_inf`, which GradScaler hands to a fused optimizer, skip this step? On a device the answer stays
    there. None: GradScaler is not driving this step.
    """
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, Tensor):
        return None
    return float(found) > 0.0 if found.device.type == "cpu" else found.detach().reshape(()).float()


def evidence(watched: WatchedOptimizer, names: dict[int, str], norm: float) -> dict[str, Any]:
    """The first bad parameter's name and how many are bad; walks all gradients, for the rare case only."""
    place, count = watched.nonfinite()
    parameter = watched.parameters[place] if place >= 0 else None
    name = names.get(id(parameter), f"parameter {place}") if parameter is not None else ""
    return {"first_parameter": name, "bad_parameters": count, "optimizer": watched.name, "grad_norm": norm}
