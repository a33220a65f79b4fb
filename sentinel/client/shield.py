"""Keep sentinel's own failures out of the user's loop: the one exception boundary of the training process."""

import functools
from collections.abc import Callable
from time import perf_counter as clock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sentinel.client.plain import text
from sentinel.client.tracing import compiler, set_compiler, untraced
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

    Where the loop is compiled, Dynamo stays out of it and of what it calls.
    """

    @functools.wraps(method)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.dead:
            return None
        started = clock()
        self.shield_depth += 1
        compiling = compiler()
        try:
            if compiling is not None:
                set_compiler(None)
            return method(self, *args, **kwargs)
        except RunStopped:
            raise
        except Exception as error:  # noqa: BLE001 -- the boundary: the loop is sacred
            self.failed(method.__name__, error)
            return None
        finally:
            if compiling is not None:
                set_compiler(compiling)
            self.shield_depth -= 1
            if not self.shield_depth:
                self.hook_seconds += clock() - started

    # functools.wraps names the first parameter, Callable does not
    return untraced(guarded, recursive=True)  # type: ignore[return-value]


def describe(error: BaseException, limit: int = 400) -> str:
    """Type and text, without the frames that would keep the user's tensors alive."""
    return f"{type(error).__name__}: {text(error)[:limit]}"
