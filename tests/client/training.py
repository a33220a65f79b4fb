"""Small training runs for the tests of the client: seeded, one thread, nothing but torch."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FEATURES, CLASSES = 16, 4


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Separable classes with noise; the same on every machine."""

    def __init__(self, size: int = 512) -> None:
        generator = torch.Generator().manual_seed(7)
        self.targets = torch.randint(0, CLASSES, (size,), generator=generator)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        self.inputs = centres[self.targets] + 0.5 * torch.randn(size, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Setup(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


def make(
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, dropout: float = 0.1, seed: int = 0
) -> Setup:
    """A two-layer classifier with dropout and batch norm (buffers), and an optimizer over it."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)
    )
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    return Setup(model, make_optimizer(model.parameters()))


def loader(batch_size: int = 16, size: int = 512, workers: int = 0, **more: Any) -> "DataLoader[Any]":
    return DataLoader(Numbers(size), batch_size=batch_size, shuffle=True, num_workers=workers, **more)


def forever(batches: Callable[[], Any], steps: int) -> Iterator[Any]:
    """Epoch after epoch until so many batches were seen."""
    seen = 0
    while True:
        for batch in batches():
            if seen == steps:
                return
            seen += 1
            yield batch


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return len(left) == len(right) and all(
        torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        for one, other in zip(left, right, strict=True)
    )
