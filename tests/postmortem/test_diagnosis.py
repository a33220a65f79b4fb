"""The diagnosis says what the records show, link by link, and nothing else."""

import math
from typing import Any

import pytest

from sentinel.postmortem.diagnosis import Clue, Link, Verdict, diagnose
from sentinel.postmortem.series import Series, gather
from sentinel.store.rows import STEP_COLUMNS
from sentinel.store.timeline import segments

ONSET = 80


def row(step: int, generation: int = 0, rank: int = 0, **other: Any) -> dict[str, Any]:
    fields = {
        **dict.fromkeys(STEP_COLUMNS),
        "attempt": 1,
        "generation": generation,
        "step": step,
        "rank": rank,
        "result": "applied",
        "loss": 2.0 + 0.01 * (step % 3),
        "grad_norm": 1.0 + 0.05 * (step % 4),
        "lr": 1e-3,
        "step_seconds": 0.1,
        "data_position": step,
    }
    return fields | other


def incident(kind: str = "loss_spike", actions: tuple[dict[str, Any], ...] = (), **other: Any) -> dict[str, Any]:
    where = {"attempt": 1, "generation": 0, "onset_step": ONSET, "first_step": ONSET + 1, "last_step": ONSET + 2}
    return {"id": "i1", "kind": kind, "cause": "as told", "actions": list(actions), **where} | other


def action(name: str = "rollback", **other: Any) -> dict[str, Any]:
    fields = {"action": name, "outcome": "applied", "applied_step": ONSET + 2, "target_step": 60}
    return fields | {"skipped_batches": 20, "seconds": 0.1} | other


def series(changed: dict[int, dict[str, Any]], after: dict[str, Any] | None = None) -> Series:
    """82 steps, some changed; with `after`, a rollback to 60 and 30 steps more."""
    rows = [row(step, **changed.get(step, {})) for step in range(1, ONSET + 3)]
    known = [{"attempt": 1, "generation": 0, "target_step": 0}]
    if after is not None:
        rows += [row(step, 1, **after) for step in range(61, 91)]
        known.append({"attempt": 1, "generation": 1, "target_step": 60})
    return gather(segments(known), rows)


def clues(found: Series, told: dict[str, Any] | None = None) -> dict[Link, Clue]:
    (diagnosis,) = diagnose({"incidents": [told or incident()]}, found)
    assert [clue.link for clue in diagnosis.clues] == list(Link)
    return {clue.link: clue for clue in diagnosis.clues}


HIGH = {"loss": 6.0}


@pytest.mark.parametrize(
    ("first_gradient", "words"),
    [
        (ONSET - 3, "rose 3 steps before the loss, at step 77: to 9, 8.2 times the median of 1.1"),
        (ONSET, "rose together with the loss, at step 80"),
        (ONSET + 1, "rose 1 step after the loss, at step 81, so it followed"),
    ],
)
def test_it_says_whether_the_gradient_rose_before_the_loss(first_gradient, words):
    changed = {step: dict(HIGH) for step in range(ONSET, ONSET + 3)}
    for step in range(first_gradient, ONSET + 3):
        changed.setdefault(step, {})["grad_norm"] = 9.0
    clue = clues(series(changed))[Link.GRADIENT]
    assert clue.verdict is Verdict.SHOWS
    assert words in clue.text


def test_one_high_gradient_that_falls_back_is_no_rise():
    changed = {step: dict(HIGH) for step in range(ONSET, ONSET + 3)} | {70: {"grad_norm": 9.0}}
    clue = clues(series(changed))[Link.GRADIENT]
    assert clue.verdict is Verdict.CLEARS
    assert "stayed usual: at most 9" in clue.text


def test_a_nonfinite_gradient_that_was_kept_out_is_told_as_such():
    found = series({ONSET: {"grad_norm": math.nan, "result": "reflex"}})
    told = incident("nonfinite_gradient", (action("skip_update", target_step=None, applied_step=ONSET),))
    seen = clues(found, told)
    assert "was NaN at step 80; one step earlier it was 1.15" in seen[Link.GRADIENT].text
    assert "No such update reached the weights" in seen[Link.GRADIENT].text
    assert "Only the update of step 80 (batch 80 of the data) was left out" in seen[Link.DATA].text
    assert seen[Link.DATA].verdict is Verdict.UNKNOWN


