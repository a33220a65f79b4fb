"""One of two gloo ranks under DDP: `python -m ...ranks FOLDER RANK PORT WHO`, WHO attaches: `both` or `first`.

There is a poisoned window of batches on both, and near the end one NaN loss on rank 1, which DDP spreads.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 150
POISON = range(90, 110)
NAN_AT = 140
PACE_SECONDS = 0.01


def main(folder: str, rank: str, port: str, who: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["SENTINEL_RUN_ID"] = who
    model = stage.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = sentinel.attach(model, optimizer) if who == "both" or rank == "0" else None
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    if run is not None:
        stage.connected(run)
    dist.barrier()
    before_nan = ""
    for number in range(STEPS):
        inputs, targets = stage.batch(2 * number + int(rank))
        if number in POISON:
            targets = -20.0 * targets
        loss = stage.error(wrapped(inputs), targets)
        if number == NAN_AT and rank == "1":
            loss = loss * float("nan")
        before_nan = stage.digest(model) if number == NAN_AT else before_nan
        loss.backward()
        optimizer.step()
        if number == NAN_AT:
            told.say("nan", {"skipped": stage.digest(model) == before_nan, "finite": stage.is_finite(model)})
        optimizer.zero_grad()
        stage.pace(PACE_SECONDS)
    dist.barrier()
    dist.destroy_process_group()
    told.say("end", {"digest": stage.digest(model), "step": run.step if run is not None else None})


if __name__ == "__main__":
    main(*sys.argv[1:])
