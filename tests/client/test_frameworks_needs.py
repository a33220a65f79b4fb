"""What a loop that belongs to a framework asks of the client: to be told of a stop, to end with an error."""

import threading

import pytest
import torch
from torch import nn

import sentinel
from sentinel.records import RunEnd, StepRecord
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action
from tests.client.training import loader, make


def test_a_stop_is_told_once_instead_of_raised_where_the_loop_asks_for_it(daemon: FakeDaemon) -> None:
    setup, told = make(), []
    run = sentinel.attach(setup.model, setup.optimizer, on_stop=told.append)
    daemon.wait_for(lambda: run._inbox.attempt)
    command = daemon.command(Action.STOP, apply_at=3, reason="enough")
    thread = threading.Thread(target=lambda: daemon.turn(command))
    thread.start()
    daemon.wait_for(lambda: run._inbox.turn)
    for inputs, targets in loader(size=128):
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.optimizer.step()
    thread.join()
    run.detach()
    assert told == ["enough"]
    assert run.step == 8  # the loop went on until it ended by itself
    end = daemon.wait_for(lambda: daemon.of(RunEnd))[0]
    assert (end.status, end.error) == ("completed", "stopped: enough")


def test_on_stop_that_is_no_function_is_refused_at_once(home) -> None:
    setup = make()
    with pytest.raises(sentinel.SentinelError, match="on_stop is 3"):
        sentinel.attach(setup.model, setup.optimizer, on_stop=3)


def test_a_run_that_is_detached_with_an_error_has_failed(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    daemon.wait_for(lambda: run._inbox.attempt)
    run.detach(RuntimeError("no more data"))
    run.detach()
    (end,) = daemon.wait_for(lambda: daemon.of(RunEnd))
    assert (end.status, end.error) == ("failed", "RuntimeError: no more data")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_greets(home, monkeypatch, capsys, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    run.detach()
    assert capsys.readouterr().err.count("turn off: SENTINEL_MODE=off") == (1 if rank == 0 else 0)


def test_clipping_to_infinity_tells_the_norm_and_is_no_limit(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    inputs, targets = next(iter(loader()))
    nn.functional.cross_entropy(setup.model(inputs), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(setup.model.parameters(), float("inf"))
    setup.optimizer.step()
    run.detach()
    (seen,) = daemon.wait_for(lambda: daemon.of(StepRecord))
    assert (seen.clip_max_norm, seen.grad_norm_source) == (None, "clip")
    assert seen.grad_norm == pytest.approx(float(norm))


def test_the_first_step_of_a_loop_with_closures_took_some_time(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    inputs, targets = next(iter(loader()))

    def evaluate() -> torch.Tensor:
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        loss.backward()
        return loss

    with run.phase("eval"):
        threading.Event().wait(0.2)  # longer than the step: were it taken off, nothing would be left
    setup.optimizer.step(evaluate)
    run.detach()
    (seen,) = daemon.wait_for(lambda: daemon.of(StepRecord))
    assert seen.step_seconds > 0.0
