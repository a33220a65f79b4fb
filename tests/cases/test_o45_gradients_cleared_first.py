"""O45: a norm that is always 0 or absent because the loop cleared its gradients first (Lightning#272, tnt#969)."""

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from tests.client.training import Setup, loader, make
from tests.client.watching import norm_of, watched

STEPS = 5


def train(setup: Setup, clear: str) -> list[float]:
    """`clear`: "before" the backward, or right "after" the step; "to none" and "to zero" say how."""
    torch.manual_seed(1)
    when, how = clear.split(", ")
    norms = []
    for inputs, targets in list(loader())[:STEPS]:
        if when == "before":
            setup.optimizer.zero_grad(set_to_none=how == "to none")
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        norms.append(norm_of(setup.model.parameters()))
        setup.optimizer.step()
        if when == "after":
            setup.optimizer.zero_grad(set_to_none=how == "to none")
            gradients = [parameter.grad for parameter in setup.model.parameters()]
            assert all(one is None if how == "to none" else not one.any() for one in gradients), "cleared"
    return norms


def test_the_norm_is_the_same_wherever_the_loop_clears_its_gradients(daemon: FakeDaemon) -> None:
    series = []
    for clear in ("before, to none", "after, to none", "before, to zero", "after, to zero"):
        setup = make(dropout=0.0)
        with watched(daemon, setup.model, setup.optimizer) as found:
            norms = train(setup, clear)
        assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6), clear
        series.append(norms)
    assert all(one == pytest.approx(series[0]) for one in series)


def test_where_there_is_no_gradient_the_norm_is_absent_and_not_zero(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer) as found:
        train(setup, "after, to none")
        assert all(parameter.grad is None for parameter in setup.model.parameters())
        setup.optimizer.step()
    assert found.records[-1].grad_norm is None
    assert found.records[-1].loss is None
