"""O32: a watched model that can no longer be saved, days later, at its checkpoint (wandb#5573, pytorch#1148)."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.records import StepRecord
from sentinel.testing import FakeDaemon
from tests.client.training import Setup, equal, loader, make, weights

CHILD_SECONDS = 120.0


def train(setup: Setup, steps: int = 3) -> None:
    for inputs, targets in list(loader())[:steps]:
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.optimizer.step()


def through_save(what: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "torch.save": through_save,
    "pickle": lambda what: pickle.loads(pickle.dumps(what)),
    "deepcopy": copy.deepcopy,
}


def test_the_danger_is_real_with_a_closure_as_a_hook() -> None:
    model = make().model
    model.register_forward_hook(lambda *_: None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["at once", "after steps", "with gradients"])
def test_a_watched_pair_is_copied_whole_and_the_copy_is_not_watched(daemon: FakeDaemon, way: str, when: str) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    if when != "at once":
        train(setup)
    if when == "after steps":
        setup.optimizer.zero_grad()
    before = run.step
    model, optimizer = WAYS[way]((setup.model, setup.optimizer))
    assert equal(weights(setup.model), weights(model))
    copied = Setup(model, optimizer)
    train(copied)
    assert run.step == before, "what the copy does is its own business"
    again = sentinel.attach(*copied)
    train(copied)
    assert (again.step, run.step) == (3, before)
    again.detach()
    train(setup)
    run.detach()
    assert len(daemon.of(StepRecord)) == before + 6


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_holds_its_run_is_copied_too_and_the_copys_run_does_nothing(
    daemon: FakeDaemon, way: str
) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    setup.model.run = run
    train(setup)
    model = WAYS[way](setup.model)
    assert equal(weights(setup.model), weights(model))
    assert (model.run.mode, model.run.step, model.run.run_id) == ("off", 3, run.run_id)
    model.run.report(loss=1.0)
    assert list(model.run.batches([1, 2])) == [1, 2]
    model.run.detach()
    assert not run.detached
    train(setup)
    assert (run.step, model.run.step) == (6, 3)
    run.detach()
    assert len(daemon.of(StepRecord)) == 6


def test_a_model_and_its_optimizer_can_be_handed_to_a_spawned_process(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    train(setup)
    setup.optimizer.zero_grad()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=in_child, args=(setup.model, setup.optimizer, answers))
    child.start()
    child.join(CHILD_SECONDS)
    assert child.exitcode == 0
    assert answers.get() == {"hooks": 0, "stepped": True}
    assert run.step == 3
    run.detach()


def in_child(model: nn.Module, optimizer: torch.optim.Optimizer, answers: Any) -> None:
    hooks = len(optimizer._optimizer_step_pre_hooks) + sum(len(one._forward_hooks) for one in model.modules())
    before = weights(model)
    train(Setup(model, optimizer), 1)
    answers.put({"hooks": hooks, "stepped": not equal(before, weights(model))})
