"""Non-finite losses, gradients and states: what each means."""

import math

import pytest

from sentinel.detect.nonfinite import NonFinite
from sentinel.detect_settings import NonFiniteSettings
from sentinel.vocabulary import Kind, Quality, Severity, Tier, UpdateResult
from tests.detect.series import note, record, reflex, refused


@pytest.fixture
def detector() -> NonFinite:
    return NonFinite(NonFiniteSettings())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_with_finite_gradients_is_certain_and_only_a_warning(detector, value):
    found = detector.observe(record(5, value))
    assert (found.kind, found.tier, found.severity) == (Kind.NONFINITE_LOSS, Tier.T0, Severity.WARNING)
    assert found.evidence["gradient"] == "finite"
    assert found.onset_step == 5


def test_a_lone_reflexed_gradient_is_a_notice_with_the_clients_evidence(detector):
    found = detector.observe(reflex(7))
    assert (found.kind, found.tier, found.severity) == (Kind.NONFINITE_GRADIENT, Tier.T1, Severity.WARNING)
    assert found.evidence["parameter"] == "head.weight"
    assert not found.evidence["reached_weights"]


def test_the_record_of_a_reflexed_step_with_a_finite_loss_adds_no_finding(detector):
    detector.observe(reflex(7))
    assert detector.observe(record(7, 2.0, math.nan, result=UpdateResult.REFLEX)) is None


def test_the_record_of_a_reflexed_step_with_a_nan_loss_names_the_loss(detector):
    detector.observe(reflex(7))
    found = detector.observe(record(7, math.nan, math.nan, result=UpdateResult.REFLEX))
    assert found.kind is Kind.NONFINITE_LOSS
    assert found.evidence["gradient"] == "nonfinite"
    assert not found.evidence["reached_weights"]


def test_three_reflexes_in_a_row_are_certain_and_their_onset_is_the_first(detector):
    tiers = [detector.observe(reflex(step, consecutive)).tier for step, consecutive in ((4, 1), (5, 2))]
    found = detector.observe(reflex(6, 3))
    assert tiers == [Tier.T1, Tier.T1]
    assert (found.tier, found.onset_step, found.severity) == (Tier.T0, 4, Severity.CRITICAL)


def test_a_clean_step_ends_the_row(detector):
    detector.observe(record(4, 2.0, math.inf, result=UpdateResult.REFLEX))
    detector.observe(record(5, 2.0, math.inf, result=UpdateResult.REFLEX))
    detector.observe(record(6))
    assert detector.observe(record(7, 2.0, math.inf, result=UpdateResult.REFLEX)).tier is Tier.T1


def test_a_nonfinite_gradient_that_was_applied_is_certain_at_once(detector):
    found = detector.observe(record(9, 2.0, math.nan))
    assert (found.kind, found.tier) == (Kind.NONFINITE_GRADIENT, Tier.T0)
    assert found.evidence["reached_weights"]


def test_an_amp_overflow_is_normal(detector):
    for step in range(1, 20):
        assert detector.observe(record(step, 2.0, math.inf, result=UpdateResult.OVERFLOW)) is None
        assert detector.observe(record(step, math.inf, math.inf, result=UpdateResult.OVERFLOW)) is None


def test_a_nan_loss_with_unknown_gradients_is_lasting_only_after_three(detector):
    lasting = [detector.observe(record(step, math.nan, None)).evidence["lasting"] for step in (1, 2, 3)]
    assert lasting == [False, False, True]


def test_a_refused_snapshot_names_the_tensor(detector):
    found = detector.observe(refused(30, "blocks.0.weight"))
    assert (found.kind, found.tier, found.onset_step) == (Kind.NONFINITE_STATE, Tier.T0, 30)
    assert found.evidence["tensor"] == "blocks.0.weight"


def test_other_bad_snapshots_say_nothing_about_the_state(detector):
    assert detector.observe(note(30, Quality.BAD, reason="a state was loaded from outside")) is None
    assert detector.observe(note(30, Quality.GOOD)) is None
