"""O31: an average of the weights that is forgotten, poisoned for ever, or taken for training (schnetpack#785)."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sentinel
from sentinel.records import SnapshotNote, StepRecord, Trouble
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Quality
from tests.client.test_rollback import SETTINGS, commit, outcome
from tests.client.training import Setup, equal, loader, make, weights

BACK_TO = 20


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def train(setup: Setup, average: nn.Module, batch: Any) -> float:
    inputs, targets = batch
    setup.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(setup.model(inputs), targets)
    loss.backward()
    setup.optimizer.step()
    average.update_parameters(setup.model)
    return loss.item()


def test_the_danger_is_real_with_hooks_on_modules() -> None:
    fired: list[int] = []
    model = make().model
    model[0].register_forward_hook(lambda *_: fired.append(1))
    average_of(model)(torch.randn(4, 16))
    copy.deepcopy(model)(torch.randn(4, 16))
    assert len(fired) == 2, "copies fire the original's hooks"


@pytest.mark.parametrize("made", ["before attach", "after attach"])
def test_what_a_copy_does_is_no_training(daemon: FakeDaemon, made: str) -> None:
    """Evaluated in every step, and even trained by itself."""
    setup = make()
    average = average_of(setup.model) if made == "before attach" else None
    run = sentinel.attach(setup.model, setup.optimizer, ema=average)
    average = average or average_of(setup.model)
    twin = copy.deepcopy(setup.model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = []
    for batch in list(loader())[:6]:
        losses.append(train(setup, average, batch))
        average(batch[0])
        (1e6 * nn.functional.cross_entropy(twin(batch[0]), batch[1])).backward()
        twin_optimizer.step()
    run.detach()
    assert [(record.step, record.loss) for record in daemon.of(StepRecord)] == [
        (number, pytest.approx(loss)) for number, loss in enumerate(losses, 1)
    ]
    assert not daemon.of(Trouble)


def test_the_average_goes_back_with_the_weights(daemon: FakeDaemon) -> None:
    setup = make()
    average = average_of(setup.model)
    run = sentinel.attach(setup.model, setup.optimizer, ema=average, settings=SETTINGS)
    saved: list[Any] = []
    restored: list[Any] = []
    command = None
    for batch in run.batches(loader(batch_size=8)):
        if run.step == BACK_TO:
            (saved if command is None else restored).append((weights(setup.model), weights(average)))
        if run.step == 25 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=BACK_TO, data="replay")
            commit(daemon, command)
        train(setup, average, batch)
        if restored:
            break
    assert outcome(daemon, command).state == "applied"
    run.detach()
    for then, now in zip(saved[0], restored[0], strict=True):
        assert equal(then, now)
    assert not equal(weights(average), saved[0][1]), "and it moved on from there"


def test_a_snapshot_with_a_poisoned_average_is_none(daemon: FakeDaemon) -> None:
    """The weights are healthy: only the average has a NaN, which no later update takes away."""
    setup = make()
    average = average_of(setup.model)
    run = sentinel.attach(setup.model, setup.optimizer, ema=average, settings=SETTINGS)
    for place, batch in enumerate(list(loader(batch_size=8))[:32]):
        if place == 15:
            next(average.module.parameters()).detach()[0, 0] = float("nan")
        train(setup, average, batch)
    assert all(bool(torch.isfinite(one).all()) for one in setup.model.parameters())
    assert any(bool(torch.isnan(one).any()) for one in average.parameters()), "it stays"
    run.detach()
    notes = daemon.of(SnapshotNote)
    poisoned = [note for note in notes if note.step > 15]
    assert {note.quality for note in poisoned} == {Quality.BAD}
    assert all("ema" in note.reason for note in poisoned)
    assert {note.quality for note in notes if note.step <= 15} & {Quality.GOOD, Quality.PENDING}
