"""What the loop does with torch.distributed, as seams tell it: how long it waits, and which models DDP wraps.

Waiting is seen in two places: `Work.wait`, in which every blocking collective ends too, and DDP's broadcast of
buffers, which is one call into C++. What DDP waits for at the end of backward is seen by nobody here
(`probes/communication.py` measures that). The seams are put in place and taken away by `interception`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BLOCKING = frozenset({"gloo", "mpi"})  # backends whose Work.wait returns when the data is there, also for the host

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Listener(Protocol):
    """Told in whichever thread it happens; neither method may raise or block."""

    def waited(self, seconds: float) -> None: ...
    def wrapped(self, model: DistributedDataParallel) -> None: ...


_listeners: tuple[Listener, ...] = ()
_waiting: set[int] = set()  # threads that are inside a wait: a wait within a wait is part of it


def listen(listener: Listener) -> None:
    global _listeners  # noqa: PLW0603 -- one tuple, replaced whole, so that readers need no lock
    _listeners = (*_listeners, listener)


def ignore(listener: Listener) -> None:
    """The second call does nothing."""
    global _listeners  # noqa: PLW0603
    _listeners = tuple(other for other in _listeners if other is not listener)


def seams() -> Iterator[tuple[Any, str, Wrap]]:
    """Owner, name and wrapper of what is to be replaced; nothing in a torch that was built without distributed."""
    if dist.is_available():
        yield dist.Work, "wait", _timed
        yield DistributedDataParallel, "_sync_buffers", _timed
        yield DistributedDataParallel, "__init__", _made


def wrappers_of(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Every DDP in or around the model. Around it only a pass over the heap can tell: for `attach`, never a hook."""
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if inside or not dist.is_available() or not dist.is_initialized():
        return inside
    import gc

    mine = {id(parameter) for parameter in model.parameters()}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    around = [one for one in objects if type(one) in kinds]
    return [one for one in around if any(id(parameter) in mine for parameter in one.parameters())]


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def wait_is_seen(device: torch.device) -> bool:
    """Do collectives of this device hold up the host until they are done, and is there anybody to wait for?

    Parameters on the host may be offloaded ones, whose collectives run on the GPU: there no backend may be another.
    """
    if world_size() < 2:
        return False
    group: Any = dist.group.WORLD
    known = {one.type for one in group._device_types}
    used = {device.type, "cuda"} if torch.cuda.is_initialized() else {device.type}
    backends = {str(group._get_backend(torch.device(kind)).name()).lower() for kind in used & known}
    return device.type in known and backends <= BLOCKING


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if not _listeners or thread in _waiting:
            return original(self, *args, **kwargs)
        _waiting.add(thread)
        started = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - started
            _waiting.discard(thread)
            for listener in _listeners:
                listener.waited(seconds)

    return timed


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in _listeners:
            listener.wrapped(self)

    return make
