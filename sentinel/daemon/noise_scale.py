"""The gradient noise scale of a run, from what its ranks sampled at the same step."""

import math
from collections.abc import Mapping

from sentinel.detect.noise_scale import NoiseScale, moments
from sentinel.records import StepRecord


class RunNoiseScale:
    """Of one run; the averages live here. In samples where the loop reports them, else in tokens.

    The unit is chosen once, by the first step that tells one, so that the averages never mix two.
    """

    def __init__(self) -> None:
        self._scale = NoiseScale()
        self._unit = ""

    def __call__(self, records: Mapping[int, StepRecord]) -> float | None:
        """`records`: of every rank, of one step that all of them sampled. None: it cannot be told (yet)."""
        ordered = [records[rank] for rank in sorted(records)]
        self._unit = self._unit or next((unit for unit in ("samples", "tokens") if _sizes(ordered, unit)), "")
        sizes = _sizes(ordered, self._unit)
        norms = [one.sampled.local_grad_norm for one in ordered if one.sampled is not None]
        own = [norm for norm in norms if norm is not None]
        whole = next((one.grad_norm for one in ordered if one.grad_norm is not None), None)
        # Every rank's mean gradient is the same; where they differ one of them is not in step.
        alike = all(one.grad_norm is None or _close(one.grad_norm, whole) for one in ordered)
        if len(own) < len(ordered) or len(sizes) < len(ordered) or whole is None or not alike:
            return self._scale.value
        return self._scale.learn(moments(own, sizes, whole))


def _sizes(records: list[StepRecord], unit: str) -> list[float]:
    """The ranks' batch sizes; empty unless every one tells it."""
    known = [getattr(record, unit) for record in records] if unit else []
    return known if known and all(size is not None and size > 0.0 for size in known) else []


def _close(norm: float, other: float | None) -> bool:
    return other is not None and math.isclose(norm, other, rel_tol=1e-3)
