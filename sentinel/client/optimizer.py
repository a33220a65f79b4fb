"""One optimizer of a Run: its parameters and gradients, its learning rate, its step hooks."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sentinel.client.probes.gradients import exact_norm, global_norm, is_sharded, nonfinite_among
from sentinel.client.probes.loss import Value, plain
from sentinel.client.wrapping import Wrappers


def watch(optimizers: list[torch.optim.Optimizer], wrappers: Sequence[Wrappers]) -> "list[WatchedOptimizer]":
    """One each, named `optimizer`, or by place when there are several."""
    alone = len(optimizers) == 1
    names = ["optimizer"] if alone else [f"optimizer.{place}" for place in range(len(optimizers))]
    return [WatchedOptimizer(*each) for each in zip(optimizers, names, wrappers, strict=True)]


class WatchedOptimizer:
    """Holds the optimizer weakly. All methods are called on the loop's thread, inside the shield."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, wrappers: Wrappers) -> None:
        self.name = name
        self.wrappers = wrappers
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[Any] = []
        self._parameters: list[Tensor] = []
        self._ids: frozenset[int] = frozenset()
        self._shape: tuple[int, ...] = ()
        self._seen: list[int] = []
        self.sharded = False  # this rank holds parts of its parameters
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
        self._parameters, self._ids, self._shape, self._seen = [], frozenset(), (), []

    @property
    def parameters(self) -> list[Tensor]:
        """Each parameter once; follows `add_param_group`."""
        groups = self.target.param_groups
        shape = tuple(len(group["params"]) for group in groups)
        if shape != self._shape:
            unique = {id(parameter): parameter for group in groups for parameter in group["params"]}
            self._parameters, self._ids, self._shape = list(unique.values()), frozenset(unique), shape
            self.sharded = any(is_sharded(parameter) for parameter in self._parameters)
        return self._parameters

    def look_again(self) -> None:
        """Notice parameters that were replaced, in an unchanged number. Once a step: it walks all of them."""
        seen = [id(parameter) for group in self.target.param_groups for parameter in group["params"]]
        if seen != self._seen:
            self._seen, self._shape = seen, ()

    def holds(self, parameter_id: int) -> bool:
        return parameter_id in self._ids

    def overlap(self, holders: frozenset[int]) -> str:
        """How far the parameters with these ids, which hold gradients, are this optimizer's: all, some or none."""
        parameters = self.parameters  # brings the ids up to date
        if holders.isdisjoint(self._ids):
            return "none"
        mine = {id(parameter) for parameter in parameters if parameter.grad is not None}
        return "all" if holders == mine else "some"

    @property
    def gradient_marks(self) -> list[int]:
        """Identity and version of every gradient: equal lists mean that nobody wrote to them in between."""
        marks: list[int] = []
        for gradient in self.gradients:
            marks += (id(gradient), gradient._version)
        return marks

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def norm(self) -> Tensor | None:
        """Global L2 of the gradients as they are; None without gradients (absent, not 0)."""
        gradients = self.gradients
        return global_norm(gradients) if gradients else None

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
