"""The detectors that run, in a list that one can see."""

from collections.abc import Callable

from sentinel.config import DetectSettings
from sentinel.detect.detector import Detector
from sentinel.detect.loss_divergence import LossDivergence
from sentinel.detect.loss_spike import LossSpike
from sentinel.detect.nonfinite import NonFinite

Factory = Callable[[DetectSettings], Detector | None]

DEFAULT_DETECTORS: tuple[Factory, ...] = (
    lambda settings: NonFinite(settings.nonfinite) if settings.nonfinite.enabled else None,
    lambda settings: LossSpike(settings.loss_spike) if settings.loss_spike.enabled else None,
    lambda settings: LossDivergence(settings.loss_divergence) if settings.loss_divergence.enabled else None,
)


def build(settings: DetectSettings) -> tuple[Detector, ...]:
    """A fresh set of the enabled detectors, in the order in which they see each observation."""
    made = (factory(settings) for factory in DEFAULT_DETECTORS)
    return tuple(detector for detector in made if detector is not None)
