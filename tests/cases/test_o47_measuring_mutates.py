"""O47: a norm that was measured by clipping to infinity turned gradients into NaN (Skovorp/feral#16)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sentinel.testing import FakeDaemon
from tests.client.training import equal, loader, make, weights
from tests.client.watching import watched

INFINITE_AT, STEPS = 4, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(1)
    for place, (inputs, targets) in enumerate(list(loader())[:STEPS]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if place == INFINITE_AT:
            model[4].bias.grad[0] = math.inf
        optimizer.step()
    return weights(model)


def test_the_danger_is_real_with_clipping_as_a_ruler() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[math.inf, 1.0]])
    nn.utils.clip_grad_norm_(layer.parameters(), math.inf)
    assert layer.weight.grad[0, 0].isnan()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_are_bit_identical_also_where_a_gradient_holds_an_infinity(daemon: FakeDaemon, kind: str) -> None:
    """Only observed: what may act does skip such an update."""
    alone, seen = make(OPTIMIZERS[kind]), make(OPTIMIZERS[kind])
    expected = train(alone.model, alone.optimizer)
    with watched(daemon, seen.model, seen.optimizer, mode="observe") as found:
        got = train(seen.model, seen.optimizer)
    assert equal(expected, got)
    norms = found.all("grad_norm")
    assert norms[INFINITE_AT] == math.inf, "the infinity was there"
    assert all(math.isfinite(norm) for norm in norms[:INFINITE_AT])
    assert any(not bool(torch.isfinite(weight).all()) for weight in got), "and it reached the weights"
