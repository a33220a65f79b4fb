"""What sentinel may cost a loop, and whether it did: one line per goal, from numbers that were measured. Pure."""

from typing import NamedTuple

from tests.benchmarks.rivals.arms import SENTINEL
from tests.benchmarks.rivals.compare import Table

EMIT_SECONDS = 5e-6
HOOK_SECONDS = 60e-6
STEP_SECONDS = 0.1  # the step that the share is spoken of
SHARE = 0.001
NORM_RATIO = 1.05
TRACKER, TIMES_CHEAPER = "W&B, offline", 5.0
FINEST_RATIO = 0.02  # with an A/A spread that reaches farther, "within" would say nothing


class Parts(NamedTuple):
    """Sentinel's parts, one by one (`tests/benchmarks/hook.py`); seconds of CPU time of the loop's thread."""

    emit: float  # one record made, encoded, put into the outbox
    hook: float  # all of a step in which the loop clips, hooks, seams and wrappers; its own work is next to nothing
    hook_own: float  # of a step in which it does not, less the norm
    norm: float  # of 76 gradients with 10 million values
    norm_bare: float  # `torch._foreach_norm` over the same, combined

    @property
    def norm_ratio(self) -> float:
        return self.norm / self.norm_bare


class Goal(NamedTuple):
    """One goal, as it is printed."""

    what: str
    limit: str
    measured: str
    met: bool | None  # None: it was not measured, or not finely enough

    @property
    def verdict(self) -> str:
        return {True: "met", False: "**not met**", None: "cannot be said"}[self.met]


def judge(parts: Parts, clips: Table, owns: Table) -> list[Goal]:
    """`clips`: the arms of a loop that clips, so that its norm is had for nothing; `owns`: of one that does not."""
    return [
        _at_most("a record handed over, in a tight loop", parts.emit, EMIT_SECONDS),
        _at_most("all hooks of a step, the loop clips, in a tight loop", parts.hook, HOOK_SECONDS),
        _at_most("all hooks of a step less the norm of its own, in a tight loop", parts.hook_own, HOOK_SECONDS),
        _share(clips),
        Goal(
            "a norm of its own, beside `torch._foreach_norm`",
            f"{NORM_RATIO:.2f} x",
            f"{parts.norm_ratio:.3f} x",
            parts.norm_ratio <= NORM_RATIO,
        ),
        _cheaper(clips),
        _not_told(clips, "the loop clips"),
        _not_told(owns, "the loop does not clip"),
    ]


def _at_most(what: str, seconds: float, limit_seconds: float) -> Goal:
    return Goal(what, f"{limit_seconds * 1e6:.0f} µs", f"{seconds * 1e6:.1f} µs", seconds <= limit_seconds)


def _share(clips: Table) -> Goal:
    what = f"all hooks of a step of the GPT, the loop clips, as a share of {STEP_SECONDS * 1e3:.0f} ms"
    row = clips.row(SENTINEL)
    if row is None:
        return Goal(what, f"{SHARE:.1%}", "-", None)
    share = row.calls_seconds / STEP_SECONDS
    return Goal(what, f"{SHARE:.1%}", f"{share:.3%} ({row.calls_seconds * 1e6:.0f} µs)", share <= SHARE)


def _cheaper(clips: Table) -> Goal:
    what, limit = f"cheaper in a step than {TRACKER}", f"{TIMES_CHEAPER:.0f} x"
    row = clips.row(TRACKER)
    if row is None or row.times_sentinel is None:
        return Goal(what, limit, "-", None)
    return Goal(what, limit, f"{row.times_sentinel:.1f} x", row.times_sentinel >= TIMES_CHEAPER)


def _not_told(table: Table, kind: str) -> Goal:
    what, limit = f"CPU time of a step, attached to bare, {kind}", "within the A/A spread"
    row, again = table.row(SENTINEL), table.again
    if row is None or again is None:
        return Goal(what, limit, "-", None)
    measured = f"{row.ratio.median:.4f}; A/A {again.ratio.low:.4f} to {again.ratio.high:.4f}"
    if max(abs(again.ratio.low - 1.0), abs(again.ratio.high - 1.0)) > FINEST_RATIO:
        return Goal(what, limit, f"{measured}, too wide to say", None)
    return Goal(what, limit, measured, row.within["thread"])
