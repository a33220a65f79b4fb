"""Attach, train a little, load a checkpoint, train on, meet a poisoned window: `python -m ...late_load FOLDER`."""

import copy
import sys
from typing import Any

import torch

import sentinel
from tests.end_to_end.scripts import stage

LOADED_AFTER = 70
ITERATIONS = 300
POISON = range(100, 108)
PACE_SECONDS = 0.004


def main(folder: str) -> None:
    told = stage.Stage(folder)
    saved = _trained()
    model = stage.make_model(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = sentinel.attach(model, optimizer)
    stage.connected(run)
    distances: list[float] = []  # right after each rollback
    reached = 0
    for number in range(ITERATIONS):
        if number == LOADED_AFTER:
            before = _distance(model, saved["model"])
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            told.say("loaded", {"step": run.step, "distance_before": before})
            told.wait("go on")
        inputs, targets = stage.batch(number)
        if number in POISON:
            targets = -40.0 * targets
        stage.error(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= LOADED_AFTER and run.step <= reached:
            distances.append(_distance(model, saved["model"]))
        reached = run.step
        stage.pace(PACE_SECONDS)
    told.say("end", {"step": run.step, "distances": distances, "finite": stage.is_finite(model)})


def _trained() -> dict[str, Any]:
    """The checkpoint of an earlier training."""
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for number in range(400):
        inputs, targets = stage.batch(5000 + number)
        stage.error(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _distance(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> float:
    """From the loaded weights; the state before the load is far away from them."""
    parts = [(tensor - saved[name]).norm() ** 2 for name, tensor in model.state_dict().items()]
    return float(torch.stack(parts).sum().sqrt())


if __name__ == "__main__":
    main(*sys.argv[1:])
