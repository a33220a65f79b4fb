"""Sampling changes nothing that the loop could see: not its weights, not what it pickles, nothing after detach."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sentinel.client.attach import attach
from sentinel.testing import FakeDaemon
from tests.client.sampling.conftest import EVERY
from tests.client.sampling.mixtures import Mixture
from tests.client.training import equal, loader, make, weights
from tests.client.watching import watched

STEPS = 3 * EVERY


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_SAMPLING__EVERY_STEPS", "1")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[int], None] = lambda _: None
) -> None:
    torch.manual_seed(1)
    for number, (inputs, targets) in enumerate(loader(size=16 * STEPS), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        between(number)


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 16)).square().mean().backward()
    optimizer.step()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_are_bit_identical_with_and_without_sampling_at_every_step(daemon: FakeDaemon, kind: str) -> None:
    bare, sampled = make(OPTIMIZERS[kind]), make(OPTIMIZERS[kind])
    train(*bare)
    with watched(daemon, *sampled) as found:
        train(*sampled)
    assert samples_of(found), "it was sampled"
    assert equal(weights(bare.model), weights(sampled.model))
    states = [
        [value for state in one.optimizer.state_dict()["state"].values() for value in state.values()]
        for one in (bare, sampled)
    ]
    assert equal(*[[value for value in state if isinstance(value, Tensor)] for state in states])


def hooks(model: nn.Module) -> list[Any]:
    """Every hook on a module or a parameter of it."""
    found: list[Any] = []
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += vars(module)[name].values()
    for parameter in model.parameters():
        found += (parameter._backward_hooks or {}).values()
        found += (parameter._post_accumulate_grad_hooks or {}).values()
    return found


def armed(model: nn.Module) -> bool:
    return any("sentinel.client.sampling" in type(hook).__module__ for hook in hooks(model))


@pytest.mark.usefixtures("every_step")
def test_hooks_are_on_routers_while_a_step_is_sampled_and_none_is_left_after_detach(daemon: FakeDaemon) -> None:
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, seen = len(hooks(model)), set()
    with watched(daemon, model, optimizer) as found:
        train(model, optimizer, lambda _: seen.add(len(hooks(model))))
        assert len(seen) > 1, "hooks come and go"
    assert any(sample.expert_load for sample in samples_of(found)), "they were there"
    assert len(hooks(model)) == before == 0
    assert len(hooks(nn.Linear(1, 1))) == 0


def samples_of(found: Any) -> list[Any]:
    return [one for one in found.all("sampled") if one is not None]


@pytest.mark.usefixtures("every_step")
def test_a_model_is_pickled_copied_and_saved_while_its_sample_is_armed(daemon: FakeDaemon) -> None:
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = torch.randn(4, 16)
    told: list[tuple[str, bytes]] = []

    def look(number: int) -> None:
        if not armed(model):
            return
        saved = io.BytesIO()
        torch.save(model, saved)
        told.append(("saved", saved.getvalue()))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies.append(torch.load(io.BytesIO(saved.getvalue()), weights_only=False))
        for one in copies:
            assert torch.equal(one(probe), model(probe))
            assert not any("sentinel" in type(hook).__module__ for hook in hooks(one))
        copied = copy.deepcopy(optimizer)
        assert pickle.loads(pickle.dumps(copied)).state_dict()["param_groups"][0]["lr"] == 0.1

    with watched(daemon, model, optimizer) as found:
        train(model, optimizer, look)
    assert told, "it was armed"
    assert b"sentinel" not in told[0][1], "what was saved can be read where sentinel is not installed"
    assert any(sample.expert_load for sample in samples_of(found))


class Counting(TorchDispatchMode):
    """Counts what asks the device for a number, and so would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("every_step")
def test_sampling_asks_the_device_for_no_number(daemon: FakeDaemon) -> None:
    counts = []
    for enabled in (False, True):
        model = Mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"snapshot": {"enabled": False}, "sampling": {"enabled": enabled}}
        with watched(daemon, model, optimizer, settings=settings) as found, Counting() as counting:
            train(model, optimizer)
        counts.append(counting.asked)
        assert bool(samples_of(found)) is enabled
    assert counts[0] == counts[1]


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    return found


@pytest.mark.usefixtures("every_step", "_fresh_dynamo")
@pytest.mark.parametrize("late", [False, True])
def test_compiled_routers_are_not_heard_and_nothing_more_is_compiled(daemon: FakeDaemon, late: bool) -> None:
    """Also where the first compiled call comes while a sample is armed."""
    expected = []
    for attached in (False, True):
        model = Mixture()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wait_for_a_sample = attached and late
        compiled = torch.compile(model, backend="aot_eager")
        run = attach(model, optimizer) if attached else None
        while wait_for_a_sample and not armed(model):
            step(model, optimizer)
        torch._dynamo.reset()
        counters.clear()
        train(compiled, optimizer)
        assert counters["stats"]["unique_graphs"] > 0, "it was compiled"
        expected.append(graphs())
        if run is not None:
            run.detach()
    assert expected[0] == expected[1]
