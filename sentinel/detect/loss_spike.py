"""Find abrupt jumps of the loss that stay for more than a step.

A lone high step is normal on healthy runs (up to twice the level, see docs/detection.md), so a jump counts once it
persists. Four rules on the residual r and the robust deviation z of `sentinel.detect.statistics.Baseline`:

- steady:    `hits` of the last `window` steps with z > `z` and at least `rise_ratio` above the level;
- fast:      `hits_fast` of the last `window_fast` with z > `z_fast` and `rise_ratio_fast`;
- sustained: the last `window` steps all above the level, their z (each cut at 6) 3 or more on average and the
             value 15 % above on average: a modest jump of a noisy loss (a one-sided CUSUM, E. S. Page, 1954, over a
             window);
- rail:      before the baseline has `warmup_steps` samples, a step `rail_ratio` times the level with z > `z`, and
             another within two steps that is at least half as far up (in log units) or 30 % above the level; while
             there are fewer than 12 samples the noise is unknown, and both are compared with the highest loss so far
             (a low first loss of a small batch is no reason to call the next ones high); with fewer than 4 the step
             must also be 3 times that and 10 or more, which no sane cross entropy is.
"""

import math
from typing import Any

import msgspec

from sentinel.detect.statistics import Baseline, is_finite, plain
from sentinel.detect_settings import LossSpikeSettings
from sentinel.records import Finding, Observation, StepRecord
from sentinel.vocabulary import Kind, Severity, Tier, UpdateResult

FREEZE_Z = 4.0  # from here on a value is anomalous and the baseline does not learn it
RELEARN_STEPS = 200  # a level that stays so long is the new normal
SUSTAINED_Z = 3.0
SUSTAINED_CUT = 6.0
SUSTAINED_RISE = 0.15
RAIL_SECOND_RISE = 0.3
FEW_SAMPLES = 12  # with fewer the noise of the loss is not known
FEW_Z = 4.0
FEWEST_SAMPLES = 4
FEWEST_RAIL_RATIO = 3.0
INSANE_LOSS = 10.0  # a cross entropy of 10 gives the right answer a probability of 5e-5
REMEMBERED = 8  # recent steps; also how far back an onset is looked for


class Seen(msgspec.Struct):
    """One recent step, judged against the baseline of its time."""

    step: int
    z: float
    rise: float
    high: bool = False  # clearly above the highest loss so far; these two only while there are few samples
    beyond_rail: bool = False


class Memory(msgspec.Struct):
    """All that the detector knows."""

    baseline: Baseline = msgspec.field(default_factory=Baseline)
    recent: list[Seen] = []
    frozen_steps: int = 0
    peak: float = 0.0  # the highest loss learned so far
    holding_since: int | None = None  # onset of the jump that holds now