def test_a_nonfinite_gradient_that_was_applied_is_told_as_such():
    found = series({ONSET: {"grad_norm": math.inf}})
    assert "At least one such update was applied" in clues(found)[Link.GRADIENT].text


def test_a_jump_of_the_learning_rate_before_the_onset_is_the_cause():
    changed = {step: {"lr": 1e-2} for step in range(ONSET - 2, ONSET + 3)}
    (diagnosis,) = diagnose({"incidents": [incident()]}, series(changed))
    clue = diagnosis.clues[1]
    assert clue == Clue(
        Link.LEARNING_RATE,
        Verdict.POINTS,
        "The learning rate jumped from 0.001 to 0.01 at step 78, 2 steps before it began.",
    )
    assert diagnosis.conclusion.startswith("Most likely the learning rate")


def test_a_jump_after_the_onset_is_not():
    changed = {step: {"lr": 1e-2} for step in range(ONSET + 1, ONSET + 3)}
    assert clues(series(changed))[Link.LEARNING_RATE].verdict is Verdict.CLEARS


def test_a_falling_loss_scale_points_at_precision():
    changed = {step: {"loss_scale": 2.0**16} for step in range(1, ONSET)}
    for number, step in enumerate(range(ONSET, ONSET + 3)):
        changed[step] = {"loss_scale": 2.0 ** (14 - 2 * number), "result": "overflow"}
    clue = clues(series(changed))[Link.PRECISION]
    assert clue.verdict is Verdict.POINTS
    assert "from 6.55e+04 to 4.1e+03, with 2 overflows" in clue.text


def test_a_steady_loss_scale_clears_it_and_none_leaves_it_unknown():
    steady = series({step: {"loss_scale": 1024.0} for step in range(1, ONSET + 3)})
    assert clues(steady)[Link.PRECISION].verdict is Verdict.CLEARS
    assert clues(series({}))[Link.PRECISION].verdict is Verdict.UNKNOWN


def test_health_after_skipping_points_at_the_data():
    found = series(dict.fromkeys(range(ONSET, ONSET + 3), HIGH), after={})
    (diagnosis,) = diagnose({"incidents": [incident(actions=(action(),))]}, found)
    clue = diagnosis.clues[3]
    assert clue.verdict is Verdict.POINTS
    assert "to step 60, with 20 batches left out, the loss was 2.01 in the next 20 steps, where 2.01" in clue.text
    assert diagnosis.conclusion.startswith("Most likely the data")


@pytest.mark.parametrize(("skipped", "after"), [(0, {}), (20, HIGH)])
def test_health_after_a_replay_and_illness_after_a_skip_clear_the_data(skipped, after):
    found = series(dict.fromkeys(range(ONSET, ONSET + 3), HIGH), after=after)
    clue = clues(found, incident(actions=(action(skipped_batches=skipped),)))[Link.DATA]
    assert clue.verdict is Verdict.CLEARS


def test_without_signals_every_link_is_unknown():
    absent = dict.fromkeys(("grad_norm", "lr", "loss"))
    found = series(dict.fromkeys(range(1, ONSET + 3), absent))
    assert {clue.verdict for clue in clues(found).values()} == {Verdict.UNKNOWN}


def test_an_incident_at_the_first_step_has_too_little_before_it():
    found = series({1: HIGH, 2: HIGH})
    clue = clues(found, incident(onset_step=1, first_step=1, last_step=2))[Link.GRADIENT]
    assert clue.verdict is Verdict.UNKNOWN
    assert "Too few steps" in clue.text


def test_other_kinds_keep_the_cause_that_was_found_with_them():
    (diagnosis,) = diagnose({"incidents": [incident("dead_rank")]}, series({}))
    assert (diagnosis.clues, diagnosis.conclusion) == ((), "as told")


def test_an_incident_without_any_step_record_is_no_error():
    (diagnosis,) = diagnose({"incidents": [incident(attempt=7)]}, series({}))
    assert diagnosis.clues == ()
