"""The demo's corpus, data and verdict."""

import math

import pytest
import torch

from sentinel.demo import corpus, data
from sentinel.demo.plan import Plan
from sentinel.demo.verdict import judge
from sentinel.errors import MisuseError

PLAN = Plan(steps=200, batch=4, corpus_characters=60_000)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    numbers, vocabulary = corpus.encode(corpus.sources(PLAN.corpus_characters))
    assert int(numbers.max()) < vocabulary
    return numbers


def test_the_corpus_is_the_same_every_time_and_mostly_printable(text):
    again, _ = corpus.encode(corpus.sources(PLAN.corpus_characters))
    assert torch.equal(text, again)
    assert len(text) == PLAN.corpus_characters
    assert (text == 0).float().mean() < 0.01


def test_validation_shares_no_block_with_training(text):
    training, validation = corpus.split(text)
    assert len(validation) * 8 < len(training)
    blocks = {tuple(block.tolist()) for block in validation.view(-1, corpus.BLOCK)}
    assert blocks.isdisjoint(tuple(block.tolist()) for block in training.view(-1, corpus.BLOCK))


def test_only_the_window_is_poisoned_and_only_in_its_targets(text):
    clean, bad = (list(data.loader(text, PLAN, poisoned=poisoned)) for poisoned in (False, True))
    assert len(clean) == PLAN.batches
    different = [number for number, (one, other) in enumerate(zip(clean, bad, strict=True)) if _differ(one, other)]
    assert different == list(range(PLAN.first_poisoned, PLAN.first_poisoned + PLAN.poisoned_batches))
    assert all(torch.equal(one[0], other[0]) for one, other in zip(clean, bad, strict=True))
    assert {int(number) for number in bad[7][2]} == {7}


def test_the_window_ends_before_the_run_and_follows_the_nan_by_more_than_good_takes():
    for steps in (200, 240, 1000):
        plan = Plan(steps=steps)
        assert plan.first_poisoned + plan.poisoned_batches < steps
        # A snapshot from after the NaN is GOOD by then, and older than the margin before the onset.
        assert plan.first_poisoned - plan.nan_batch > 50 + 10


def test_too_few_steps_are_refused():
    with pytest.raises(MisuseError, match="at least 200"):
        Plan(steps=20)


def test_a_saved_run_keeps_every_promise():
    assert [check.promise for check in judge(LOSSES, _report()) if not check.kept] == []


@pytest.mark.parametrize(
    ("losses", "report", "broken"),
    [
        ({"with sentinel": 2.05}, {}, "within 2 %"),
        ({"with sentinel": math.nan}, {}, "within 2 %"),
        ({"both faults": 2.2}, {}, "without it"),
        ({"window alone": 2.2}, {}, "alone"),
        ({}, {"incidents": []}, "skip_update"),
        ({}, {"incidents": [0]}, "rollback"),
        ({}, {"outcome": "refused"}, "rollback"),
        ({}, {"stored": 98}, "accounted"),
        ({}, {"conservation": []}, "accounted"),
    ],
)
def test_a_broken_promise_is_named(losses, report, broken):
    failed = [check.promise for check in judge({**LOSSES, **losses}, _report(**report)) if not check.kept]
    assert failed
    assert any(broken in promise for promise in failed)


LOSSES = {"clean": 2.0, "window alone": 3.5, "both faults": math.nan, "with sentinel": 2.01}


def _report(incidents=(0, 1), outcome="applied", stored=99, **other):
    def act(action, target, outcome):
        return {"action": action, "target_step": target, "outcome": outcome}

    known = [
        {"kind": "nonfinite_gradient", "first_step": 61, "actions": [act("skip_update", None, "applied")]},
        {"kind": "loss_spike", "first_step": 142, "actions": [act("rollback", 100, outcome)]},
    ]
    return {
        "incidents": [known[place] for place in incidents],
        "conservation": [{"rank": 0, "produced": 100, "stored": stored, "dropped": 1}],
        **other,
    }


def _differ(one, other):
    return not torch.equal(one[1], other[1])
