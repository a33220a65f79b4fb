"""One of several gloo ranks that train one task in several ways: `... FOLDER RANK WORLD PORT WAY...`, one run each.

Every rank takes its share of the same global batch, so that each way and each world size computes the same updates.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 10
PIECES = 2  # of a rank's share, in the ways that accumulate
OVERFLOW_AT = 4  # in the way "scaled": an infinity in the gradient of step 5, on every rank alike
WAYS = (
    "ddp", "accumulated", "unused", "scaled", "recomputed", "zero",
    "fsdp2", "fsdp2-clipped", "fsdp2-accumulated",
    "fsdp1", "fsdp1-original", "fsdp1-clipped", "fsdp1-accumulated",
)  # fmt: skip


def main(folder: str, rank: str, world: str, port: str, *ways: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for way in ways:
        told.say(way, play(way, int(rank), int(world)))
    dist.destroy_process_group()
    told.say("end")


def play(way: str, rank: int, world: int) -> dict[str, Any]:
    """What the loop itself knows: its losses, and how many parameters its optimizer steps on."""
    model = wrapped(way)
    make = {"lr": 1e-2, "foreach": False}
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **make)
        if way == "zero"
        else torch.optim.AdamW(model.parameters(), **make)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way == "scaled")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run = sentinel.attach(model, optimizer, run_id=f"{way}-{world}")
    stage.connected(run)
    dist.barrier()
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(evaluate(model, scaler, way, number, rank, world))
        if way == "scaled" and number == OVERFLOW_AT:
            next(model.parameters()).grad[0, 0] = float("inf")
        if way == "fsdp2-clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if way == "fsdp1-clipped":
            model.clip_grad_norm_(1e9)
        scaler.step(optimizer)
        scaler.update(1024.0 if way == "scaled" else None)
        scheduler.step()
    dist.barrier()
    run.detach()
    inner = optimizer.optim if way == "zero" else optimizer
    return {"losses": losses, "stepped": sum(len(group["params"]) for group in inner.param_groups)}


def evaluate(model: nn.Module, scaler: Any, way: str, number: int, rank: int, world: int) -> float:
    """Forward and backward over this rank's share of batch `number`; the mean loss of the share."""
    inputs, targets = stage.batch(number)
    share = slice(rank * stage.BATCH // world, (rank + 1) * stage.BATCH // world)
    pieces = PIECES if "accumulated" in way else 1
    parts = list(zip(inputs[share].chunk(pieces), targets[share].chunk(pieces), strict=True))
    total = 0.0
    for place, (part, wanted) in enumerate(parts):
        with without_sync(model, way, last=place == len(parts) - 1):
            loss = stage.error(model(part), wanted) / pieces
            scaler.scale(loss).backward()
            total += loss.item()
    return total


@contextlib.contextmanager
def without_sync(model: Any, way: str, *, last: bool) -> Iterator[None]:
    """Only the last micro-batch's backward brings the ranks together."""
    if way == "fsdp2-accumulated":
        model.set_requires_gradient_sync(last)
    if way in {"accumulated", "fsdp1-accumulated"} and not last:
        with model.no_sync():
            yield
    else:
        yield


class Recomputing(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layers, inputs, use_reentrant=False)


class Unused(nn.Module):
    """Has a layer that no batch uses."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.idle = layers, nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def wrapped(way: str) -> nn.Module:
    model = stage.make_model()
    if way.startswith("fsdp2"):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    if way.startswith("fsdp1"):
        return FullyShardedDataParallel(model, use_orig_params=way == "fsdp1-original", device_id=torch.device("cpu"))
    if way == "unused":
        return DistributedDataParallel(Unused(model), find_unused_parameters=True)
    return DistributedDataParallel(Recomputing(model) if way == "recomputed" else model)


if __name__ == "__main__":
    main(*sys.argv[1:])
