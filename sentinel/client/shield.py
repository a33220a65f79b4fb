"""Keep sentinel's own failures out of the user's loop: the one exception boundary of the training process."""

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

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


S = TypeVar("S", bound=Shielded)


def shielded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """The method as the loop may call it: nothing raises but RunStopped, its time is counted, dead means no-op.

    Where the loop is compiled, Dynamo does not look into it, nor into what it calls.
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

    untraced: Any = torch.compiler.disable(guarded)
    return untraced  # type: ignore[no-any-return]  # functools.wraps names the first parameter, Callable does not


def describe(error: BaseException, limit: int = 400) -> str:
    """Type and text, without the frames that would keep the user's tensors alive."""
    return f"{type(error).__name__}: {text(error)[:limit]}"
