"""Each framework trains through one NaN gradient and one poisoned window, with a real daemon beside it.

`python -m tests.hooks.scripts.frameworks_train FOLDER NAME...` teaches the named courses one after another, each as a
run of its own name, and says of each what really happened in it.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.end_to_end.scripts import stage
from tests.hooks.frameworks import Training, load
from tests.hooks.lesson import Lesson, make
from tests.hooks.scripts import language

NAN_UPDATE, POISONED_UPDATES = 70, range(150, 160)  # counted from 0
WAIT_UPDATE = 40  # what came before had no daemon yet
ACCUMULATION = 2
COURSE = Lesson(
    updates=300,
    accumulation=ACCUMULATION,
    clip=0.5,
    rows=32,
    nan_at=frozenset({NAN_UPDATE * ACCUMULATION}),
    poison=range(POISONED_UPDATES.start * ACCUMULATION, POISONED_UPDATES.stop * ACCUMULATION),
    pace_seconds=0.002,
)


class Truth(NamedTuple):
    """What really happened, told to the test."""

    nan_fired: int
    poison_step: int  # the run's number for the first poisoned update
    framework_updates: int
    run_steps: int
    finite: bool


class Watch:
    """Holds until the daemon is there, and notes the run's own numbers."""

    def __init__(self) -> None:
        self.run: Any = None
        self.poison_step = 0

    def __call__(self, number: int, run: Any) -> None:
        self.run = run
        if number == WAIT_UPDATE:
            stage.connected(run)
        if number == POISONED_UPDATES.start + 1:
            self.poison_step = run.step + 1

    def truth(self, model: Any, updates: int) -> Truth:
        return Truth(model.nan_fired, self.poison_step, updates, self.run.step, stage.is_finite(model))


def regression(name: str, folder: Path) -> Truth:
    framework = load(name)
    watch, parts = Watch(), make(COURSE)
    updates = framework.train(Training(COURSE, parts, folder, framework.callback(), watch))
    return watch.truth(parts.model, updates)


def gpt2(folder: Path) -> Truth:
    """A tiny GPT-2 with everything that the Trainer makes by itself: optimizer, schedule, clipping, loss, log."""
    watch = Watch()
    spoiled = frozenset(range(COURSE.poison.start, COURSE.poison.stop))
    rows = language.rows(COURSE.batches, nan_at=COURSE.nan_at, poison=spoiled)
    model, updates = language.train(rows, ACCUMULATION, folder, watch)
    return watch.truth(model, updates)


COURSES = {
    "transformers": lambda folder: regression("transformers", folder),
    "lightning": lambda folder: regression("lightning", folder),
    "gpt2": gpt2,
}


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    told = stage.Stage(folder)
    for name in names:
        os.environ["SENTINEL_RUN_ID"] = name
        told.say(name, COURSES[name](Path(folder) / f"{name}-output")._asdict())
    told.say("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
