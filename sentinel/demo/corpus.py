"""Real text that every machine has: the standard library's own sources, as characters."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 4096  # characters; every tenth block is kept aside for validation
KEPT_ASIDE = 10


def sources(limit_bytes: int) -> str:
    """The standard library's top-level modules in alphabetical order, cut at `limit_bytes` characters."""
    pieces: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        pieces.append(text)
        size += len(text)
        if size >= limit_bytes:
            break
    return "".join(pieces)[:limit_bytes]


def encode(text: str) -> tuple[Tensor, int]:
    """Characters as numbers, and how many different ones there are. What is not printable ASCII becomes 0."""
    data = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8).long()
    printable = (data >= 32) & (data < 127)
    numbers = torch.where(printable, data - 30, torch.where(data == 10, 1, 0))
    return numbers, 127 - 30


def split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(training, validation), block by block, so that both hold text of every module."""
    blocks = numbers[: len(numbers) // BLOCK * BLOCK].view(-1, BLOCK)
    aside = torch.arange(len(blocks)) % KEPT_ASIDE == KEPT_ASIDE - 1
    return blocks[~aside].reshape(-1), blocks[aside].reshape(-1)
