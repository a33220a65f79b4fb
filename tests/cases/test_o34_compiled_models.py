"""O34: under torch.compile hooks are silently lost, or break the graph (wandb#10221, pytorch#117758)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from sentinel.testing import FakeDaemon
from tests.client.training import CLASSES, FEATURES, loader
from tests.client.watching import norm_of, watched

STEPS = 5


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def graphs() -> tuple[int, int]:
    """Graphs made, whether at first or again, and breaks in them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[tuple[float, float]]:
    torch.manual_seed(1)
    pairs = []
    for inputs, targets in list(loader())[:steps]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        pairs.append((loss.item(), norm_of(model.parameters())))
        optimizer.step()
    return pairs


def compiled_alone(backend: str) -> tuple[int, int]:
    """What it takes without sentinel."""
    model = network()
    train(torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.1), 2 * STEPS)
    found = graphs()
    torch._dynamo.reset()
    counters.clear()
    return found


def test_the_danger_is_real_with_hooks_on_modules() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(4, FEATURES))
    fired: list[Any] = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    compiled(torch.randn(4, FEATURES))
    assert not fired, "a hook that comes after the first compiled call never fires"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("target", ["module", "wrapper"])
@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_the_series_is_whole_and_nothing_more_is_compiled(
    daemon: FakeDaemon, backend: str, target: str, when: str
) -> None:
    expected = compiled_alone(backend)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)
    if when == "after it":
        train(compiled, optimizer)
        assert graphs()[0] > 0, "it is compiled already"
    with watched(daemon, model if target == "module" else compiled, optimizer) as found:
        pairs = train(compiled, optimizer, STEPS if when == "after it" else 2 * STEPS)
    assert found.all("loss") == pytest.approx([loss for loss, _ in pairs], rel=1e-6)
    assert found.all("grad_norm") == pytest.approx([norm for _, norm in pairs], rel=1e-6)
    assert graphs() == expected


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_eager_give_the_same_series(daemon: FakeDaemon, backend: str) -> None:
    series = []
    for compiles in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        running = torch.compile(model, backend=backend) if compiles else model
        with watched(daemon, running, optimizer) as found:
            train(running, optimizer)
        series.append(found)
    eager, compiled = series
    assert graphs()[0] > 0, "it was compiled"
    for name in ("loss", "grad_norm", "lr"):
        assert compiled.all(name) == pytest.approx(eager.all(name), rel=1e-5), name
    assert compiled.all("step") == eager.all("step")
