"""A loop that trains until it hears `stop`, and says how long its steps and its end took.

`python -m ...steady FOLDER [--break-every N] [--nan-loss-at K]`; says `trains` after the first steps.
"""

import argparse
import atexit
import statistics
import time

import torch

import sentinel
from tests.end_to_end.scripts import stage

MOST_STEPS = 60_000
PACE_SECONDS = 0.002


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--break-every", type=int, default=0)
    parser.add_argument("--nan-loss-at", type=int, default=-1)
    given = parser.parse_args()
    told = stage.Stage(given.folder)
    left_at: list[float] = []
    atexit.register(lambda: told.say("left", time.monotonic() - left_at[0]))  # runs after sentinel's own
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sentinel.attach(model, optimizer)
    seconds: list[float] = []
    broken: list[int] = []
    while not told.heard("stop") and len(seconds) < MOST_STEPS:
        began = time.perf_counter()
        inputs, targets = stage.batch(len(seconds) % 32)
        loss = stage.error(model(inputs), targets)
        if len(seconds) == given.nan_loss_at:
            loss = loss * float("nan")
            broken.append(run.step + 1)
        loss.backward()
        if given.break_every and len(seconds) % given.break_every == given.break_every - 1:
            stage.break_gradients(model)
            broken.append(run.step + 1)
        optimizer.step()
        optimizer.zero_grad()
        stage.pace(PACE_SECONDS)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == 20:
            told.say("trains")
    told.say("end", _summary(seconds) | {"step": run.step, "broken": broken, "finite": stage.is_finite(model)})
    left_at.append(time.monotonic())


def _summary(seconds: list[float]) -> dict[str, float]:
    steady = seconds[20:]  # the first ones import and allocate
    return {"steps": len(seconds), "median_seconds": statistics.median(steady), "max_seconds": max(steady)}


if __name__ == "__main__":
    main()
