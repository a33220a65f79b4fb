"""What sentinel costs a training loop: the same loop bare and attached, interleaved, in CPU time of its thread.

Two models: a GPT of about 10 million parameters, where the work is in the tensors, and 100 small parameter tensors,
where it is in the calls. Blocks come in the order bare, attached, attached, bare, so that a machine that gets slower
or faster hits both alike; the ratio of the two halves of the bare blocks (A/A) is the floor below which a difference
means nothing. A real daemon runs beside, in its own process. Run: `python -m tests.benchmarks.overhead`.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from statistics import median
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import sentinel
from sentinel.demo.model import CharacterGPT
from sentinel.demo.plan import Shape

ROUNDS = 4  # of bare, attached, attached, bare


class Case(NamedTuple):
    """A model with a loss, and how long a block is."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    steps: int  # of a block, after the first ones, which are not counted
    skipped: int


class Arm(NamedTuple):
    """Thread CPU seconds of every counted step, block by block."""

    blocks: list[list[float]]

    @property
    def steps(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


def main() -> None:
    """Print a line of numbers per model."""
    torch.set_num_threads(1)
    with _home():
        for case in (_gpt(), _many_tensors()):
            _report(case, *_measure(case))


def _gpt() -> Case:
    torch.manual_seed(0)
    shape = Shape(width=384, layers=6, heads=6, context=64)
    text = torch.randint(97, (4, shape.context + 1))

    def loss(model: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return Case("GPT", CharacterGPT(97, shape), loss, steps=10, skipped=2)


def _many_tensors() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    inputs = torch.randn(4, 8)
    return Case("100 small tensors", model, lambda net: net(inputs).square().mean(), steps=200, skipped=20)


def _measure(case: Case) -> tuple[Arm, Arm]:
    bare, attached = Arm([]), Arm([])
    for _ in range(ROUNDS):
        for arm in (bare, attached, attached, bare):
            arm.blocks.append(_block(case, attach=arm is attached))
    return bare, attached


def _block(case: Case, *, attach: bool) -> list[float]:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-4)
    run = None
    if attach:
        with redirect_stderr(StringIO()):  # its greeting is not what we print here
            run = sentinel.attach(case.model, optimizer)
    taken = []
    for number in range(case.skipped + case.steps):
        started = time.thread_time()
        loss = case.loss(case.model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= case.skipped:
            taken.append(time.thread_time() - started)
    if run is not None:
        run.detach()
    return taken


def _report(case: Case, bare: Arm, attached: Arm) -> None:
    parameters = sum(parameter.numel() for parameter in case.model.parameters())
    half = len(bare.blocks) // 2
    floor = median(Arm(bare.blocks[half:]).steps) / median(Arm(bare.blocks[:half]).steps)
    without, with_us = median(bare.steps), median(attached.steps)
    total = sum(attached.steps) / sum(bare.steps)
    print(f"{case.name}, {parameters / 1e6:.2f} M parameters, {len(bare.steps)} steps each")
    print(f"  bare      {without * 1e6:10.0f} us a step (median, CPU time of the loop's thread)")
    print(f"  attached  {with_us * 1e6:10.0f} us a step, {(with_us - without) * 1e6:+.0f} us")
    print(f"  ratio     {with_us / without:.4f} of medians, {total:.4f} of sums (with snapshots); A/A {floor:.4f}")


@contextmanager
def _home() -> Iterator[None]:
    """A home that is thrown away, with a daemon that leaves by itself."""
    names = ("SENTINEL_HOME", "SENTINEL_MODE", "SENTINEL_RUN_ID", "SENTINEL_SETTINGS", "TORCHELASTIC_RUN_ID")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["SENTINEL_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["SENTINEL_HOME"]
            os.environ.update(before)


if __name__ == "__main__":
    main()
