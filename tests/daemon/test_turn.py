"""Where to return to, and when: the choices of a turn, as pure functions."""

import pytest

from sentinel.daemon.turn import Turn, apply_at, choose_target, valid_seconds
from sentinel.records import Ack, Command, Decision
from sentinel.vocabulary import Action, Quality, Reason

GOOD, PENDING, SUSPECT, BAD = Quality.GOOD, Quality.PENDING, Quality.SUSPECT, Quality.BAD


def command(action: Action = Action.ROLLBACK, **values) -> Command:
    base = {
        "id": "c",
        "run_id": "r",
        "attempt": 1,
        "generation": 0,
        "sequence": 1,
        "not_after": 0.0,
        "action": action,
        "apply_at": 100,
        "reason": Reason.CONFIRMED,
    }
    return Command(**{**base, **values})


def prepared(*candidates: tuple[int, Quality]) -> Ack:
    return Ack(1, 0.0, "c", "prepared", Reason.OK, candidates=[(step, quality, "") for step, quality in candidates])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"onset_step": 95}, 60),  # newest GOOD older than the onset by the margin of 10
        ({"onset_step": 70}, 40),
        ({"onset_step": 40}, 0),
        ({"onset_step": 5}, None),
        ({"onset_step": 95, "pending_ok": True}, 90),  # an exact onset needs no margin
        ({"onset_step": 90, "pending_ok": True}, 60),
        ({}, 60),  # a person names no onset
        ({"target_step": 80}, 80),  # what a person names may be SUSPECT, but never BAD
        ({"target_step": 85}, None),
        ({"target_step": 3}, None),
    ],
)
def test_the_newest_clean_snapshot_is_chosen(values, expected):
    held = prepared((90, PENDING), (85, BAD), (80, SUSPECT), (60, GOOD), (40, GOOD), (0, GOOD))
    assert choose_target(command(**values), [held], margin_steps=10) == expected


def test_only_what_every_rank_holds_counts_and_the_worst_opinion_of_it():
    one = prepared((60, GOOD), (40, GOOD), (20, GOOD))
    other = prepared((60, BAD), (40, PENDING), (20, GOOD), (50, GOOD))
    assert choose_target(command(), [one, other], margin_steps=0) == 20
    assert choose_target(command(pending_ok=True), [one, other], margin_steps=0) == 40


@pytest.mark.parametrize(
    ("step", "step_seconds", "round_trip_seconds", "expected"),
    [(10, 1.0, 0.01, 12), (10, 0.001, 0.01, 31), (10, 0.01, 0.01, 13)],
)
def test_the_command_is_carried_out_after_two_round_trips(step, step_seconds, round_trip_seconds, expected):
    assert apply_at(step, step_seconds, round_trip_seconds) == expected


def test_a_command_stays_valid_for_ten_steps_and_at_least_half_a_minute():
    assert valid_seconds(0.1) == 30
    assert valid_seconds(60) == 600


def turn(*ranks: int, action: Action = Action.PAUSE) -> Turn:
    decision = Decision(action, Reason.REQUESTED, "")
    return Turn("d", decision, command(action), ranks)


def test_all_ranks_must_be_prepared():
    both = turn(0, 1)
    assert not both.answered(0, prepared())
    assert not both.answered(0, prepared())
    assert not both.answered(7, prepared())
    assert both.answered(1, Ack(1, 0.0, "c", "refused", Reason.BUSY))
    verdict = both.verdict(10)
    assert (verdict.commit, verdict.reason) == (False, Reason.BUSY)


def test_another_try_starts_from_nothing():
    again = turn(0)
    assert again.answered(0, prepared())
    again.again(command(Action.PAUSE, id="c2"), [0])
    assert again.tries == 2
    assert again.answered(0, prepared())
    assert again.verdict(10).commit


def test_a_rollback_without_a_target_says_what_was_held():
    alone = turn(0, action=Action.ROLLBACK)
    alone.command = command(onset_step=5)
    assert alone.answered(0, prepared((60, GOOD)))
    verdict = alone.verdict(10)
    assert (verdict.commit, verdict.reason) == (False, Reason.NO_SNAPSHOT)
    assert "60 GOOD" in verdict.text
