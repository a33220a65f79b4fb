"""Settings of the detectors: one documented class each, gathered in `DetectSettings` ([detect])."""

from dataclasses import dataclass, field

from sentinel.checks import at_least, positive


@dataclass(frozen=True, slots=True)
class LossSpikeSettings:
    """[detect.loss_spike] Abrupt jumps of the loss. Numbers: tuned on public curves, see docs/detection.md."""

    enabled: bool = True  # false: this detector does not run
    z: float = 6.0  # robust z of the log residual that counts as high
    rise_ratio: float = 0.05  # and the loss at least this much above its level
    hits: int = 3  # so many high steps ...
    window: int = 5  # ... of the last so many confirm
    z_fast: float = 8.0  # the fast rule: higher z
    rise_ratio_fast: float = 0.20  # and higher above the level
    hits_fast: int = 2  # but fewer such steps ...
    window_fast: int = 3  # ... of fewer confirm
    warmup_steps: int = 50  # samples before the baseline is trusted
    rail_ratio: float = 2.0  # before that: a loss this many times the lowest so far is high

    def __post_init__(self) -> None:
        positive("detect.loss_spike.z", self.z)
        positive("detect.loss_spike.z_fast", self.z_fast)
        at_least("detect.loss_spike.hits", self.hits, 1)
        at_least("detect.loss_spike.window", self.window, self.hits)
        at_least("detect.loss_spike.hits_fast", self.hits_fast, 1)
        at_least("detect.loss_spike.window_fast", self.window_fast, self.hits_fast)
        at_least("detect.loss_spike.warmup_steps", self.warmup_steps, 2)


@dataclass(frozen=True, slots=True)
class LossDivergenceSettings:
    """[detect.loss_divergence] Slow drift away from the best level."""

    enabled: bool = True  # false: this detector does not run
    drift: float = 0.08  # natural log units of the fast average above its best
    hold_steps: int = 100  # for so many steps in a row
    warmup_steps: int = 50  # samples before there is a best level

    def __post_init__(self) -> None:
        positive("detect.loss_divergence.drift", self.drift)
        at_least("detect.loss_divergence.hold_steps", self.hold_steps, 1)


@dataclass(frozen=True, slots=True)
class NonFiniteSettings:
    """[detect.nonfinite] NaN and infinity in loss, gradients and state."""

    enabled: bool = True  # false: this detector does not run
    consecutive: int = 3  # so many non-finite gradients in a row are certain (T0) and ask for a rollback

    def __post_init__(self) -> None:
        at_least("detect.nonfinite.consecutive", self.consecutive, 1)


@dataclass(frozen=True, slots=True)
class RankDesyncSettings:
    """[detect.rank_desync] Ranks whose parameters differ from those of their replicas."""

    enabled: bool = True  # false: this detector does not run


@dataclass(frozen=True, slots=True)
class DetectSettings:
    """[detect] Detectors; one section each."""

    nonfinite: NonFiniteSettings = field(default_factory=NonFiniteSettings)
    loss_spike: LossSpikeSettings = field(default_factory=LossSpikeSettings)
    loss_divergence: LossDivergenceSettings = field(default_factory=LossDivergenceSettings)
    rank_desync: RankDesyncSettings = field(default_factory=RankDesyncSettings)
    resolve_steps: int = 20  # an incident ends after so many steps without a finding of its kind

    def __post_init__(self) -> None:
        at_least("detect.resolve_steps", self.resolve_steps, 1)
