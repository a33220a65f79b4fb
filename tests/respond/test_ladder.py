"""The ladder of a spike: rungs, budgets, cooldown, and what hinders an action."""

import math
from dataclasses import replace

import pytest

from sentinel.config import RespondSettings, Settings
from sentinel.detect_settings import NonFiniteSettings
from sentinel.vocabulary import Action, IncidentStatus, Mode, Outcome, Reason
from tests.detect.series import record
from tests.respond.bench import Bench, spiked


def test_the_second_rollback_leaves_out_more_data_and_the_fourth_action_is_a_pause():
    bench = spiked()
    plans = []
    for _ in range(3):
        decision = bench.acting[-1]
        plans.append((decision.onset_step, decision.skip_batches))
        bench.answer(decision, target=40)
        bench.steps(41, 92)
        bench.steps(93, 103, loss=6.0)
    assert len(set(plans)) == 3
    assert plans[0][1] is None
    assert plans[1][1] > 103 - 40
    assert plans[2][1] > plans[1][1]
    assert plans[2][0] <= 40  # further back than the snapshot that was tried
    last = bench.acting[-1]
    assert [decision.action for decision in bench.acting] == [Action.ROLLBACK] * 3 + [Action.PAUSE]
    assert [decision.reason for decision in bench.acting[1:3]] == [Reason.RECURRED] * 2
    assert last.limit_seconds == Settings().pause.limit_seconds
    assert len(bench.incidents) == 1
    unsaid = [decision for decision in bench.decisions if decision.reason is Reason.NOT_ALLOWED]
    assert ["scale_lr" in decision.text for decision in unsaid] == [True]


def test_scale_lr_is_part_of_the_third_rollback_where_it_is_allowed_and_possible():
    can = frozenset({"rollback", "skip_data", "pause", "scale_lr"})
    bench = spiked(settings=Settings(respond=RespondSettings(allow="all")), can=can)
    for _ in range(2):
        bench.answer(bench.acting[-1], target=40)
        bench.steps(41, 92)
        bench.steps(93, 103, loss=6.0)
    assert bench.acting[-1].factor == 0.5


@pytest.mark.parametrize("bad_batches", [8, 20, 30])
def test_a_loop_that_cannot_skip_data_gets_through_a_long_bad_window_without_a_pause(bad_batches):
    bench = spiked(can=frozenset({"rollback", "pause"}))
    step, left = 40, bad_batches - 2
    bench.answer(bench.acting[-1], target=40)
    answered = 1
    while left > 0:
        step, left = step + 1, left - 1
        bench.steps(step, step, loss=6.0)
        if len(bench.acting) > answered:
            bench.answer(bench.acting[-1], target=40)
            answered, step = answered + 1, 40
    bench.steps(step + 1, 160)
    assert {decision.action for decision in bench.acting} == {Action.ROLLBACK}
    assert bench.only.status is IncidentStatus.RESOLVED


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"mode": Mode.OBSERVE}, Reason.OBSERVE_MODE),
        ({"world_size": 2, "ranks_connected": 1}, Reason.RANKS_MISSING),
        ({"world_size": 2, "ranks_connected": 2}, Reason.SEVERAL_RANKS),
        ({"record_kept": False}, Reason.NO_RECORD),
        ({"in_flight": True}, Reason.IN_FLIGHT),
        ({"can": frozenset({"pause"})}, Reason.LOOP_CANNOT),
        ({"settings": Settings(respond=RespondSettings(allow=("pause",)))}, Reason.NOT_ALLOWED),
        ({"settings": replace(Settings(), rollback=replace(Settings().rollback, enabled=False))}, Reason.NOT_ALLOWED),
    ],
)
def test_what_hinders_an_action_is_its_recorded_reason_once(other, reason):
    bench = spiked(**other)
    bench.steps(102, 130, loss=6.0)
    assert [(decision.action, decision.reason) for decision in bench.decisions] == [(Action.NONE, reason)]
    assert len(bench.incidents) == 1


def test_an_action_follows_as_soon_as_nothing_hinders_it():
    bench = spiked(in_flight=True)
    bench.situation = bench.situation._replace(in_flight=False)
    bench.steps(102, 103, loss=6.0)
    assert [decision.action for decision in bench.decisions] == [Action.NONE, Action.ROLLBACK]


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED, Outcome.ABORTED])
def test_what_was_not_applied_is_tried_again_and_then_a_person_is_asked_once(outcome):
    bench = spiked()
    for step in range(102, 140):
        bench.answer(bench.acting[-1], outcome, Reason.TOO_LATE)
        bench.steps(step, step, loss=6.0)
    assert [decision.action for decision in bench.acting] == [Action.ROLLBACK] * 3 + [Action.PAUSE]


def test_without_a_snapshot_a_person_is_asked_only_if_the_loss_is_still_bad():
    healed, bad = spiked(), spiked()
    for bench, loss in ((healed, 2.0), (bad, 6.0)):
        bench.answer(bench.acting[0], Outcome.REFUSED, Reason.NO_SNAPSHOT)
        bench.steps(102, 120, loss=loss)
    assert [decision.action for decision in healed.acting] == [Action.ROLLBACK]
    assert [decision.action for decision in bad.acting] == [Action.ROLLBACK, Action.PAUSE]


def test_the_budget_ends_in_a_pause():
    bench = spiked(settings=Settings(respond=RespondSettings(budget=1)))
    bench.answer(bench.acting[0], target=40)
    bench.steps(41, 92)
    bench.steps(93, 103, loss=6.0)
    assert [decision.action for decision in bench.acting] == [Action.ROLLBACK, Action.PAUSE]
    assert bench.acting[1].reason is Reason.BUDGET_SPENT


def test_the_cooldown_holds_the_next_action_back():
    bench = Bench(settings=Settings(detect=replace(Settings().detect, nonfinite=NonFiniteSettings(consecutive=1))))
    bench.steps(1, 30)
    bench.see(record(31, 2.0, math.nan))
    bench.answer(bench.acting[0], target=30)
    bench.see(record(31, 2.0, math.nan, generation=1))
    assert (bench.decisions[-1].action, bench.decisions[-1].reason) == (Action.NONE, Reason.COOLDOWN)
    bench.steps(32, 36)
    bench.see(record(37, 2.0, math.nan, generation=1))
    assert (bench.decisions[-1].action, bench.decisions[-1].reason) == (Action.ROLLBACK, Reason.RECURRED)


def test_a_spike_at_the_same_place_after_its_incident_ended_is_a_recurrence():
    bench = spiked()
    bench.answer(bench.acting[0], target=40)
    bench.steps(41, 125)
    bench.steps(126, 128, loss=6.0)
    first, second = bench.incidents.values()
    assert first.status is IncidentStatus.RESOLVED
    assert second.evidence["recurrence_of"] == first.id
    assert bench.acting[-1].reason is Reason.RECURRED
    assert bench.acting[-1].skip_batches is not None


def test_a_spike_far_away_is_a_new_trouble():
    bench = spiked()
    bench.answer(bench.acting[0], target=40)
    bench.steps(41, 400)
    bench.steps(401, 403, loss=6.0)
    assert bench.acting[-1].reason is Reason.CONFIRMED
    assert "recurrence_of" not in list(bench.incidents.values())[-1].evidence
