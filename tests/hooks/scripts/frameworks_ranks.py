"""One of two gloo ranks on which frameworks train, one after another: `... FOLDER RANK PORT NAME...`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.end_to_end.scripts import stage
from tests.hooks.frameworks import Training, load
from tests.hooks.lesson import Lesson, make

UPDATES, NAN_UPDATE = 12, 9  # of each rank; counted from 1
# Frameworks deal out batches or rows in turn: rank 0 gets all or some of this one's, rank 1 none or the others.
LESSON = Lesson(updates=2 * UPDATES, clip=0.5, nan_at=frozenset({2 * (NAN_UPDATE - 1)}))


def main(folder: str, rank: str, port: str, *names: str) -> None:
    told = stage.Stage(folder)
    os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for name in names:
        os.environ["SENTINEL_RUN_ID"] = name
        told.say(name, train(name, Path(folder) / f"{name}-output"))
    dist.destroy_process_group()
    told.say("end")


def train(name: str, folder: Path) -> dict[str, Any]:
    framework, parts = load(name), make(LESSON)

    def at_update(number: int, run: Any) -> None:
        if number == 2:
            stage.hold(lambda: run._loop.reflexes.acts, 60.0, "every rank is connected")

    updates = framework.train(Training(LESSON, parts, folder, framework.callback(), at_update))
    return {"updates": updates, "digest": stage.digest(parts.model), "nan_fired": parts.model.nan_fired}


if __name__ == "__main__":
    main(*sys.argv[1:])
