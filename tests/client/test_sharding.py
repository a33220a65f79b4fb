"""Micro-batches under FSDP2 without synchronising run no hook of a parameter, and are taken all the same."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sentinel.client.sharding import gathers_apart
from sentinel.testing import FakeDaemon
from tests.client.training import FEATURES
from tests.client.watching import watched

STEPS, PIECES = 4, 3


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_it_is_known_whether_gradients_are_kept_back(world: None) -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 1)))
    assert not gathers_apart(model)
    model.set_requires_gradient_sync(False)
    assert gathers_apart(model)
    model.set_requires_gradient_sync(True)
    assert not gathers_apart(model)
    assert not gathers_apart(nn.Linear(4, 1))


def test_every_micro_batch_is_in_the_loss(daemon: FakeDaemon, world: None) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accumulated: list[int] = []
    losses: list[float] = []
    with watched(daemon, model, optimizer, settings={"snapshot": {"enabled": False}}) as found:
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))
        for _ in range(STEPS):
            losses.append(0.0)
            for piece in range(PIECES):
                model.set_requires_gradient_sync(piece == PIECES - 1)
                loss = model(torch.randn(4, FEATURES)).square().mean() / PIECES
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
    assert len(accumulated) == STEPS, "only the last micro-batch runs a parameter's hook"
    assert found.all("loss") == pytest.approx(losses, rel=1e-6)
