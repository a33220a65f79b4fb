"""Guard "deferred" on a device: what is read one step late is still undone. The lateness is made on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sentinel
from sentinel.client import reflex
from sentinel.client.guard import Measure, measure
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.records import Reflex, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, UpdateResult
from tests.client.training import equal, loader, make, weights

OPTIMIZERS: dict[str, Any] = {
    "unfused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: the finite check stays a tensor and is read with the record of its step."""

    def on_device(watched: WatchedOptimizer, divisor: Tensor | None = None, taken: Tensor | None = None) -> Measure:
        found = measure(watched, divisor, taken)
        return found._replace(nonfinite=torch.tensor(bool(found.nonfinite)))

    monkeypatch.setattr(reflex, "measure", on_device)


@pytest.mark.parametrize("stand", ["hooks", "batches"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_update_is_skipped_on_the_device_or_undone(
    daemon: FakeDaemon, late: None, kind: str, stand: str
) -> None:
    setup = make(OPTIMIZERS[kind])
    run = sentinel.attach(setup.model, setup.optimizer, settings={"snapshot": {"every_steps": 10}})
    data, fired = list(loader()), 0
    for inputs, targets in run.batches(data) if stand == "batches" else data:
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        if run.step == 14 and not fired:
            fired += 1
            setup.model[0].weight.grad.fill_(float("nan"))
        before = weights(setup.model[0])
        setup.optimizer.step()
        if kind == "fused" and run.step == 15:
            assert equal(before, weights(setup.model[0]))
    run.detach()
    assert fired
    assert all(torch.isfinite(weight).all() for weight in weights(setup.model))
    (told,) = daemon.of(Reflex)
    assert (told.step, told.action) == (15, Action.SKIP_UPDATE if kind == "fused" else Action.ROLLBACK)
    generations = {record.generation for record in daemon.of(StepRecord)}
    assert generations == ({0} if kind == "fused" else {0, 1})


def test_an_overflow_that_the_device_tells_late_is_no_reflex(
    daemon: FakeDaemon, late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflex, "amp_overflow", lambda optimizer: getattr(optimizer, "found_inf", None))
    setup = make(OPTIMIZERS["fused"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run = sentinel.attach(setup.model, setup.optimizer)
    for place, (inputs, targets) in enumerate(list(loader())[:6]):
        setup.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
        if place == 3:
            setup.model[0].weight.grad[0, 0] = float("inf")
        scaler.step(setup.optimizer)
        scaler.update()
    run.detach()
    assert not daemon.of(Reflex)
    results = [record.result for record in daemon.of(StepRecord)]
    assert results == [UpdateResult.APPLIED] * 3 + [UpdateResult.OVERFLOW] + [UpdateResult.APPLIED] * 2
