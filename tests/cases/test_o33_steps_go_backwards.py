"""O33: a rollback repeats step numbers; both histories stay, the default view shows the live one."""

from pathlib import Path

from sentinel.records import Origin
from sentinel.store.database import Store
from sentinel.store.history import History
from tests.store.building import RANK0, RUN, START, entries, hello, record, rolled_back_run, start, url_in


def test_both_histories_can_be_queried_and_the_live_one_is_the_default(tmp_path: Path) -> None:
    store = rolled_back_run(tmp_path)
    with History(store.url) as history:
        live = [(row["generation"], row["step"]) for row in history.steps(RUN)]
        everything = [(row["generation"], row["step"]) for row in history.steps(RUN, live_only=False)]
    assert [step for _, step in live] == list(range(1, 14)), "each step once, in order"
    assert {generation for generation, step in live if step > 4} == {1}
    assert [step for generation, step in everything if generation == 0] == list(range(1, 9))
    assert [step for generation, step in everything if generation == 1] == list(range(5, 14))


def test_a_process_that_resumes_from_an_older_step_repeats_numbers_without_a_clash(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    for attempt, first in ((1, 0), (2, 3)):
        store.register_rank(hello(nonce=f"n{attempt}"), "box", START)
        origin = Origin(RUN, attempt, 0)
        steps = [record(seq, first + seq - 1, loss=float(attempt)) for seq in range(2, 7)]
        store.write(entries(start(step=first), *steps, origin=origin), critical=False)
    with History(store.url) as history:
        live = [(row["step"], row["loss"]) for row in history.steps(RUN)]
        assert len(list(history.steps(RUN, live_only=False))) == 10
        (books,) = history.conservation(RUN)
    assert live == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0), (8, 2.0)]
    assert books["produced"] == books["stored"] == 12


def test_a_record_of_the_very_same_key_replaces_the_row_and_the_old_one_is_kept_as_an_event(tmp_path: Path) -> None:
    store = Store.open(url_in(tmp_path))
    store.register_rank(hello(), "box", START)
    store.write(entries(start(), record(2, 1), record(3, 2, loss=float("nan"))), critical=False)
    store.write(entries(record(4, 2, loss=7.0), record(5, 2, loss=8.0), record(6, 3)), critical=False)
    with History(store.url) as history:
        rows = [(row["step"], row["seq"], row["loss"]) for row in history.steps(RUN, live_only=False)]
        replaced = [row["body"] for row in history.events(RUN) if row["kind"] == "replaced_step"]
    assert rows == [(1, 2, 2.0), (2, 5, 8.0), (3, 6, 2.0)]
    assert [row["seq"] for row in replaced] == [3, 4]
    assert replaced[0]["loss"] != replaced[0]["loss"], "the old row kept its NaN"
    assert store.rank_state(RANK0).stored == 6
