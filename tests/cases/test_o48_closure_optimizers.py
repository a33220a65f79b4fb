"""O48: an optimizer that evaluates a closure many times makes one step, not twenty (Lightning#4083, #4188)."""

import pytest
import torch
from torch import Tensor, nn

from sentinel.testing import FakeDaemon
from tests.client.watching import norm_of, watched

STEPS = 3


def test_one_record_per_step_with_the_first_loss_and_the_last_norm(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=20)
    inputs, wanted = torch.randn(32, 4), torch.randn(32, 1)
    evaluations: list[tuple[float, float]] = []
    accumulated: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        evaluations.append((loss.item(), norm_of(model.parameters())))
        return loss

    returned, ends = [], []
    with watched(daemon, model, optimizer) as found:
        for _ in range(STEPS):
            returned.append(optimizer.step(closure).item())
            ends.append(len(evaluations))
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert min(counts) > 10, "one step evaluates many times"
    assert len(accumulated) == sum(counts), "and so often fires what hooks a gradient"
    assert found.all("step") == list(range(1, STEPS + 1))
    assert found.all("loss") == pytest.approx(returned)
    assert found.all("grad_norm") == pytest.approx([evaluations[end - 1][1] for end in ends], rel=1e-6)
    assert found.all("evaluations") == counts
    assert found.records[-1].applied == STEPS
