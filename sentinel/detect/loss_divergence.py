"""Find a loss that drifts away from its best level and does not come back.

A fast exponential average of the log loss is compared with the lowest it ever was. A drift is `drift`, or the usual
noise of the loss where that is more. Each step on which the average stays more than a drift above adds its distance
in drifts, at most 4, to a sum (a one-sided CUSUM: E. S. Page, "Continuous inspection schemes", 1954); a step below
empties it. The sum at `hold_steps` is a divergence: a small drift is confirmed after `hold_steps` steps, a steep one
four times sooner. At half of the sum a notice goes out, so that a good snapshot is kept before the ring has rotated
past the onset.
"""

import math
from typing import Any

import msgspec

from sentinel.detect.statistics import LOSS_FLOOR, MEAN_TO_SIGMA, is_finite, plain
from sentinel.detect_settings import LossDivergenceSettings
from sentinel.records import Finding, Observation, StepRecord
from sentinel.vocabulary import Kind, Severity, Tier, UpdateResult

GAIN = 0.05  # of the fast average: remembers about 20 steps
SPREAD_GAIN = 0.01
MOST_DRIFTS = 4.0  # what one step can add
STEP_LIMIT = 0.3  # log units: a step moves the average up by at most GAIN times this; a short jump is no drift
BEST_FORGETS = 2000.0  # the best level rises by one drift in about so many steps: an epoch of harder data is no fault
RELEARN_STEPS = 200  # a level that stays so long after its confirmation is the new normal


class Memory(msgspec.Struct):
    """All that the detector knows."""

    fast: float = 0.0  # average of log(loss + floor)
    best: float = 0.0
    spread: float = 0.0  # average distance of a value from the fast average
    samples: int = 0
    drifts: float = 0.0  # the sum
    onset_step: int = 0
    confirmed_steps: int = 0
    off: bool = False  # the loss was negative: it has no logarithm


class LossDivergence:
    """Kind loss_divergence: tier T1 as a notice, T3 once confirmed.

    >>> from sentinel.records import StepRecord
    >>> detector = LossDivergence(LossDivergenceSettings())
    >>> tiers = []
    >>> for step in range(1, 400):
    ...     loss = 2.0 * (1.01 ** max(0, step - 200))
    ...     found = detector.observe(StepRecord(step, 0, step, 0.0, UpdateResult.APPLIED, loss=loss))
    ...     if found and found.tier not in tiers:
    ...         tiers.append(found.tier)
    ...         print(found.tier.value, found.step, found.onset_step)
    T1 244 209
    T3 257 209
    """

    name = "loss_divergence"

    def __init__(self, settings: LossDivergenceSettings) -> None:
        self._settings = settings
        self._memory = Memory()

    def observe(self, seen: Observation) -> Finding | None:
        if not isinstance(seen, StepRecord) or seen.result is UpdateResult.TURN or not is_finite(seen.loss):
            return None
        assert seen.loss is not None
        memory = self._memory
        memory.off = memory.off or seen.loss < 0
        if memory.off:
            return None
        self._follow(math.log(seen.loss + LOSS_FLOOR), seen.step)
        if memory.drifts < self._settings.hold_steps / 2:
            return None
        return self._finding(seen)

    def state(self) -> dict[str, Any]:
        return plain(self._memory)

    def restore(self, state: dict[str, Any]) -> None:
        self._memory = msgspec.convert(state, Memory)

    def _follow(self, place: float, step: int) -> None:
        memory = self._memory
        memory.samples += 1
        gain = max(GAIN, 1.0 / memory.samples)
        residual = min(STEP_LIMIT, place - memory.fast) if memory.samples > 1 else place
        memory.fast += gain * residual
        if memory.drifts == 0.0 and memory.samples > 1:
            memory.spread += max(SPREAD_GAIN, 1.0 / memory.samples) * (min(abs(residual), 1.0) - memory.spread)
        drift = max(self._settings.drift, MEAN_TO_SIGMA * memory.spread)
        if memory.samples < self._settings.warmup_steps:
            memory.best = memory.fast
            memory.onset_step = step + 1
            return
        distance = (memory.fast - memory.best) / drift
        if distance < 0.2:
            memory.onset_step = step + 1
        if distance <= 1.0:
            memory.drifts, memory.confirmed_steps = 0.0, 0
        else:
            memory.drifts += min(distance, MOST_DRIFTS)
        if memory.drifts >= self._settings.hold_steps:
            memory.confirmed_steps += 1
        if memory.confirmed_steps > RELEARN_STEPS:
            memory.best, memory.drifts, memory.confirmed_steps = memory.fast, 0.0, 0
        elif memory.fast < memory.best:
            memory.best = memory.fast
        elif memory.drifts == 0.0:
            memory.best += drift / BEST_FORGETS

    def _finding(self, seen: StepRecord) -> Finding:
        memory = self._memory
        confirmed = memory.drifts >= self._settings.hold_steps
        best = math.exp(memory.best) - LOSS_FLOOR
        return Finding(
            kind=Kind.LOSS_DIVERGENCE,
            severity=Severity.CRITICAL if confirmed else Severity.WARNING,
            tier=Tier.T3 if confirmed else Tier.T1,
            step=seen.step,
            onset_step=min(memory.onset_step, seen.step),
            detector=self.name,
            summary=f"loss drifted from {best:.4g} to {math.exp(memory.fast):.4g} since step {memory.onset_step}",
            value=seen.loss,
            expected=best,
            evidence={"drift": round(memory.fast - memory.best, 3), "sum_ratio": round(memory.drifts, 1)},
        )
