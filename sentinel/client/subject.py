"""What a Run watches: the model, its optimizers and the other state. We keep nothing alive beyond the optimizers."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sentinel.client.handle import Handle
from sentinel.client.wrapping import Wrappers
from sentinel.errors import MisuseError

KEEPSAKE = "_sentinel_keepsake"  # attribute of the first optimizer


class Extra(NamedTuple):
    """A named object with state besides model and optimizer: scheduler, EMA, the user's own."""

    name: str
    handle: Handle


class Keepsake:
    """Hangs on an optimizer and holds what lives as long as it does; copies and pickles of it are empty."""

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    def __reduce__(self) -> tuple[type["Keepsake"], tuple[()]]:
        return Keepsake, ()


class Subject:
    """Checked once, in `attach`; raises MisuseError there and never later."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        *,
        wrappers: Sequence[Wrappers] = (),
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.wrappers = wrappers or [Wrappers() for _ in optimizers]  # around each optimizer
        self.scaler = None if scaler is None else Handle(_grad_scaler(scaler))
        self.extras = [*_schedulers(scheduler), *_emas(ema), *_states(state)]
        self.has_scheduler = scheduler is not None

    def keep(self) -> None:
        """Model and extras live as long as the first optimizer, if only `attach` was given them: a ModuleList of two
        networks, an adapter with state_dict.
        """
        extras = [extra.handle() for extra in self.extras]
        vars(self.optimizers[0])[KEEPSAKE] = Keepsake(self.model, *extras)

    def release(self) -> None:
        optimizer = self._optimizers[0]()
        if optimizer is not None:
            vars(optimizer).pop(KEEPSAKE, None)

    @property
    def gone(self) -> bool:
        """True once the user has dropped the model or an optimizer."""
        return self._model() is None or any(reference() is None for reference in self._optimizers)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model is gone")
        return model

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        alive = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        if len(alive) < len(self._optimizers):
            raise ReferenceError("an optimizer is gone")
        return alive

    @property
    def unmaterialized(self) -> bool:
        """A lazy module has not been given its shape yet; it gets it in its first forward."""
        return any(is_lazy(tensor) for _, tensor in self.tensors())

    def untrained(self) -> Iterator[str]:
        """Names of buffers and frozen parameters of the model."""
        model = self.model
        yield from (name for name, _ in model.named_buffers())
        yield from (name for name, parameter in model.named_parameters() if not parameter.requires_grad)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, buffers (persistent or not) and parameters that only an optimizer knows; each tensor once."""
        seen: set[int] = set()
        model = self.model
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
        for place, parameter in enumerate(_optimized(self.optimizers)):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"optimizer.parameter.{place}", parameter
        for extra in self.extras:
            target = extra.handle()
            if isinstance(target, nn.Module):
                for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{extra.name}.{name}", tensor


def check_shared(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise MisuseError unless every optimizer updates at least one parameter of the model."""
    mine = {id(parameter) for parameter in model.parameters()}
    for place, optimizer in enumerate(optimizers):
        parameters = _optimized([optimizer])
        if not any(id(parameter) in mine for parameter in parameters):
            which = f"optimizer {place} ({type(optimizer).__name__})" if len(optimizers) > 1 else "the optimizer"
            raise MisuseError(
                f"the model ({type(model).__name__}, {len(mine)} parameters) and {which} "
                f"({len(parameters)} parameters) have no parameter in common; "
                "build the optimizer from this model's parameters, after moving or wrapping it, and attach both"
            )


def _optimized(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    return [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]


def _schedulers(scheduler: Any) -> list[Extra]:
    if scheduler is None:
        return []
    several = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
    names = ["scheduler"] if len(several) == 1 else [f"scheduler.{place}" for place in range(len(several))]
    return [Extra(name, Handle(_stateful(name, one))) for name, one in zip(names, several, strict=True)]


def _emas(ema: Any) -> list[Extra]:
    return [] if ema is None else [Extra("ema", Handle(_stateful("ema", ema)))]


def _states(state: Mapping[str, Any] | None) -> list[Extra]:
    if state is None:
        return []
    if not isinstance(state, Mapping):
        raise MisuseError(f"state is a {type(state).__name__}; it must be a dict of name -> object with state_dict")
    return [Extra(f"state.{name}", Handle(_stateful(f"state[{name!r}]", one))) for name, one in state.items()]


def _grad_scaler(scaler: Any) -> torch.amp.GradScaler:
    if not isinstance(scaler, torch.amp.GradScaler):
        raise MisuseError(
            f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler "
            '(hand over another object with state_dict() as state={"scaler": ...})'
        )
    return scaler


def _stateful(name: str, target: Any) -> Any:
    if not (callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))):
        raise MisuseError(f"{name} is a {type(target).__name__}; it must have state_dict() and load_state_dict()")
    return target
