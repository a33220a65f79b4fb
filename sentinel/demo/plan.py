"""The numbers of the demo: the model's shape, the training plan, and where the faults are."""

from dataclasses import dataclass, field

from sentinel.errors import MisuseError

LEAST_STEPS = 200  # fewer leave no room for a GOOD snapshot between the faults


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model; the default has 1.26 million parameters."""

    width: int = 160
    layers: int = 4
    heads: int = 5
    context: int = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run; every run of the demo uses the same."""

    steps: int = 240
    seed: int = 0
    batch: int = 16
    shape: Shape = field(default_factory=Shape)
    peak_lr: float = 2e-3
    warmup_steps: int = 30
    clip_norm: float = 1.0
    corpus_characters: int = 3_000_000
    poisoned_batches: int = 24
    validation_batches: int = 16
    snapshot_every_steps: int = 20  # fixed, so that the demo does the same on every machine

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise MisuseError(f"--steps is {self.steps}; the demo needs at least {LEAST_STEPS}")

    @property
    def nan_batch(self) -> int:
        """Position in the data, from 0, of the batch whose gradient turns NaN, once."""
        return round(0.3 * self.steps)

    @property
    def first_poisoned(self) -> int:
        """Position in the data, from 0, of the first poisoned batch."""
        return round(0.7 * self.steps)

    @property
    def batches(self) -> int:
        """How many batches the data holds: enough for the steps, and for all that a rollback may leave out."""
        return 2 * self.steps + 200


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in a run."""

    nan_gradient: bool = False
    poisoned_window: bool = False
