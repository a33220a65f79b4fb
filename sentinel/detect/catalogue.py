"""The detectors that run, in a list that one can see."""

from collections.abc import Callable

from sentinel.detect.detector import Detector
from sentinel.detect.loss_divergence import LossDivergence
from sentinel.detect.loss_spike import LossSpike
from sentinel.detect.nonfinite import NonFinite
from sentinel.detect.rank_desync import RankDesync
from sentinel.detect.run_detector import RunDetector
from sentinel.detect_settings import DetectSettings

Factory = Callable[[DetectSettings], Detector | None]
RunFactory = Callable[[DetectSettings, int], RunDetector | None]

DEFAULT_DETECTORS: tuple[Factory, ...] = (
    lambda settings: NonFinite(settings.nonfinite) if settings.nonfinite.enabled else None,
    lambda settings: LossSpike(settings.loss_spike) if settings.loss_spike.enabled else None,
    lambda settings: LossDivergence(settings.loss_divergence) if settings.loss_divergence.enabled else None,
)

RUN_DETECTORS: tuple[RunFactory, ...] = (
    lambda settings, world_size: (
        RankDesync(settings.rank_desync, world_size) if settings.rank_desync.enabled else None
    ),
)


def build(settings: DetectSettings) -> tuple[Detector, ...]:
    """A fresh set of the enabled detectors, in the order in which they see each observation."""
    made = (factory(settings) for factory in DEFAULT_DETECTORS)
    return tuple(detector for detector in made if detector is not None)


def build_for_run(settings: DetectSettings, world_size: int) -> tuple[RunDetector, ...]:
    """A fresh set of the enabled detectors that compare ranks; none in a world of one."""
    made = (factory(settings, world_size) for factory in RUN_DETECTORS) if world_size > 1 else ()
    return tuple(detector for detector in made if detector is not None)
