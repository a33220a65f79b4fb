"""A rank's part of the gradient norm: how placements share it out. A fake process group of four; no other process."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sentinel.client.guard import Measure, measure
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probes.gradients import exact_norm, shard_norm, spread
from sentinel.client.wrapping import Wrappers

WORLD = 4


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def gradient(value: Tensor, on: DeviceMesh, *placements: Any) -> DTensor:
    """What this rank holds of it, as it is: nothing is exchanged."""
    return DTensor.from_local(value, on, placements, run_check=False)


def measured(one: Tensor, divisor: Tensor | None = None, taken: Tensor | None = None) -> Measure:
    parameter = torch.nn.Parameter(torch.zeros_like(one))
    parameter.grad = one
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return measure(WatchedOptimizer(optimizer, "optimizer", Wrappers()), divisor, taken)


ONES = torch.ones(4)  # norm 2


@pytest.mark.parametrize(
    ("shape", "placements", "copies"),
    [
        ((4,), (Shard(0),), 1),
        ((4,), (Replicate(),), 4),
        ((2, 2), (Replicate(), Shard(0)), 2),
        ((2, 2), (Shard(0), Shard(0)), 1),
        ((2, 2), (Replicate(), Replicate()), 4),
    ],
)
def test_a_square_is_divided_by_the_ranks_that_hold_the_same(world: None, shape, placements, copies) -> None:
    gradients = [gradient(ONES, mesh(*shape), *placements)]
    lie = spread(gradients)
    assert (lie.copies, lie.ranks, lie.adds_up) == ([copies], WORLD, True)
    assert float(shard_norm(gradients, lie)) == pytest.approx(2.0 / math.sqrt(copies))
    assert exact_norm(gradients, lie.copies) == pytest.approx(2.0 / math.sqrt(copies))


def test_a_plain_tensor_or_one_of_a_smaller_mesh_is_held_by_every_other_rank_too(world: None) -> None:
    whole = mesh(2, 2)
    gradients = [gradient(ONES, whole, Shard(0), Shard(0)), ONES, gradient(ONES, whole["inner"], Shard(0))]
    lie = spread(gradients)
    assert (lie.copies, lie.ranks) == ([1, 4, 2], WORLD)
    assert float(shard_norm(gradients, lie)) == pytest.approx(math.sqrt(4.0 + 4.0 / 4 + 4.0 / 2))


def test_half_precision_and_empty_shards_have_their_part(world: None) -> None:
    large = torch.full((4,), 300.0, dtype=torch.float16)  # its square is beyond float16
    on = mesh(4)
    gradients = [gradient(large, on, Shard(0)), gradient(torch.empty(0), on, Shard(0))]
    assert float(shard_norm(gradients, spread(gradients))) == pytest.approx(600.0)


def test_a_norm_that_overflows_is_measured_again_and_is_finite(world: None) -> None:
    found = measured(gradient(torch.full((4,), 1e30), mesh(4), Shard(0)))
    assert found.norm == pytest.approx(2e30)
    assert (found.source, found.ranks, found.nonfinite) == ("local", WORLD, False)


def test_a_part_that_is_not_finite_is_told(world: None) -> None:
    found = measured(gradient(torch.tensor([1.0, math.nan]), mesh(4), Shard(0)))
    assert math.isnan(found.norm)
    assert (found.source, found.nonfinite) == ("local", True)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((4,), (Partial(),)), ((2,), (Shard(0),))],
    ids=["a sum that has still to be made", "a mesh that does not cover the world"],
)
def test_a_part_of_which_nobody_knows_how_it_adds_up_says_so(world: None, shape, placements) -> None:
    on = mesh(*shape) if shape == (WORLD,) else DeviceMesh("cpu", [0, 1])
    assert measured(gradient(ONES, on, *placements)).source == "part"


def test_a_loss_scale_is_taken_out(world: None) -> None:
    found = measured(gradient(ONES, mesh(4), Shard(0)), torch.tensor(8.0))
    assert found.norm == pytest.approx(0.25)


def test_a_global_norm_that_the_clipping_gathered_is_taken_as_it_is(world: None) -> None:
    on = mesh(4)
    taken = gradient(torch.tensor(5.0), on, Replicate())
    found = measured(gradient(ONES, on, Shard(0)), None, taken)
    assert (found.norm, found.source, found.ranks) == (5.0, "clip", 1)
