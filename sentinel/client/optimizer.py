"""One optimizer of a Run: its parameters and gradients, its learning rate, its step hooks."""

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sentinel.client.probes.gradients import (
    are_alike,
    exact_norm,
    global_norm,
    is_sharded,
    nonfinite_among,
    quick_norm,
)
from sentinel.client.probes.loss import Value, plain
from sentinel.client.wrapping import Wrappers

# Walked by C code, a pass over the gradients of 76 parameters takes 5 us.
_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")
_NOTHING = id(None)


class Marks(NamedTuple):
    """How an optimizer's gradients stand: as long as these are equal nobody wrote to them."""

    identities: list[int]  # of every parameter's gradient, in order
    versions: int  # their sum: of the same tensors each only grows


def watch(
    optimizers: list[torch.optim.Optimizer], wrappers: Sequence[Wrappers], flat_shards: int | None
) -> "list[WatchedOptimizer]":
    """One each, named `optimizer`, or by place when there are several."""
    alone = len(optimizers) == 1
    names = ["optimizer"] if alone else [f"optimizer.{place}" for place in range(len(optimizers))]
    found = [WatchedOptimizer(*each) for each in zip(optimizers, names, wrappers, strict=True)]
    for watched in found:
        watched.flat_shards = flat_shards
    return found


