"""Measure all arms in turn, again and again, until the time is up.

Each sweep has one block of each arm, in an order that is drawn anew for every second sweep and reversed in the one
after it (ABBA), so that no arm is always late or always behind the same one: what an arm leaves behind, in caches or
in another process, falls on all alike. The two kinds of loop take turns.
"""

import importlib
import random
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.benchmarks.rivals.arms import BARE, SENTINEL, Arm
from tests.benchmarks.rivals.compare import Blocks
from tests.benchmarks.rivals.loop import SKIPPED, Block, Step, Trainer

STEPS = 6  # of a block that count
SETTLING = 20  # first steps of a long stretch; the first snapshots come before their cost is known
FEWEST = 3  # sweeps of each kind, however long they take

CLIPS = {"the loop clips": True, "the loop does not clip": False}


class Usable(NamedTuple):
    arms: list[Arm]
    missing: dict[str, str]  # name -> why it was not measured


def usable(arms: tuple[Arm, ...], trainer: Trainer, folder: Path) -> Usable:
    """Try every arm once, uncounted: what is slow at first is over then, and what fails is named in the table."""
    found = Usable([], {})
    for arm in arms:
        try:
            if arm.module:
                importlib.import_module(arm.module)
            _block(arm, trainer, folder / f"trial-{len(found.arms)}", clip=True)
        except ImportError as error:
            found.missing[arm.name] = f"not installed here ({error})"
        except Exception as error:  # a tracker that cannot work here is no reason to measure none
            if arm.name in {BARE, SENTINEL}:
                raise
            found.missing[arm.name] = f"failed here ({type(error).__name__}: {error})"
        else:
            found.arms.append(arm)
    return found


def measure(arms: list[Arm], trainer: Trainer, folder: Path, seconds: float) -> dict[str, Blocks]:
    """Kind of loop -> arm -> blocks. Only whole sweeps, as many of each kind."""
    measured: dict[str, Blocks] = {kind: {arm.name: [] for arm in arms} for kind in CLIPS}
    end = time.monotonic() + seconds
    longest = 0.0
    for number in count():
        started = time.monotonic()
        if number >= FEWEST and started + longest > end:
            return measured
        for kind, clip in CLIPS.items():
            for place, arm in enumerate(order(arms, number)):
                home = folder / f"{number}-{int(clip)}-{place}"
                measured[kind][arm.name].append(_block(arm, trainer, home, clip=clip))
        longest = max(longest, time.monotonic() - started)
    raise AssertionError("count() does not end")


def order(arms: list[Arm], sweep: int) -> list[Arm]:
    """Of one sweep; the same in every run."""
    drawn = random.Random(sweep // 2).sample(arms, len(arms))
    return drawn[::-1] if sweep % 2 else drawn


class Stretch(NamedTuple):
    """One long block."""

    steps: list[Step]
    snapshots: int  # taken in it


def stretch(arm: Arm, trainer: Trainer, folder: Path, most_steps: int, most_seconds: float) -> Stretch:
    """A loop that clips goes on for long: what comes seldom is in it. The time may end it early."""
    folder.mkdir()
    started = time.monotonic()
    with arm.open(trainer, folder) as use:
        trainer.block(use, 0, clip=True, skipped=SETTLING)
        before = use.snapshots()
        taken: list[Step] = []
        while len(taken) < most_steps and time.monotonic() - started < most_seconds:
            taken += trainer.block(use, 1, clip=True, skipped=0)
        return Stretch(taken, use.snapshots() - before)


def _block(arm: Arm, trainer: Trainer, folder: Path, *, clip: bool) -> Block:
    folder.mkdir()
    with arm.open(trainer, folder) as use:
        before = _beside()
        taken = trainer.block(use, STEPS, clip=clip)
        return Block(taken, (_beside() - before) / (SKIPPED + STEPS))


def _beside() -> float:
    """CPU seconds so far of the processes below this one: sentinel's daemon, a tracker's core. In ticks of 10 ms."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
    return total
