"""What the daemon writes is there once, completely, or not at all."""

import stat
from pathlib import Path

import pytest

from sentinel.errors import PermanentError
from sentinel.records import Ack, Command, Finding, Gap, Origin, PhaseNote, Reflex, Trouble, Word
from sentinel.store.database import Entry, Store
from sentinel.store.history import History
from sentinel.store.tables import acks, commands, steps, system_samples
from sentinel.vocabulary import Action, DropReason, Kind, Outcome, Quality, Reason, RunStatus, Severity, Tier
from tests.store.building import RANK0, RUN, START, entries, hello, record, snapshot, start, url_in


@pytest.fixture
def store(url: str) -> Store:
    store = Store.open(url)
    store.register_rank(hello(), "box", START)
    return store


def rows_of(store: Store, table: object) -> list[dict]:
    with store._engine.connect() as connection:
        return [dict(row) for row in connection.execute(table.select()).mappings()]


def books(store: Store, origin: Origin = RANK0) -> tuple[int, int, int, int]:
    state = store.rank_state(origin)
    return state.stored_seq, state.stored, state.dropped, state.produced


def test_every_field_of_a_step_record_has_a_column() -> None:
    from sentinel.records import StepRecord

    assert set(StepRecord.__struct_fields__) <= set(steps.columns.keys())


def test_a_message_sent_twice_is_stored_once(store: Store) -> None:
    store.write(entries(start(), record(2, 1)), critical=True)
    store.write(entries(record(2, 1), record(3, 2)), critical=True)
    assert [row["step"] for row in rows_of(store, steps)] == [1, 2]
    assert books(store) == (3, 3, 0, 3)


def test_a_jump_in_the_numbers_becomes_a_gap_that_nobody_explained(store: Store) -> None:
    store.write(entries(start(), record(5, 4)), critical=False)
    assert books(store) == (5, 2, 3, 5)
    with History(store.url) as history:
        assert history.conservation(RUN)[0]["dropped_by_reason"] == {"unexplained": 3}


def test_a_gap_is_counted_with_its_reason_and_only_for_what_is_news(store: Store) -> None:
    store.write(entries(start(), record(2, 1)), critical=False)
    store.write(entries(Gap(1, 4, DropReason.OUTBOX_FULL), Gap(2, 4, DropReason.OUTBOX_FULL)), critical=False)
    store.write(entries(Gap(7, 8, DropReason.PROCESS_DIED)), critical=False)
    assert books(store) == (8, 2, 6, 8)
    with History(store.url) as history:
        found = history.conservation(RUN)[0]
    assert found["dropped_by_reason"] == {"outbox_full": 2, "process_died": 2, "unexplained": 2}


def test_what_was_heard_of_but_has_not_come_is_in_flight(store: Store) -> None:
    store.write(entries(start(), record(2, 1)), critical=False)
    store.heard({RANK0: 9, Origin("unknown", 1, 0): 4})
    store.heard({RANK0: 7})
    with History(store.url) as history:
        found = history.conservation(RUN)[0]
    assert (found["produced"], found["stored"], found["dropped"], found["in_flight"]) == (9, 2, 0, 7)


def test_a_number_that_no_column_can_hold_costs_that_message_only(store: Store) -> None:
    store.write(entries(start(), record(2, 2**63), record(3, 2)), critical=False)
    assert [row["step"] for row in rows_of(store, steps)] == [2]
    assert books(store) == (3, 2, 1, 3)


def test_a_rank_that_never_registered_is_refused_and_leaves_nothing(store: Store) -> None:
    with pytest.raises(PermanentError, match="register"):
        store.write([*entries(start()), Entry(Origin("other", 1, 0), record(1, 1))], critical=True)
    assert books(store) == (0, 0, 0, 0)
    store.write(entries(start()), critical=True)
    assert books(store) == (1, 1, 0, 1)


def test_a_failed_part_is_not_committed_even_if_its_error_was_ignored(store: Store) -> None:
    def careless() -> None:
        with store.transaction(critical=True):
            store.write(entries(start()), critical=True)
            with pytest.raises(PermanentError, match="register"):
                store.write(entries(record(2, 1), origin=Origin("other", 1, 0)), critical=True)

    with pytest.raises(PermanentError, match="ignored"):
        careless()
    assert books(store) == (0, 0, 0, 0)


def test_the_books_are_right_after_the_store_is_opened_again(store: Store) -> None:
    store.write(entries(start(), record(2, 1)), critical=True)
    store.close()
    again = Store.open(store.url)
    again.write(entries(record(2, 1), record(4, 3)), critical=True)
    assert books(again) == (4, 3, 1, 4)


def test_the_position_of_a_nonce_is_the_attempt(store: Store) -> None:
    store.write(entries(start(), record(2, 1)), critical=True)
    assert store.register_rank(hello(), "box", START) == (1, 2, 0)
    assert store.register_rank(hello(nonce="n2"), "box", START) == (2, 0, 0)
    assert store.register_rank(hello(nonce="n2", last_seq=7), "box", START) == (2, 0, 0)
    assert store.register_rank(hello(rank=1, nonce="m1"), "box", START) == (1, 0, 0)
    assert store.rank_state(Origin(RUN, 2, 0)).produced == 7


