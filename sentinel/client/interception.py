"""What is replaced in torch while a Run is attached, and how it is put back when the last one is gone.

Six seams, none of which the loop can see: where autograd starts (the loss), where gradients are clipped (a norm for
free), GradScaler (the exact loss, and the updates it skips), `load_state_dict` (a resume that makes snapshots stale),
where the loop waits for other ranks (`collectives`), and for data (`loading`).
The originals are looked up when the first Run attaches, so a library that replaced them earlier stays in the chain.
"""

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from sentinel.client import collectives, loading
from sentinel.client.probes.loss import SCALED_BY, UNSCALED
from sentinel.client.tracing import untraced


class Observer(Protocol):
    """What a Loop offers. Every method is shielded: none raises but RunStopped."""

    def before_backward(self, arrived: float) -> object: ...
    def after_backward(self, outputs: Sequence[Any], arrived: float, started: float, returned: float) -> object: ...
    def before_clip(self, parameters: list[Tensor], clip: "Clip") -> object: ...
    def after_clip(self) -> object: ...
    def before_scaler_step(self, scaler: Any, optimizer: Any) -> object: ...
    def after_scaler_step(self, scaler: Any, optimizer: Any) -> object: ...
    def state_loaded(self, target: Any) -> object: ...
    def loader_waited(self, started: float, ended: float) -> object: ...


class Clip(NamedTuple):
    """What gradients are about to be clipped by."""

    most: Any  # the norm that they may have; infinite for a clipping by value
    norm: Tensor | None  # that they have, as the loop told it
    exact: bool  # torch computed it just now: it is the L2 norm of exactly these gradients


_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
_last_norm: Tensor | None = None  # between the two halves of clip_grad_norm_


def add(observer: Observer) -> None:
    """Let `observer` see; the first one puts the seams in place."""
    global _observers  # noqa: PLW0603 -- one tuple, replaced whole, so that readers need no lock
    with _lock:
        if not _observers:
            _install()
        _observers = (*_observers, observer)


def remove(observer: Observer) -> None:
    """Stop `observer`; after the last one torch is as it was."""
    global _observers  # noqa: PLW0603
    with _lock:
        had = bool(_observers)
        _observers = tuple(other for other in _observers if other is not observer)
        if had and not _observers:
            while _undo:
                _undo.pop()()


def observers() -> tuple[Observer, ...]:
    return _observers


def forget_all() -> None:
    """In a forked child: nobody observes; torch is put back without the lock that the parent may have held."""
    global _observers  # noqa: PLW0603
    _observers = ()
    while _undo:
        _undo.pop()()


def _install() -> None:
    _replace(torch.autograd.graph, "_engine_run_backward", _untraced(_run_backward), also=[torch.autograd])
    _replace(clip_grad, "_get_total_norm", _total_norm, aliases=[(torch.nn.utils, "get_total_norm")])
    _replace(clip_grad, "_clip_grads_with_norm_", _clip, aliases=[(torch.nn.utils, "clip_grads_with_norm_")])
    _replace(clip_grad, "clip_grad_value_", _clip_values, aliases=[(torch.nn.utils, "clip_grad_value_")])
    _replace(grad_scaler.GradScaler, "scale", _untraced(_scale))
    _replace(grad_scaler.GradScaler, "step", _untraced(_scaler_step))
    _replace(torch.nn.Module, "load_state_dict", _untraced(_load_state_dict))
    _replace(torch.optim.Optimizer, "load_state_dict", _untraced(_load_state_dict))
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None:
        _replace(fsdp, "clip_grad_norm_", _clip_flat_shards)
    for owner, name, wrap in (*collectives.seams(), *loading.seams(observers)):
        _replace(owner, name, _untraced(wrap))


def _untraced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """None of these can be traced by Dynamo without us either. What the original calls is compiled as ever."""
    return lambda original: untraced(wrap(original), recursive=False)


def _replace(
    owner: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    also: list[Any] | None = None,
    aliases: list[tuple[Any, str]] | None = None,
) -> None:
    original = getattr(owner, name)
    wrapped = functools.wraps(original)(wrap(original))
    for place, attribute in [(owner, name), *((other, name) for other in also or []), *(aliases or [])]:
        if getattr(place, attribute, None) is not original:
            continue
        setattr(place, attribute, wrapped)
        _undo.append(functools.partial(_put_back, place, attribute, wrapped, original))


def _put_back(place: Any, attribute: str, wrapped: Any, original: Any) -> None:
    # If somebody wrapped our wrapper meanwhile it must stay; with no observers it only passes through.
    if getattr(place, attribute, None) is wrapped:
        setattr(place, attribute, original)


def _run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # A nested call (checkpointing, double backward) or autograd.grad is not the objective's backward.
        if not _observers or not kwargs.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            return original(outputs, *args, **kwargs)
        arrived = clock()
        for observer in _observers:
            observer.before_backward(arrived)
        started = clock()
        result = original(outputs, *args, **kwargs)
        returned = clock()
        for observer in _observers:
            observer.after_backward(outputs, arrived, started, returned)
        return result

    return run_backward


def _total_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        global _last_norm  # noqa: PLW0603
        if torch.compiler.is_compiling():
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        _last_norm = None
        norm = original(tensors, norm_type, error_if_nonfinite, foreach)
        if _observers and float(norm_type) == 2.0:
            _last_norm = norm
        return norm

    return total_norm


def _clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_with_norm(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> Any:
        if not _observers or torch.compiler.is_compiling():
            return original(parameters, max_norm, total_norm, foreach)
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clip = Clip(max_norm, total_norm, _last_norm is not None and _last_norm is total_norm)
        for observer in _observers:
            observer.before_clip(several, clip)
        result = original(several, max_norm, total_norm, foreach)
        for observer in _observers:
            observer.after_clip()
        return result

    return clip_with_norm


def _clip_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_values(parameters: Any, clip_value: float, foreach: bool | None = None) -> Any:
        if not _observers or torch.compiler.is_compiling():
            return original(parameters, clip_value, foreach)
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for observer in _observers:
            observer.before_clip(several, Clip(math.inf, None, exact=False))
        result = original(several, clip_value, foreach)
        for observer in _observers:
            observer.after_clip()
        return result

    return clip_values


def _clip_flat_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        for observer in _observers:
            observer.before_clip(list(self.parameters()), Clip(max_norm, None, exact=False))
        result = original(self, max_norm, *args, **kwargs)
        for observer in _observers:
            observer.after_clip()
        return result

    return clip_grad_norm_


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        if _observers and isinstance(outputs, Tensor) and outputs.numel() == 1 and result is not outputs:
            setattr(result, UNSCALED, outputs.detach())
            setattr(result, SCALED_BY, weakref.ref(self))
        return result

    return scale


def _scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for observer in _observers:
            observer.before_scaler_step(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for observer in _observers:
            observer.after_scaler_step(self, optimizer)
        return result

    return step


def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for observer in _observers:
            observer.state_loaded(self)
        return result

    return load_state_dict
