"""Keep sentinel's own failures out of the user's loop: the one exception boundary of the training process."""

import functools
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from sentinel.client.plain import text
from sentinel.errors import RunStopped

P = ParamSpec("P")
R = TypeVar("R")

FAILURES_BEFORE_OFF = 20  # after so many the Run goes silent: something is wrong with us, not with the loop


class Shielded(Protocol):
    """What a class needs so that its methods can be shielded."""

    dead: bool
    hook_seconds: float
    shield_depth: int

    def failed(self, where: str, error: Exception) -> None: ...


MARK = "_sentinel_shielded"
S = TypeVar("S", bound=Shielded)


def shielded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """The method as the loop may call it: nothing raises but RunStopped, its time is counted, dead means no-op.

    `untraced` keeps Dynamo out of it where the loop is compiled.
    """

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.dead:
            return None
        started = time.perf_counter()
        self.shield_depth += 1
        try:
            return method(self, *args, **kwargs)
        except RunStopped:
            raise
        except Exception as error:  # noqa: BLE001 -- the boundary: the loop is sacred
            self.failed(method.__name__, error)
            return None
        finally:
            self.shield_depth -= 1
            if not self.shield_depth:
                self.hook_seconds += time.perf_counter() - started

    setattr(guarded, MARK, True)
    return guarded  # type: ignore[return-value]  # functools.wraps names the first parameter, Callable does not


def untraced(instance: Shielded) -> None:
    """Keep Dynamo out of this instance's shielded methods, and out of what they call.

    Done in `attach` and not where the class is made: it imports Dynamo, which takes a second and makes a folder.
    """
    for name in dir(type(instance)):
        if getattr(getattr(type(instance), name), MARK, False):
            setattr(instance, name, torch.compiler.disable(getattr(instance, name)))


def describe(error: BaseException, limit: int = 400) -> str:
    """Type and text, without the frames that would keep the user's tensors alive."""
    return f"{type(error).__name__}: {text(error)[:limit]}"