def test_a_new_attempt_reopens_a_run_that_had_ended(store: Store) -> None:
    store.end_run(RUN, RunStatus.FAILED, START + 9)
    assert store.running() == []
    store.register_rank(hello(nonce="n2"), "box", START + 10)
    assert [state.origin for state in store.running()] == [Origin(RUN, 2, 0)]
    with History(store.url) as history:
        assert (history.run(RUN)["status"], history.run(RUN)["ended_at"]) == ("running", None)


def test_a_process_that_was_given_up_as_lost_and_comes_back_runs_again(store: Store) -> None:
    store.end_run(RUN, RunStatus.LOST, START + 9)
    store.register_rank(hello(), "box", START + 10)
    assert [state.origin for state in store.running()] == [RANK0]


def test_the_latest_note_about_a_snapshot_holds(store: Store) -> None:
    store.write(entries(start(), snapshot(2, 10, Quality.PENDING)), critical=False)
    store.write(entries(snapshot(3, 10, Quality.BAD, kept=False, reason="w is NaN")), critical=False)
    with History(store.url) as history:
        (found,) = history.checkpoints(RUN)
    assert (found["quality"], found["kept"], found["reason"]) == ("BAD", False, "w is NaN")


def test_reflexes_phases_and_troubles_are_events_with_all_their_fields(store: Store) -> None:
    reflex = Reflex(
        2, START, 0, 5, Kind.NONFINITE_GRADIENT, Action.SKIP_UPDATE, Outcome.APPLIED, 1, {"norm": float("nan")}
    )
    trouble = Trouble(4, START, 6, "probe", "disabled")
    store.write(entries(start(), reflex, PhaseNote(3, START, 5, "eval", True), trouble), critical=True)
    with History(store.url) as history:
        found = history.events(RUN)
    assert [row["kind"] for row in found] == ["reflex", "phase", "trouble"]
    assert found[0]["body"]["evidence"]["norm"] != found[0]["body"]["evidence"]["norm"]
    assert found[0]["body"]["consecutive"] == 1


def test_a_command_keeps_every_state_it_went_through(store: Store) -> None:
    command = Command("c1", RUN, 1, 0, 1, 99.0, Action.ROLLBACK, 12, "confirmed")
    store.save_command(command, "d1", START)
    store.save_word(Word("c1", True, Reason.OK, 4), START + 1)
    store.write(entries(start(), Ack(2, START, "c1", "applied", Reason.OK, target_step=4)), critical=True)
    found = {row["state"]: row for row in rows_of(store, commands)}
    assert set(found) == {"prepare", "commit"}
    assert found["commit"]["decision_id"] == "d1"
    assert [row["state"] for row in rows_of(store, acks)] == ["applied"]


def test_nan_infinity_and_missing_stay_four_different_values(store: Store) -> None:
    numbers = (float("nan"), float("inf"), float("-inf"), None, 1e308, 5e-324)
    store.write(entries(*(record(step, step, loss=loss) for step, loss in enumerate(numbers, 1))), critical=True)
    with History(store.url) as history:
        assert [repr(row["loss"]) for row in history.steps(RUN)] == [repr(number) for number in numbers]


def test_a_finding_keeps_a_value_that_is_not_finite(store: Store) -> None:
    finding = Finding(
        Kind.NONFINITE_LOSS, Severity.CRITICAL, Tier.T0, 3, 3, "nonfinite", "NaN", float("nan"), float("-inf")
    )
    store.save_finding(RANK0, finding, 0, START, "i1")
    with History(store.url) as history:
        (found,) = history.findings(RUN)
    assert found["value"] != found["value"]
    assert found["expected"] == float("-inf")


def test_system_samples_are_kept(store: Store) -> None:
    store.save_system_sample(RUN, 1, 0, START, {"gpu_watts": 300.0})
    assert len(rows_of(store, system_samples)) == 1


def test_critical_transactions_are_synced_and_others_are_not(store: Store) -> None:
    question, relaxed, synced = {
        "sqlite": ("PRAGMA synchronous", 1, 2),
        "postgresql": ("SHOW synchronous_commit", "off", "on"),
    }[store._engine.dialect.name]

    def level() -> int | str:
        return store._connection.exec_driver_sql(question).scalar()

    with store.transaction(critical=False):
        assert level() == relaxed
    with store.transaction(critical=True):
        assert level() == synced
    store.heard({RANK0: 1})
    with store.transaction(critical=True):
        assert level() == synced


def test_a_character_that_a_database_cannot_hold_costs_that_character_only(store: Store) -> None:
    trouble = Trouble(2, START, 6, "probe", "a\x00b")
    store.write(entries(start(), trouble, record(3, 1)), critical=True)
    with History(store.url) as history:
        (found,) = history.events(RUN)
    assert found["body"]["text"] == "a\x00b", "structured values are JSON, which holds it everywhere"
    assert found["text"] in {"probe: a\x00b", "probe: a\ufffdb"}
    assert books(store) == (3, 3, 0, 3)


def test_the_database_is_nobody_elses_business(tmp_path: Path) -> None:
    Store.open(url_in(tmp_path))
    assert stat.S_IMODE((tmp_path / "sentinel.db").stat().st_mode) == 0o600
