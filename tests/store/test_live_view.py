"""After rollbacks and restarts the default view is what the weights went through; all the rest is still there."""

import pytest

from sentinel.records import Origin
from sentinel.store.database import Store
from sentinel.store.history import History
from sentinel.store.timeline import Segment, segments
from sentinel.vocabulary import UpdateResult
from tests.store.building import RANK0, RUN, START, entries, hello, record, start


@pytest.fixture
def store(url: str) -> Store:
    store = Store.open(url)
    store.register_rank(hello(), "box", START)
    store.write(entries(start(), *(record(seq, seq - 1) for seq in range(2, 12))), critical=False)
    return store


def live(store: Store) -> list[tuple[int, int, int]]:
    with History(store.url) as history:
        return [(row["attempt"], row["generation"], row["step"]) for row in history.steps(RUN)]


def test_an_earlier_generation_counts_up_to_the_earliest_later_target() -> None:
    rows = [
        {"attempt": 1, "generation": 2, "target_step": 3},
        {"attempt": 1, "generation": 0, "target_step": 0},
        {"attempt": 1, "generation": 1, "target_step": 8},
        {"attempt": 2, "generation": 0, "target_step": 5},
        {"attempt": 3, "generation": 0, "target_step": None},
    ]
    assert segments(rows) == [
        Segment(1, 0, 3),
        Segment(1, 1, 3),
        Segment(1, 2, 5),
        Segment(2, 0, None),
        Segment(3, 0, None),
    ]


def test_steps_after_the_target_of_a_rollback_are_history(store: Store) -> None:
    store.save_generation(RANK0, 1, 4, 11, START, "rollback")
    store.write(entries(record(12, 5, 1), record(13, 6, 1)), critical=False)
    assert live(store) == [(1, 0, 1), (1, 0, 2), (1, 0, 3), (1, 0, 4), (1, 1, 5), (1, 1, 6)]
    with History(store.url) as history:
        everything = [(row["generation"], row["step"], row["live"]) for row in history.steps(RUN, live_only=False)]
        assert history.run(RUN)["steps"] == 6
        assert history.run(RUN)["generations"] == 2
    assert [row for row in everything if not row[2]] == [(0, step, False) for step in range(5, 11)]
    assert len(everything) == 12


def test_a_restart_makes_later_steps_of_the_older_attempt_history(store: Store) -> None:
    store.register_rank(hello(nonce="n2"), "box", START)
    second = Origin(RUN, 2, 0)
    assert len(live(store)) == 10, "before it says where it starts, nothing is cut"
    store.write(entries(start(step=8), record(2, 9), origin=second), critical=True)
    assert live(store)[-3:] == [(1, 0, 7), (1, 0, 8), (2, 0, 9)]


def test_a_generation_that_nobody_announced_still_cuts(store: Store) -> None:
    store.write(entries(record(12, 5, 1)), critical=False)
    assert live(store)[-2:] == [(1, 0, 4), (1, 1, 5)]
    store.save_generation(RANK0, 1, 3, 11, START, "rollback")
    assert live(store)[-2:] == [(1, 0, 3), (1, 1, 5)]


def test_a_fresh_generation_without_records_is_at_its_target(store: Store) -> None:
    store.save_generation(RANK0, 1, 4, 11, START, "rollback")
    with History(store.url) as history:
        assert history.run(RUN)["steps"] == 4


def test_pages_leave_nothing_out_and_repeat_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.register_rank(hello(rank=1, nonce="m1"), "box", START)
    others = entries(*(record(seq, seq) for seq in range(1, 9)), origin=Origin(RUN, 1, 1))
    store.write(others, critical=False)
    monkeypatch.setattr("sentinel.store.history._PAGE_ROWS", 3)
    with History(store.url) as history:
        found = [(row["step"], row["rank"]) for row in history.steps(RUN)]
    assert found == sorted(found)
    assert len(found) == len(set(found)) == 18


def test_seconds_are_useful_only_where_the_update_stayed(store: Store) -> None:
    store.save_generation(RANK0, 1, 4, 11, START, "rollback")
    skipped = record(12, 5, 1, result=UpdateResult.REFLEX)
    turn = record(13, 6, 1, result=UpdateResult.TURN, step_seconds=99.0)
    store.write(entries(skipped, turn, record(14, 7, 1), record(15, 8, 1, step_seconds=float("nan"))), critical=False)
    with History(store.url) as history:
        assert history.spent(RUN) == (pytest.approx(4 * 0.5 + 0.5), pytest.approx(6 * 0.5 + 0.5))
