"""How the tokens are spread over the experts of a mixture: the share of the choices that each one got."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.sampling.routers import Router, chosen, find
from sentinel.client.sampling.signal import Signal, Take
from sentinel.client.subject import Subject

REPORTED = "reported"  # the router's name for what `run.report(expert_load=...)` says


class ExpertLoad(Signal):
    """Over all training forwards of the attempt, on this rank. Routers are found by `routers.find`.

    Forward hooks are on the routers for the sampled attempt only, and copies of the model carry none that do
    anything. Where torch.compile hides the routers nothing is heard: absent.
    """

    name = "expert_load"
    from_forward = True

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._routers: list[Router] | None = None

    def applies(self) -> bool:
        if self._routers is None:
            self._routers = find(self._subject.model)
        return bool(self._routers)

    def arm(self, take: Take) -> None:
        ears = take.notes["ears"] = [_Ear(router) for router in self._routers or ()]
        for router, ear in zip(self._routers or (), ears, strict=True):
            ear.handle = router.module.register_forward_hook(ear)

    def before_update(self, take: Take, watched: WatchedOptimizer, attempt: Attempt) -> None:
        del watched, attempt
        for ear in take.notes.get("ears", ()):
            take.inside(ear.seconds)
            ear.seconds = 0.0
            if ear.error is not None:
                raise ear.error
            if ear.counts is not None:
                take.values[ear.name] = ear.counts

    def end(self, take: Take) -> None:
        for ear in take.notes.pop("ears", ()):
            ear.leave()

    def fields(self, take: Take, numbers: Mapping[str, Any], attempt: Attempt) -> Mapping[str, Any]:
        del take, attempt
        loads = {name: load for name, counts in numbers.items() if (load := shares(counts)) is not None}
        return {"expert_load": loads} if loads else {}

    def close(self) -> None:
        self._routers = []


def shares(counts: Sequence[float]) -> list[float] | None:
    """Counts or weights as shares of 1; None where they say nothing.

    >>> shares([3, 1]), shares([0, 0]), shares([float("nan"), 1.0])
    ([0.75, 0.25], None, None)
    """
    total = sum(counts)
    if not 0.0 < total < float("inf") or any(not count >= 0.0 for count in counts):
        return None
    return [count / total for count in counts]


class _Ear:
    """A forward hook that holds no Run. Pickled or copied with a model it becomes something that does nothing."""

    __slots__ = ("counts", "error", "experts", "handle", "module_id", "name", "seconds", "top_k")

    def __init__(self, router: Router) -> None:
        self.name, module, self.experts, self.top_k = router
        self.module_id = id(module)
        self.counts: Any = None
        self.handle: Any = None
        self.seconds = 0.0
        self.error: Exception | None = None

    def __call__(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # a graph made just now must know nothing of us
            return
        # DataParallel's replicas share the hooks; an evaluation is no training.
        if id(module) != self.module_id or not module.training or not torch.is_grad_enabled():
            return
        started = time.perf_counter()
        try:
            counts = chosen(output, self.experts, self.top_k)
            if counts is not None:
                self.counts = counts if self.counts is None else self.counts + counts
        except Exception as error:  # noqa: BLE001 -- must not raise into the forward; `before_update` tells it
            self.error = error
        self.seconds += time.perf_counter() - started

    def __reduce__(self) -> tuple[Any, ...]:
        # Its bound method takes what a hook is given and returns None; a copy's reader needs no sentinel.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def leave(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.counts = None
