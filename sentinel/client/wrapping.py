"""Find the optimizer whose step really runs behind wrappers, and know what stands in its place (O54)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sentinel.client import reading
from sentinel.client.handle import Handle
from sentinel.errors import MisuseError

# Accelerate, Lookahead, fairseq | ZeroRedundancyOptimizer, PostLocalSGDOptimizer | Opacus | SAM
INNER = ("optimizer", "optim", "original_optimizer", "base_optimizer")


class Unwrapped(NamedTuple):
    """An optimizer and the objects around it, the outermost first."""

    inner: torch.optim.Optimizer
    outer: tuple[Any, ...]


def unwrap(given: Any) -> Unwrapped:
    """Follow the wrappers as far as they lead to an optimizer of the same parameters. Raises MisuseError.

    Inside ZeroRedundancyOptimizer is one for this rank's share of the parameters, but every gradient is here: the
    outer one is meant.
    """
    chain = [given]
    while (inner := _inside(chain[-1])) is not None and not any(inner is one for one in chain):
        chain.append(inner)
    *outer, last = chain
    if not isinstance(last, torch.optim.Optimizer):
        raise MisuseError(
            f"optimizer is a {type(given).__name__}; pass a torch.optim.Optimizer, "
            "a wrapper with .optimizer or .optim, or a list of them"
        )
    return Unwrapped(last, tuple(outer))


class Wrappers:
    """The objects around one optimizer, held weakly. Empty, it is false and costs nothing."""

    __slots__ = ("_handles", "_told")

    def __init__(self, outer: tuple[Any, ...] = ()) -> None:
        self._handles = [Handle(one) for one in outer]
        self._told = False

    def __bool__(self) -> bool:
        return bool(self._handles)

    def include(self, candidate: object) -> bool:
        return any(handle() is candidate for handle in self._handles)

    @property
    def ids(self) -> list[int]:
        return [id(handle()) for handle in self._handles]

    def disagreement(self, inner: torch.optim.Optimizer) -> str | None:
        """A sentence, once, if a wrapper shows another learning rate than the one that is used. Never syncs."""
        if self._told:
            return None
        used = _rates(inner)
        for handle in self._handles:
            outer = handle()
            shown = _rates(outer)
            for number, (theirs, mine) in enumerate(zip(shown, used, strict=False)):
                if not math.isclose(theirs, mine, rel_tol=1e-9):
                    self._told = True
                    return (
                        f"{type(outer).__name__} shows the learning rate {theirs:g} for parameter group {number}, "
                        f"but {type(inner).__name__} inside it, whose step runs, uses {mine:g}; let the scheduler "
                        "drive the inner one, or share its param_groups"
                    )
        return None


def _inside(current: Any) -> Any:
    for name in INNER:
        inner = getattr(current, name, None)
        if inner is None:
            continue
        if isinstance(current, torch.optim.Optimizer) and not _covers(inner, current):
            continue
        return inner
    return None


def _covers(inner: Any, outer: torch.optim.Optimizer) -> bool:
    """Does the inner one step on all that the outer one is about?"""
    groups = getattr(inner, "param_groups", None)
    if not isinstance(groups, list):
        return False
    return _parameters(outer.param_groups) <= _parameters(groups)


def _parameters(groups: list[dict[str, Any]]) -> set[int]:
    return {id(parameter) for group in groups for parameter in group["params"]}


def _rates(optimizer: Any) -> list[float]:
    """Learning rate of each group, as far as they are known without asking a device."""
    found: list[float] = []
    for group in getattr(optimizer, "param_groups", None) or ():
        rate = group.get("lr") if isinstance(group, dict) else None
        if rate is None or (isinstance(rate, Tensor) and not reading.is_free(rate)):
            break
        found.append(float(rate))
    return found
