"""Models with odd tensors are copied and put back like any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from sentinel.client.attach import attach
from sentinel.records import SnapshotNote, Trouble
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Quality
from tests.client.test_rollback import SETTINGS, commit, outcome
from tests.client.training import FEATURES, equal, weights

INFINITY = float("inf")


def with_buffer(name: str, buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(FEATURES, 4)
    model.register_buffer(name, buffer)
    return model


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = nn.Linear(FEATURES, 4)
    model.odd = parameter
    return model


class Lazily(nn.Module):
    """Registers its mask in the first forward, as many attention modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((4, 4), -INFINITY).triu(1), persistent=False)
        return self.layer(inputs)


class Cached(Lazily):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            with torch.inference_mode():
                self.register_buffer("table", torch.arange(4.0), persistent=False)
        return self.layer(inputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a conjugate view": lambda: with_buffer("odd", torch.randn(3, dtype=torch.complex64).conj()),
    "a sparse adjacency": lambda: with_buffer("odd", torch.eye(5).to_sparse()),
    "a compressed adjacency": lambda: with_buffer("odd", torch.eye(5).to_sparse_csr()),
    "an expanded row": lambda: with_buffer("odd", torch.zeros(1, 4).expand(6, 4)),
    "a transposed view": lambda: with_buffer("odd", torch.randn(4, 6).t()),
    "a mask of infinities": lambda: with_buffer("odd", torch.full((4, 4), -INFINITY).triu(1)),
    "a frozen mask": lambda: with_parameter(nn.Parameter(torch.full((4,), -INFINITY), requires_grad=False)),
    "no elements": lambda: with_parameter(nn.Parameter(torch.zeros(0, 5))),
    "complex weights": lambda: with_parameter(nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))),
    "eight-bit floats": lambda: with_buffer("odd", torch.zeros(3, dtype=torch.float8_e4m3fn)),
    "a tensor of two": lambda: with_buffer("odd", TwoTensor(torch.randn(4, 6), torch.randn(4, 6))),
    "a frozen weight of two": lambda: with_parameter(
        nn.Parameter(TwoTensor(torch.randn(3), torch.randn(3)), requires_grad=False)
    ),
    "a late mask": Lazily,
    "a cache of inference mode": Cached,
    "a lazy layer": lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = model(torch.randn(8, FEATURES)).square().mean()
    loss = loss + sum(
        one.abs().sum() for name, one in model.named_parameters() if name == "odd" and one.requires_grad
    )
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("target", [0, 20])
def test_a_model_with_an_odd_tensor_is_rolled_back_exactly(daemon: FakeDaemon, kind: str, target: int) -> None:
    torch.manual_seed(0)
    if kind == "a lazy layer":  # it has no state before its first batch, so all comes one step later
        target += 1
    model = MODELS[kind]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = attach(model, optimizer, settings=SETTINGS)
    seen: list[Any] = []
    command = None
    for _ in run.batches(range(60)):
        if run.step == (target or 1):
            seen.append(trained(model))
        if run.step == 25 and command is None:
            daemon.wait_for(lambda: run._inbox.attempt)
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=target, data="replay")
            commit(daemon, command)
        step(model, optimizer)
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.text) == ("applied", "")
    assert ack.target_step == target
    assert len(seen) == 2
    assert equal(*seen)
    assert not daemon.of(Trouble)
    assert all(note.quality is not Quality.BAD for note in daemon.of(SnapshotNote))


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_default_device_does_not_lead_the_copies_astray(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.Adam(model.parameters())
    torch.set_default_device("meta")
    try:
        run = attach(model, optimizer, settings=SETTINGS)
        for _ in run.batches(range(15)):
            optimizer.zero_grad()
            with torch.device("cpu"):
                model(torch.randn(8, FEATURES)).square().mean().backward()
            optimizer.step()
    finally:
        torch.set_default_device(None)
    copies = [tensor for one in run._ring.snapshots for tensor in one.state.tensors.values()]
    run.detach()
    assert copies
    assert {tensor.device.type for tensor in copies} == {"cpu"}
    assert not daemon.of(Trouble)


def test_a_layer_replaced_by_one_of_another_shape_fails_the_rollback_and_changes_nothing(daemon: FakeDaemon) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(model, optimizer, settings=SETTINGS)
    command, before, after = None, [], []
    for _ in run.batches(range(40)):
        if run.step == 25 and command is None:
            model[0] = nn.Linear(FEATURES, 9)
            model[1] = nn.Linear(9, 4)
            optimizer.add_param_group({"params": list(model.parameters())})
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="replay")
            commit(daemon, command)
        elif command is not None and not after:
            after = weights(model)
        step(model, optimizer)
        if run.step == 26 and not before:
            before = weights(model)
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.reason) == ("failed", "not_verified")
    assert before
    assert equal(before, after)
    reasons = [note.reason for note in daemon.of(SnapshotNote) if note.quality is Quality.BAD]
    assert reasons
    assert all("another shape" in reason for reason in reasons)
    assert run.step == 40


def test_a_load_that_raises_fails_the_rollback_and_changes_nothing(daemon: FakeDaemon) -> None:
    class Grumpy:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("not me")

    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.Adam(model.parameters())
    run = attach(model, optimizer, settings=SETTINGS, state={"grumpy": Grumpy()})
    command, before, after = None, [], []
    for _ in run.batches(range(40)):
        if run.step == 26 and not after:
            after = weights(model)
        if run.step == 25 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="replay")
            commit(daemon, command)
        step(model, optimizer)
        if run.step == 26 and not before:
            before = weights(model)
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.reason) == ("failed", "not_verified")
    assert equal(before, after)
    assert any("not me" in note.reason for note in daemon.of(SnapshotNote))


def test_optimizer_state_that_belongs_to_no_parameter_comes_back_too(daemon: FakeDaemon) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["calls"] = self.state.get("calls", 0) + 1
            return super().step(closure)

    model = nn.Linear(FEATURES, 4)
    optimizer = Counting(model.parameters(), lr=0.1)
    run = attach(model, optimizer, settings=SETTINGS)
    command = None
    for _ in run.batches(range(30)):
        if run.step == 25 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="skip")
            commit(daemon, command)
        step(model, optimizer)
        assert optimizer.state["calls"] == run.step
    ack = outcome(daemon, command)
    run.detach()
    assert ack.state == "applied"
    assert run.step < 30
