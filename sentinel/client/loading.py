"""How long the loop waits in torch's DataLoader, for loops that only attached: a seam at its iterators.

Not counted: what `run.batches` fetches (it times that itself), a loader inside a loader, other threads, and batches
that are fetched while gradients are disabled, which are of an evaluation. Inside `run.phase` nothing is (`timing`).
"""

import threading
from collections.abc import Callable, Iterator
from time import perf_counter as clock
from typing import Any, Protocol

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_fetching: set[int] = set()  # threads that are inside a fetch already


class Listener(Protocol):
    def loader_waited(self, started: float, ended: float) -> object: ...


def fetch(get: Callable[[], Any]) -> Any:
    """Call `get`, whose time its caller takes."""
    thread = threading.get_ident()
    _fetching.add(thread)
    try:
        return get()
    finally:
        _fetching.discard(thread)


def seams(
    listeners: Callable[[], tuple[Listener, ...]],
) -> Iterator[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
    """Owner, name and wrapper of what is to be replaced."""

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def following(self: Any) -> Any:
            told = listeners()
            if not told or not torch.is_grad_enabled() or threading.get_ident() in _fetching:
                return original(self)
            started = clock()
            batch = fetch(lambda: original(self))
            ended = clock()
            for listener in told:
                listener.loader_waited(started, ended)
            return batch

        return following

    yield _BaseDataLoaderIter, "__next__", timed
