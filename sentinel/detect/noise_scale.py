"""The gradient noise scale: from which batch size on a larger batch helps less.

S. McCandlish, J. Kaplan, D. Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1: the
squared norm of a gradient over B samples is on average |G|^2 + tr(S) / B, with G the true gradient and S the
covariance of one sample's. Under data parallelism two batch sizes are seen at once, one rank's and the whole, so both
unknowns follow, without bias, and the noise scale is tr(S) / |G|^2. A single step tells little, and the quotient of
two noisy numbers is biased: numerator and denominator are averaged separately, as the paper does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

DECAY = 0.9  # of the averages, per sample
SAMPLES_BEFORE_TOLD = 5


class Moments(NamedTuple):
    """What one step tells; either may be negative, as estimates without bias are."""

    noise: float  # tr(S): the variance of one sample's gradient, summed over its components
    signal: float  # |G|^2


def moments(local_norms: Sequence[float], batch_sizes: Sequence[float], global_norm: float) -> Moments | None:
    """From each rank's own gradient norm and batch size, and the norm of the ranks' mean gradient. Pure.

    Ranks may have different batch sizes b: the mean of their squared norms is |G|^2 + tr(S) * mean(1/b), and the
    gradient that DDP makes, the plain mean over n ranks, has |G|^2 + tr(S) * mean(1/b) / n; for equal b this is the
    paper's formula. None for fewer than two ranks, or a batch size that is not positive.
    """
    ranks = len(local_norms)
    if ranks < 2 or len(batch_sizes) != ranks or any(not size > 0.0 for size in batch_sizes):
        return None
    small = sum(norm * norm for norm in local_norms) / ranks
    big = global_norm * global_norm
    per_sample = sum(1.0 / size for size in batch_sizes) / ranks
    noise = (small - big) / (per_sample - per_sample / ranks)
    return Moments(noise, big - noise * per_sample / ranks)


class NoiseScale(msgspec.Struct):
    """The two averages of one run.

    Sixteen samples on each of four ranks, every component of a sample's gradient being normal with mean 0.5 and
    variance 9: the noise scale is 9 / 0.25 = 36.

    >>> import random
    >>> draw, scale, size, ranks = random.Random(1), NoiseScale(), 200, 4
    >>> for step in range(200):
    ...     own = [[draw.gauss(0.5, 3.0 / 4.0) for _ in range(size)] for _ in range(ranks)]
    ...     mean = [sum(values) / ranks for values in zip(*own)]
    ...     norms = [sum(value * value for value in one) ** 0.5 for one in own]
    ...     found = scale.learn(moments(norms, [16.0] * ranks, sum(value * value for value in mean) ** 0.5))
    >>> 33 < found < 39
    True
    """

    noise: float = 0.0
    signal: float = 0.0
    samples: int = 0

    def learn(self, step: Moments | None) -> float | None:
        """Take one step in; the noise scale in samples, None while it cannot be told (too few steps, no signal)."""
        if step is None or not all(-_HUGE < value < _HUGE for value in step):  # NaN is not either
            return self.value
        self.samples += 1
        weight = max(1.0 - DECAY, 1.0 / self.samples)  # the first averages are plain means
        self.noise += weight * (step.noise - self.noise)
        self.signal += weight * (step.signal - self.signal)
        return self.value

    @property
    def value(self) -> float | None:
        if self.samples < SAMPLES_BEFORE_TOLD or self.signal <= 0.0 or self.noise < 0.0:
            return None
        return self.noise / self.signal


_HUGE = 1e300
