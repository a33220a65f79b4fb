"""Train twice, without sentinel and with it, and say the digests: `python -m ...exact FOLDER`.

Three parts, each in the same process as its clean twin: a healthy run of 300 steps; one whose weights were broken
once and that a person rolls back and replays; and then a loop that goes on until a person stops it.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.end_to_end.scripts import stage

STEPS = 300
BROKEN_AFTER = 150
EPOCHS = 10
SETTINGS = {"snapshot": {"every_steps": 20}}
PACE_SECONDS = 0.005


class Twin:
    """A model with dropout, batch norm and a scheduler over a shuffled loader: everything that has state."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(
            nn.Linear(stage.FEATURES, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
        )
        torch.manual_seed(0)
        for layer in self.model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        parts = [stage.batch(number) for number in range(32)]
        dataset = TensorDataset(
            torch.cat([inputs for inputs, _ in parts]), torch.cat([wanted for _, wanted in parts])
        )
        self.loader = DataLoader(dataset, batch_size=stage.BATCH, shuffle=True)
        torch.manual_seed(1)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        loss = stage.error(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def clean(self) -> str:
        """The digest of a run that never heard of sentinel."""
        for batch in self.first(STEPS):
            self.step(batch)
        return stage.digest(self.model)

    def first(self, steps: int) -> Iterator[Any]:
        for _ in range(EPOCHS):
            for batch in self.loader:
                if steps == 0:
                    return
                steps -= 1
                yield batch


def healthy(told: stage.Stage) -> None:
    import sentinel

    twin = Twin()
    run = sentinel.attach(twin.model, twin.optimizer, run_id="healthy", settings=SETTINGS)
    for number, batch in enumerate(twin.first(STEPS)):
        if number == 50:
            stage.connected(run)
        twin.step(batch)
    run.detach()
    told.say("healthy", stage.digest(twin.model))


def replayed(told: stage.Stage) -> None:
    import sentinel

    twin = Twin()
    run = sentinel.attach(twin.model, twin.optimizer, scheduler=twin.scheduler, run_id="replayed", settings=SETTINGS)
    stage.connected(run)
    broken = False
    while run.step < STEPS:
        for batch in run.batches(twin.loader):
            if run.step >= STEPS:
                break
            twin.step(batch)
            if run.step == BROKEN_AFTER and not broken:
                broken = True
                with torch.no_grad():
                    twin.model[0].weight.mul_(3.0)
                told.say("broken", run.step)
                told.wait("go on")
            stage.pace(PACE_SECONDS)
    run.detach()
    told.say("replayed", stage.digest(twin.model))


def endless(told: stage.Stage) -> None:
    """Ends when it is told to stop: `run.batches` ends."""
    import sentinel

    twin = Twin()
    run = sentinel.attach(
        twin.model, twin.optimizer, scheduler=twin.scheduler, run_id="endless", settings=SETTINGS, name="forever"
    )
    stage.connected(run)
    told.say("endless")
    stopped = False
    while not stopped:
        stopped = True
        for place, batch in enumerate(run.batches(twin.loader)):
            twin.step(batch)
            stage.pace(PACE_SECONDS)
            stopped = place + 1 < len(twin.loader)  # the pass was cut short
    told.say("stopped", run.step)


def main(folder: str) -> None:
    told = stage.Stage(folder)
    clean = Twin().clean()
    assert "sentinel" not in sys.modules
    told.say("clean", clean)
    healthy(told)
    replayed(told)
    endless(told)
    told.say("end")


if __name__ == "__main__":
    main(sys.argv[1])
