"""What the blocks say: medians, how far chance alone carries them, and whether an arm stands out from that. Pure.

Every sweep has one block of each arm, and two of the bare loop. An arm is compared with the mean of the two in the
same sweep, so that a machine that gets slower or faster hits both; the median over the sweeps is the result. Its
interval holds the middle 95 % of what the median becomes when sweeps are drawn anew with replacement (the percentile
bootstrap of Efron, 1979). The interval of one bare block against the other is the A/A spread, and an arm whose
difference is not larger than its farther end has not been told from a bare loop.
"""

import random
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from tests.benchmarks.rivals.arms import AGAIN, BARE, SENTINEL
from tests.benchmarks.rivals.loop import Block, Step

DRAWS = 1000
CLOCKS = ("thread", "process", "wall")

Blocks = dict[str, list[Block]]  # arm -> one of each sweep


class Spread(NamedTuple):
    """A median over sweeps, and the interval that chance leaves it."""

    median: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """The end that is farther from 0."""
        return max(abs(self.low), abs(self.high))


class Row(NamedTuple):
    """One arm beside the bare loop."""

    name: str
    calls_seconds: float  # median of a step
    calls_mean_seconds: float
    over_bare: dict[str, Spread]  # clock -> seconds of a step
    ratio: Spread  # of CPU time of the thread
    within: dict[str, bool]  # clock -> not told from a bare loop
    beside_seconds: float  # of a step, in other processes, over what they use while the loop is bare; mean
    times_sentinel: float | None  # calls, as a multiple of sentinel's


class Table(NamedTuple):
    """All arms of one kind of loop."""

    title: str
    rows: list[Row]
    bare: dict[str, float]  # clock -> seconds of a bare step
    sweeps: int
    steps: int  # that count, of each arm

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def again(self) -> Row | None:
        """Bare against bare."""
        return self.row(AGAIN)


def compare(title: str, blocks: Blocks) -> Table:
    """A table of what was measured; the rows in the order of the arms."""
    chance = {clock: _differences(blocks, AGAIN, clock).reach for clock in CLOCKS}
    ours = _calls(blocks.get(SENTINEL, []))
    rows = [_row(name, blocks, chance, median(ours) if ours else None) for name in blocks]
    bare = {clock: median(_of(step, clock) for block in blocks[BARE] for step in block.steps) for clock in CLOCKS}
    return Table(title, rows, bare, len(blocks[BARE]), sum(len(block.steps) for block in blocks[BARE]))


def spread(values: Sequence[float], draws: int = DRAWS) -> Spread:
    """Of one number per sweep; seeded, so that the same blocks give the same table."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(draws))
    return Spread(median(values), medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))])


def _row(name: str, blocks: Blocks, chance: dict[str, float], ours: float | None) -> Row:
    calls = _calls(blocks[name])
    over_bare = {clock: _differences(blocks, name, clock) for clock in CLOCKS}
    return Row(
        name=name,
        calls_seconds=median(calls),
        calls_mean_seconds=fmean(calls),
        over_bare=over_bare,
        ratio=_paired(blocks, name, "thread", lambda arm, bare: arm / bare),
        within={clock: abs(over_bare[clock].median) <= chance[clock] for clock in CLOCKS},
        beside_seconds=_beside(blocks[name]) - _beside([*blocks[BARE], *blocks[AGAIN]]),
        times_sentinel=median(calls) / ours if ours else None,
    )


def _differences(blocks: Blocks, name: str, clock: str) -> Spread:
    return _paired(blocks, name, clock, lambda arm, bare: arm - bare)


def _paired(blocks: Blocks, name: str, clock: str, against: Callable[[float, float], float]) -> Spread:
    alike = (BARE,) if name == AGAIN else (BARE, AGAIN)
    bare = [
        fmean(_middle(block, clock) for block in both) for both in zip(*(blocks[one] for one in alike), strict=True)
    ]
    arm = [_middle(block, clock) for block in blocks[name]]
    return spread([against(*pair) for pair in zip(arm, bare, strict=True)])


def _middle(block: Block, clock: str) -> float:
    return median(_of(step, clock) for step in block.steps)


def _of(step: Step, clock: str) -> float:
    value: float = getattr(step, clock)
    return value


def _calls(blocks: list[Block]) -> list[float]:
    return [step.calls for block in blocks for step in block.steps]


def _beside(blocks: list[Block]) -> float:
    return fmean(block.beside_seconds for block in blocks)
