"""O43: two optimizers double the step (Lightning#17958, mlflow#10594)."""

import pytest
import torch
from torch import nn

from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
from tests.client.watching import watched

ITERATIONS = 100


@pytest.mark.parametrize("every", [1, 5])
def test_an_iteration_of_a_gan_is_one_step(daemon: FakeDaemon, every: int) -> None:
    """The generator is trained in every iteration, or in every fifth: the others are steps of the critic alone."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.02)
    calls = {"critic": 0, "generator": 0}
    losses = []
    with watched(daemon, nn.ModuleList([generator, critic]), [of_critic, of_generator]) as found:
        for iteration in range(ITERATIONS):
            loss = critic(generator(torch.randn(4, 2)).detach()).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            calls["critic"] += 1
            total = loss.item()
            if (iteration + 1) % every == 0:
                of_generator.zero_grad()
                loss = -critic(generator(torch.randn(4, 2))).mean()
                loss.backward()
                of_generator.step()
                calls["generator"] += 1
                total += loss.item()
            losses.append(total)
    assert calls == {"critic": ITERATIONS, "generator": ITERATIONS // every}
    assert found.all("step") == list(range(1, ITERATIONS + 1))
    assert found.all("loss") == pytest.approx(losses, abs=1e-5)
    assert set(found.all("result")) == {UpdateResult.APPLIED}
    assert found.all("applied") == list(range(1, ITERATIONS + 1))
    tables = found.all("optimizers")
    both = [number for number, table in enumerate(tables, 1) if table is not None and "optimizer.1" in table]
    assert both == list(range(every, ITERATIONS + 1, every))
    assert all(table["optimizer.0"]["lr"] == 0.01 for table in tables if table is not None)
    assert {table["optimizer.1"]["lr"] for table in tables if table and "optimizer.1" in table} == {0.02}
