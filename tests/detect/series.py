"""Records made from plain numbers, for tests of detectors and of the judge."""

from collections.abc import Iterable

from sentinel.detect.detector import Detector
from sentinel.records import Finding, Reflex, SnapshotNote, StepRecord
from sentinel.vocabulary import Action, Kind, Outcome, Quality, UpdateResult


def record(step: int, loss: float | None = 2.0, norm: float | None = 1.0, generation: int = 0, **more) -> StepRecord:
    result = more.pop("result", UpdateResult.APPLIED)
    return StepRecord(step, generation, step, float(step), result, loss=loss, grad_norm=norm, **more)


def reflex(step: int, consecutive: int = 1, generation: int = 0) -> Reflex:
    return Reflex(
        step,
        float(step),
        generation,
        step,
        Kind.NONFINITE_GRADIENT,
        Action.SKIP_UPDATE,
        Outcome.APPLIED,
        consecutive,
        {"parameter": "head.weight"},
    )


def note(
    step: int, quality: Quality = Quality.PENDING, *, generation: int = 0, reason: str = "new", **more
) -> SnapshotNote:
    more = {"digest": "d", "kept": True, **more}
    verified = quality is not Quality.BAD
    return SnapshotNote(step, float(step), generation, step, "ram", quality, verified, reason, "step", 1, 0.0, **more)


def refused(step: int, tensor: str = "head.weight", generation: int = 0) -> SnapshotNote:
    """As the client's ring says it when the state is not finite."""
    return note(step, Quality.BAD, generation=generation, reason=tensor, digest="", kept=False)


def findings(detector: Detector, losses: Iterable[float | None], first_step: int = 1) -> list[Finding]:
    found = (detector.observe(record(step, loss)) for step, loss in enumerate(losses, first_step))
    return [finding for finding in found if finding is not None]
