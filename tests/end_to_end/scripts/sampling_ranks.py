"""One of several gloo ranks that are sampled: `... FOLDER RANK WORLD PORT WAY...`, one run for each way.

Every rank takes its share of the same global batch. Before DDP can average them the script itself computes this
rank's gradient, by `autograd.grad` on a second model with the same weights, which is what a test compares with.
"""

import contextlib
import copy
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 20
EVERY = 4
LONG = 1000  # steps of the way "long"
FLIP_AT = 10  # in the way "flipped": after this update rank 1 adds 1e-6 to one weight of the last layer
PIECES = 2
WAYS = (
    "ddp", "accumulated", "views", "hooked", "unused", "static", "scaled", "flipped", "unsynced", "fsdp2", "long",
)  # fmt: skip


def main(folder: str, rank: str, world: str, port: str, *ways: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["SENTINEL_SAMPLING__EVERY_STEPS"] = str(EVERY)
    os.environ["SENTINEL_SAMPLING__COST_RATIO"] = "1.0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for way in ways:
        told.say(way, play(way, int(rank), int(world)))
    dist.destroy_process_group()
    told.say("end")


def play(way: str, rank: int, world: int) -> dict[str, Any]:
    """What the loop itself knows at each step: the norm of this rank's own gradient."""
    model = wrapped(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way == "scaled")
    run = sentinel.attach(model, optimizer, run_id=f"{way}-{world}")
    stage.connected(run)
    dist.barrier()
    own, hooks = [], set()
    for number in range(1, (LONG if way == "long" else STEPS) + 1):
        inputs, targets = stage.batch(number)
        share = slice(rank * stage.BATCH // world, (rank + 1) * stage.BATCH // world)
        optimizer.zero_grad()
        if way not in ("fsdp2", "long"):
            own.append(own_norm(model, inputs[share], targets[share]))
        hooks.add(hooks_on(model))
        evaluate(model, scaler, way, inputs[share], targets[share])
        scaler.step(optimizer)
        scaler.update()
        if way == "flipped" and number == FLIP_AT and rank == 1:
            with torch.no_grad():
                list(model.parameters())[-2][0, 0] += 1e-6
        run.report(samples=stage.BATCH // world)
    dist.barrier()
    run.detach()
    return {"own": own, "hooks": sorted(hooks), "left": hooks_on(model)}


def evaluate(model: Any, scaler: Any, way: str, inputs: Tensor, targets: Tensor) -> None:
    pieces = PIECES if way == "accumulated" else 1
    parts = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
    for place, (part, wanted) in enumerate(parts):
        alone = way == "unsynced" or place < len(parts) - 1
        with model.no_sync() if alone else contextlib.nullcontext():
            scaler.scale(stage.error(model(part), wanted) / pieces).backward()


def own_norm(model: Any, inputs: Tensor, targets: Tensor) -> float:
    twin = copy.deepcopy(model.module)
    used = [one for name, one in twin.named_parameters() if "idle" not in name]
    gradients = torch.autograd.grad(stage.error(twin(inputs), targets), used)
    return float(torch.stack([(one.double() ** 2).sum() for one in gradients]).sum().sqrt())


def hooks_on(model: nn.Module) -> int:
    """Post-accumulate hooks on all parameters."""
    return sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())


class Unused(nn.Module):
    """Has a layer that no batch uses."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.idle = layers, nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def wrapped(way: str) -> Any:
    model = stage.make_model()
    if way == "fsdp2":
        return fully_shard(model)
    if way == "unused":
        return DistributedDataParallel(Unused(model), find_unused_parameters=True)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=way == "views", static_graph=way == "static")
    if way == "hooked":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


if __name__ == "__main__":
    main(*sys.argv[1:])
