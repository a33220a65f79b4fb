"""O44: a fused optimizer steps on scaled gradients, and its hooks run for overflowed steps too (pytorch#94060)."""

import math

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.watching import watched

SCALE, OVERFLOW_AT, STEPS = 1024.0, 2, 5


def train(daemon: FakeDaemon, fused: bool):
    """The records, and per hook call the norm of the gradients as the optimizer's step gets them."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    seen: list[float] = []
    with watched(daemon, layer, optimizer) as found:
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(layer.weight.grad.norm())))
        for place in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
            if place == OVERFLOW_AT:
                layer.weight.grad[0, 0] = math.inf
            before = layer.weight.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(before, layer.weight) == (place == OVERFLOW_AT)
            scaler.update(SCALE)
    return found, seen


def test_fused_and_unfused_report_the_same_series(daemon: FakeDaemon) -> None:
    (plain, plain_hooks), (fused, fused_hooks) = train(daemon, fused=False), train(daemon, fused=True)
    assert plain_hooks == pytest.approx([math.sqrt(2)] * (STEPS - 1)), "no hook for the overflowed step"
    assert fused_hooks[0] == pytest.approx(SCALE * math.sqrt(2)), "the hook sees scaled gradients"
    assert len(fused_hooks) == STEPS, "and runs for the overflowed step as well"
    for found in (plain, fused):
        norms = [math.sqrt(2)] * STEPS
        norms[OVERFLOW_AT] = math.inf
        assert found.all("grad_norm") == pytest.approx(norms, rel=1e-6)
        results = [UpdateResult.APPLIED] * STEPS
        results[OVERFLOW_AT] = UpdateResult.OVERFLOW
        assert found.all("result") == results
        assert (found.records[-1].applied, found.records[-1].skipped) == (STEPS - 1, 1)
    for name in ("step", "lr", "loss_scale", "applied", "skipped"):
        assert plain.all(name) == fused.all(name), name
    assert plain.all("loss") == pytest.approx(fused.all("loss"), rel=1e-5)
