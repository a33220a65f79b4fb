"""Train with DataLoader workers after `attach`, of one start method after another: `python -m ... FOLDER METHOD...`.

A child that is forked at the end outlives the trainer. With `hold` as the last word the last loader goes on, its
workers alive, until the trainer is killed.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 40


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """What a worker of any start method can make."""

    def __len__(self) -> int:
        return STEPS * 16

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = stage.batch(place)
        return inputs[0], targets[0]


def main(folder: str, *words: str) -> None:
    told = stage.Stage(folder)
    methods = [word for word in words if word != "hold"]
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sentinel.attach(model, optimizer)
    stage.connected(run)
    for method in methods:
        loader = DataLoader(Numbers(), batch_size=16, num_workers=1, multiprocessing_context=method)
        for inputs, targets in loader:
            stage.error(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "hold" in words and run.step == STEPS // 2:
                told.say("holds", os.getpid())
                told.wait("let go")
    if os.fork() == 0:
        told.wait("let go", 120.0)  # a forked child that keeps every descriptor of its parent
        os._exit(0)
    told.say("end", {"step": run.step, "finite": stage.is_finite(model)})


if __name__ == "__main__":
    main(*sys.argv[1:])
