"""Dynamo compiles what it compiled before, and never looks into sentinel's code (O34)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters

from sentinel.client.attach import attach
from sentinel.records import StepRecord, Trouble
from sentinel.testing import FakeDaemon
from tests.client.training import FEATURES, equal, weights

SETTINGS = {"snapshot": {"every_steps": 5}}
Loop = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Any]]


def model_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        compiled(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return step


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    compiled = torch.compile(optimizer.step, backend="aot_eager")

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        compiled()

    return step


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    clip = torch.compile(nn.utils.clip_grad_norm_, backend="aot_eager", fullgraph=True)
    parameters = list(model.parameters())

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        clip(parameters, 0.1)
        optimizer.step()

    return step


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    @torch.compile(backend="aot_eager")
    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return step


LOOPS: dict[str, Loop] = {
    "model": model_alone, "optimizer": optimizer_step, "clipping": clipping, "whole": whole_step,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(loop: Loop, attached: bool) -> tuple[list[Tensor], int, int]:
    """The weights after 20 steps, how many graphs Dynamo made, and from how many functions of ours."""
    torch._dynamo.reset()
    counters.clear()
    convert_frame.input_codes.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    run = attach(model, optimizer, settings=SETTINGS) if attached else None
    step = loop(model, optimizer)
    for _ in range(20):
        step(torch.randn(8, FEATURES))
    if run is not None:
        run.detach()
    traced = [code.co_filename for seen in convert_frame.input_codes.seen if (code := seen()) is not None]
    assert any("torch" in name for name in traced), "it is still written down what was traced"
    # The seams in torch are looked at and skipped (`recursive=False`); nothing behind them is.
    ours = sum("/sentinel/client/" in name and not name.endswith("interception.py") for name in traced)
    return weights(model), counters["stats"]["unique_graphs"], ours


@pytest.mark.parametrize("kind", LOOPS)
def test_no_graph_more_is_compiled_and_the_weights_are_the_same(daemon: FakeDaemon, kind: str) -> None:
    clean, graphs, _ = run(LOOPS[kind], attached=False)
    watched, graphs_watched, ours = run(LOOPS[kind], attached=True)
    assert graphs_watched == graphs > 0
    assert ours == 0
    assert equal(clean, watched)
    records = daemon.of(StepRecord)
    assert [record.step for record in records] == list(range(1, 21))
    assert all(record.loss is not None and record.grad_norm is not None for record in records)
    assert not daemon.of(Trouble)
