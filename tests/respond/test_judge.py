"""From observations to incidents and decisions: the whole judge, as the pipeline uses it."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.vocabulary import (
    Action,
    IncidentStatus,
    Kind,
    Mode,
    Outcome,
    Quality,
    Reason,
    Severity,
    Tier,
    UpdateResult,
)
from tests.detect.series import note, record, reflex
from tests.respond.bench import Bench, spiked


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


def test_a_fallen_back_incident_without_action_takes_its_mark_off():
    bench = spiked(mode=Mode.OBSERVE)
    bench.steps(102, 130)
    assert bench.only.status is IncidentStatus.RESOLVED
    assert bench.only.cause == "it healed by itself"
    assert [(mark.since_step, mark.clear) for mark in bench.marks] == [(90, False), (90, True)]


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