class LossSpike:
    """Kind loss_spike, tier T2.

    >>> import random
    >>> from sentinel.records import StepRecord
    >>> random.seed(3)
    >>> detector = LossSpike(LossSpikeSettings())
    >>> def loss(step): return (2.5 if step >= 120 else 1.0) * random.gauss(2.0, 0.05)
    >>> found = None
    >>> for step in range(1, 140):
    ...     record = StepRecord(step, 0, step, 0.0, UpdateResult.APPLIED, loss=loss(step))
    ...     found = found or detector.observe(record)
    >>> found.kind.value, found.onset_step, found.step
    ('loss_spike', 120, 121)
    """

    name = "loss_spike"

    def __init__(self, settings: LossSpikeSettings) -> None:
        self._settings = settings
        self._memory = Memory()

    def observe(self, seen: Observation) -> Finding | None:
        if not isinstance(seen, StepRecord) or seen.result is UpdateResult.TURN or not is_finite(seen.loss):
            return None
        assert seen.loss is not None
        memory = self._memory
        baseline = memory.baseline
        now = self._judge(seen.step, seen.loss)
        expected = baseline.expected() if baseline.samples else seen.loss
        memory.recent = [*memory.recent[-(REMEMBERED - 1) :], now]
        rule = self._rule()
        if rule and memory.holding_since is None:
            memory.holding_since = self._onset()
        self._learn(seen.loss, now)
        if now.z <= FREEZE_Z and not rule:
            memory.holding_since = None
        if memory.holding_since is None or now.rise < self._settings.rise_ratio:
            return None
        return self._finding(seen, now, expected, rule)

    def _judge(self, step: int, loss: float) -> Seen:
        memory = self._memory
        judged = Seen(step, memory.baseline.deviation(loss), memory.baseline.rise(loss))
        samples, peak = memory.baseline.samples, memory.peak
        if not 0 < samples < FEW_SAMPLES or peak <= 0:
            return judged
        ratio = max(self._settings.rail_ratio, math.exp(min(FEW_Z * memory.baseline.scale, 10.0)))
        ratio = ratio if samples >= FEWEST_SAMPLES else FEWEST_RAIL_RATIO
        beyond = loss >= ratio * peak and (samples >= FEWEST_SAMPLES or loss >= INSANE_LOSS)
        return msgspec.structs.replace(judged, high=loss >= (1.0 + RAIL_SECOND_RISE) * peak, beyond_rail=beyond)

    def state(self) -> dict[str, Any]:
        return plain(self._memory)

    def restore(self, state: dict[str, Any]) -> None:
        self._memory = msgspec.convert(state, Memory)

    def _rule(self) -> str:
        settings, recent = self._settings, self._memory.recent
        if self._memory.baseline.samples < settings.warmup_steps:
            return "rail" if not self._memory.baseline.linear and self._beyond_rail() else ""
        if _count(recent[-settings.window_fast :], settings.z_fast, settings.rise_ratio_fast) >= settings.hits_fast:
            return "fast"
        window = recent[-settings.window :]
        if _count(window, settings.z, settings.rise_ratio) >= settings.hits:
            return "steady"
        return "sustained" if len(window) == settings.window and _sustained(window) else ""

    def _beyond_rail(self) -> bool:
        last = self._memory.recent[-3:]
        if self._memory.baseline.samples < FEW_SAMPLES:
            return any(seen.beyond_rail for seen in last) and sum(seen.high for seen in last) >= 2
        half_way = math.sqrt(self._settings.rail_ratio) - 1.0
        beyond = _count(last, self._settings.z, self._settings.rail_ratio - 1.0)
        high = sum(seen.rise >= half_way or seen.rise >= RAIL_SECOND_RISE for seen in last)
        return beyond >= 1 and high >= 2

    def _onset(self) -> int:
        """The first of the steps, up to the present one, that were all clearly above the level, gaps of one apart."""
        onset, quiet = self._memory.recent[-1].step, 0
        for seen in reversed(self._memory.recent):
            high = seen.z > 2.0 and seen.rise > self._settings.rise_ratio
            quiet = 0 if high else quiet + 1
            if quiet > 1:
                break
            onset = seen.step if high else onset
        return onset

    def _learn(self, loss: float, now: Seen) -> None:
        memory = self._memory
        if loss < 0 and not memory.baseline.linear:
            memory.recent = []  # judged on another axis
        elif now.z > FREEZE_Z and memory.frozen_steps < RELEARN_STEPS:
            memory.frozen_steps += 1
            return
        elif now.z > FREEZE_Z:
            memory.baseline, memory.recent, memory.holding_since = Baseline(), [], None
        memory.frozen_steps = 0
        memory.peak = max(memory.peak, loss)
        memory.baseline.learn(loss)

    def _finding(self, seen: StepRecord, now: Seen, expected: float, rule: str) -> Finding:
        assert self._memory.holding_since is not None
        assert seen.loss is not None
        since = self._memory.holding_since
        return Finding(
            kind=Kind.LOSS_SPIKE,
            severity=Severity.CRITICAL,
            tier=Tier.T2,
            step=seen.step,
            onset_step=since,
            detector=self.name,
            summary=f"loss {seen.loss:.4g} where {expected:.4g} was expected, since step {since}",
            value=seen.loss,
            expected=expected,
            evidence={"z": round(now.z, 1), "rise_ratio": round(now.rise, 3), "rule": rule or "holds"},
        )


def _count(recent: list[Seen], z: float, rise_ratio: float) -> int:
    return sum(seen.z > z and seen.rise >= rise_ratio for seen in recent)


def _sustained(window: list[Seen]) -> bool:
    if any(seen.z <= 0 for seen in window):
        return False
    mean_z = sum(min(seen.z, SUSTAINED_CUT) for seen in window) / len(window)
    # The median would need a sort; the mean of cut rises serves as well.
    mean_rise = sum(min(seen.rise, 2 * SUSTAINED_RISE) for seen in window) / len(window)
    return mean_z >= SUSTAINED_Z and mean_rise >= SUSTAINED_RISE
