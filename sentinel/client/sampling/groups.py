"""Which layer group of the model a parameter belongs to: names that are the same on every rank and in every wrapping.

A group is the first indexed block of a name (`transformer.h.3`), else the module (`lm_head`, at most two parts deep).
Beyond 64 groups neighbours are merged (`layers.0..layers.1`). A tied weight belongs to the module that names it
first.
"""

from collections.abc import Iterable

from torch import Tensor

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.subject import Subject

MOST_GROUPS = 64
MOST_CHARACTERS = 120  # of a name
ROOT = "model"  # parameters of the model itself, outside any of its modules
OUTSIDE = "outside"  # parameters that only the optimizer knows
DEPTH = 2  # parts of a name without an index

# What DDP, torch.compile, FSDP1 and activation checkpointing put into names.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")


class Groups:
    """Asked at sampled steps only. Follows parameters that are added or replaced."""

    def __init__(self, subject: Subject, watched: list[WatchedOptimizer]) -> None:
        self._subject = subject
        self._watched = watched
        self._lists: list[list[Tensor]] = []  # of each optimizer, when the names were found
        self._names: dict[int, str] = {}

    def of(self, parameters: Iterable[Tensor]) -> list[str]:
        lists = [watched.parameters for watched in self._watched]
        if len(lists) != len(self._lists) or any(a is not b for a, b in zip(lists, self._lists, strict=True)):
            self._lists = lists
            named = [(plain(name), parameter) for name, parameter in self._subject.model.named_parameters()]
            merged = merge([group_of(name) for name, _ in named])
            self._names = {id(parameter): merged[group_of(name)] for name, parameter in named}
        return [self._names.get(id(parameter), OUTSIDE) for parameter in parameters]

    def close(self) -> None:
        self._lists, self._names = [], {}


def plain(name: str) -> str:
    """The name as the model has it when nothing is wrapped around it.

    >>> plain("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    for part in WRAPPERS:
        name = name.replace(part, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def group_of(name: str) -> str:
    """
    >>> [group_of(name) for name in ("transformer.h.3.attn.weight", "lm_head.weight", "encoder.pooler.dense.weight")]
    ['transformer.h.3', 'lm_head', 'encoder.pooler']
    >>> group_of("scale")
    'model'
    """
    *modules, _ = name.split(".")
    for place, part in enumerate(modules):
        if part.isdigit():
            return ".".join(modules[: place + 1])
    return ".".join(modules[:DEPTH]) or ROOT


def merge(groups: list[str]) -> dict[str, str]:
    """Each group's name once there are at most `MOST_GROUPS`; in the order in which the model names them.

    >>> sorted(set(merge([f"layers.{n}" for n in range(128)]).values()))[:2]
    ['layers.0..layers.1', 'layers.10..layers.11']
    """
    ordered = list(dict.fromkeys(groups))
    count = min(len(ordered), MOST_GROUPS - 1)  # one is left for OUTSIDE
    merged: dict[str, str] = {}
    for number in range(count):
        chunk = ordered[number * len(ordered) // count : (number + 1) * len(ordered) // count]
        name = chunk[0] if len(chunk) == 1 else f"{chunk[0]}..{chunk[-1]}"
        merged |= dict.fromkeys(chunk, name[-MOST_CHARACTERS:])
    return merged
