"""The training loop that every arm goes through, and what is measured of each step.

A GPT of 10.7 million parameters learns characters of the standard library's sources, on one thread. Model, optimizer
and data go on from block to block, so that every arm sees the same work; only what follows the loop changes.
"""

import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sentinel.demo.corpus import encode, sources
from sentinel.demo.model import CharacterGPT
from sentinel.demo.plan import Shape

SKIPPED = 2  # steps at the begin of a block, which are not counted: first calls, sentinel's snapshot of the start
SHAPE = Shape(width=384, layers=6, heads=6, context=64)
BATCH = 1  # keeps a step near 100 ms on one core, which is what the goals speak of
CLIP = 1.0

Log = Callable[[int, dict[str, float]], object]


class Use(NamedTuple):
    """What follows the loop during a block."""

    log: Log | None = None  # is given the step's number and values after each step
    hook_seconds: Callable[[], float] = float  # spent so far by what hooks itself into the loop
    snapshots: Callable[[], int] = int  # taken so far


class Step(NamedTuple):
    """What one step took, in seconds."""

    thread: float  # CPU time of the loop's thread
    process: float  # CPU time of all threads of the process
    wall: float
    calls: float  # wall time inside what follows the loop: its calls, its hooks, the norm that it needs


class Block(NamedTuple):
    """Steps in a row with one arm."""

    steps: list[Step]  # that count
    beside_seconds: float  # CPU time of a step in the processes that this one has started; mean, coarse


class Trainer:
    """The loop. One for all arms of a run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._text, characters = encode(sources(1_000_000))
        self.model: nn.Module = CharacterGPT(characters, SHAPE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.parameters = list(self.model.parameters())
        self._chance = torch.Generator().manual_seed(1)
        self._number = 0
        self._step_seconds = 0.0

    @property
    def size(self) -> int:
        """Parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters)

    def block(self, use: Use, steps: int, *, clip: bool, skipped: int = SKIPPED) -> list[Step]:
        """`skipped` steps and then `steps` that count. With `clip` the loop clips its gradients by itself."""
        taken = [self._measured(use, clip) for _ in range(skipped + steps)]
        return taken[skipped:]

    def _measured(self, use: Use, clip: bool) -> Step:
        batch = self._batch()
        thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
        calls = self._step(batch, use, clip)
        self._step_seconds = time.perf_counter() - wall
        return Step(time.thread_time() - thread, time.process_time() - process, self._step_seconds, calls)

    def _step(self, batch: Tensor, use: Use, clip: bool) -> float:
        hooks = use.hook_seconds()
        calls = 0.0
        norm: Tensor | None = None
        loss = functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        elif use.log is not None:  # a tracker can only be given a norm that the loop has computed
            started = time.perf_counter()
            norm = nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None])
            calls += time.perf_counter() - started
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._number += 1
        if use.log is not None and norm is not None:
            started = time.perf_counter()
            use.log(self._number, self._values(loss, norm))
            calls += time.perf_counter() - started
        return calls + use.hook_seconds() - hooks

    def _values(self, loss: Tensor, norm: Tensor) -> dict[str, float]:
        """What sentinel streams of such a loop too. Peak memory is what can be had without a walk through /proc."""
        return {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
            "step_seconds": self._step_seconds,
        }

    def _batch(self) -> Tensor:
        starts = torch.randint(len(self._text) - SHAPE.context - 1, (BATCH, 1), generator=self._chance)
        return self._text[starts + torch.arange(SHAPE.context + 1)]
