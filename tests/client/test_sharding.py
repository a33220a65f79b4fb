"""What parameters and hooks do not tell of FSDP: gradients that are kept back, plain tensors that are shards."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sentinel.client.sharding import flat_shards, gathers_apart
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import UpdateResult
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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_over_how_many_ranks_fsdp1_splits_is_known(world: None, strategy: str) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
    )
    assert flat_shards(nn.Sequential(model)) == (None if strategy == "NO_SHARD" else 2)
    assert flat_shards(nn.Linear(4, 4)) is None


@pytest.mark.parametrize("original", [False, True])
def test_of_fsdp1_no_rank_skips_an_update_on_its_own(daemon: FakeDaemon, world: None, original: bool) -> None:
    """Its shards are ordinary tensors, and the other rank's may be sound."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(FEATURES, 2), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watched(daemon, model, optimizer, settings={"snapshot": {"enabled": False}}) as found:
        found.run._loop.reflexes.acts = True  # as the roster says where every rank is connected
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, FEATURES)).square().mean().backward()
            held = [one.grad for one in model.parameters() if one.grad is not None]
            assert sum(one.numel() for one in held) < 2 * FEATURES + 2, "only a part is here"
            if step == 1:
                held[0].fill_(float("nan"))
            optimizer.step()
    assert found.all("result") == [UpdateResult.APPLIED] * 3
    assert set(found.all("grad_norm_source")) == {"local"}
    assert set(found.all("grad_norm")) == {None}, "one rank cannot know it"
    assert [norm != norm for norm in found.all("grad_norm_local")] == [False, True, True]
