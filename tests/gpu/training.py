"""A small model on a device, a loop that never waits for it, and a Run attached to a daemon that obeys the test."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import sentinel
from sentinel import places
from sentinel.records import Hello, StepRecord, Trouble
from sentinel.testing import FakeDaemon

FEATURES, CLASSES, BATCH = 32, 8, 16


class Setup(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Attached(NamedTuple):
    run: Any  # sentinel.Run, whose optional methods differ by mode
    daemon: FakeDaemon


def make(device: str, *, fused: bool) -> Setup:
    """With dropout (a generator on the device) and batch norm (buffers)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES)
    ).to(device)
    return Setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))


def batches(device: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """The same for everybody who asks, on the device already."""
    chance = torch.Generator().manual_seed(7)
    made = []
    for _ in range(count):
        targets = torch.randint(0, CLASSES, (BATCH,), generator=chance)
        inputs = functional.one_hot(targets, FEATURES) + 0.5 * torch.randn(BATCH, FEATURES, generator=chance)
        made.append((inputs.to(device), targets.to(device)))
    return made


def step(setup: Setup, batch: tuple[Tensor, Tensor], run: Any = None, *, bad: bool = False) -> None:
    """One update; `bad` puts a NaN into one gradient. Nothing here waits for the device."""
    inputs, targets = batch
    loss = functional.cross_entropy(setup.model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
    if bad:
        first = next(setup.model.parameters())
        assert first.grad is not None
        first.grad.view(-1)[:1].fill_(float("nan"))
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    if run is not None:
        run.report(loss=loss.detach(), tokens=BATCH)


@contextlib.contextmanager
def attached(setup: Setup, *, every_steps: int = 100_000, **arguments: Any) -> Iterator[Attached]:
    """Attach, wait for the greeting, and afterwards make sure that nothing went wrong inside sentinel."""
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        variables = {
            "SENTINEL_HOME": f"{folder}/home",
            "XDG_RUNTIME_DIR": folder,
            "SENTINEL_DAEMON__AUTOSTART": "false",
        }
        with mock.patch.dict(os.environ, variables), FakeDaemon(places.find(variables).socket) as daemon:
            settings = {"snapshot": {"every_steps": every_steps, "good_after_steps": 5}}
            run = sentinel.attach(setup.model, setup.optimizer, settings=settings, **arguments)
            daemon.wait_for(lambda: daemon.of(Hello), 20.0)
            try:
                yield Attached(run, daemon)
            finally:
                run.detach()
            assert not daemon.of(Trouble), daemon.of(Trouble)[0].text
            assert not daemon.errors, daemon.errors


def records(daemon: FakeDaemon, count: int) -> list[StepRecord]:
    """The records of the first `count` attempts, once they have come."""
    daemon.wait_for(lambda: len(daemon.of(StepRecord)) >= count, 20.0)
    return daemon.of(StepRecord)[:count]


def state(setup: Setup) -> list[Tensor]:
    """A copy of weights, buffers and optimizer state, on the device and without waiting for it."""
    held = [*setup.model.state_dict().values()]
    for values in setup.optimizer.state.values():
        held += [value for value in values.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in held]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(left, right, strict=True)
    )


def is_finite(setup: Setup) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state(setup))
