"""O42: a monitor that asks the device for numbers makes the loop wait for it (torchtune#522: 40 to 50 ms a step).

The meta device stands for a GPU: its tensors have no numbers, so whoever asks for one raises instead of waiting.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sentinel
from sentinel.records import StepRecord, Trouble
from sentinel.testing import FakeDaemon
from tests.client.training import CLASSES, FEATURES

STEPS = 10
SYNCS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
SETTINGS = {"snapshot": {"enabled": False}}  # they are copied and checked within a budget of their own


class Device(TorchDispatchMode):
    """Counts what would wait for the device, and lets what is copied from it arrive, as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in SYNCS and args[0].device.type == "meta":  # an Adam's step counter is on the CPU
            self.seen[name] += 1
        if name == "_to_copy" and torch.device((kwargs or {}).get("device") or "meta").type == "cpu":
            self.seen["copy"] += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return function(*args, **(kwargs or {}))


def clip(model: nn.Module, maximum: float = 1.0) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), maximum)


KINDS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[nn.Module], Any]]] = {
    "plain": (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), lambda _: None),
    "clipped": (lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9), clip),
    "one by one": (lambda parameters: torch.optim.Adam(parameters, foreach=False), clip),
}


def test_the_danger_is_real() -> None:
    loss = nn.Linear(FEATURES, 1, device="meta")(torch.empty(4, FEATURES, device="meta")).sum()
    with Device() as device, pytest.raises(RuntimeError, match="meta"):
        loss.item()
    assert device.seen["_local_scalar_dense"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(daemon: FakeDaemon, kind: str) -> None:
    make_optimizer, before_step = KINDS[kind]
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to("meta")
    optimizer = make_optimizer(model.parameters())
    run = sentinel.attach(model, optimizer, settings=SETTINGS)
    inputs, targets = torch.empty(8, FEATURES, device="meta"), torch.empty(8, device="meta", dtype=torch.long)
    with Device() as device:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            before_step(model)
            optimizer.step()
            run.report(loss=loss, tokens=loss.detach(), quality=loss)
        asked = {name: count for name, count in device.seen.items() if name != "copy"}
        run.detach()
    assert asked == {}
    assert device.seen["copy"] == STEPS, "one copy of all numbers together for each step"
    records = daemon.of(StepRecord)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert {(record.loss, record.grad_norm, record.tokens) for record in records} == {(0.0, 0.0, 0.0)}
    assert not daemon.of(Trouble)
