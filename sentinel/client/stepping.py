"""Know which optimizer stands inside its step, and whether its closure is being evaluated just now."""

from collections.abc import Callable
from typing import Any

from sentinel.client.optimizer import WatchedOptimizer


class Stepping:
    """One per loop. A step that raises never leaves; `broken` finds that out when the next thing happens."""

    def __init__(self) -> None:
        self.evaluations = 0
        self._inside: WatchedOptimizer | None = None
        self._evaluating = False

    def enter(self, watched: WatchedOptimizer) -> None:
        self._inside, self.evaluations = watched, 0

    def leave(self) -> None:
        self._inside = None

    @property
    def evaluating(self) -> WatchedOptimizer | None:
        """Whose closure is running, if one is: what backward makes then belongs to the step that goes on."""
        return self._inside if self._evaluating else None

    @property
    def broken(self) -> WatchedOptimizer | None:
        """Whose step was entered and has not been left, unless its closure is running."""
        return None if self._evaluating else self._inside

    def watch(self, closure: Callable[..., Any], after: Callable[[], object]) -> Callable[..., Any]:
        """`step(closure)` makes its gradients inside: `after` runs after each evaluation (O48)."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.evaluations += 1
            self._evaluating = True
            try:
                loss = closure(*args, **kwargs)
            finally:
                self._evaluating = False
            after()
            return loss

        return evaluate
