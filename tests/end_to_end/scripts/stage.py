"""What the training scripts share: files as words between script and test, a small model, seeded data, a pace."""

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 8
BATCH = 64

_never = threading.Event()


class Stage:
    """The script's side of `tests.end_to_end.jobs.Job`."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._folder = Path(folder)

    def say(self, name: str, value: Any = None) -> None:
        """Whole or not at all: a rename."""
        draft = self._folder / f"{name}.draft"
        draft.write_text(json.dumps(value))
        draft.replace(self._folder / name)

    def heard(self, name: str) -> bool:
        return (self._folder / name).exists()

    def wait(self, name: str, seconds: float = 60.0) -> None:
        """Hold the loop until the test says `name`."""
        hold(lambda: self.heard(name), seconds, name)


def hold(condition: Any, seconds: float, what: str) -> None:
    """Wait for a condition with a deadline; training does not go on before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        _never.wait(0.005)


def pace(seconds: float) -> None:
    """Make a step of a tiny model last as long as one of a small real one."""
    _never.wait(seconds)


def connected(run: Any, seconds: float = 60.0) -> None:
    """Hold until the daemon has greeted."""
    hold(lambda: run.url, seconds, "the daemon greets")


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Batch `number` of an endless stream that is the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 + number)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    noise = torch.randn(BATCH, 1, generator=generator)
    return inputs, inputs[:, :4].sum(1, keepdim=True) + 0.5 * noise


def error(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean()


def break_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))


def is_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())


def digest(model: nn.Module) -> str:
    """SHA-256 of the state, bit for bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
