"""The tables as text and as the generated part of docs/performance.md. Pure, but for writing that file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.rivals.arms import ARMS, BARE
from tests.benchmarks.rivals.compare import Row, Spread, Table
from tests.benchmarks.rivals.goals import Goal

PAGE = Path(__file__).resolve().parents[3] / "docs" / "performance.md"
BEGIN = "<!-- from here on made by `make bench-overhead` -->"
END = "<!-- to here -->"

COLUMNS = (
    "arm",
    "in its calls, µs a step",
    "mean",
    "times sentinel",
    "thread CPU over bare, µs",
    "ratio to bare",
    "process CPU over bare, µs",
    "wall over bare, µs",
    "CPU of other processes, µs",
    "told from bare",
)
GOAL_COLUMNS = ("goal", "at most, or at least", "measured", "")
INCLUDES_COLUMNS = ("arm", "in every step, besides the loop")


class Machine(NamedTuple):
    """Where and when; never the host's name."""

    processor: str
    cores: int
    load_before: float  # of one minute, when it began: above 0 the machine had other work
    load_after: float
    torch: str
    python: str
    day: str
    versions: dict[str, str]  # of the trackers


class Long(NamedTuple):
    """Sentinel in one long block of a loop that clips: what comes seldom is in the mean."""

    steps: int
    median_seconds: float
    mean_seconds: float
    worst_seconds: float
    step_seconds: float  # median wall time of a step
    snapshots: int  # taken meanwhile


class Report(NamedTuple):
    machine: Machine
    parameters: int
    goals: list[Goal]
    tables: list[Table]
    long: Long
    missing: dict[str, str]


def write(report: Report, page: Path = PAGE) -> None:
    """Put the report between the markers; the rest of the page stays."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the line {END if begin else BEGIN!r}; put both markers back")
    page.write_text(f"{before}{BEGIN}\n\n{made(report)}\n{END}{after}", encoding="utf-8")


def made(report: Report) -> str:
    """The generated part, in Markdown."""
    parts = [_where(report), "### Goals", grid(GOAL_COLUMNS, [_goal(goal) for goal in report.goals])]
    for table in report.tables:
        parts += [f"### {table.title}", _about(table), grid(COLUMNS, [_cells(row) for row in table.rows])]
    parts += ["### A long stretch", _long(report.long)]
    parts += ["### What each arm does", grid(INCLUDES_COLUMNS, _includes(report.missing))]
    return "\n\n".join(parts) + "\n"


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns as wide as what they hold, so that it also reads as plain text."""
    every = [columns, *rows]
    widths = [max(len(row[place]) for row in every) for place in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in every
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _where(report: Report) -> str:
    machine = report.machine
    trackers = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{machine.day}, {machine.processor}, {machine.cores} cores, load {machine.load_before:.1f} before and "
        f"{machine.load_after:.1f} after; torch {machine.torch} on one thread, Python {machine.python}; {trackers}. "
        f"The model has {report.parameters / 1e6:.1f} million parameters."
    )


def _about(table: Table) -> str:
    return (
        f"{table.sweeps} blocks and {table.steps} counted steps of each arm. A bare step takes "
        f"{table.bare['thread'] * 1e3:.1f} ms of CPU time of the loop's thread and {table.bare['wall'] * 1e3:.1f} ms "
        "of wall time."
    )


def _goal(goal: Goal) -> list[str]:
    return [goal.what, goal.limit, goal.measured, goal.verdict]


def _cells(row: Row) -> list[str]:
    if row.name == BARE:
        return [row.name, *["-"] * (len(COLUMNS) - 1)]
    told = [clock for clock, within in row.within.items() if not within]
    return [
        row.name,
        _microseconds(row.calls_seconds),
        _microseconds(row.calls_mean_seconds),
        "-" if row.times_sentinel is None else f"{row.times_sentinel:.1f}",
        _interval(row.over_bare["thread"]),
        f"{row.ratio.median:.4f} ({row.ratio.low:.4f} to {row.ratio.high:.4f})",
        _interval(row.over_bare["process"]),
        _interval(row.over_bare["wall"]),
        _microseconds(row.beside_seconds, "+"),
        ", ".join(told) or "no",
    ]


def _long(long: Long) -> str:
    share = long.mean_seconds / long.step_seconds
    return (
        f"Sentinel over {long.steps} steps in a row, the loop clips: {_microseconds(long.median_seconds)} µs a step "
        f"in its hooks in the median, {_microseconds(long.mean_seconds)} µs in the mean ({share:.2%} of a step of "
        f"{long.step_seconds * 1e3:.0f} ms), {_microseconds(long.worst_seconds)} µs at worst. The mean has "
        f"{long.snapshots} {'snapshot' if long.snapshots == 1 else 'snapshots'} in it, copies of the whole training "
        "state for a rollback, which no tracker takes, and what is sampled every some steps."
    )


def _includes(missing: Mapping[str, str]) -> list[list[str]]:
    named = {arm.name: arm.includes for arm in ARMS}
    return [
        [name, f"{includes}. **Not measured**: {missing[name]}" if name in missing else includes]
        for name, includes in named.items()
    ]


def _interval(seconds: Spread) -> str:
    middle, low, high = (_microseconds(one, "+") for one in seconds)
    return f"{middle} ({low} to {high})"


def _microseconds(seconds: float, sign: str = "") -> str:
    value = round(seconds * 1e6, 1) + 0.0  # -0.0 becomes 0.0
    return f"{value:{sign}.1f}" if abs(value) < 10 else f"{value:{sign}.0f}"
