"""One of several gloo ranks under FSDP2: `... FOLDER RANK WORLD PORT SCENARIO...`, one run each.

Every rank takes its share of the same global batch, so that any world size computes the same gradients. After each
backward the script itself asks torch for the global norm, all ranks together, which is what a test compares with.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 12
NAN_AT = 6  # counted from 1, in the scenario "nan", in the shard of the last rank alone
NOT_SHARDED = "2.bias"  # in the scenario "mixed"


def main(folder: str, rank: str, world: str, port: str, *scenarios: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in scenarios:
        told.say(f"{scenario}-{world}", play(scenario, int(rank), int(world)))
    dist.destroy_process_group()
    told.say("end")


def play(scenario: str, rank: int, world: int) -> list[float]:
    """The global norm before each update, as torch has it."""
    model = sharded(scenario, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = sentinel.attach(model, optimizer, run_id=f"{scenario}-{world}")
    stage.connected(run)
    dist.barrier()
    norms = []
    for number in range(1, STEPS + 1):
        inputs, targets = stage.batch(number)
        share = slice(rank * stage.BATCH // world, (rank + 1) * stage.BATCH // world)
        optimizer.zero_grad()
        stage.error(model(inputs[share]), targets[share]).backward()
        gather_plain(model, world)
        if scenario == "nan" and number == NAN_AT and rank == world - 1:
            next(iter(model.parameters())).grad.to_local()[0] = float("nan")
        norms.append(true_norm(model))
        if scenario == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    dist.barrier()
    run.detach()
    return norms


def sharded(scenario: str, world: int) -> nn.Module:
    """Shards of odd size: 33 rows, and a last layer whose bias has one row for all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(stage.FEATURES, 33), nn.Tanh(), nn.Linear(33, 1))
    if scenario == "replicated":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    ignored = {model.get_parameter(NOT_SHARDED)} if scenario == "mixed" else None
    return fully_shard(model, ignored_params=ignored)


def gather_plain(model: nn.Module, world: int) -> None:
    """FSDP2 leaves the gradients of what it ignores alone; the loop averages them."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def true_norm(model: nn.Module) -> float:
    """`get_total_norm`, which raises on mixed parameters: of both kinds apart, and together by hand."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    kinds: tuple[list[Any], ...] = ([], [])
    for gradient in gradients:
        kinds[isinstance(gradient, DTensor)].append(gradient)
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(whole))
    return float(total)


if __name__ == "__main__":
    main(*sys.argv[1:])
