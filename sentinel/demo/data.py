"""The demo's training data: excerpts of the corpus in a fixed order, some of them poisoned."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sentinel.demo.plan import Plan

POISON = 5  # the one character that every target of a poisoned batch is


class Excerpts(Dataset[tuple[Tensor, Tensor, int]]):
    """(characters, their successors, number of the batch); the same excerpt under the same index, always."""

    def __init__(self, text: Tensor, plan: Plan, *, poisoned: bool) -> None:
        chance = torch.Generator().manual_seed(plan.seed + 1)
        self._text = text
        self._batch = plan.batch
        self._length = plan.shape.context
        size = plan.batches * plan.batch
        self._starts = torch.randint(len(text) - self._length - 1, (size,), generator=chance).tolist()
        first = plan.first_poisoned
        self._poisoned = range(first, first + plan.poisoned_batches) if poisoned else range(0)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        start, number = self._starts[index], index // self._batch
        text = self._text[start : start + self._length]
        following = self._text[start + 1 : start + self._length + 1]
        if number in self._poisoned:
            following = torch.full_like(following, POISON)
        return text, following, number


def loader(text: Tensor, plan: Plan, *, poisoned: bool) -> "DataLoader[tuple[Tensor, Tensor, int]]":
    """Batches in the order of the excerpts, which is random already."""
    return DataLoader(Excerpts(text, plan, poisoned=poisoned), batch_size=plan.batch)


def validation(text: Tensor, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """The same excerpts of the kept-aside text for every run and every seed."""
    chance = torch.Generator().manual_seed(0)
    places = torch.arange(plan.shape.context)
    found = []
    for _ in range(plan.validation_batches):
        starts = torch.randint(len(text) - plan.shape.context - 1, (plan.batch, 1), generator=chance)
        found.append((text[starts + places], text[starts + places + 1]))
    return found
