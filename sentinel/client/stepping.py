"""Know which optimizer stands inside its step, and whether its closure is being evaluated just now."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from sentinel.client.optimizer import WatchedOptimizer


class Stepping:
    """One per loop. A step that raises never leaves; `broken` finds that out when the next thing happens."""

    def __init__(self) -> None:
        self.evaluations = 0
        self._repeated = 0
        self._inside: WatchedOptimizer | None = None
        self._evaluating = False

    def enter(self, watched: WatchedOptimizer) -> None:
        self._inside, self.evaluations, self._repeated = watched, 0, 0

    def leave(self) -> bool:
        """False: only the parent class's part of the step is over."""
        if self._repeated:
            self._repeated -= 1
            return False
        self._inside = None
        return True

    def repeats(self, watched: WatchedOptimizer) -> bool:
        """Is this step on the stack already? torch runs the hooks again where a subclass calls `super().step`."""
        if self._inside is not watched or _steps_on_stack(watched.target) < 2:
            return False
        self._repeated += 1
        return True

    @property
    def evaluating(self) -> WatchedOptimizer | None:
        """Whose closure is running, if one is: what backward makes then belongs to the step that goes on."""
        return self._inside if self._evaluating else None

    @property
    def broken(self) -> WatchedOptimizer | None:
        """Whose step was entered and has not been left, unless its closure is running."""
        return None if self._evaluating else self._inside

    def watch(
        self, closure: Callable[..., Any], before: Callable[[], object], after: Callable[[], object]
    ) -> Callable[..., Any]:
        """`step(closure)` makes its gradients inside: `before` and `after` run around each evaluation (O48)."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.evaluations += 1
            before()
            self._evaluating = True
            try:
                loss = closure(*args, **kwargs)
            finally:
                self._evaluating = False
            after()
            return loss

        return evaluate


def _steps_on_stack(optimizer: torch.optim.Optimizer) -> int:
    """Walks the stack, so it is asked only where the last step was not seen to end."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        count += frame.f_code is _STEP_CODE and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


# The wrapper that torch puts around `step` of every optimizer class, which runs the hooks.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda _self: None).__code__
