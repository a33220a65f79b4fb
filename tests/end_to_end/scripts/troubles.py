"""Train under one trouble of the environment after another: `python -m ...troubles FOLDER FILE`.

FILE is a JSON object: name of a trouble -> the variables that make it, and what must be said of it. Each is a run of
its own; between them a line `== NAME` on stderr. Says per trouble the digest of its weights, where it would look, and
how long its steps took.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import sentinel
from tests.end_to_end.scripts import stage

STEPS = 60
TOLD_SECONDS = 15.0


def main(folder: str, file: str) -> None:
    told = stage.Stage(folder)
    troubles = json.loads(Path(file).read_text())
    for name, trouble in troubles.items():
        print(f"== {name}", file=sys.stderr, flush=True)
        before = dict(os.environ)
        os.environ.update(trouble["variables"])
        wants_daemon = name in ("no port", "long home")
        told.say(name, train(Path(folder), trouble["says"], wants_daemon=wants_daemon))
        os.environ.clear()
        os.environ.update(before)
    print("== end", file=sys.stderr, flush=True)
    told.say("end")


def clean() -> str:
    """The digest of the same training without sentinel."""
    torch.set_num_threads(1)
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(STEPS):
        _step(model, optimizer, number)
    return stage.digest(model)


def train(folder: Path, says: str, *, wants_daemon: bool) -> dict[str, object]:
    model = stage.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = sentinel.attach(model, optimizer)
    heard = (folder / "err").stat().st_size  # the greeting included
    slowest = 0.0
    for number in range(STEPS):
        began = time.perf_counter()
        _step(model, optimizer, number)
        slowest = max(slowest, time.perf_counter() - began if number else 0.0)
        if number == STEPS // 2:
            if wants_daemon:  # it greets in spite of the trouble
                stage.hold(lambda: run._link.connected, TOLD_SECONDS, "the daemon greets")  # type: ignore[attr-defined]
            else:
                stage.hold(lambda: says in _since(folder, heard), TOLD_SECONDS, "the trouble is told")
    began = time.perf_counter()
    run.detach()
    seconds = time.perf_counter() - began
    digest = stage.digest(model)
    return {"digest": digest, "url": run.url, "run_id": run.run_id, "slowest": slowest, "detach_seconds": seconds}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs, targets = stage.batch(number)
    stage.error(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def _since(folder: Path, size: int) -> str:
    """What stderr got after its first `size` bytes."""
    return (folder / "err").read_bytes()[size:].decode(errors="replace")


if __name__ == "__main__":
    main(*sys.argv[1:])
