"""O49: recomputing activations in backward changes no count, loss or norm (pytorch#81296, OLMo-core#720)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sentinel.testing import FakeDaemon
from tests.client.watching import norm_of, watched

STEPS = 5
Forward = Callable[[nn.Module, Tensor], Tensor]
WAYS: dict[str, Forward] = {
    "plain": lambda layer, inputs: layer(inputs),
    "reentrant": lambda layer, inputs: checkpoint(layer, inputs, use_reentrant=True),
    "not reentrant": lambda layer, inputs: checkpoint(layer, inputs, use_reentrant=False),
}


class Shared(nn.Module):
    """One layer used twice: its gradient is accumulated twice where each use is recomputed by itself."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self._way = way

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(2):
            hidden = torch.tanh(self._way(self.shared, hidden))
        return self.last(hidden)


def train(daemon: FakeDaemon, way: str):
    """What was recorded, the true norms, and how often a step ran the shared layer and gave it a gradient."""
    torch.manual_seed(0)
    model = Shared(WAYS[way])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    forwards: list[int] = []
    accumulated: list[int] = []
    model.shared.register_forward_pre_hook(lambda *_: forwards.append(1))
    model.shared.weight.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))
    norms = []
    with watched(daemon, model, optimizer) as found:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            norms.append(norm_of(model.parameters()))
            optimizer.step()
    return found, norms, len(forwards) / STEPS, len(accumulated) / STEPS


def test_counts_losses_and_norms_are_the_same_with_and_without(daemon: FakeDaemon) -> None:
    plain, expected, forwards, accumulated = train(daemon, "plain")
    assert (forwards, accumulated) == (2, 1)
    for way, times in (("reentrant", 2), ("not reentrant", 1)):
        found, norms, forwards, accumulated = train(daemon, way)
        assert (forwards, accumulated) == (4, times), "it was recomputed"
        assert norms == pytest.approx(expected, rel=1e-5)
        assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)
        assert found.all("loss") == pytest.approx(plain.all("loss"), rel=1e-5)
        for name in ("step", "lr", "result", "applied", "skipped"):
            assert found.all(name) == plain.all(name), name


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_of_a_step_fit_into_it(daemon: FakeDaemon, way: str) -> None:
    """A backward inside the backward is not timed twice."""
    found, *_ = train(daemon, way)
    for record in found.records[1:]:
        assert 0 < record.backward_seconds < record.step_seconds
