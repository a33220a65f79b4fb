"""Measure how long an attempt waited for other ranks: what this rank would have saved had the others been ready.

Two sources add up. Under DDP: from the moment when every gradient of a synchronising backward is accumulated to the
return of that backward; DDP sits in its finalizer then. The moment is told by a callback of autograd's engine that
is queued, from a gradient's hook, before DDP queues its own: the engine runs them in that order when the whole graph
is done, so neither the order of the parameters nor unused or frozen ones matter, and no bucket is touched. Elsewhere
(FSDP2, a loop's own collectives, blocking communication hooks): the time inside `Work.wait` on the loop's thread.

Where a wait does not hold up the host (NCCL), where nothing was waited for, and in a world of one: absent.
The first backward of a static graph reduces everything after the graph, so it tells nothing.
"""

import functools
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sentinel.client import collectives
from sentinel.client.attempt import Attempt
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.probe import Probe
from sentinel.client.subject import Subject

DDP, WORK = "ddp", "work"
ASK_AGAIN_STEPS = 100

_engine = torch.autograd.Variable._execution_engine
_graph_id = torch._C._current_graph_task_id


class _Replica:
    """One DDP and the parameters whose gradients it averages."""

    __slots__ = ("reference", "told")

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reference = weakref.ref(model)
        self.told = not model.static_graph  # False until the first backward of a static graph is over

    @property
    def synchronises(self) -> bool:
        """Does the backward that runs now reduce? Its forward has left word; under no_sync it does not."""
        model = self.reference()
        return model is not None and model.require_forward_param_sync and not model._use_python_reducer


class Ear:
    """Hears the seams, in any thread; counts what the loop's own thread waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self.thread = 0
        self.paused = False
        self.news: list[weakref.ref[DistributedDataParallel]] = []

    def waited(self, seconds: float) -> None:
        if threading.get_ident() == self.thread and not self.paused:
            self.seconds += seconds
            self.count += 1

    def wrapped(self, model: DistributedDataParallel) -> None:
        self.news.append(weakref.ref(model))


class CommunicationWait(Probe):
    """Fields communication_wait_seconds and communication_source."""

    def __init__(self, subject: Subject, watched: list[WatchedOptimizer]) -> None:
        self._watched = watched
        self._ear = Ear()
        self._replicas: dict[int, _Replica] = {}  # by the id of each parameter
        self._graph = -1  # the backward whose end is asked for
        self._asked = 0  # how often the end of a graph was asked for
        self._complete = 0  # which of them is over last of all, 0 for none
        self._complete_at = 0.0  # and when that was
        self._before = (0.0, 0)  # what the ear had counted by then
        self._reached: _Replica | None = None  # by this backward
        self._untold = False  # a backward of this attempt waited, and nobody knows how long
        self._ddp_seconds: float | None = None  # of the attempt that goes on
        self._attempt: Attempt | None = None  # whose backward ran last
        self._seen = False  # the process group lets us see its waits
        self._ask_again = 0  # at this step: it may be another one by then
        for model in collectives.wrappers_of(subject.model):
            self._ear.wrapped(model)
        collectives.listen(self._ear)

    def close(self) -> None:
        collectives.ignore(self._ear)

    def phase(self, name: str) -> None:
        self._ear.paused = name != "train"

    def touched(self, parameter: Tensor) -> None:
        graph = _graph_id()
        if graph == self._graph:
            return
        if self._ear.news:
            self._adopt()
        mine = self._replicas.get(id(parameter))
        if mine is None:
            return
        self._graph = graph
        if not mine.synchronises:
            return
        self._reached = mine
        if mine.told:
            self._asked += 1
            _engine.queue_callback(functools.partial(self._gradients_complete, self._asked))

    def after_backward(self, attempt: Attempt, returned: float) -> None:
        self._attempt = attempt
        if self._reached is not None:
            self._untold = self._untold or not self._reached.told
            self._reached.told, self._reached = True, None
        if self._complete:
            self._complete = 0
            self._ddp_seconds = (self._ddp_seconds or 0.0) + max(0.0, returned - self._complete_at)
            self._ear.seconds, self._ear.count = self._before  # what was waited since is within that time

    def arm(self, step: int) -> None:
        ear, attempt, of_ddp = self._ear, self._attempt, self._ddp_seconds
        known = (of_ddp is not None or ear.count) and not self._untold
        if attempt is not None and attempt.step == step - 1 and known:
            attempt.communication_wait_seconds = (of_ddp or 0.0) + ear.seconds
            attempt.communication_source = WORK if of_ddp is None else DDP
        if attempt is not None:  # what came before the first backward is no part of the first step
            ear.thread = threading.get_ident()
        ear.seconds, ear.count = 0.0, 0
        self._ddp_seconds = self._attempt = None
        self._complete, self._untold = 0, False

    def fields(self, attempt: Attempt, numbers: Mapping[str, float | None]) -> Mapping[str, Any]:
        del numbers
        if attempt.communication_wait_seconds is None or not self._is_seen(attempt.step):
            return {}
        return {
            "communication_wait_seconds": attempt.communication_wait_seconds,
            "communication_source": attempt.communication_source,
        }

    def _gradients_complete(self, number: int) -> None:
        """Called by autograd's engine when a graph is done, before DDP's finalizer. Must not raise.

        A backward within a backward (reentrant checkpoints) is a graph of its own: the one that was asked for last
        holds the last gradient, and DDP's finalizer too, although the outer graph ends after it.
        """
        if number > self._complete:
            self._complete, self._complete_at = number, time.perf_counter()
            self._before = self._ear.seconds, self._ear.count

    def _adopt(self) -> None:
        news, self._ear.news = self._ear.news, []
        mine = {id(parameter) for watched in self._watched for parameter in watched.parameters}
        for model in (reference() for reference in news):
            if model is None:
                continue
            of_model = {id(one) for one in model.module.parameters() if one.requires_grad}
            if not mine.isdisjoint(of_model):
                self._replicas |= dict.fromkeys(of_model, _Replica(model))

    def _is_seen(self, step: int) -> bool:
        if step >= self._ask_again or step < self._ask_again - ASK_AGAIN_STEPS:
            device = next((one.device for watched in self._watched for one in watched.parameters), None)
            self._seen = device is not None and collectives.wait_is_seen(device)
            self._ask_again = step + ASK_AGAIN_STEPS
        return self._seen
