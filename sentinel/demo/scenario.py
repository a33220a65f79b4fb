"""The demo's runs, side by side: what is trained under which faults, with and without sentinel."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch

from sentinel.demo.plan import Faults, Plan
from sentinel.demo.training import Result, Text, load_text, train


class Variant(StrEnum):
    """The runs, in the order in which they are trained and shown."""

    CLEAN = "clean"
    WINDOW = "window alone"
    FAULTY = "both faults"
    PROTECTED = "with sentinel"


class Setup(NamedTuple):
    faults: Faults
    protected: bool
    words: str


SETUPS = {
    Variant.CLEAN: Setup(Faults(), protected=False, words="no fault"),
    Variant.WINDOW: Setup(Faults(poisoned_window=True), protected=False, words="poisoned window, unprotected"),
    Variant.FAULTY: Setup(
        Faults(nan_gradient=True, poisoned_window=True), protected=False, words="NaN and window, unprotected"
    ),
    Variant.PROTECTED: Setup(
        Faults(nan_gradient=True, poisoned_window=True), protected=True, words="NaN and window, with sentinel"
    ),
}

Watcher = Callable[[Variant, int, float], None]  # run, step, loss


def play(plan: Plan, home: Path, watch: Watcher) -> dict[Variant, Result]:
    """Train every variant. What sentinel records goes to `home`."""
    with _one_thread():
        text = load_text(plan)
        return {variant: _one(variant, text, plan, home, watch) for variant in Variant}


def _one(variant: Variant, text: Text, plan: Plan, home: Path, watch: Watcher) -> Result:
    setup = SETUPS[variant]
    with _home(home):
        return train(
            text, plan, setup.faults, lambda step, loss: watch(variant, step, loss), protected=setup.protected
        )


def again(plan: Plan, home: Path, watch: Watcher, enough: Callable[[], bool]) -> None:
    """Train the protected run over and over, so that there is something to look at, until `enough()`."""
    setup = SETUPS[Variant.PROTECTED]
    with _one_thread(), _home(home):
        text = load_text(plan)
        while not enough():
            train(
                text,
                plan,
                setup.faults,
                lambda step, loss: watch(Variant.PROTECTED, step, loss),
                protected=True,
                enough=enough,
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same everywhere, and the other core is the daemon's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _home(home: Path) -> Iterator[None]:
    """SENTINEL_HOME for a while, and none of the variables that would choose another run or mode."""
    names = ("SENTINEL_HOME", "SENTINEL_MODE", "SENTINEL_RUN_ID", "SENTINEL_SETTINGS", "TORCHELASTIC_RUN_ID")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ["SENTINEL_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["SENTINEL_HOME"]
        os.environ.update(before)
