"""O35: watching again after an end, and two models of one class (wandb#1164, #626, #279)."""

import pytest
from torch import nn

import sentinel
from sentinel.records import Hello, StepRecord, Trouble
from sentinel.testing import FakeDaemon
from tests.client.training import Setup, loader, make
from tests.client.watching import watched


def train(setup: Setup, steps: int, factor: float = 1.0) -> list[float]:
    losses = []
    for inputs, targets in list(loader())[:steps]:
        setup.optimizer.zero_grad()
        loss = factor * nn.functional.cross_entropy(setup.model(inputs), targets)
        loss.backward()
        setup.optimizer.step()
        losses.append(loss.item())
    return losses


def test_attach_detach_attach_watches_the_second_time_as_the_first(daemon: FakeDaemon) -> None:
    setup = make()
    ids = []
    for _ in range(3):
        with watched(daemon, setup.model, setup.optimizer) as found:
            losses = train(setup, 4)
        train(setup, 2)  # what happens between two Runs is nobody's
        assert found.all("loss") == pytest.approx(losses)
        assert found.all("step") == [1, 2, 3, 4]
        ids.append(found.run.run_id)
    assert len(set(ids)) == 3


def test_a_run_goes_on_counting_where_the_loop_says_so(daemon: FakeDaemon) -> None:
    setup = make()
    with watched(daemon, setup.model, setup.optimizer, run_id="one") as first:
        train(setup, 3)
    with watched(daemon, setup.model, setup.optimizer, run_id="one", step=first.run.step) as second:
        train(setup, 3)
    assert second.all("step") == [4, 5, 6]


def test_two_models_of_one_class_have_two_names_and_two_series(daemon: FakeDaemon) -> None:
    """Trained in turn, and one's losses a thousand times the other's."""
    one, two = make(), make(seed=1)
    runs = [sentinel.attach(setup.model, setup.optimizer, run_id="twins") for setup in (one, two)]
    expected: list[list[float]] = [[], []]
    for _ in range(5):
        expected[0] += train(one, 1)
        expected[1] += train(two, 1, factor=1e3)
    for run in runs:
        run.detach()
    assert {hello.run_id for hello in daemon.of(Hello)} == {"twins", "twins.2"}
    seen = daemon.of(StepRecord)
    assert len(seen) == 10
    assert [one.loss for one in seen if one.loss < 20] == pytest.approx(expected[0])
    assert [one.loss for one in seen if one.loss > 20] == pytest.approx(expected[1])
    assert not daemon.of(Trouble)
