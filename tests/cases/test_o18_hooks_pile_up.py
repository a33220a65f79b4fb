"""O18: hooks that pile up over epochs and notebook cells (omerbt/Splice#134, ML4SCI/DeepLense#141)."""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.client import interception
from sentinel.testing import FakeDaemon
from tests.client.training import Setup, loader, make

TIMES = 50


def hooks_of(setup: Setup) -> list[Any]:
    """Every hook on the model, on its parameters and on the optimizer."""
    found: list[Any] = []
    for module in setup.model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("hooks") and hooks:
                found += hooks.values()
    for parameter in setup.model.parameters():
        for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            found += (getattr(parameter, name) or {}).values()
    for name, hooks in vars(setup.optimizer).items():
        if name.endswith("hooks"):
            found += hooks.values()
    return found


def calls_in_a_step(setup: Setup, batch: Any) -> int:
    """How many functions of ours a step enters: unlike its time, the same on every machine."""
    count = 0

    def entered(frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call" and "/sentinel/client/" in frame.f_code.co_filename

    inputs, targets = batch
    sys.setprofile(entered)
    try:
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.optimizer.step()
    finally:
        sys.setprofile(None)
    return count


def test_the_danger_is_real_with_hooks_of_ones_own() -> None:
    setup = make()
    for _ in range(3):
        setup.model.register_forward_hook(lambda *_: None)
    assert len(hooks_of(setup)) == 3


@pytest.mark.parametrize("ends", ["detached", "attached over"])
def test_fifty_runs_of_one_model_cost_as_much_as_one(daemon: FakeDaemon, ends: str) -> None:
    setup, batches = make(), list(loader())
    counts, sets = [], []
    run = None
    for _ in range(TIMES):
        run = sentinel.attach(setup.model, setup.optimizer)
        calls = [calls_in_a_step(setup, batch) for batch in batches[:4]]
        counts.append(calls[-1])
        sets.append(len(hooks_of(setup)))
        assert len(interception.observers()) == 1
        if ends == "detached":
            run.detach()
            assert not hooks_of(setup)
    assert run is not None
    run.detach()
    assert sets[0] > 0, "something was hooked"
    assert set(sets) == {sets[0]}
    assert counts[0] > 0
    assert max(counts) <= 1.1 * min(counts), counts
    assert not hooks_of(setup)
    assert not interception.observers()


def test_after_detach_the_model_can_be_collected(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    calls_in_a_step(setup, next(iter(loader())))
    run.detach()
    seen = [weakref.ref(one) for one in (setup.model, setup.optimizer, *setup.model.parameters())]
    del setup
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


@pytest.fixture(autouse=True)
def _torch_as_it_was(daemon: FakeDaemon) -> Any:
    """Whatever a test attached, torch is put back after it."""
    names: list[tuple[Any, str]] = [
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
        (torch.amp.GradScaler, "step"),
        (torch.optim.Optimizer, "load_state_dict"),
    ]
    before: list[Callable[..., Any]] = [getattr(owner, name) for owner, name in names]
    yield
    assert [getattr(owner, name) for owner, name in names] == before
