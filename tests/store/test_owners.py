"""Several daemons may share a database: none takes another's ranks for its own."""

from collections.abc import Callable

import pytest
from sqlalchemy import text

from sentinel.daemon.recovery import unsettled
from sentinel.records import Decision
from sentinel.store.database import Store
from sentinel.vocabulary import Action, Outcome, Reason
from tests.store.building import RANK0, RUN, START, entries, hello, start


@pytest.fixture
def open_as(url: str) -> Callable[[str], Store]:
    return lambda owner: Store.open(url, owner)


def running(store: Store) -> list[str]:
    return [state.origin.run_id for state in store.running()]


def test_a_daemon_takes_over_its_own_ranks_and_those_of_nobody(open_as: Callable[[str], Store]) -> None:
    open_as("box:/home/a").register_rank(hello(), "box", START)
    open_as("far:/home/a").register_rank(hello(run_id="other"), "far", START)
    open_as("").register_rank(hello(run_id="old"), "box", START)
    assert running(open_as("box:/home/a")) == ["old", RUN]
    assert running(open_as("far:/home/a")) == ["old", "other"]
    assert running(open_as("")) == ["old", "other", RUN]


def test_a_rank_belongs_to_the_daemon_that_it_spoke_to_last(open_as: Callable[[str], Store]) -> None:
    open_as("box:/home/a").register_rank(hello(), "box", START)
    open_as("box:/home/b").register_rank(hello(), "box", START)
    assert running(open_as("box:/home/a")) == []
    assert running(open_as("box:/home/b")) == [RUN]


def test_only_its_own_pending_decisions_are_settled_by_a_new_daemon(open_as: Callable[[str], Store]) -> None:
    store = open_as("box:/home/a")
    store.register_rank(hello(), "box", START)
    store.write(entries(start()), critical=True)
    decision = Decision(Action.ROLLBACK, Reason.CONFIRMED, "roll back", incident_id="i1", step=8)
    store.save_decision("d1", RANK0, 0, START, decision, Outcome.PENDING)
    assert unsettled(store.url, "far:/home/a") == []
    assert [left.decision_id for left in unsettled(store.url, "box:/home/a")] == ["d1"]


def test_ranks_from_before_there_were_owners_are_whoevers_comes(
    open_as: Callable[[str], Store],
) -> None:
    store = open_as("box:/home/a")
    store.register_rank(hello(), "box", START)
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE ranks SET owner = NULL"))
    assert running(open_as("far:/home/a")) == [RUN]