class WatchedOptimizer:
    """Holds the optimizer weakly. All methods are called on the loop's thread, inside the shield."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, wrappers: Wrappers) -> None:
        self.name = name
        self.wrappers = wrappers
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[Any] = []
        self._parameters: list[Tensor] = []
        self._ids: frozenset[int] = frozenset()
        self._lists: list[list[Tensor]] = []  # of its groups, as they were when last seen
        self._named: list[int] = []  # a list of parameters that was found to be exactly these, in another order
        self._alike = False  # ordinary parameters, for which the quick norm will do
        self.absent = 0  # trainable parameters that had no gradient when the gradients were last walked
        self.norm_seconds = 0.0  # spent on norms of our own, in all
        self.sharded = False  # this rank holds parts of its parameters
        self.flat_shards: int | None = None  # FSDP1: over so many ranks, 0: not known; the parameters do not tell
        self._aside: list[tuple[Tensor, Tensor]] = []
        self.device_skip = False  # found_inf was set on a fused optimizer for this step

    @property
    def target(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError(f"the optimizer {self.name} is gone")
        return optimizer

    def is_(self, optimizer: object) -> bool:
        """Itself, or a wrapper around it, which the loop may give to a GradScaler."""
        return self._optimizer() is optimizer or (bool(self.wrappers) and self.wrappers.include(optimizer))

    @property
    def ids(self) -> list[int]:
        """Under which a GradScaler may know it."""
        return [id(self.target), *self.wrappers.ids]

    def hook(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Let `before` and `after` run around every step. Step hooks are not pickled with an optimizer."""
        optimizer = self.target
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def release(self) -> None:
        """Nothing follows: keep no parameter alive for whoever keeps the Run."""
        self._read([])

    def follow(self) -> None:
        """Notice `add_param_group`."""
        groups = self.target.param_groups
        if len(groups) != len(self._lists) or any(
            len(group["params"]) != len(known) for group, known in zip(groups, self._lists, strict=True)
        ):
            self._read([group["params"] for group in groups])

    def look_again(self) -> None:
        """Notice also parameters that were replaced, in an unchanged number. Once a step: it walks all of them."""
        lists = [group["params"] for group in self.target.param_groups]
        if len(lists) != len(self._lists) or not all(map(_same, lists, self._lists)):
            self._read(lists)

    def _read(self, lists: list[list[Tensor]]) -> None:
        unique = {id(parameter): parameter for each in lists for parameter in each}
        self._parameters, self._ids = list(unique.values()), frozenset(unique)
        self._lists, self._named = [list(each) for each in lists], []
        self.sharded = self.flat_shards is not None or any(is_sharded(one) for one in self._parameters)
        self._alike = are_alike(self._parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """Each parameter once; follows `add_param_group`."""
        self.follow()
        return self._parameters

    def holds(self, parameter_id: int) -> bool:
        return parameter_id in self._ids

    def overlap(self, parameters: list[Tensor]) -> str:
        """How far the gradients of these parameters are this optimizer's: "exactly" (all of them, each once, and no
        others), "some" or "none". Loops name the same list step after step; that one is known by a single walk.
        """
        mine = self.parameters
        ids = None if _same(parameters, mine) else list(map(id, parameters))
        if ids is None or ids == self._named:
            return "exactly" if any(one.grad is not None for one in mine) else "none"
        holding = [id(parameter) for parameter in parameters if parameter.grad is not None]
        holders = frozenset(holding)
        if holders.isdisjoint(self._ids):
            return "none"
        if len(ids) == len(self._ids) and self._ids.issuperset(ids) and len(set(ids)) == len(ids):
            self._named = ids
        held = {id(parameter) for parameter in mine if parameter.grad is not None}
        return "exactly" if holders == held and len(holding) == len(holders) else "some"

    def marks(self) -> Marks:
        """How its gradients stand now; no pass over their values."""
        gradients = list(map(_GRADIENT, self.parameters))
        identities = list(map(id, gradients))
        if _NOTHING in identities:
            present = self._present(gradients)
            return Marks(identities, sum(map(_VERSION, present)))
        self.absent = 0
        return Marks(identities, sum(map(_VERSION, gradients)))

    @property
    def gradients(self) -> list[Tensor]:
        return self._present(list(map(_GRADIENT, self.parameters)))

    def _present(self, gradients: list[Tensor | None]) -> list[Tensor]:
        present = [gradient for gradient in gradients if gradient is not None]
        self.absent = 0
        if len(present) < len(gradients):
            pairs = zip(self._parameters, gradients, strict=True)
            self.absent = sum(parameter.requires_grad for parameter, gradient in pairs if gradient is None)
        return present

    def norm(self) -> Tensor | None:
        """Global L2 of the gradients as they are; None without gradients (absent, not 0)."""
        started = clock()
        gradients = self.gradients
        if not gradients:
            return None
        norm = quick_norm(gradients) if self._alike else None
        if norm is None:
            norm = global_norm(gradients)
            self._alike = False  # until the parameters change: their gradients are of another kind
        self.norm_seconds += clock() - started
        return norm

    def exact(self, divisor: float = 1.0) -> float:
        return exact_norm(self.gradients) / divisor

    def nonfinite(self) -> tuple[int, int]:
        """(place in `parameters` of the first bad gradient or -1, how many are bad). For the rare second look."""
        holders = [place for place, parameter in enumerate(self.parameters) if parameter.grad is not None]
        bad = nonfinite_among(self.gradients)
        return (holders[bad[0]] if bad else -1), len(bad)

    @property
    def lr(self) -> Value | None:
        """Of the first group; a tensor lr on a device is returned as it is, unsynced."""
        groups = self.target.param_groups
        lr = groups[0].get("lr") if groups else None
        if isinstance(lr, Tensor):
            return plain(lr)
        return float(lr) if lr is not None else None

    @property
    def fused_skip(self) -> bool:
        """The step obeys `found_inf` on the device."""
        return bool(getattr(self.target, "_step_supports_amp_scaling", False))

    def set_aside(self) -> None:
        """Take the gradients away, so that the coming step is a true no-op for any optimizer.

        May be called again in one step (a closure makes new gradients); what a step that raised left over is dropped.
        """
        self._aside.clear()
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self) -> None:
        """Put the very same gradient tensors back (DDP's are views into its buckets)."""
        while self._aside:
            parameter, gradient = self._aside.pop()
            parameter.grad = gradient

    def forget(self) -> None:
        """The step raised: what was set aside for it is void."""
        self._aside.clear()
        self.end_device_skip()

    def skip_on_device(self, nonfinite: Tensor) -> None:
        """Let a fused step skip itself if `nonfinite` (bool, on the device) is true; nothing is synced."""
        optimizer: Any = self.target
        optimizer.grad_scale = None
        optimizer.found_inf = nonfinite.to(torch.float32)
        self.device_skip = True

    def end_device_skip(self) -> None:
        if self.device_skip:
            optimizer: Any = self.target
            del optimizer.grad_scale, optimizer.found_inf
            self.device_skip = False


def _same(now: Sequence[Tensor], then: Sequence[Tensor]) -> bool:
    """The same tensors in the same order; `==` would compare their values."""
    return len(now) == len(then) and all(map(is_, now, then))
