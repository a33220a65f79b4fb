"""What is done about non-finite losses, gradients and states."""

import math
from dataclasses import replace

import pytest

from sentinel.config import Settings
from sentinel.vocabulary import Action, IncidentStatus, Kind, Reason, Severity, Tier, UpdateResult
from tests.detect.series import record, reflex, refused
from tests.respond.bench import Bench


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
