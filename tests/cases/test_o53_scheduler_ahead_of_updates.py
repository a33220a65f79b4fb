"""O53: a scheduler that steps where the update was skipped runs ahead (pytorch#44511, transformers#11106)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, UpdateResult
from tests.client.test_rollback import SETTINGS, commit, outcome
from tests.client.training import loader, make
from tests.client.watching import watched

STEPS = 8
OVERFLOW_AT = (2, 3)


def train(daemon: FakeDaemon, handed_over: bool, waits: bool = False) -> Any:
    """Steps its scheduler in every iteration, or, as `waits`, only where the update was applied."""
    setup = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    rates = []
    more = {"scheduler": scheduler} if handed_over else {}
    with watched(daemon, setup.model, setup.optimizer, **more) as found:
        for place, (inputs, targets) in enumerate(list(loader())[:STEPS]):
            setup.optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
            if place in OVERFLOW_AT:
                setup.model[0].weight.grad[0, 0] = math.inf
            rates.append(setup.optimizer.param_groups[0]["lr"])
            before = scaler.get_scale()
            scaler.step(setup.optimizer)
            scaler.update()
            if not waits or scaler.get_scale() >= before:
                scheduler.step()
    return found, rates, scheduler.last_epoch


@pytest.mark.parametrize("handed_over", [True, False])
def test_how_far_it_is_ahead_can_be_read_from_the_counters(daemon: FakeDaemon, handed_over: bool) -> None:
    found, rates, epochs = train(daemon, handed_over)
    skipped = [result is UpdateResult.OVERFLOW for result in found.all("result")]
    assert [place for place, was in enumerate(skipped) if was] == list(OVERFLOW_AT), "two updates were skipped"
    assert epochs == STEPS, "and the scheduler did not wait"
    ahead = [one.scheduler_steps - one.applied for one in found.records]
    # The record of an attempt is complete when its scheduler has stepped, before the next backward begins.
    assert ahead == [0, 0, 1, 2, 2, 2, 2, 2]
    assert found.all("lr") == pytest.approx(rates), "what was used, before and after"


def test_a_scheduler_that_waits_for_the_updates_is_never_ahead(daemon: FakeDaemon) -> None:
    found, _, epochs = train(daemon, handed_over=True, waits=True)
    assert epochs == STEPS - len(OVERFLOW_AT)
    assert [one.scheduler_steps - one.applied for one in found.records] == [0] * STEPS


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "warm restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "in sequence": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": schedulers.ReduceLROnPlateau,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("resumed", [False, True])
def test_the_steps_since_attach_are_counted_whatever_scheduler_it_is(
    daemon: FakeDaemon, kind: str, resumed: bool
) -> None:
    """Resumed: the state of a scheduler that stepped 100 times is loaded after attach."""
    setup, older = make(), make()
    scheduler, old = SCHEDULERS[kind](setup.optimizer), SCHEDULERS[kind](older.optimizer)

    def step(one: Any) -> None:
        one.step(*([1.0] if kind == "plateau" else []))

    older.optimizer.step()
    for _ in range(100):
        step(old)
    with watched(daemon, setup.model, setup.optimizer, scheduler=scheduler) as found:
        if resumed:
            scheduler.load_state_dict(old.state_dict())
        for inputs, targets in list(loader())[:5]:
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            setup.optimizer.step()
            step(scheduler)
    assert found.all("scheduler_steps") == [1, 2, 3, 4, 5]


def test_a_rollback_takes_both_counters_back(daemon: FakeDaemon) -> None:
    setup = make()
    scheduler = schedulers.ExponentialLR(setup.optimizer, 0.99)
    command = None
    with watched(daemon, setup.model, setup.optimizer, scheduler=scheduler, settings=SETTINGS) as found:
        run = found.run
        for inputs, targets in run.batches(loader()):
            if run.step == 25 and command is None:
                command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="replay")
                commit(daemon, command)
            setup.optimizer.zero_grad()
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            setup.optimizer.step()
            scheduler.step()
    assert outcome(daemon, command).state == "applied"
    again = [one for one in found.records if one.generation == 1]
    assert again[0].step == 21, "some steps were taken twice"
    assert all(one.scheduler_steps == one.applied == one.step for one in found.records)


def test_without_a_scheduler_there_is_no_counter(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        for inputs, targets in list(loader())[:2]:
            nn.functional.cross_entropy(setup.model(inputs), targets).backward()
            setup.optimizer.step()
    assert found.all("scheduler_steps") == [None, None]
