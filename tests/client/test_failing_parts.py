"""Whatever of sentinel fails, and as often as it likes: the loop is not disturbed and its weights are the same."""

from typing import Any

import pytest
import torch
from torch import nn

from sentinel.client import clipping, interception, loop, ring
from sentinel.client.attach import attach
from sentinel.client.attempt import Attempt
from sentinel.client.attempts import Attempts
from sentinel.client.clipping import Clipping
from sentinel.client.data import Cursor, IndexedSource
from sentinel.client.inbox import Inbox
from sentinel.client.judgement import Judgement
from sentinel.client.loop import Loop
from sentinel.client.markers import Markers
from sentinel.client.optimizer import WatchedOptimizer
from sentinel.client.outbox import Outbox
from sentinel.client.reflex import Reflexes
from sentinel.client.ring import Ring
from sentinel.client.stepping import Stepping
from sentinel.client.subject import Subject
from sentinel.client.turns import Turns
from sentinel.testing import FakeDaemon
from tests.client.training import Setup, equal, loader, make, weights

PARTS: list[tuple[Any, str]] = [
    (Attempt, "record"), (Attempt, "values"),
    (Cursor, "hand_out"), (Cursor, "step_done"), (Cursor, "trim"), (IndexedSource, "close"),
    (Inbox, "lost"),
    (Attempts, "of"), (Attempts, "open"), (Attempts, "of_backward"), (Attempts, "of_report"),
    (Attempts, "forget_broken_step"), (Clipping, "before"), (Clipping, "after"), (Judgement, "before_step"),
    (Loop, "flush"), (Loop, "_close"), (Loop, "_emit"), (Loop, "end_attempt"), (Loop, "finish"),
    (Markers, "begin"), (Markers, "reached"),
    (Outbox, "push"),
    (Reflexes, "judge"),
    (Ring, "take"), (Ring, "promote"), (Ring, "observe_step"), (Ring, "clear"), (Ring, "_tell"),
    (Stepping, "enter"), (Stepping, "leave"), (Stepping, "repeats"),
    (Subject, "tensors"), (Subject, "release"),
    (Turns, "top_of_batches"), (Turns, "after_step"), (Turns, "take_base"), (Turns, "wants_step"),
    (WatchedOptimizer, "give_back"), (WatchedOptimizer, "look_again"),
    (clipping, "measure"), (loop, "device_memory"),
    (ring, "capture"), (ring, "live_tensors"), (ring, "first_nonfinite"), (ring, "digest"),
]  # fmt: skip


def train(setup: Setup, run: Any) -> int:
    data, steps = loader(size=256), 0
    for inputs, targets in [*(run.batches(data) if run else data), *data]:
        setup.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(setup.model.parameters(), 0.5)
        setup.optimizer.step()
        steps += 1
        if run:
            run.report(loss=loss, accuracy=1.0)
    if run:
        with run.phase("eval"):
            steps += 0
        run.detach()
    return steps


@pytest.fixture(scope="module")
def clean() -> Any:
    setup = make()
    torch.manual_seed(1)
    train(setup, None)
    return weights(setup.model)


@pytest.mark.parametrize(("owner", "name"), PARTS, ids=[f"{owner.__name__}.{name}" for owner, name in PARTS])
def test_a_part_that_always_raises_does_not_disturb_the_loop(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, clean: Any, owner: Any, name: str
) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer, settings={"snapshot": {"every_steps": 5}})
    daemon.wait_for(lambda: run._inbox.attempt)
    torch.manual_seed(1)
    fired = 0

    def fail(*_arguments: Any, **_named: Any) -> Any:
        nonlocal fired
        fired += 1
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(owner, name, fail)
    assert train(setup, run) == 32
    assert fired > 0
    assert equal(weights(setup.model), clean)
    assert run.detached
    assert not interception.observers()
