"""Running statistics that a few wild values cannot pull away: level, trend and scale in O(1) a step.

Holt's linear exponential smoothing (C. C. Holt, 1957) on the logarithm of the loss, with three changes: residuals are
clipped before they enter (M. Gelper, R. Fried, C. Croux, "Robust forecasting with exponential and Holt-Winters
smoothing", 2010), the trend never points upwards (a rising loss is what is looked for, not what is learned), and the
scale is an exponential average of absolute residuals with a floor.
"""

import math
from typing import Any

import msgspec

LOSS_FLOOR = 0.01  # added before the logarithm: below it a loss has no interesting relative changes
SCALE_FLOOR = 0.01  # natural log units; a logged loss has about two stable decimals
CLIP = 3.0  # residuals enter the averages cut at so many scales
MEAN_TO_SIGMA = 1.2533  # sqrt(pi / 2): makes a mean absolute residual comparable to a standard deviation
PRIOR_SCALE = 0.10  # before the residuals are known: the noise of a small batch
PRIOR_WEIGHT = 4.0  # counts as so many residuals


class Baseline(msgspec.Struct):
    """Where a series should be next, and how far from there it usually is.

    >>> import random
    >>> random.seed(1)
    >>> base = Baseline()
    >>> for step in range(400):
    ...     base.learn(1.0 * 0.995**step * random.gauss(1.0, 0.02))
    >>> 0.01 < base.scale < 0.04
    True
    >>> round(base.deviation(1.0 * 0.995**400), 1) < 3 < base.deviation(1.3 * 0.995**400)
    True
    """

    level: float = 0.0  # the current value, smoothed; log units, or the value itself once it was negative
    trend: float = 0.0  # change per step, never positive
    spread: float = 0.0  # exponential average of absolute residuals
    wobble: float = 0.0  # the same of the values themselves
    samples: int = 0
    linear: bool = False  # a negative value has no logarithm: from then on the series is taken as it is

    ALPHA = 0.08
    BETA = 0.05
    GAMMA = 0.03

    @property
    def scale(self) -> float:
        """The usual size of a residual, like a standard deviation."""
        floor = SCALE_FLOOR * (max(abs(self.level), LOSS_FLOOR) if self.linear else 1.0)
        return max(floor, MEAN_TO_SIGMA * self.spread)

    def residual(self, value: float) -> float:
        """How far above its expected place a finite value lies, in log units (linear: in levels)."""
        if not self.samples:
            return 0.0
        return self.place(value) - (self.level + self.trend)

    def deviation(self, value: float) -> float:
        """The residual in scales: a robust z."""
        return self.residual(value) / self.scale

    def expected(self) -> float:
        """The value that would surprise nobody."""
        place = self.level + self.trend
        return place if self.linear else math.exp(min(place, 700.0)) - LOSS_FLOOR

    def learn(self, value: float) -> None:
        """Take a finite value in. The caller leaves anomalous ones out."""
        if value < 0 and not self.linear:
            self._become_linear()
        place = self.place(value)
        if not self.samples:
            self.level = place
            prior = PRIOR_SCALE * (max(abs(place), LOSS_FLOOR) if self.linear else 1.0) / MEAN_TO_SIGMA
            self.spread = max(prior, self.spread)
            self.samples = 1
            return
        self.wobble += max(self.GAMMA, 1.0 / self.samples) * (abs(value - self.expected()) - self.wobble)
        residual = place - (self.level + self.trend)
        limit = CLIP * self.scale
        cut = max(-limit, min(limit, residual))
        # A young baseline follows fast: the first averages are plain means.
        gain = max(self.ALPHA, 1.0 / (self.samples + 1))
        self.level += self.trend + gain * (cut if residual > 0 else max(residual, -3 * limit))
        self.trend = min(0.0, self.trend + self.BETA * gain * cut)
        share = max(self.GAMMA, 1.0 / (self.samples + PRIOR_WEIGHT))
        self.spread += share * (abs(cut) - self.spread)
        self.samples += 1

    def place(self, value: float) -> float:
        """The value on the axis of this baseline."""
        return value if self.linear else math.log(max(value, 0.0) + LOSS_FLOOR)

    def rise(self, value: float) -> float:
        """How far above the expected value, relative to it: 0.05 is five per cent."""
        residual = self.residual(value)
        if value - self.expected() < LOSS_FLOOR:
            return min(residual, 0.0)  # too little to be called a rise, however calm the series was
        return residual / max(abs(self.level), self.scale) if self.linear else math.expm1(min(residual, 700.0))

    def _become_linear(self) -> None:
        self.linear = True
        self.level = self.trend = 0.0
        self.spread = self.wobble
        self.samples = 0


def plain(struct: msgspec.Struct) -> dict[str, Any]:
    """A deep copy of a detector's memory as plain data."""
    copied: dict[str, Any] = msgspec.to_builtins(struct)
    return copied


def is_finite(value: float | None) -> bool:
    """True for a number that may enter a statistic; absent and non-finite ones may not."""
    return value is not None and math.isfinite(value)
