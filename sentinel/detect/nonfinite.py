"""Find NaN and infinity in the loss, the gradients and the state.

Nothing here is statistics: a value is finite or it is not. What needs care is what it means. A non-finite gradient
that the reflex kept from the weights is a notice; `consecutive` of them in a row are certain trouble (T0). One that
reached the weights is T0 at once. A non-finite loss is T0, and harmless as long as gradients and weights stay finite
(all labels ignored, torchtune#2341). An AMP overflow that GradScaler skips is normal. Gradients that turn NaN under a
finite loss: pytorch/pytorch#41508 and #46849.
"""

import math
from typing import Any

import msgspec

from sentinel.detect.statistics import plain
from sentinel.detect_settings import NonFiniteSettings
from sentinel.records import Finding, Observation, Reflex, SnapshotNote, StepRecord
from sentinel.vocabulary import Kind, Quality, Severity, Tier, UpdateResult


class Memory(msgspec.Struct):
    """All that the detector knows."""

    reflex_step: int = -1  # step of the latest reflex; its StepRecord comes after it
    bad_gradients: int = 0  # in a row
    bad_losses: int = 0  # in a row


class NonFinite:
    """Kinds nonfinite_loss, nonfinite_gradient and nonfinite_state.

    >>> from sentinel.records import StepRecord
    >>> detector = NonFinite(NonFiniteSettings())
    >>> healthy = StepRecord(1, 0, 1, 0.0, UpdateResult.APPLIED, loss=2.0, grad_norm=1.0)
    >>> detector.observe(healthy) is None
    True
    >>> found = detector.observe(StepRecord(2, 0, 2, 0.0, UpdateResult.APPLIED, loss=math.nan, grad_norm=1.0))
    >>> found.kind.value, found.tier.value, found.severity.value, found.evidence["gradient"]
    ('nonfinite_loss', 'T0', 'warning', 'finite')
    """

    name = "nonfinite"

    def __init__(self, settings: NonFiniteSettings) -> None:
        self._settings = settings
        self._memory = Memory()

    def observe(self, seen: Observation) -> Finding | None:
        if isinstance(seen, Reflex):
            return self._reflex(seen)
        if isinstance(seen, SnapshotNote):
            return _state(seen)
        return self._step(seen)

    def state(self) -> dict[str, Any]:
        return plain(self._memory)

    def restore(self, state: dict[str, Any]) -> None:
        self._memory = msgspec.convert(state, Memory)

    def _reflex(self, seen: Reflex) -> Finding:
        self._memory.reflex_step = seen.step
        self._memory.bad_gradients = max(seen.consecutive, 1)
        return self._gradient(seen.step, kept_out=True, more=seen.evidence)

    def _step(self, seen: StepRecord) -> Finding | None:
        if seen.result is UpdateResult.TURN:
            return None
        memory = self._memory
        bad_loss = seen.loss is not None and not math.isfinite(seen.loss)
        reflexed = seen.result is UpdateResult.REFLEX or memory.reflex_step == seen.step
        overflow = seen.result is UpdateResult.OVERFLOW
        norm = _norm_of(seen)
        bad_norm = norm is not None and not math.isfinite(norm) and not overflow
        memory.bad_losses = memory.bad_losses + 1 if bad_loss else 0
        if (bad_norm or reflexed) and memory.reflex_step != seen.step:
            memory.bad_gradients += 1
        elif not bad_norm and not reflexed and not overflow:
            memory.bad_gradients = 0
        if bad_loss:
            return self._loss(seen, bad_gradient=bad_norm or reflexed, kept_out=reflexed, overflow=overflow)
        if memory.reflex_step == seen.step or not (bad_norm or reflexed):
            return None
        return self._gradient(seen.step, kept_out=reflexed, more={"grad_norm": norm})

    def _loss(self, seen: StepRecord, *, bad_gradient: bool, kept_out: bool, overflow: bool) -> Finding | None:
        if overflow:
            return None
        gradient = "nonfinite" if bad_gradient else "absent" if _norm_of(seen) is None else "finite"
        repeated = self._memory.bad_gradients if bad_gradient else self._memory.bad_losses
        lasting = repeated >= self._settings.consecutive and gradient != "finite"
        reached_weights = bad_gradient and not kept_out
        return Finding(
            kind=Kind.NONFINITE_LOSS,
            severity=Severity.CRITICAL if lasting or reached_weights else Severity.WARNING,
            tier=Tier.T0,
            step=seen.step,
            onset_step=seen.step - (repeated - 1),
            detector=self.name,
            summary=f"loss is {seen.loss} at step {seen.step}, its gradient is {gradient}",
            value=seen.loss,
            evidence={
                "gradient": gradient,
                "reached_weights": reached_weights,
                "consecutive": repeated,
                "lasting": lasting,
            },
        )

    def _gradient(self, step: int, *, kept_out: bool, more: dict[str, Any]) -> Finding:
        repeated = self._memory.bad_gradients
        lasting = repeated >= self._settings.consecutive
        certain = lasting or not kept_out
        return Finding(
            kind=Kind.NONFINITE_GRADIENT,
            severity=Severity.CRITICAL if certain else Severity.WARNING,
            tier=Tier.T0 if certain else Tier.T1,
            step=step,
            onset_step=step - (repeated - 1),
            detector=self.name,
            summary=f"a gradient is not finite at step {step}, {repeated} in a row",
            value=math.nan,
            evidence={
                **more,
                "gradient": "nonfinite",
                "reached_weights": not kept_out,
                "consecutive": repeated,
                "lasting": lasting,
            },
        )


def _norm_of(seen: StepRecord) -> float | None:
    """The global norm, or under sharding a rank's own part that is not finite: no part of another makes that good."""
    local = seen.grad_norm_local
    return seen.grad_norm if local is None or math.isfinite(local) else local


def _state(seen: SnapshotNote) -> Finding | None:
    # A refused copy has no digest, and its reason names the tensor. BAD with a digest was finite once.
    if seen.quality is not Quality.BAD or seen.digest:
        return None
    return Finding(
        kind=Kind.NONFINITE_STATE,
        severity=Severity.CRITICAL,
        tier=Tier.T0,
        step=seen.step,
        onset_step=seen.step,
        detector=NonFinite.name,
        summary=f"the state after step {seen.step} is not finite: {seen.reason}",
        evidence={"tensor": seen.reason, "snapshot_step": seen.step},
    )
