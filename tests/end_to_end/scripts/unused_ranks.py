"""One of two gloo ranks under DDP with a parameter that no loss reaches: `... FOLDER RANK PORT`.

The same loops without and with sentinel, so that a test can compare what became of them.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 12
UNUSED = 2  # parameters: weight and bias of the layer that is left out


class Partly(nn.Module):
    """Has a layer that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.left_out, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def main(folder: str, rank: str, port: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for find in (False, True):
        for attached in (False, True):
            name = f"{'found' if find else 'unfound'}{'-attached' if attached else ''}"
            told.say(name, train(int(rank), name, find=find, attached=attached))
    dist.destroy_process_group()
    told.say("end")


def train(rank: int, name: str, *, find: bool, attached: bool) -> dict[str, Any]:
    model = DistributedDataParallel(Partly(), find_unused_parameters=find)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = sentinel.attach(model, optimizer, run_id=name) if attached else None
    if run is not None:
        stage.connected(run)
    dist.barrier()
    error, done, rebuilt = "", 0, []
    try:
        for number in range(STEPS):
            inputs, targets = stage.batch(2 * number + rank)
            optimizer.zero_grad()
            stage.error(model(inputs), targets).backward()
            optimizer.step()
            done += 1
            rebuilt.append(bool(model._has_rebuilt_buckets))
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    if run is not None:
        run.detach()
    absent = sum(one.grad is None for one in model.parameters())
    return {"error": error, "steps": done, "rebuilt": rebuilt, "absent": absent, "digest": stage.digest(model)}


if __name__ == "__main__":
    main(*sys.argv[1:])
