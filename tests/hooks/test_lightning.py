"""What only Lightning has: optimization by hand, several optimizers, a least number of steps, batches of any kind."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from sentinel.records import RunEnd, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, UpdateResult
from sentinel_hooks.lightning import SentinelCallback, _rows
from tests.client.training import Numbers
from tests.hooks.with_lightning import QUIET


class ByHand(LightningModule):
    """Two optimizers that step in every batch; the gradients of one of them are NaN once."""

    def __init__(self, nan_at: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
        self.nan_at = nan_at

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in ((self.body, 0.1), (self.head, 0.05))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        optimizers = self.optimizers()
        self.manual_backward(nn.functional.cross_entropy(self.head(self.body(inputs).tanh()), targets))
        if batch_idx == self.nan_at:
            self.body.weight.grad.fill_(float("nan"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class ByItself(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def fit(module: LightningModule, folder: Path, callback: SentinelCallback, **more: Any) -> Trainer:
    trainer = Trainer(default_root_dir=folder, callbacks=[callback], **{"max_epochs": 1, **QUIET, **more})
    trainer.fit(module, DataLoader(Numbers(160), batch_size=16))
    return trainer


def test_optimization_by_hand_with_two_optimizers_is_one_record_a_batch(daemon: FakeDaemon, tmp_path: Path) -> None:
    module = ByHand(nan_at=4)
    fit(module, tmp_path, SentinelCallback())
    daemon.wait_for(lambda: daemon.of(RunEnd))
    seen = daemon.of(StepRecord)
    assert [record.step for record in seen] == list(range(1, 11))
    assert [record.step for record in seen if record.result is UpdateResult.REFLEX] == [5]
    assert all(record.optimizers.keys() == {"optimizer.0", "optimizer.1"} for record in seen)
    assert {record.samples for record in seen} == {16.0}
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


def test_a_stop_holds_before_the_least_number_of_steps(daemon: FakeDaemon, tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    class Stopped(ByItself):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                daemon.wait_for(lambda: callback.run._inbox.attempt)
                command = daemon.command(Action.STOP, apply_at=4, reason="enough")
                threads.append(threading.Thread(target=lambda: daemon.turn(command)))
                threads[0].start()
                daemon.wait_for(lambda: callback.run._inbox.turn)

    callback = SentinelCallback()
    trainer = fit(Stopped(), tmp_path, callback, min_steps=8, min_epochs=3, max_epochs=5)
    threads[0].join()
    assert trainer.global_step == 4
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert end.status == "completed"


def test_validation_alone_attaches_nothing(daemon: FakeDaemon, tmp_path: Path) -> None:
    class Checked(ByItself):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

    callback = SentinelCallback()
    Trainer(default_root_dir=tmp_path, callbacks=[callback], **QUIET).validate(
        Checked(), DataLoader(Numbers(32), batch_size=16), verbose=False
    )
    assert callback.run is None
    assert daemon.connections == 0


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(4)], 4),
        ({"ids": "a", "inputs": (None, torch.zeros(5, 1))}, 5),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
    ],
)
def test_rows_of_a_batch_are_those_of_its_first_tensor(batch: Any, rows: int | None) -> None:
    assert _rows(batch) == rows
