"""The comparison with other trackers says what was measured, and docs/performance.md is what it writes."""

import random
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.benchmarks.rivals import page, sweeps
from tests.benchmarks.rivals.arms import AGAIN, ARMS, BARE, SENTINEL
from tests.benchmarks.rivals.compare import Blocks, Table, compare, spread
from tests.benchmarks.rivals.goals import TRACKER, Goal, Parts, judge
from tests.benchmarks.rivals.loop import Block, Step, Trainer, Use

GOOD = Parts(emit=4e-6, hook=50e-6, hook_own=55e-6, norm=3.1e-3, norm_bare=3e-3)


def made_blocks(costs: dict[str, float], *, noise: float = 0.0005, sweeps: int = 20) -> Blocks:
    """Steps of 100 ms that drift by a third, with each arm's cost on top; the noise is that of a block."""
    chance = random.Random(3)
    blocks: Blocks = {name: [] for name in costs}
    for sweep in range(sweeps):
        for name, cost in costs.items():
            taken = 0.1 * (1 + sweep / 60) * chance.gauss(1.0, noise) + cost
            blocks[name].append(Block([Step(taken, taken, taken, cost)] * 4, 2 * cost + 1e-5))
    return blocks


def table(sentinel: float = 50e-6, tracker: float = 500e-6, noise: float = 0.0005) -> Table:
    costs = {BARE: 0.0, SENTINEL: sentinel, AGAIN: 0.0, TRACKER: tracker, "MLflow": 0.02}
    return compare("All arms", made_blocks(costs, noise=noise))


def report(measured: Table, goals: list[Goal]) -> page.Report:
    machine = page.Machine("a processor", 2, 0.1, 1.0, "2.13.0", "3.11.7", "2026-01-31", {"wandb": "1"})
    long = page.Long(300, 50e-6, 300e-6, 0.1, 0.1, 1)
    return page.Report(machine, 10_000_000, goals, [measured, measured], long, {"trackio": "not installed here (x)"})


def verdicts(parts: Parts, measured: Table) -> list[bool | None]:
    return [goal.met for goal in judge(parts, measured, measured)]


def test_a_cost_is_what_an_arm_takes_over_the_bare_block_of_the_same_sweep() -> None:
    row = table().row("MLflow")
    assert row is not None
    assert row.over_bare["thread"].median == pytest.approx(0.02, rel=0.02)
    assert row.over_bare["wall"].low <= row.over_bare["wall"].median <= row.over_bare["wall"].high
    assert row.calls_seconds == pytest.approx(0.02)
    assert row.times_sentinel == pytest.approx(400)
    assert row.beside_seconds == pytest.approx(0.04)
    assert not any(row.within.values())


def test_an_arm_within_the_spread_of_bare_against_bare_is_not_told_from_it() -> None:
    measured = table(sentinel=0.0, noise=0.003)
    assert measured.again is not None
    assert measured.again.over_bare["thread"].reach > 0.0
    row = measured.row(SENTINEL)
    assert row is not None
    assert all(row.within.values())


def test_a_spread_is_the_same_for_the_same_numbers_and_narrower_with_more_of_them() -> None:
    chance = random.Random(5)
    few = [chance.gauss(0.0, 1.0) for _ in range(10)]
    many = [chance.gauss(0.0, 1.0) for _ in range(1000)]
    assert spread(few) == spread(few)
    assert spread(many).high - spread(many).low < spread(few).high - spread(few).low
    assert spread(many).low < 0.0 < spread(many).high


def test_every_goal_is_met_by_numbers_that_meet_it_and_missed_by_numbers_that_do_not() -> None:
    assert verdicts(GOOD, table(sentinel=0.0001 - 1e-6, tracker=0.0006, noise=0.005)) == [True] * 8
    slow = Parts(emit=6e-6, hook=61e-6, hook_own=61e-6, norm=3.2e-3, norm_bare=3e-3)
    assert verdicts(slow, table(sentinel=0.002, tracker=0.009)) == [False] * 8


def test_a_goal_that_could_not_be_measured_is_neither_met_nor_missed() -> None:
    alone = compare("All arms", made_blocks({BARE: 0.0, SENTINEL: 50e-6, AGAIN: 0.0}))
    assert verdicts(GOOD, alone)[5] is None
    noisy = judge(GOOD, table(noise=0.2), table(noise=0.2))
    assert [goal.met for goal in noisy[6:]] == [None, None]
    assert "too wide to say" in noisy[6].measured


def test_every_arm_is_measured_once_in_a_sweep_and_in_many_places_over_the_sweeps() -> None:
    arms = list(ARMS)
    orders = [sweeps.order(arms, sweep) for sweep in range(2 * len(arms))]
    assert all(sorted(order) == sorted(arms) for order in orders)
    places = [{order.index(arm) for order in orders} for arm in arms]
    assert min(map(len, places)) >= len(arms) // 2
    assert all(later == earlier[::-1] for earlier, later in zip(orders[::2], orders[1::2], strict=True))


def test_a_tracker_that_is_missing_or_fails_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    def fails(_trainer: Trainer, _folder: Path) -> AbstractContextManager[Use]:
        raise OSError("no disk")

    bare = ARMS[0]
    absent = bare._replace(name="absent", module="no_such_tracker")
    broken = bare._replace(name="broken", open=fails)
    found = sweeps.usable((bare, absent, broken), Trainer(), tmp_path)
    assert [arm.name for arm in found.arms] == [BARE]
    assert "no_such_tracker" in found.missing["absent"]
    assert "no disk" in found.missing["broken"]


def test_a_report_is_written_between_the_markers_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    target = tmp_path / "performance.md"
    target.write_text(f"before\n{page.BEGIN}\nan older table\n{page.END}\nafter\n", encoding="utf-8")
    measured = table()
    for _ in range(2):
        page.write(report(measured, judge(GOOD, measured, measured)), target)
    text = target.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{page.BEGIN}\n")
    assert text.endswith(f"{page.END}\nafter\n")
    assert text.count("### Goals") == 1
    assert "an older table" not in text
    assert "**Not measured**: not installed here (x)" in text
    target.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="put both markers back"):
        page.write(report(measured, []), target)


def test_the_page_has_the_shape_that_is_written() -> None:
    measured = table()
    shape = page.made(report(measured, judge(GOOD, measured, measured)))
    text = page.PAGE.read_text(encoding="utf-8")
    written = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert [line for line in written.splitlines() if line.startswith("### Goals")]
    assert {_columns(line) for line in written.splitlines() if line.startswith("|")} <= {
        len(page.COLUMNS),
        len(page.GOAL_COLUMNS),
        len(page.INCLUDES_COLUMNS),
    }
    heads = [[*page.GOAL_COLUMNS], [*page.COLUMNS], [*page.COLUMNS], [*page.INCLUDES_COLUMNS]]
    assert _heads(written) == _heads(shape) == heads
    named = {line.split("|")[1].strip() for line in written.splitlines() if line.startswith("|")}
    assert {arm.name for arm in ARMS} <= named
    goals = [goal.what for goal in judge(GOOD, measured, measured)]
    assert all(goal in named for goal in goals)


def _columns(line: str) -> int:
    return line.count("|") - 1


def _heads(text: str) -> list[list[str]]:
    lines = text.splitlines()
    rules = [place for place, line in enumerate(lines) if line.startswith("|--")]
    return [[cell.strip() for cell in lines[place - 1].strip("|").split("|")] for place in rules]
