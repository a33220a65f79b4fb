"""Decide at which steps a sampled signal is taken, so that all of them together cost no more than their share.

A signal is taken at steps that `every * 2**doublings` divides. Each rank doubles by what the signal costs there, so
ranks may differ, and still share every step of the coarsest. Two conditions hold for the next distance: it brings in
what one more sample costs, and the account, with all that was spent since attach, is even again when it is due.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

WARM_UP_STEPS = 3  # after attach: compiling, lazy state, DDP's rebuilt buckets
MOST_DOUBLINGS = 8  # with every_steps = 50: once in 12,800 steps
OVERRUNS_BEFORE_OFF = 2  # samples in a row that even the coarsest cadence cannot pay; one may be an accident
RECENT_STEPS = 65  # whose median is the step time


class Budget:
    """The accounts of all signals of one Run, in seconds of the loop."""

    def __init__(self, every_steps: int, cost_ratio: float) -> None:
        """`cost_ratio`: share of the step time for all signals in all."""
        self.every_steps = every_steps
        self.cost_ratio = cost_ratio
        self.elapsed_seconds = 0.0  # sum of all step times
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._accounts: dict[str, _Account] = {}
        self._first_step: int | None = None

    def stepped(self, seconds: float) -> None:
        """An attempt took so long; called for every one whose time is known."""
        self.elapsed_seconds += seconds
        self._recent.append(seconds)

    def begins(self, step: int) -> bool:
        """May anything be due at this step? Asked once per attempt; the first call tells where the Run begins."""
        if self._first_step is None:
            self._first_step = step
        return step % self.every_steps == 0 and step - self._first_step >= WARM_UP_STEPS

    def due(self, step: int, names: Iterable[str]) -> list[str]:
        """Which of these signals are taken at this step. All that are ever asked for share the budget."""
        found = [(name, self._accounts.setdefault(name, _Account())) for name in names]
        return [name for name, one in found if not one.off and step % (self.every_steps << one.doublings) == 0]

    def doublings(self, name: str) -> int:
        return self._accounts[name].doublings

    def close(self, name: str) -> None:
        """This signal is taken no more, and leaves its share to the others."""
        self._accounts.setdefault(name, _Account()).off = True

    def took(self, name: str, seconds: float) -> str | None:
        """What one sample cost. A sentence if the signal is switched off, because no cadence can pay it."""
        account = self._accounts[name]
        account.pay(seconds)
        if not self._recent:
            return None
        share = self.cost_ratio / max(1, sum(not one.off for one in self._accounts.values()))
        # What the account receives until the next sample, by how often the distance is doubled.
        steps = [self.every_steps << doublings for doublings in range(MOST_DOUBLINGS + 1)]
        incomes = [share * median(self._recent) * distance for distance in steps]
        debt = account.spent - share * self.elapsed_seconds
        enough = (n for n, income in enumerate(incomes) if account.cost <= income and debt + account.cost <= income)
        account.doublings = next(enough, MOST_DOUBLINGS)
        account.overruns = account.overruns + 1 if account.cost > incomes[-1] else 0
        account.off = account.overruns >= OVERRUNS_BEFORE_OFF
        if not account.off:
            return None
        return (
            f"the sampled signal {name} is switched off: one sample takes {account.cost:.3g} s, and its share of the "
            f"time of {steps[-1]} steps is {incomes[-1]:.3g} s; raise sampling.cost_ratio (now {self.cost_ratio:g}) "
            "or leave it out of sampling.signals"
        )


class _Account:
    """What one signal cost so far."""

    __slots__ = ("cost", "doublings", "off", "overruns", "spent")

    def __init__(self) -> None:
        self.cost = 0.0  # of one sample: falls slowly, rises at once
        self.spent = 0.0
        self.doublings = 0
        self.overruns = 0
        self.off = False

    def pay(self, seconds: float) -> None:
        self.spent += seconds
        self.cost = max(seconds, (self.cost + seconds) / 2)
