"""One small lesson that every framework can teach: the same data, model, optimizer and schedule, faults included.

A batch says by itself what goes wrong with it, so that a fault strikes at the same place whoever runs the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sentinel
from tests.end_to_end.scripts import stage

FINE, NAN, RAISES, NAN_LOSS = 0, 1, 2, 3  # what a batch does to its backward or forward


class DataGoneError(Exception):
    """The fault of a batch that raises."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What to train. `batches` are micro-batches of `rows` rows, counted from 0."""

    updates: int = 12
    accumulation: int = 1
    clip: float | None = None
    rows: int = 8
    nan_at: frozenset[int] = frozenset()  # micro-batches whose gradients are NaN, with a finite loss
    nan_loss_at: int = -1  # the micro-batch whose loss is NaN, and so its gradients
    raises_at: int = -1  # the micro-batch whose forward raises
    poison: range = range(0)  # micro-batches with wrong targets
    evaluate_every: int = 0  # updates; 0: never
    noise: float = 0.5
    pace_seconds: float = 0.0

    @property
    def batches(self) -> int:
        return self.updates * self.accumulation

    def data(self) -> list[dict[str, Tensor]]:
        """Row by row, in order."""
        generator = torch.Generator().manual_seed(3)
        rows = []
        for number in range(self.batches):
            inputs = torch.randn(self.rows, stage.FEATURES, generator=generator)
            targets = inputs[:, :4].sum(1, keepdim=True)
            targets = targets + self.noise * torch.randn(self.rows, 1, generator=generator)
            targets = -40.0 * targets if number in self.poison else targets
            fault = self._fault(number)
            rows += [
                {"inputs": one, "targets": wanted, "fault": torch.tensor(fault)}
                for one, wanted in zip(inputs, targets, strict=True)
            ]
        return rows

    def _fault(self, number: int) -> int:
        if number == self.raises_at:
            return RAISES
        if number == self.nan_loss_at:
            return NAN_LOSS
        return NAN if number in self.nan_at else FINE


class Pupil(nn.Module):
    """A small regression that obeys the faults of its batches while it trains."""

    def __init__(self, pace_seconds: float = 0.0) -> None:
        super().__init__()
        self.net = stage.make_model()
        self.pace_seconds = pace_seconds
        self.nan_fired = 0

    def forward(self, inputs: Tensor, targets: Tensor, fault: Tensor) -> dict[str, Tensor]:
        output = self.net(inputs)
        if self.training:
            stage.pace(self.pace_seconds)
            self._misbehave(output, int(fault.max()))
        return {"loss": stage.error(output, targets)}

    def _misbehave(self, output: Tensor, fault: int) -> None:
        if fault == RAISES:
            raise DataGoneError("the fault of this batch")
        if fault == NAN:
            self.nan_fired += 1
            output.register_hook(lambda gradient: gradient * float("nan"))
        if fault == NAN_LOSS:
            self.nan_fired += 1
            output.mul_(float("nan"))


class Parts(NamedTuple):
    model: Pupil
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR


def make(lesson: Lesson) -> Parts:
    """The same weights and schedule every time."""
    torch.set_num_threads(1)
    model = Pupil(lesson.pace_seconds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = lesson.updates
    return Parts(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 - 0.5 * n / steps))


def batches(lesson: Lesson) -> "list[dict[str, Tensor]]":
    data = lesson.data()
    chunks = [data[start : start + lesson.rows] for start in range(0, len(data), lesson.rows)]
    return [{name: torch.stack([row[name] for row in chunk]) for name in chunk[0]} for chunk in chunks]


AtUpdate = Callable[[int, Any], object]  # before update number n, counted from 1, with the Run


def raw_loop(lesson: Lesson, parts: Parts, at_update: AtUpdate = lambda _n, _run: None, **options: Any) -> None:
    """The lesson as a raw loop with nothing of ours but attach and detach: what every framework must equal."""
    model, optimizer, scheduler = parts
    run = sentinel.attach(model, optimizer, scheduler=scheduler, **options)
    for number, batch in enumerate(batches(lesson)):
        if number % lesson.accumulation == 0:
            at_update(number // lesson.accumulation + 1, run)
        (model(**batch)["loss"] / lesson.accumulation).backward()
        if (number + 1) % lesson.accumulation:
            continue
        if lesson.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), lesson.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.detach()
