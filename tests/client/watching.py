"""Attach to a loop for the length of a `with` block, and have the records that it made."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.client.run import Run
from sentinel.records import StepRecord, Trouble
from sentinel.testing import FakeDaemon


class Watched:
    """`run` inside the block, `records` after it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.records: list[StepRecord] = []

    def all(self, name: str) -> list[Any]:
        """One field of every record, in order."""
        return [getattr(record, name) for record in self.records]


@contextlib.contextmanager
def watched(daemon: FakeDaemon, model: nn.Module, optimizer: Any, **more: Any) -> Iterator[Watched]:
    """Other blocks of the same test must have ended: the records since this one began are taken as its own."""
    before = len(daemon.of(StepRecord))
    seen = Watched(attach(model, optimizer, **more))
    yield seen
    seen.run.detach()
    seen.records = daemon.of(StepRecord)[before:]
    assert seen.records, "nothing was recorded"
    assert not daemon.of(Trouble)


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """Global L2 of their gradients, each parameter once, in float64, the long way."""
    unique = {id(one): one for one in parameters}.values()
    dense = [one.grad.to_dense() if one.grad.is_sparse else one.grad for one in unique if one.grad is not None]
    return math.sqrt(sum(float((one.abs().double() ** 2).sum()) for one in dense))
