"""One of two gloo ranks under DDP: `... FOLDER RANK PORT SCENARIO...`; in "perturbed" rank 1 changes a weight."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sentinel
from tests.end_to_end.scripts import stage

EVERY = 10  # steps between two samples
STEPS = {"healthy": 1000, "perturbed": 60}
PERTURBED_AT = 23  # after this step, counted from 1
PERTURBATION = 1e-6


def main(folder: str, rank: str, port: str, *scenarios: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in scenarios:
        told.say(scenario, play(scenario, int(rank)))
    dist.destroy_process_group()
    told.say("end")


def play(scenario: str, rank: int) -> str:
    """The digest of the state at the end."""
    model = stage.make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampling = {"every_steps": EVERY, "signals": ["fingerprint"], "cost_ratio": 0.5}
    run = sentinel.attach(wrapped, optimizer, run_id=scenario, settings={"sampling": sampling})
    stage.connected(run)
    dist.barrier()
    for number in range(1, STEPS[scenario] + 1):
        inputs, targets = stage.batch(2 * number + rank)
        optimizer.zero_grad()
        stage.error(wrapped(inputs), targets).backward()
        optimizer.step()
        if scenario == "perturbed" and number == PERTURBED_AT and rank == 1:
            with torch.no_grad():
                model[2].weight[0, 3] += PERTURBATION
    dist.barrier()
    run.detach()
    return stage.digest(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
