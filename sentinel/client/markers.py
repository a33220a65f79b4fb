"""Tell whose parameters a backward reached: hooks on the first and last parameter of each optimizer.

A post-accumulate hook costs 2.6 us; walking the graph would cost milliseconds (facts). Such hooks survive
torch.compile, and are neither copied nor pickled with a parameter.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn.parameter import is_lazy

from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.probing import Probing
from sentinel.client.tracing import compiler, set_compiler, untraced

Touched = dict[int, set[int]]  # by thread


class Owner(Protocol):
    """Of markers: the Loop. Its probes never raise."""

    probes: Probing


class Markers:
    """Each thread's backward is told apart: another model may be trained in another thread."""

    def __init__(self, owner: Owner) -> None:
        """Its probes are told in a backward of each marked parameter that it reaches."""
        self._owner = weakref.ref(owner)
        self._touched: Touched = {}
        self._ever = False
        self.guessed = 0  # backwards taken as ours before any marker had fired
        self._thread = 0  # of the last backward that was ours
        self.cleared = False  # the loop had taken all gradients away before the backward that runs now
        self._marked: dict[int, Tensor] = {}
        self._left: dict[int, tuple[int, int]] = {}  # identity and version of their gradients after the last backward
        self._handles: list[Any] = []

    def place(self, optimizers: list[WatchedOptimizer]) -> None:
        """Mark what can be reached; called again when a step had gradients that no marker saw."""
        chosen = [(number, one) for number, watched in enumerate(optimizers) for one in _ends(watched)]
        marked = {id(one): one for _, one in chosen}
        if marked.keys() == self._marked.keys():
            return
        self.remove()
        self._marked = marked
        for number, parameter in chosen:
            touch = _Touch(self._touched, number, self._owner)
            self._handles.append(parameter.register_post_accumulate_grad_hook(touch.touch))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._marked.clear()
        self._left.clear()

    def begin(self) -> None:
        """A backward begins in this thread."""
        thread = threading.get_ident()
        # In another thread another model is trained: a gradient that ours frees meanwhile must not be looked at.
        mine = thread == self._thread and bool(self._left)
        self.cleared = mine and all(self._marked[key].grad is None for key in self._left)
        self._touched[thread] = set()

    def end(self) -> None:
        """A backward of ours has returned: this is how it left the gradients."""
        self._thread = threading.get_ident()
        holders = ((key, one.grad) for key, one in self._marked.items() if one.grad is not None)
        self._left = {key: (id(gradient), gradient._version) for key, gradient in holders}

    def rewritten(self, watched: WatchedOptimizer) -> bool:
        """Were this optimizer's gradients written to since the last backward? GradScaler's unscaling does not count:
        the operation it uses leaves a tensor's version as it was.
        """
        for key, (identity, version) in self._left.items():
            gradient = self._marked[key].grad if watched.holds(key) else None
            if gradient is not None and (id(gradient) != identity or gradient._version != version):
                return True
        return False

    def replaced(self, watched: WatchedOptimizer) -> bool:
        """Did the loop put other gradients in the place of those that the last backward left?"""
        for key, (identity, _) in self._left.items():
            gradient = self._marked[key].grad if watched.holds(key) else None
            if gradient is not None and id(gradient) != identity:
                return True
        return False

    @property
    def touched(self) -> set[int]:
        """Numbers of the optimizers that this thread's last backward reached."""
        return self._touched.get(threading.get_ident(), set())

    def reached(self, *, alone: bool, apart: Callable[[], bool]) -> bool:
        """Did the last backward reach us? Until a marker has fired once, a lone Run takes every backward as its own:
        the marked parameters may be unused ones. `apart` tells whether it was one that no hook can tell of.
        """
        if self.touched:
            self._ever = True
            return True
        if apart():
            return True
        guess = alone and not self._ever
        self.guessed += guess
        return guess


def _ends(watched: WatchedOptimizer) -> list[Tensor]:
    """First and last of the parameters that hold a gradient, else of those that may get one."""
    trainable = [one for one in watched.parameters if one.requires_grad and one.is_leaf and not is_lazy(one)]
    holders = [one for one in trainable if one.grad is not None] or trainable
    return list({id(one): one for one in holders[:1] + holders[-1:]}.values())


class _Touch:
    """A hook without a reference to the Run: the parameter may outlive it."""

    __slots__ = ("_number", "_owner", "_touched")

    def __init__(self, touched: Touched, number: int, owner: "weakref.ref[Owner]") -> None:
        self._touched = touched
        self._number = number
        self._owner = owner

    def touch(self, parameter: Tensor) -> None:
        compiling = compiler()
        if compiling is None:
            self._tell(parameter)
            return
        set_compiler(None)
        try:
            self._tell(parameter)
        finally:
            set_compiler(compiling)

    def _tell(self, parameter: Tensor) -> None:
        mine = self._touched.get(threading.get_ident())
        # A device has an autograd thread of its own: whose backward it serves is not known there.
        for touched in [mine] if mine is not None else list(self._touched.values()):
            touched.add(self._number)
        owner = self._owner()
        if owner is not None:
            owner.probes.touched(parameter)


untraced(_Touch.touch, recursive=True)
