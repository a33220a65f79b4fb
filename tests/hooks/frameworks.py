"""What a framework must offer to be tested. A new adapter joins with a file like its siblings, and one name here."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.hooks.lesson import AtUpdate, Lesson, Parts


class Training(NamedTuple):
    """One call of the framework's `train` or `fit`."""

    lesson: Lesson
    parts: Parts
    folder: Path
    callback: Any
    at_update: AtUpdate = lambda _number, _run: None
    save_at: int = 0  # write a checkpoint after so many updates
    resume: str | None = None  # begin from this checkpoint


class Framework(Protocol):
    """One adapter and the framework below it."""

    name: str

    def callback(self, **options: Any) -> Any:
        """The adapter's object; has `run`."""
        ...

    def train(self, training: Training) -> int:
        """Train; the framework's own count of updates at the end."""
        ...

    def checkpoint(self, folder: Path, updates: int) -> str:
        """Where `save_at` wrote to."""
        ...


FRAMEWORKS = ("transformers", "lightning")


def load(name: str) -> Framework:
    """The `FRAMEWORK` of `tests.hooks.with_<name>`, which imports that framework."""
    found: Framework = importlib.import_module(f"tests.hooks.with_{name}").FRAMEWORK
    return found
