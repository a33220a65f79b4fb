"""O54: an optimizer inside another object, and a step that somebody patched (dp-transformers#43, accelerate#690)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.errors import MisuseError
from sentinel.records import StepRecord, Trouble
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.training import Setup, loader, make
from tests.client.watching import norm_of, watched

STEPS = 6


class Around:
    """As Accelerate's: not an optimizer, holds one."""

    def __init__(self, optimizer: Any, attribute: str = "optimizer") -> None:
        setattr(self, attribute, optimizer)
        self._inner = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Copying(torch.optim.Optimizer):
    """Is an optimizer itself, and copied the groups: a scheduler that drives it changes nothing."""

    def __init__(self, original: torch.optim.Optimizer) -> None:
        self.original_optimizer = original
        super().__init__([{**group} for group in original.param_groups], {"lr": original.param_groups[0]["lr"]})

    def step(self, closure: Any = None) -> Any:
        return self.original_optimizer.step(closure)


class Slow(torch.optim.Optimizer):
    """As Lookahead: is an optimizer, shares the groups of the one inside."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "around": Around,
    "around twice": lambda optimizer: Around(Around(optimizer, "optim")),
    "an optimizer that shares": Slow,
    "an optimizer that copies": Copying,
    "around one that shares": lambda optimizer: Around(Slow(optimizer)),
}


def train(setup: Setup, step: Callable[[], Any]) -> list[float]:
    norms = []
    for inputs, targets in list(loader())[:STEPS]:
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        norms.append(norm_of(setup.model.parameters()))
        step()
    return norms


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_optimizer_whose_step_really_runs_is_watched(daemon: FakeDaemon, kind: str) -> None:
    setup = make()
    wrapper = WRAPPERS[kind](setup.optimizer)
    with watched(daemon, setup.model, wrapper) as found:
        norms = train(setup, wrapper.step)
    assert setup.optimizer.state, "the inner one stepped"
    assert found.all("step") == list(range(1, STEPS + 1))
    assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)
    assert found.all("lr") == [1e-2] * STEPS


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_that_is_given_the_wrapper_is_followed(daemon: FakeDaemon, kind: str, unscale: bool) -> None:
    setup = make()
    wrapper = WRAPPERS[kind](setup.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    with watched(daemon, setup.model, wrapper) as found:
        for place, (inputs, targets) in enumerate(list(loader())[:STEPS]):
            setup.optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
            norms.append(norm_of(setup.model.parameters()) / 1024.0)
            if place == 3:
                setup.model[0].weight.grad[0, 0] = math.inf
            if unscale:
                scaler.unscale_(wrapper)
                nn.utils.clip_grad_norm_(setup.model.parameters(), 1e9)
            scaler.step(wrapper)
            scaler.update(1024.0)
    results = [UpdateResult.APPLIED] * STEPS
    results[3] = UpdateResult.OVERFLOW
    assert found.all("result") == results
    applied = [number for number in range(STEPS) if number != 3]
    assert [found.records[number].grad_norm for number in applied] == pytest.approx(
        [norms[number] for number in applied], rel=1e-5
    )


@pytest.mark.parametrize("patch", ["by a scheduler", "by a person"])
def test_a_patched_step_is_seen_once(daemon: FakeDaemon, patch: str) -> None:
    setup = make()
    if patch == "by a scheduler":
        torch.optim.lr_scheduler.StepLR(setup.optimizer, 100)
        assert hasattr(setup.optimizer.step, "_wrapped_by_lr_sched")
    with watched(daemon, setup.model, setup.optimizer) as found:
        if patch == "by a person":
            setup.optimizer.step = functools.partial(setup.optimizer.step)  # type: ignore[method-assign]
        train(setup, setup.optimizer.step)
    assert "step" in vars(setup.optimizer), "it is patched on the object"
    assert found.all("step") == list(range(1, STEPS + 1))


def test_a_learning_rate_that_only_the_wrapper_shows_is_told_once(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = make()
    wrapper = Copying(setup.optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(wrapper, 0.5)
    run = sentinel.attach(setup.model, wrapper, scheduler=scheduler)
    train(setup, lambda: (wrapper.step(), scheduler.step()))
    run.detach()
    assert wrapper.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**STEPS)
    assert setup.optimizer.param_groups[0]["lr"] == 1e-2, "the scheduler drives nothing"
    assert [record.lr for record in daemon.of(StepRecord)] == [1e-2] * STEPS, "what is used is what is told"
    (trouble,) = daemon.of(Trouble)
    assert "Copying shows the learning rate 0.005" in trouble.text
    assert "AdamW inside it, whose step runs, uses 0.01" in trouble.text
    assert trouble.text in capsys.readouterr().err


def test_a_learning_rate_that_differs_from_the_start_is_told_by_attach(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = make()
    wrapper = Copying(setup.optimizer)
    wrapper.param_groups[0]["lr"] = 0.5
    sentinel.attach(setup.model, wrapper).detach()
    assert "Copying shows the learning rate 0.5" in capsys.readouterr().err


def test_what_leads_to_no_optimizer_is_refused(daemon: FakeDaemon) -> None:
    circle = Around(None)
    circle.optimizer = circle
    for given in (Around(object()), circle):
        with pytest.raises(MisuseError, match=r"pass a torch\.optim\.Optimizer"):
            sentinel.attach(make().model, given)
