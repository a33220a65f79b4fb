"""Sampling stays within its share of the step time, and ranks that pay differently still share steps."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sentinel.client.attach import attach
from sentinel.client.sampling.budget import MOST_DOUBLINGS, OVERRUNS_BEFORE_OFF, WARM_UP_STEPS, Budget
from sentinel.client.sampling.histogram import Histogram
from sentinel.client.sampling.sampling import FAILURES_BEFORE_OFF
from sentinel.records import StepRecord, Trouble
from sentinel.testing import FakeDaemon
from tests.client.sampling.conftest import EVERY
from tests.client.sampling.samples import samples
from tests.client.training import loader, make
from tests.client.watching import watched

SECONDS = st.floats(1e-4, 10.0)


def play(budget: Budget, steps: int, pace: float, costs: dict[str, float]) -> dict[str, list[int]]:
    """Steps at which each signal was taken, with the account of the budget kept."""
    taken: dict[str, list[int]] = {name: [] for name in costs}
    for step in range(1, steps + 1):
        due = budget.due(step, costs) if budget.begins(step) else []
        budget.stepped(pace)
        for name in due:
            taken[name].append(step)
            budget.took(name, costs[name])
    return taken


@given(
    every=st.integers(1, 60),
    ratio=st.floats(1e-3, 0.5),
    pace=SECONDS,
    costs=st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=4),
)
def test_all_signals_together_cost_no_more_than_the_ratio_and_one_sample_each(every, ratio, pace, costs) -> None:
    """Whatever they cost: also those that are switched off at last."""
    budget = Budget(every, ratio)
    names = {f"signal {number}": pace * cost for number, cost in enumerate(costs)}
    steps = 40 * every
    taken = play(budget, steps, pace, names)
    assert any(taken.values())
    spent = sum(names[name] * len(times) for name, times in taken.items())
    assert spent <= (ratio * steps * pace + sum(names.values())) * (1 + 1e-9)


@given(pace=SECONDS, other=SECONDS, cost=st.floats(1e-4, 1.0), every=st.integers(4, 50))
def test_ranks_that_pay_differently_share_the_steps_of_the_coarser_one(pace, other, cost, every) -> None:
    steps = every << (MOST_DOUBLINGS - 2)
    one, two = (set(play(Budget(every, 0.01), steps, each, {"x": cost})["x"]) for each in (pace, other))
    assert all(step % every == 0 for step in one | two)
    for step in one & two:
        assert step >= every
    first = every
    while first <= WARM_UP_STEPS:
        first += every
    assert first in one & two, "the first sample is early, and of all ranks"


@given(doubled=st.integers(0, MOST_DOUBLINGS), other=st.integers(0, MOST_DOUBLINGS), every=st.integers(1, 60))
def test_a_coarser_cadence_is_part_of_every_finer_one(doubled: int, other: int, every: int) -> None:
    coarse, fine = max(doubled, other), min(doubled, other)
    assert (every << coarse) % (every << fine) == 0


def test_a_cheap_signal_is_taken_at_every_step_that_the_cadence_divides() -> None:
    assert play(Budget(50, 0.005), 300, 0.1, {"x": 0.001})["x"] == [50, 100, 150, 200, 250, 300]


def test_a_dear_one_is_taken_rarely_and_more_often_once_it_is_cheaper() -> None:
    budget = Budget(10, 0.01)
    taken = play(budget, 640, 0.1, {"x": 0.1})["x"]  # a sample is paid by 100 steps
    assert taken[:1] == [10]
    assert 4 <= len(taken) <= 7
    costly = budget.doublings("x")
    for _ in range(10):
        budget.took("x", 0.0001)
    assert budget.doublings("x") < costly


def test_the_first_steps_are_never_sampled() -> None:
    assert play(Budget(1, 1.0), 20, 1.0, {"x": 0.0})["x"][0] == 1 + WARM_UP_STEPS
    budget = Budget(50, 1.0)
    assert [step for step in range(499, 560) if budget.begins(step)] == [550], "attached at step 498"


def test_what_no_cadence_can_pay_is_switched_off_with_the_reason_and_leaves_its_share() -> None:
    budget = Budget(1, 0.001)
    pace, cost = 0.01, 1.0
    said: list[str] = []
    for step in range(1, 4 << MOST_DOUBLINGS):
        due = budget.due(step, ("dear", "cheap")) if budget.begins(step) else []
        budget.stepped(pace)
        for name in due:
            sentence = budget.took(name, cost if name == "dear" else 1e-6)
            said += [sentence] if sentence else []
    (sentence,) = said
    assert "dear" in sentence
    assert "sampling.cost_ratio" in sentence
    assert budget.due(4 << MOST_DOUBLINGS, ("dear", "cheap")) == ["cheap"]
    assert OVERRUNS_BEFORE_OFF == 2, "one accident is forgiven"


class SlowHistogram(Histogram):
    """Really slow, for a run whose steps are really short."""

    def gradients(self, *arguments: Any) -> None:
        time.sleep(0.02)
        super().gradients(*arguments)


def test_in_a_real_run_a_slow_signal_becomes_rare_and_the_others_stay(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.client.sampling.catalogue.Histogram", SlowHistogram)
    model, optimizer = make()
    monkeypatch.setenv("SENTINEL_SAMPLING__COST_RATIO", "0.2")
    settings = {"sampling": {"signals": ["histogram", "group_norms"]}}
    with watched(daemon, model, optimizer, settings=settings) as found:
        for inputs, targets in loader(size=16 * 300):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    taken = samples(found.records).values()
    slow = [sample for sample in taken if sample.histogram is not None]
    quick = [sample for sample in taken if sample.group_norms is not None]
    assert slow
    assert all(sample.seconds > 0.02 for sample in slow), "the fault fired"
    assert len(quick) > 3 * len(slow)
    # The machine is not ours alone: twice the ratio leaves room for what its other work makes of a sleep.
    assert sum(sample.seconds for sample in taken) < 2 * 0.2 * sum(found.all("step_seconds")[1:]) + 0.02


class BrokenHistogram(Histogram):
    def gradients(self, *arguments: Any) -> None:
        raise ValueError("on purpose")


def test_a_signal_that_fails_is_said_and_switched_off_and_the_others_go_on(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.client.sampling.catalogue.Histogram", BrokenHistogram)
    model, optimizer = make()
    settings = {"sampling": {"signals": ["histogram", "update_ratio"]}}
    run = attach(model, optimizer, settings=settings)
    for inputs, targets in loader(size=16 * EVERY * FAILURES_BEFORE_OFF):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    run.detach()
    texts = [trouble.text for trouble in daemon.of(Trouble)]
    assert len(texts) == FAILURES_BEFORE_OFF
    assert all("histogram" in text and "on purpose" in text for text in texts)
    assert "switched off" in texts[-1]
    taken = [record.sampled for record in daemon.of(StepRecord) if record.sampled is not None]
    assert len(taken) >= FAILURES_BEFORE_OFF
    assert all(sample.update_norm is not None and sample.histogram is None for sample in taken)


def test_switched_off_nothing_is_sampled(daemon: FakeDaemon) -> None:
    model, optimizer = make()
    with watched(daemon, model, optimizer, settings={"sampling": {"enabled": False}}) as found:
        for inputs, targets in loader(size=16 * 2 * EVERY):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert found.all("sampled") == [None] * 2 * EVERY
