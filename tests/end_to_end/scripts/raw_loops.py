"""Raw loops with nothing of ours but `sentinel.attach(model, optimizer)`: each meets one NaN and one poisoned window.

`python -m tests.end_to_end.scripts.raw_loops FOLDER NAME...` trains the named loops one after another, each as a run
of its own name, and says of each what really happened in it.
"""

import os
import statistics
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from tests.end_to_end.scripts import stage

ITERATIONS = 300
NAN_AT = 70  # counted from 0
POISON = range(150, 160)
PACE_SECONDS = 0.004

Loop = Callable[["Trial"], None]


class Truth(NamedTuple):
    """What a loop did, told to the test."""

    nan_step: int
    poison_step: int
    steps: int
    finite: bool
    loss_before: float
    loss_at_end: float
    metrics: str


class Trial:
    """One loop: its data, its faults, and the notes about when they fired."""

    def __init__(self) -> None:
        self.run: Any = None
        self.model: nn.Module = nn.Module()
        self.nan_step = self.poison_step = 0
        self.losses: list[float] = []
        self.inside_step = False  # the backward runs in a closure, when the attempt has its number already
        self.varies = True

    def make(self) -> nn.Module:
        self.model = stage.make_model()
        return self.model

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The data of iteration `number`; poisoned in the window."""
        stage.pace(PACE_SECONDS)
        inputs, targets = stage.batch(number if self.varies else 0)
        if number in POISON:
            self.note_poison(number)
            return inputs, spoil(targets)
        return inputs, targets

    def note_poison(self, number: int) -> None:
        if number == POISON.start and not self.poison_step:
            self.poison_step = self.run.step + 1

    def after_backward(self, number: int, loss: Tensor) -> None:
        """Between backward and step: where the NaN comes in, once."""
        self.losses.append(float(loss.detach()))
        if number == NAN_AT - 30:
            stage.connected(self.run)  # what came before had no daemon yet
        if number == NAN_AT and not self.nan_step:
            self.nan_step = self.run.step + (not self.inside_step)
            stage.break_gradients(self.model)

    def truth(self) -> Truth:
        metrics = self._metrics()
        self.run.detach()
        return Truth(
            nan_step=self.nan_step,
            poison_step=self.poison_step,
            steps=self.run.step,
            finite=stage.is_finite(self.model),
            loss_before=statistics.median(self.losses[POISON.start - 20 : POISON.start]),
            loss_at_end=statistics.median(self.losses[-20:]),
            metrics=metrics,
        )

    def _metrics(self) -> str:
        text = ""

        def shown() -> bool:
            nonlocal text
            with urllib.request.urlopen(f"{self.run.url}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            return f'sentinel_loss{{rank="0",run_id="{self.run.run_id}"}}' in text

        stage.hold(shown, 10.0, "the metrics show the run")
        return text


def spoil(targets: Tensor) -> Tensor:
    return -40.0 * targets


def plain(trial: Trial) -> None:
    model = trial.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.run = sentinel.attach(model, optimizer)
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        loss = stage.error(model(inputs), targets)
        loss.backward()
        trial.after_backward(number, loss)
        optimizer.step()
        optimizer.zero_grad()


def accumulation(trial: Trial) -> None:
    model = trial.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9)
    trial.run = sentinel.attach(model, optimizer)
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        pieces = zip(inputs.chunk(4), targets.chunk(4), strict=True)
        for piece, wanted in pieces:
            loss = stage.error(model(piece), wanted)
            (loss / 4).backward()
        trial.after_backward(number, loss)
        optimizer.step()
        optimizer.zero_grad()


def scaler(trial: Trial) -> None:
    _scaled(trial, fused=False)


def scaler_fused(trial: Trial) -> None:
    _scaled(trial, fused=True)


def _scaled(trial: Trial, *, fused: bool) -> None:
    model = trial.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=fused)
    trial.run = sentinel.attach(model, optimizer)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        loss = stage.error(model(inputs), targets)
        grad_scaler.scale(loss).backward()
        trial.after_backward(number, loss)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()


def two_optimizers(trial: Trial) -> None:
    model = trial.make()
    assert isinstance(model, nn.Sequential)
    body = torch.optim.AdamW(model[0].parameters(), lr=5e-3)
    head = torch.optim.AdamW(model[2].parameters(), lr=5e-3)
    trial.run = sentinel.attach(model, [body, head])
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        loss = stage.error(model(inputs), targets)
        loss.backward()
        trial.after_backward(number, loss)
        body.step()
        head.step()
        body.zero_grad()
        head.zero_grad()


def compiled(trial: Trial) -> None:
    model = torch.compile(trial.make(), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.run = sentinel.attach(model, optimizer)
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        loss = stage.error(model(inputs), targets)
        loss.backward()
        trial.after_backward(number, loss)
        optimizer.step()
        optimizer.zero_grad()


def batches(trial: Trial) -> None:
    model = trial.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.run = sentinel.attach(model, optimizer)
    data = [stage.batch(number) for number in range(ITERATIONS)]
    targets_of = [spoil(targets) if number in POISON else targets for number, (_, targets) in enumerate(data)]
    dataset = TensorDataset(torch.cat([inputs for inputs, _ in data]), torch.cat(targets_of))
    for inputs, targets in trial.run.batches(DataLoader(dataset, batch_size=stage.BATCH)):
        stage.pace(PACE_SECONDS)
        loss = stage.error(model(inputs), targets)
        loss.backward()
        if trial.run.step == POISON.start:
            trial.note_poison(POISON.start)
        trial.after_backward(trial.run.step, loss)
        optimizer.step()
        optimizer.zero_grad()


def closure(trial: Trial) -> None:
    model = trial.make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=4)
    trial.inside_step = True
    trial.varies = False  # curvature that is estimated over different batches makes spikes of its own
    trial.run = sentinel.attach(model, optimizer)
    for number in range(ITERATIONS):
        inputs, targets = trial.batch(number)
        seen: list[Tensor] = []

        def evaluate(number: int = number, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = stage.error(model(inputs), targets)
            loss.backward()
            if not seen:
                seen.append(loss)
                trial.after_backward(number, loss)
            return loss

        optimizer.step(evaluate)


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "accumulation": accumulation,
    "scaler": scaler,
    "scaler_fused": scaler_fused,
    "two_optimizers": two_optimizers,
    "compiled": compiled,
    "batches": batches,
    "closure": closure,
}


def main(folder: str, *names: str) -> None:
    told = stage.Stage(folder)
    for name in names:
        os.environ["SENTINEL_RUN_ID"] = name
        trial = Trial()
        LOOPS[name](trial)
        told.say(name, trial.truth()._asdict())
    told.say("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
