"""Optimizers that keep their state in eight or four bits are watched, copied and put back like any other.

bitsandbytes is not in the `dev` extra (125 MB): its tests run where it is installed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.records import Trouble
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, UpdateResult
from tests.client.test_rollback import SETTINGS, commit, outcome
from tests.client.watching import norm_of, watched

WIDTH = 128  # so that weights have more than 4096 values: smaller ones keep a full state

Make = Callable[[Any], torch.optim.Optimizer]


class Kind(NamedTuple):
    package: str
    optimizer: str
    entry: str  # of the state, which has few bits
    few_bits: Callable[[Any], bool]


def is_byte(tensor: Any) -> bool:
    return tensor.dtype is torch.uint8


def is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


KINDS: dict[str, Kind] = {
    "torchao, 8 bit": Kind("torchao.optim", "AdamW8bit", "exp_avg", is_quantized),
    "torchao, 4 bit": Kind("torchao.optim", "AdamW4bit", "exp_avg", is_quantized),
    "bitsandbytes, 8 bit": Kind("bitsandbytes.optim", "AdamW8bit", "state1", is_byte),
    "bitsandbytes, lion": Kind("bitsandbytes.optim", "Lion8bit", "state1", is_byte),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the optimizer; its step is not compiled, which would take a minute and a compiler."""
    kind = KINDS[request.param]
    package = pytest.importorskip(kind.package, reason=f"{kind.package.split('.')[0]} is not installed")
    made: list[Any] = []

    def build(parameters: Any) -> torch.optim.Optimizer:
        made.append(getattr(package, kind.optimizer)(parameters, lr=1e-3))
        return made[-1]

    with torch.compiler.set_stance("force_eager"):
        yield build
    assert made, "no optimizer was made"
    for optimizer in made:
        states = [state[kind.entry] for state in optimizer.state.values() if kind.entry in state]
        assert any(kind.few_bits(state) for state in states), "no state has few bits"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, broken: bool = False
) -> tuple[float, float]:
    """On batch `number`: its loss and gradient norm."""
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    loss = (model(torch.randn(16, WIDTH, generator=generator)) - 1).square().mean()
    loss.backward()
    if broken:
        next(model.parameters()).grad[0, 0] = float("nan")
    truth = loss.item(), norm_of(model.parameters())
    optimizer.step()
    return truth


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Weights and state, byte for byte."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [part for one in (*model.parameters(), *states) if isinstance(one, torch.Tensor) for part in parts(one)]
    return [one.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors]


def parts(tensor: Any) -> list[torch.Tensor]:
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if is_quantized(tensor) else [tensor]


def test_the_series_is_true_and_the_bits_are_the_same_as_without(daemon: FakeDaemon, make: Make) -> None:
    clean = network()
    of_clean = make(clean.parameters())
    for number in range(25):
        step(clean, of_clean, number)
    model = network()
    optimizer = make(model.parameters())
    with watched(daemon, model, optimizer, settings=SETTINGS) as found:
        truths = [step(model, optimizer, number) for number in range(25)]
    assert found.all("loss") == pytest.approx([loss for loss, _ in truths], rel=1e-6)
    assert found.all("grad_norm") == pytest.approx([norm for _, norm in truths], rel=1e-6)
    assert found.all("lr") == pytest.approx([1e-3] * 25, rel=1e-6)  # torchao's is a tensor of single precision
    assert bits(model, optimizer) == bits(clean, of_clean)


def test_a_skipped_update_changes_no_bit(daemon: FakeDaemon, make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    with watched(daemon, model, optimizer) as found:
        daemon.wait_for(lambda: found.run._loop.reflexes.acts)
        step(model, optimizer, 0)
        before = bits(model, optimizer)
        step(model, optimizer, 1, broken=True)
        assert bits(model, optimizer) == before
        step(model, optimizer, 2)
        assert bits(model, optimizer) != before
    assert found.all("result") == [UpdateResult.APPLIED, UpdateResult.REFLEX, UpdateResult.APPLIED]


def test_a_rollback_brings_every_bit_back(daemon: FakeDaemon, make: Make) -> None:
    model = network()
    optimizer = make(model.parameters())
    run = attach(model, optimizer, settings=SETTINGS)
    seen: list[list[bytes]] = []
    command = None
    for number in run.batches(range(40)):
        if run.step == 20:
            seen.append(bits(model, optimizer))
        if run.step == 25 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="replay")
            commit(daemon, command)
        step(model, optimizer, number)
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.text) == ("applied", "")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not daemon.of(Trouble)
