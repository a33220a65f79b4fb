"""A short training whose output somebody pipes: `python -m ...piped FOLDER | tee log`. Prints when it leaves."""

import sys
import time

import torch

import sentinel
from tests.end_to_end.scripts import stage


def main() -> None:
    torch.set_num_threads(1)
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sentinel.attach(model, optimizer)
    stage.connected(run)
    for number in range(20):
        inputs, targets = stage.batch(number)
        stage.error(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("left at", time.monotonic(), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
