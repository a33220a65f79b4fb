"""Two gloo ranks: attached on one alone sentinel only looks, attached on both it acts where no turn is needed."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.jobs import Home, Job, must_balance
from tests.end_to_end.scripts.ranks import NAN_AT, POISON, STEPS


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("ranks")) as opened:
        yield opened


def two_ranks(home: Home, who: str) -> list[Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    jobs = [home.start("ranks", rank, port, who) for rank in ("0", "1")]
    for job in jobs:
        job.finish(120)
    return jobs


@pytest.fixture(scope="module")
def alone(home: Home) -> tuple[list[Job], dict[str, Any]]:
    return two_ranks(home, "first"), home.ended("first")


@pytest.fixture(scope="module")
def both(home: Home) -> tuple[list[Job], dict[str, Any]]:
    return two_ranks(home, "both"), home.ended("both")


def reasons(found: dict[str, Any], kind: str) -> dict[str, set[str]]:
    """Action -> the reasons it was decided for, in all incidents of a kind."""
    table: dict[str, set[str]] = {}
    for incident in found["incidents"]:
        if incident["kind"] == kind:
            for action in incident["actions"]:
                table.setdefault(action["action"], set()).add(action["reason"])
    return table


def test_attached_on_one_rank_alone_it_observes_and_never_acts(alone) -> None:
    jobs, found = alone
    assert reasons(found, "loss_spike") == {"none": {"ranks_missing"}}
    actions = {action["action"] for incident in found["incidents"] for action in incident["actions"]}
    assert actions == {"none"}
    assert found["run"]["world_size"] == 2
    assert (found["run"]["steps"], found["run"]["generations"]) == (STEPS, 1)
    for job in jobs:
        assert job.said("nan") == {"skipped": False, "finite": False}, "the NaN did not go through"
    must_balance(found, dropped=0)


def test_the_nan_that_it_let_through_is_told_with_its_reason(alone) -> None:
    _, found = alone
    incident = next(one for one in found["incidents"] if one["kind"].startswith("nonfinite"))
    assert incident["first_step"] == NAN_AT + 1
    assert incident["evidence"]["reached_weights"] is True
    assert {action["reason"] for action in incident["actions"]} == {"ranks_missing"}


def test_attached_on_both_the_series_of_both_are_stored(home: Home, both) -> None:
    jobs, found = both
    rows = home.steps("both")
    for rank in (0, 1):
        steps = [row["step"] for row in rows if row["rank"] == rank]
        assert steps == list(range(1, STEPS + 1))
    losses = {rank: [row["loss"] for row in rows if row["rank"] == rank] for rank in (0, 1)}
    assert losses[0] != losses[1]
    assert jobs[0].said("end") == jobs[1].said("end") | {"step": STEPS}
    assert [books["rank"] for books in found["conservation"]] == [0, 1]
    must_balance(found, dropped=0)


def test_on_both_the_reflex_skips_the_same_update(both) -> None:
    jobs, found = both
    for job in jobs:
        assert job.said("nan") == {"skipped": True, "finite": True}
    skipped = [
        (incident["ranks"], action["applied_step"], action["outcome"])
        for incident in found["incidents"]
        for action in incident["actions"]
        if action["action"] == "skip_update"
    ]
    assert sorted(skipped) == [([0], NAN_AT + 1, "applied"), ([1], NAN_AT + 1, "applied")]


def test_what_needs_a_turn_is_refused_because_there_are_several_ranks(both) -> None:
    _, found = both
    assert reasons(found, "loss_spike") == {"none": {"several_ranks"}}
    spikes = [incident for incident in found["incidents"] if incident["kind"] == "loss_spike"]
    assert all(abs(spike["onset_step"] - (POISON.start + 1)) <= 1 for spike in spikes)
    assert found["run"]["generations"] == 1
