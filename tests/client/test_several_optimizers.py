"""A loop in which several optimizers step on one model's gradients."""

import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.records import Reflex, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, UpdateResult
from tests.client.test_rollback import SETTINGS, commit, outcome
from tests.client.training import equal, weights


def test_one_nan_counts_once_however_many_optimizers_step(daemon: FakeDaemon) -> None:
    model, optimizers = two()
    run = attach(model, optimizers)
    daemon.wait_for(lambda: run._loop.reflexes.acts)  # type: ignore[attr-defined]
    train(model, optimizers, steps=3, broken_at=1)
    run.detach()
    told = daemon.of(Reflex)
    assert [(reflex.step, reflex.consecutive) for reflex in told] == [(2, 1), (2, 1)]


def test_after_a_rollback_no_optimizer_applies_gradients_of_the_old_state(daemon: FakeDaemon) -> None:
    model, optimizers = two()
    run = attach(model, optimizers, settings=SETTINGS)
    train(model, optimizers, steps=25)
    command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20)
    commit(daemon, command)
    train(model, optimizers, steps=1)
    assert outcome(daemon, command).state == "applied"
    assert run.step == 20
    restored = run._ring.snapshots[-1]  # type: ignore[attr-defined]
    assert restored.step == 20
    after = weights(model)
    train(model, optimizers, steps=3)
    assert not equal(weights(model), after)
    run.detach()
    head_steps = {int(optimizers[1].state[one]["step"]) for one in model[2].parameters()}
    assert head_steps == {22}, "19 before the snapshot, none in the turn, 3 after it"
    records = daemon.of(StepRecord)
    assert [record.step for record in records if record.result is UpdateResult.TURN] == [26]
    assert [record.step for record in records if record.generation == 1] == [21, 22, 23]
    assert all(record.loss is not None for record in records if record.result is UpdateResult.APPLIED)


def two() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, [torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]


def train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], *, steps: int, broken_at: int | None = None
) -> None:
    for number in range(steps):
        loss = (model(torch.randn(16, 4)) ** 2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if number == broken_at:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(float("nan"))
        for optimizer in optimizers:
            optimizer.step()
