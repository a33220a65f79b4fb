"""Score the detectors on the public curves: false alarms on healthy ones, hits and delays on injected faults.

Run from the repository root: `python -m tests.benchmarks.detection`. The curves lie beside the repository
(`../shared/curves`); without them there is nothing to score.
"""

import csv
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from sentinel.detect import catalogue
from sentinel.detect.detector import Detector
from sentinel.detect_settings import DetectSettings
from sentinel.records import Finding, StepRecord
from sentinel.vocabulary import Tier, UpdateResult

CURVES = Path(__file__).resolve().parents[3] / "shared" / "curves"
HEALTHY = ("llmc_124M_moddednanogpt", "hf_alpaca_llama")
HARD = ("modded_scaleup1B_a", "modded_fp4quant", "hf_star_speculative")
ANOMALIES = {"megatron_mixtral8x7b_a100": 4050, "pgolf_earlyspike_seed42": 2, "llmc_124M_hector_nan_short": 1}
ACTING = (Tier.T0, Tier.T2, Tier.T3)
POSITIONS = 20

Curve = list[float]


def read(name: str) -> Iterator[tuple[int, float]]:
    """(step, loss) of one curve."""
    with (CURVES / f"{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["loss"]:
                yield int(float(row["step"])), float(row["loss"])


def episodes(points: list[tuple[int, float]]) -> list[Finding]:
    """The first acting finding of each episode; findings of one kind at most 50 samples apart are one."""
    detectors = catalogue.build(DetectSettings())
    found: list[Finding] = []
    last: dict[str, int] = {}
    for index, (step, loss) in enumerate(points):
        for finding in _acting(detectors, step, loss):
            if index - last.get(finding.kind, -1000) > 50:
                found.append(finding)
            last[finding.kind] = index
    return found


def _acting(detectors: tuple[Detector, ...], step: int, loss: float) -> Iterator[Finding]:
    record = StepRecord(step, 0, step, float(step), UpdateResult.APPLIED, loss=loss)
    for detector in detectors:
        finding = detector.observe(record)
        if finding is not None and finding.tier in ACTING:
            yield finding


def bloom(curve: Curve, at: int) -> Curve:
    shape = [1.01, 1.18, 1.02, 1.07, 2.32] + [1 + 1.32 * (1 - k / 25) for k in range(25)]
    return _scaled(curve, at, shape, 1.0)


def step_up(curve: Curve, at: int) -> Curve:
    shape = [1.05, 1.06, 1.12, 1.23, 1.25, 1.40, 1.5, 1.6, 1.7]
    return _scaled(curve, at, shape, 1.8)


def ramp(curve: Curve, at: int) -> Curve:
    return _scaled(curve, at, [1.0015**k for k in range(600)], 1.0015**600)


def nan(curve: Curve, at: int) -> Curve:
    return curve[:at] + [math.nan] * (len(curve) - at)


def window(curve: Curve, at: int) -> Curve:
    """A poisoned window: half as much again for fifteen steps."""
    return _scaled(curve, at, [1.5] * 15, 1.0)


def _scaled(curve: Curve, at: int, shape: list[float], after: float) -> Curve:
    factors = shape[: len(curve) - at] + [after] * (len(curve) - at - len(shape))
    return curve[:at] + [value * factor for value, factor in zip(curve[at:], factors, strict=True)]


def hits(curve: Curve, inject: Callable[[Curve, int], Curve], seed: int) -> list[int]:
    """Delays of the detected ones among `POSITIONS` injections, in steps; earlier findings do not count."""
    delays = []
    chance = random.Random(seed)
    for _ in range(POSITIONS):
        at = chance.randrange(len(curve) // 5, len(curve) - 650)
        start = max(0, at - 500)
        bad = inject(curve, at)[start : at + 650]
        found = [finding.step - at for finding in episodes(list(enumerate(bad, start))) if finding.step >= at]
        delays += found[:1]
    return delays


def toy(seed: int, factor: float, at: int, noise: float) -> list[tuple[int, float]]:
    """A toy loop: 4.5 to 2.5 within 100 steps, then slowly on; from `at` on fifteen steps times `factor`."""
    chance = random.Random(seed)
    points = []
    for step in range(1, 301):
        loss = (2.4 + 2.1 * math.exp(-step / 35) - 0.001 * step) * chance.gauss(1.0, noise)
        points.append((step, loss * (factor if at <= step < at + 15 else 1.0)))
    return points


def main() -> int:
    if not CURVES.is_dir():
        print(f"no curves at {CURVES}; nothing scored")
        return 0
    for name in HEALTHY + HARD:
        points = list(read(name))
        found = episodes(points)
        print(f"{name:30} {len(points):6} steps, {len(found)} false", [(f.kind.value, f.step) for f in found][:8])
    for name, at in ANOMALIES.items():
        found = [f for f in episodes(list(read(name))) if f.step >= at]
        print(
            f"{name:30} first at {found[0].step if found else 'never'} ({at})",
            [(f.kind.value, f.step) for f in found][:6],
        )
    for name in HEALTHY[:1] + HARD[:2]:
        curve = [loss for _, loss in read(name)]
        for inject in (bloom, step_up, ramp, nan, window):
            delays = hits(curve, inject, 7)
            print(f"{name:30} {inject.__name__:8} {len(delays)}/{POSITIONS} median delay {median(delays or [-1])}")
    for noise in (0.03, 0.05, 0.10):
        false = sum(len(episodes(toy(seed, 1.0, 999, noise))) for seed in range(200))
        print(f"toy noise {noise}: {false} false alarms in 200 runs")
        for factor, at in ((1.3, 180), (1.5, 180), (2.0, 180), (3.0, 180), (2.5, 30), (3.0, 15)):
            firsts = [
                [f.step - at for f in episodes(toy(seed, factor, at, noise)) if f.step >= at][:1]
                for seed in range(100)
            ]
            delays = [first[0] for first in firsts if first]
            print(
                f"  x{factor} at {at}: {len(delays)}/100 median {median(delays or [-1])} worst {max(delays or [-1])}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
