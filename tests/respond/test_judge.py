"""From observations to incidents and decisions: the whole judge, as the pipeline uses it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.config import NonFiniteSettings, RespondSettings, Settings
from sentinel.records import IncidentStatus
from sentinel.vocabulary import Action, Kind, Mode, Outcome, Quality, Reason, Severity, Tier, UpdateResult
from tests.detect.series import note, record, reflex, refused
from tests.respond.bench import Bench


def spiked(**other) -> Bench:
    """A bench in whose run a spike at step 100 was just confirmed; GOOD snapshots at 20 and 40."""
    bench = Bench(**other)
    bench.steps(1, 20)
    bench.snapshots(20, quality=Quality.GOOD)
    bench.steps(21, 40)
    bench.snapshots(40, quality=Quality.GOOD)
    bench.steps(41, 99)
    bench.steps(100, 101, loss=6.0)
    return bench


def test_a_healthy_run_says_nothing():
    bench = Bench()
    bench.steps(1, 300)
    bench.end()
    assert (bench.decisions, bench.incidents, bench.marks, bench.findings) == ([], {}, [], [])


def test_a_spike_is_one_incident_with_one_rollback_however_long_it_lasts():
    bench = spiked()
    bench.steps(102, 140, loss=6.0)
    assert bench.only.kind is Kind.LOSS_SPIKE
    assert (bench.only.onset_step, bench.only.first_step) == (100, 101)
    (decision,) = bench.decisions
    assert (decision.action, decision.reason) == (Action.ROLLBACK, Reason.CONFIRMED)
    assert (decision.onset_step, decision.data, decision.pending_ok, decision.skip_batches) == (
        100,
        "skip",
        False,
        None,
    )
    assert bench.only.last_step >= 131
    assert bench.written < 10


def test_a_confirmed_spike_marks_the_ring_from_the_margin_before_the_onset():
    (mark,) = spiked().marks
    assert (mark.since_step, mark.clear, mark.generation) == (90, False, 0)


def test_after_a_rollback_the_incident_is_resolved_by_healthy_steps_past_its_place_only():
    bench = spiked()
    bench.answer(bench.acting[0], target=40)
    bench.steps(41, 108)
    assert bench.only.status is IncidentStatus.OPEN
    bench.steps(109, 112)
    assert bench.only.status is IncidentStatus.RESOLVED
    assert bench.only.cause == "healthy again after rollback"
    assert len(bench.acting) == 1


def test_records_of_an_older_generation_say_nothing():
    bench = spiked()
    bench.answer(bench.acting[0], target=40)
    ruling = bench.judge.observe(record(102, math.nan, math.nan, generation=0), bench.situation)
    assert ruling == ((), (), (), ())


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


def test_replayed_data_that_fails_again_is_skipped_or_replayed_from_further_back():
    replaying = replace(Settings(), rollback=replace(Settings().rollback, data="replay"))
    for chosen, data, older in ((None, "skip", False), (replaying, "replay", True)):
        bench = Bench(settings=chosen)
        bench.steps(1, 40)
        bench.see(refused(40))
        bench.answer(bench.acting[0], target=20)
        bench.steps(21, 39)
        bench.see(refused(40, generation=1))
        assert bench.acting[1].data == data
        assert (bench.acting[1].onset_step <= 20) is older


def test_the_detectors_go_back_with_the_snapshot():
    bench = Bench()
    bench.steps(1, 50)
    bench.snapshots(50)
    states = [detector.state() for detector in bench.detectors]
    bench.steps(51, 99)
    bench.steps(100, 101, loss=6.0)
    assert [detector.state() for detector in bench.detectors] != states
    bench.answer(bench.acting[0], target=50)
    assert [detector.state() for detector in bench.detectors] == states


def test_a_note_that_comes_before_or_after_its_record_saves_the_state_of_its_own_step():
    early, late = Bench(), Bench()
    for bench in (early, late):
        bench.steps(1, 59)
    early.snapshots(60)
    for bench in (early, late):
        bench.steps(60, 65, loss=2.2)
    late.snapshots(60)
    for bench in (early, late):
        bench.steps(66, 99)
        bench.steps(100, 101, loss=6.0)
        bench.answer(bench.acting[0], target=60)
    expected = Bench()
    expected.steps(1, 59)
    expected.steps(60, 60, loss=2.2)
    states = [detector.state() for detector in expected.detectors]
    assert [detector.state() for detector in early.detectors] == states
    assert [detector.state() for detector in late.detectors] == states


def test_a_rollback_to_the_state_at_attach_starts_the_detectors_afresh():
    bench = Bench()
    fresh = [detector.state() for detector in bench.detectors]
    bench.steps(1, 70)
    bench.steps(71, 72, loss=6.0)
    bench.answer(bench.acting[0], target=0)
    assert [detector.state() for detector in bench.detectors] == fresh


def test_a_lone_reflex_is_an_incident_with_the_applied_action_and_nothing_else():
    bench = Bench()
    bench.steps(1, 30)
    bench.see(reflex(31))
    bench.see(record(31, 2.0, math.nan, result=UpdateResult.REFLEX))
    bench.steps(32, 60)
    (decision,) = bench.decisions
    assert (decision.action, decision.reason, decision.step) == (Action.SKIP_UPDATE, Reason.REFLEX, 31)
    assert (bench.only.kind, bench.only.severity) == (Kind.NONFINITE_GRADIENT, Severity.WARNING)
    assert (bench.only.first_step, bench.only.onset_step, bench.only.last_step) == (31, 31, 31)
    assert bench.only.status is IncidentStatus.RESOLVED
    assert bench.marks == []


def test_a_nan_loss_and_a_nan_gradient_of_one_step_are_one_incident_named_after_the_loss():
    bench = Bench()
    bench.steps(1, 30)
    bench.see(reflex(31))
    first = bench.only
    bench.see(record(31, math.nan, math.nan, result=UpdateResult.REFLEX))
    assert bench.only.id == first.id
    assert (first.kind, bench.only.kind) == (Kind.NONFINITE_GRADIENT, Kind.NONFINITE_LOSS)
    assert bench.only.tier is Tier.T0
    assert bench.only.evidence["also"] == [Kind.NONFINITE_GRADIENT]
    assert bench.only.evidence["gradient"] == "nonfinite"
    assert [decision.action for decision in bench.decisions] == [Action.SKIP_UPDATE]


def test_a_nan_loss_with_finite_gradients_is_harmless():
    bench = Bench()
    bench.steps(1, 60)
    states = [detector.state() for detector in bench.detectors[1:]]
    bench.see(record(61, math.nan, 0.0))
    assert [detector.state() for detector in bench.detectors[1:]] == states
    (decision,) = bench.decisions
    assert (decision.action, decision.reason) == (Action.NONE, Reason.HARMLESS)
    assert (bench.only.kind, bench.only.tier, bench.only.severity) == (Kind.NONFINITE_LOSS, Tier.T0, Severity.WARNING)
    assert bench.marks == []
    bench.steps(62, 90)
    assert bench.only.status is IncidentStatus.RESOLVED


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_three_bad_gradients_in_a_row_are_rolled_back_to_a_pending_snapshot(loss):
    bench = Bench()
    bench.steps(1, 30)
    for step in (31, 32, 33):
        bench.see(reflex(step, step - 30))
        bench.see(record(step, loss, math.nan, result=UpdateResult.REFLEX))
    (decision,) = [one for one in bench.acting if one.action is Action.ROLLBACK]
    assert (decision.onset_step, decision.pending_ok, decision.data) == (31, True, "skip")
    assert bench.only.severity is Severity.CRITICAL
    assert [mark.since_step for mark in bench.marks] == [31]


def test_a_gradient_that_reached_the_weights_is_rolled_back_at_once():
    bench = Bench()
    bench.steps(1, 30)
    bench.see(record(31, 2.0, math.nan))
    (decision,) = bench.acting
    assert (decision.action, decision.pending_ok, decision.onset_step) == (Action.ROLLBACK, True, 31)


def test_a_nonfinite_state_is_rolled_back_and_its_data_replayed():
    bench = Bench()
    bench.steps(1, 40)
    bench.see(refused(40, "optimizer.0.exp_avg"))
    (decision,) = bench.acting
    assert (decision.action, decision.data, decision.pending_ok, decision.onset_step) == (
        Action.ROLLBACK,
        "replay",
        True,
        40,
    )
    assert bench.only.kind is Kind.NONFINITE_STATE


def test_the_setting_overrides_what_happens_to_the_data():
    bench = Bench(settings=replace(Settings(), rollback=replace(Settings().rollback, data="skip")))
    bench.steps(1, 40)
    bench.see(refused(40))
    assert bench.acting[0].data == "skip"


def test_a_fallen_back_incident_without_action_takes_its_mark_off():
    bench = spiked(mode=Mode.OBSERVE)
    bench.steps(102, 130)
    assert bench.only.status is IncidentStatus.RESOLVED
    assert bench.only.cause == "it healed by itself"
    assert [(mark.since_step, mark.clear) for mark in bench.marks] == [(90, False), (90, True)]


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


def test_a_divergence_is_announced_pins_a_snapshot_and_is_then_rolled_back():
    bench = Bench()
    bench.steps(1, 200)
    for step in range(201, 330):
        bench.see(record(step, 2.0 * 1.003 ** (step - 200), data_position=step))
    assert bench.only.kind is Kind.LOSS_DIVERGENCE
    notice, rollback = bench.decisions
    assert (notice.action, notice.reason) == (Action.NONE, Reason.NOTICE_ONLY)
    assert (rollback.action, rollback.onset_step) == (Action.ROLLBACK, bench.only.onset_step)
    assert len(bench.marks) == 1
    assert (bench.only.tier, bench.only.severity) == (Tier.T3, Severity.CRITICAL)


def test_a_divergence_within_a_spike_belongs_to_its_incident():
    bench = spiked(mode=Mode.OBSERVE)
    bench.steps(102, 180, loss=6.0)
    assert bench.only.kind is Kind.LOSS_SPIKE
    assert bench.only.evidence["also"] == [Kind.LOSS_DIVERGENCE]


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


def test_the_end_of_the_run_closes_what_is_open():
    unsolved, solved, skipped = spiked(), spiked(), Bench()
    solved.answer(solved.acting[0], target=40)
    solved.steps(41, 60)
    skipped.see(reflex(1))
    skipped.steps(2, 3)
    for bench, status in (
        (unsolved, IncidentStatus.GAVE_UP),
        (solved, IncidentStatus.RESOLVED),
        (skipped, IncidentStatus.RESOLVED),
    ):
        bench.end()
        assert bench.only.status is status
        assert bench.only.resolved_at is not None


def test_a_rollback_asked_for_by_a_person_takes_the_detectors_back_too():
    bench = Bench()
    bench.steps(1, 50)
    bench.snapshots(50)
    states = [detector.state() for detector in bench.detectors]
    bench.steps(51, 80)
    asked = spiked().acting[0].__class__(Action.ROLLBACK, Reason.REQUESTED, "asked for", step=80)
    bench.answer(asked, target=50)
    assert [detector.state() for detector in bench.detectors] == states
    assert bench.steps(51, 80).findings == ()


def test_a_dropped_snapshot_is_no_longer_a_target_of_the_detectors():
    bench = Bench()
    bench.steps(1, 50)
    bench.snapshots(30, 50)
    at_thirty = Bench()
    at_thirty.steps(1, 30)
    bench.see(note(50, Quality.PENDING, kept=False))
    bench.steps(51, 99)
    bench.steps(100, 101, loss=6.0)
    bench.answer(bench.acting[0], target=30)
    assert [each.state() for each in bench.detectors] == [each.state() for each in at_thirty.detectors]


ROW = st.tuples(
    st.sampled_from([2.0, 2.0, 2.1, 9.0, 0.0, math.nan, math.inf, None]),
    st.sampled_from([1.0, math.nan, None]),
    st.sampled_from(UpdateResult),
    st.booleans(),
    st.sampled_from([None, *Outcome]),
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROW, max_size=120))
def test_any_course_of_events_is_judged_the_same_twice_and_stays_bounded(rows):
    benches = Bench(), Bench()
    for bench in benches:
        step = 0
        for loss, norm, result, reflexed, outcome in rows:
            step += 1
            if reflexed:
                bench.see(reflex(step, generation=bench.generation))
            ruling = bench.see(record(step, loss, norm, bench.generation, result=result, data_position=step))
            acting = [one for one in ruling.decisions if one.action not in (Action.NONE, Action.SKIP_UPDATE)]
            if acting and outcome is not None:
                bench.answer(acting[-1], outcome, Reason.ERROR, target=max(0, step - 7))
                step = max(0, step - 7) if outcome is Outcome.APPLIED else step
        bench.end()
    left, right = benches
    assert repr(left.decisions) == repr(right.decisions)
    assert repr(left.incidents) == repr(right.incidents)
    assert all(incident.status is not IncidentStatus.OPEN for incident in left.incidents.values())
    rollbacks = [one for one in left.acting if one.action is Action.ROLLBACK]
    budget = left.settings.respond.budget
    assert len(rollbacks) <= 2 * (budget + 3 * budget + 3)
