"""How far an update moves the weights, against how large they are: the learning rate as the weights feel it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import FULL_PRECISION, local, spread
from sentinel.client.sampling.group_norms import each_norm
from sentinel.client.sampling.signal import Signal, Take
from sentinel.client.sampling.strided import Plan, plan, taken
from sentinel.vocabulary import UpdateResult


class UpdateRatio(Signal):
    """update_norm: L2 of the weights after the step minus those before it; weight_norm: L2 of those before it.

    Over the trainable parameters of the optimizers that stepped. Exact up to `most` values; beyond, over every nth
    value of each large tensor, whose square is scaled to all of them. Absent when the update was skipped. Under
    sharding of this rank's shards: squares add up.
    """

    name = "update_ratio"

    def __init__(self, watched: list[WatchedOptimizer], most: int) -> None:
        """`most` bounds the memory too: so many weights are copied, and freed after the step."""
        self._watched = watched
        self._most = most

    @torch.no_grad()
    def before_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None:
        trained = [one for one in watched.parameters if one.requires_grad and local(one.detach()).numel()]
        if attempt.result is not UpdateResult.APPLIED or not trained:
            return
        held = [local(one.detach()) for each in self._watched for one in each.parameters if one.requires_grad]
        chosen = plan([one.numel() for one in held], self._most)
        copies = [_exact(one, chosen).clone() for one in trained]
        take.notes[_copies(watched)] = chosen, trained, copies

    @torch.no_grad()
    def after_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None:
        del attempt
        chosen, trained, copies = take.notes.pop(_copies(watched), (None, [], []))
        if not copies:
            return
        changes = torch._foreach_sub([_exact(one, chosen) for one in trained], copies)
        take.values[f"update.{watched.name}"] = each_norm(changes)
        take.values[f"weight.{watched.name}"] = each_norm(copies)
        # By how much the square of what was taken of a tensor stands for the square of this rank's part of it.
        parts = zip(trained, copies, spread(trained).copies, strict=True)
        take.notes[watched.name] = [_size(one) / copy.numel() / held for one, copy, held in parts]

    def end(self, take: Take) -> None:
        for name in [one for one in take.notes if one.startswith(_COPIES)]:
            del take.notes[name]  # of a step that raised

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        if attempt.result is not UpdateResult.APPLIED or not take.notes:
            return {}
        return {
            f"{what}_norm": math.hypot(
                *(
                    norm * math.sqrt(scale)
                    for name, scales in take.notes.items()
                    for norm, scale in zip(numbers[f"{what}.{name}"], scales, strict=True)
                )
            )
            for what in ("update", "weight")
        }


_COPIES = "copies."


def _copies(watched: WatchedOptimizer) -> str:
    return f"{_COPIES}{watched.name}"


def _size(parameter: Tensor) -> int:
    """Real numbers that this rank holds of it."""
    return local(parameter.detach()).numel() * (2 if parameter.is_complex() else 1)


def _exact(parameter: Tensor, chosen: Plan) -> Tensor:
    """The values of the plan, in a type in which the difference of two of them is not rounded away."""
    values = local(parameter.detach())
    distance = chosen.of(values)
    values = taken(torch.view_as_real(values) if values.is_complex() else values, distance)
    return values if values.dtype in FULL_PRECISION else values.float()
