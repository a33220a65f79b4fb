"""A non-finite gradient never reaches the weights, and nothing else is touched."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.records import Reflex, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Kind, Outcome, UpdateResult
from tests.client.training import equal, loader, make, weights

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def train(setup: Any, count: int, poison: int, value: float, after_clip: bool) -> None:
    torch.manual_seed(5)
    for place, (inputs, targets) in enumerate(list(loader())[:count]):

        def closure(inputs: Any = inputs, targets: Any = targets, place: int = place) -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(setup.model(inputs), targets)
            loss.backward()
            if not after_clip and place == poison:
                setup.model[0].weight.grad[1, 2] = value
            nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
            if after_clip and place == poison:
                setup.model[0].weight.grad[1, 2] = value
            return loss

        if isinstance(setup.optimizer, torch.optim.LBFGS):
            setup.optimizer.step(closure)
        else:
            closure()
            setup.optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("after_clip", [False, True])
def test_a_nonfinite_gradient_is_skipped_before_it_reaches_the_weights(
    daemon: FakeDaemon, kind: str, value: float, after_clip: bool
) -> None:
    setup = make(OPTIMIZERS[kind])
    run = attach(setup.model, setup.optimizer)
    train(setup, 8, 4, value, after_clip)
    gradient = setup.model[0].weight.grad
    run.detach()
    assert all(torch.isfinite(weight).all() for weight in weights(setup.model))
    reflexes = daemon.of(Reflex)
    assert [(one.step, one.kind, one.action, one.outcome) for one in reflexes] == [
        (5, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED)
    ]
    if not after_clip:  # clipping by a NaN norm has spread it to every gradient
        assert reflexes[0].evidence["bad_parameters"] >= 1
    else:
        assert reflexes[0].evidence["first_parameter"] == "0.weight"
    assert gradient is not None
    results = [record.result for record in daemon.of(StepRecord)]
    assert results == [UpdateResult.APPLIED] * 4 + [UpdateResult.REFLEX] + [UpdateResult.APPLIED] * 3


def test_the_skipped_step_is_a_true_no_op_and_the_gradients_come_back(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    train(setup, 3, -1, 0.0, after_clip=False)
    before, state = weights(setup.model), setup.optimizer.state_dict()["state"]
    moments = [value.clone() for entry in state.values() for value in entry.values()]
    setup.model[0].weight.grad.fill_(math.nan)
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    setup.optimizer.step()
    after = [v for entry in setup.optimizer.state_dict()["state"].values() for v in entry.values()]
    assert equal(before, weights(setup.model))
    assert equal(moments, after)
    assert all(mine is p.grad for mine, p in zip(gradients, setup.model.parameters(), strict=True))
    assert daemon.wait_for(lambda: daemon.of(Reflex))
    run.detach()


@pytest.mark.parametrize("how", ["observe", "settings", "roster"])
def test_the_reflex_is_off_when_it_may_not_act(daemon: FakeDaemon, how: str) -> None:
    setup = make()
    settings = {"reflex": {"nonfinite_gradient": False}} if how == "settings" else None
    run = attach(setup.model, setup.optimizer, mode="observe" if how == "observe" else "protect", settings=settings)
    if how == "roster":
        daemon.wait_for(lambda: run._inbox.attempt)
        daemon.roster(1, 2)
        daemon.wait_for(lambda: not run._loop.reflexes.acts)
    train(setup, 5, 3, math.nan, after_clip=True)
    run.detach()
    assert not daemon.of(Reflex)
    assert not all(torch.isfinite(weight).all() for weight in weights(setup.model))
    assert math.isnan(daemon.of(StepRecord)[3].grad_norm) or daemon.of(StepRecord)[3].grad_norm is not None


def test_a_healthy_run_is_bit_identical_with_and_without_sentinel(daemon: FakeDaemon) -> None:
    ends = []
    for attached in (False, True):
        setup = make()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, 0.02, total_steps=400)
        run = attach(setup.model, setup.optimizer, settings={"snapshot": {"every_steps": 10}}) if attached else None
        data = loader(workers=2)
        done = 0
        while done < 300:
            for inputs, targets in run.batches(data) if run else data:
                setup.optimizer.zero_grad()
                nn.functional.cross_entropy(setup.model(inputs), targets).backward()
                nn.utils.clip_grad_norm_(setup.model.parameters(), 0.5)
                setup.optimizer.step()
                scheduler.step()
                done += 1
                if done == 300:
                    break
        if run:
            run.detach()
        ends.append(weights(setup.model))
    assert equal(*ends)
    assert len(daemon.of(StepRecord)) == 300
