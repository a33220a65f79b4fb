"""The norm of this rank's own gradient, before DDP averages the ranks': what the gradient noise scale is made of."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel.client import scaling
from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import local
from sentinel.client.sampling.group_norms import each_norm
from sentinel.client.sampling.replicas import Replicas
from sentinel.client.sampling.signal import Signal, Take


class LocalNorm(Signal):
    """Under DDP. Accumulated over the attempt's backwards as the gradient itself is, unscaled, before clipping.

    For one sampled attempt every parameter has a post-accumulate hook: autograd calls it when the gradient has been
    added, before the hook through which DDP's reducer takes it. A parameter that this rank did not use adds nothing.
    Absent where an optimizer holds gradients that DDP does not average.
    """

    name = "local_grad_norm"
    from_forward = True

    def __init__(self, replicas: Replicas, watched: list[WatchedOptimizer]) -> None:
        self._replicas = replicas
        self._watched = watched

    def applies(self) -> bool:
        return bool(self._replicas.ids())

    def arm(self, take: Take) -> None:
        ear = take.notes["ear"] = _Ear(self._replicas.ids())
        heard = torch.compiler.disable(ear.heard)
        ear.handles = [
            parameter.register_post_accumulate_grad_hook(heard)
            for watched in self._watched
            for parameter in watched.parameters
            if id(parameter) in ear.of and parameter.requires_grad and parameter.is_leaf
        ]

    def gradients(self, take: Take, watched: WatchedOptimizer, divisor: Tensor | None, attempt: Attempt) -> None:
        del divisor  # what was heard came before any unscaling
        ear: _Ear | None = take.notes.get("ear")
        holders = [one for one in watched.parameters if one.grad is not None]
        if ear is None or not holders:
            return
        if ear.error is not None:
            raise ear.error
        take.inside(ear.seconds)
        ear.seconds = 0.0
        foreign = any(id(one) not in ear.of for one in holders)
        norms = [ear.norms[id(one)] for one in watched.parameters if id(one) in ear.norms]
        take.notes["foreign"] = foreign or take.notes.get("foreign", False)
        if not norms:
            return
        scale = scaling.scale_of(attempt.scaler)
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
        take.values[watched.name] = stacked if scale is None else stacked / scale.to(stacked.device)

    def end(self, take: Take) -> None:
        ear: _Ear | None = take.notes.pop("ear", None)
        if ear is not None:
            ear.leave()

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        del attempt
        if not numbers or take.notes.get("foreign"):
            return {}
        return {"local_grad_norm": math.hypot(*(norm for norms in numbers.values() for norm in norms))}


class _Ear:
    """Hears the parameters' gradients; holds no Run and no parameter. In whichever thread autograd runs."""

    __slots__ = ("error", "handles", "norms", "of", "seconds")

    def __init__(self, of: frozenset[int]) -> None:
        self.of = of  # ids of the parameters that DDP averages
        self.norms: dict[int, Tensor] = {}  # by parameter, of what its gradient was when it was heard last
        self.handles: list[Any] = []
        self.seconds = 0.0
        self.error: Exception | None = None

    def heard(self, parameter: Tensor) -> None:
        started = time.perf_counter()
        try:
            if parameter.grad is not None:  # a hook of the loop's own may have taken it away
                self.norms[id(parameter)] = each_norm([local(parameter.grad.detach())])[0]
        except Exception as error:  # noqa: BLE001 -- must not raise into the backward; `gradients` tells it
            self.error = error
        self.seconds += time.perf_counter() - started

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.norms.clear()
