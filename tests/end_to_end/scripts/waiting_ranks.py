"""One of several gloo ranks that wait for each other: `... FOLDER RANK WORLD PORT SCENARIO...`, one run each."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 20
LATE = 1  # the rank that is late in backward
LATE_SECONDS = 0.06
SLOW_LOADER = 2  # the rank whose loader is slow
LOADER_SECONDS = 0.05
PIECES = 3  # micro-batches of an accumulated update


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """A row is a whole batch; reading one takes long on one rank."""

    def __init__(self, rank: int) -> None:
        self._pause = LOADER_SECONDS if rank == SLOW_LOADER else 0.0
        self._rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stage.pace(self._pause)
        return stage.batch(10 * index + self._rank)


class Branches(nn.Module):
    """Uses one of its two branches, in turn, so that the parameter whose gradient is last is another each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.other, self.end = (nn.Linear(a, b) for a, b in ((8, 16), (8, 16), (16, 1)))
        self.turn = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.turn += 1
        return self.end(torch.tanh((self.front if self.turn % 2 else self.other)(inputs)))


class Recomputed(nn.Module):
    """Its layers run again in a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.end = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        flowing = inputs.requires_grad_()
        for layer in self.layers:
            flowing = checkpoint(layer, flowing, use_reentrant=True)
        return self.end(flowing)


class Rank:
    """What a scenario needs to know."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.hook_calls = 0
        self.delays = 0
        self.phase: Callable[[str], Any] = contextlib.nullcontext

    def late(self, output: Tensor) -> Tensor:
        """The same; on one rank its backward takes longer."""
        if self.number == LATE:
            output.register_hook(self._delay)
        return output

    def comm_hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A user's own: averages in another precision."""
        del state
        self.hook_calls += 1
        flat = bucket.buffer().double() / dist.get_world_size()
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(bucket.buffer().dtype))

    def _delay(self, gradient: Tensor) -> Tensor:
        self.delays += 1
        stage.pace(LATE_SECONDS)
        return gradient


def main(folder: str, rank: str, world: str, port: str, *scenarios: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scenario in scenarios:
        told.say(scenario, play(scenario, Rank(int(rank))))
    dist.barrier()
    dist.destroy_process_group()
    told.say("end")


def play(scenario: str, rank: Rank) -> dict[str, Any]:
    step: Callable[..., None] = update
    batches: Any = None
    if scenario == "hook":
        model = DistributedDataParallel(stage.make_model())
        model.register_comm_hook(None, rank.comm_hook)
    elif scenario == "unused":
        model = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    elif scenario == "recomputed":
        model = DistributedDataParallel(Recomputed(), static_graph=True)
    elif scenario == "accumulated":
        model, step = DistributedDataParallel(stage.make_model()), accumulated
    elif scenario == "fsdp2":
        model = sharded()
    elif scenario == "loader":
        model, batches = DistributedDataParallel(stage.make_model()), DataLoader(Slow(rank.number), batch_size=None)
        rank.late = lambda output: output  # type: ignore[method-assign]
    elif scenario == "own":
        model, step = stage.make_model(), own
    elif scenario == "wrapped_later":
        model = stage.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = sentinel.attach(model, optimizer, run_id=scenario)
    if scenario == "wrapped_later":
        model = DistributedDataParallel(model)
    stage.connected(run)
    dist.barrier()
    if scenario == "own":
        rank.phase = run.phase
        aside = in_background(rank)
    for inputs, targets in run.batches(batches) if batches else plain(rank.number):
        step(rank, model, optimizer, inputs, targets)
    if scenario == "own":
        aside.join()
    dist.barrier()
    run.detach()
    return {
        "hook_calls": rank.hook_calls,
        "delays": rank.delays,
        "digest": "" if scenario == "fsdp2" else stage.digest(model),
    }


def plain(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (stage.batch(10 * number + rank) for number in range(STEPS))


def update(rank: Rank, model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    stage.error(rank.late(model(inputs)), targets).backward()
    optimizer.step()


def accumulated(rank: Rank, model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    """Every piece's backward is late on one rank, but ranks meet only in the last."""
    optimizer.zero_grad()
    for piece in range(PIECES):
        with model.no_sync() if piece + 1 < PIECES else contextlib.nullcontext():
            stage.error(rank.late(model(inputs)), targets).backward()
    optimizer.step()


def own(rank: Rank, model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    """The loop averages by itself, and waits in a phase of its own too, which is no part of the step."""
    optimizer.zero_grad()
    stage.error(rank.late(model(inputs)), targets).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    with rank.phase("eval"):
        if rank.number == LATE:
            stage.pace(LATE_SECONDS)
        dist.barrier()


def in_background(rank: Rank) -> threading.Thread:
    """Waits for the late rank as well, in another thread, as a checkpoint being saved would."""
    group = dist.new_group(backend="gloo")

    def talk() -> None:
        for _ in range(STEPS):
            if rank.number == LATE:
                stage.pace(LATE_SECONDS)
            dist.barrier(group)

    thread = threading.Thread(target=talk)
    thread.start()
    return thread


def sharded() -> nn.Module:
    model = stage.make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
