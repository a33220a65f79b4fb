"""A small training run that goes on until it is told otherwise: `python -m tests.end_to_end.patient_loop FOLDER`.

A file in FOLDER is a word to it: `break` asks for one NaN gradient, `stop` ends it. It answers with files of its own:
`steps` once it trains, `broken` once the NaN was there.
"""

import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import sentinel

MOST_SECONDS = 120.0
STEP_SECONDS = 0.02


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentinel.attach(model, optimizer, run_id="patient")
    pace, began = threading.Event(), time.monotonic()
    while not (folder / "stop").exists() and time.monotonic() - began < MOST_SECONDS:
        inputs = torch.randn(256, 8)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean() + 0.1
        loss.backward()
        if (folder / "break").exists() and not (folder / "broken").exists():
            model.weight.grad.fill_(float("nan"))
            (folder / "broken").touch()
        optimizer.step()
        optimizer.zero_grad()
        (folder / "steps").touch()
        pace.wait(STEP_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
