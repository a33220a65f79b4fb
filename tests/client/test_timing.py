"""Where the time of a step went: one definition of each part, whatever the loop looks like.

Known times are slept in known places. A part is at least what was slept in its place; and because the parts of a step
never exceed it, it is at most what the step took by the test's own clock without what was slept elsewhere. Both hold
on a busy machine too.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from sentinel.client.attempt import Attempt
from sentinel.client.timing import Timing
from sentinel.detect.step_parts import StepTimes, parts_of
from sentinel.records import StepRecord
from sentinel.testing import FakeDaemon
from tests.client.training import Numbers
from tests.client.watching import Watched, watched

STEPS = 4
SLEPT = {"data_wait": 0.008, "forward": 0.012, "backward": 0.016, "optimizer": 0.010}
PARTS = tuple(SLEPT)


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(SLEPT["data_wait"])
    return torch.utils.data.default_collate(samples)


def slow_loader(batches: int = STEPS, **more: Any) -> "DataLoader[Any]":
    return DataLoader(Numbers(4 * batches), batch_size=4, collate_fn=slow_collate, **more)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        time.sleep(SLEPT["backward"])
        Clocked.last = time.perf_counter()
        return gradient


class Slow(nn.Module):
    """A classifier that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(SLEPT["forward"])
        result: Tensor = SlowBackward.apply(self.linear(inputs))
        return result


class SlowSGD(torch.optim.SGD):
    """`evaluations` of a closure, where there is one."""

    evaluations: ClassVar[int] = 2

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(SLEPT["optimizer"])
        for _ in range(self.evaluations if closure else 0):
            with torch.enable_grad():
                closure()
        Clocked.last = time.perf_counter()
        return super().step()


class Clocked:
    """The test's own clock around every step, and what it slept in which part of it."""

    last: ClassVar[float] = 0.0  # a moment shortly before the attempt that goes on is closed

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        self._began = time.perf_counter()

    def step(self, **times: float) -> None:
        """An attempt is over; in each part of it was slept so many times, once where it is not named."""
        slept = {part: SLEPT[part] * times.get(part, 1) for part in PARTS}
        self.steps.append((time.perf_counter() - self._began, slept))
        self._began = Clocked.last  # so that the test's step encloses the one that is told, whoever is interrupted


def parts(record: StepRecord) -> dict[str, float | None]:
    return {part: getattr(record, f"{part}_seconds") for part in PARTS}


def check(found: Watched, clocked: Clocked, *, first: bool = False, elsewhere: float = 0.0) -> None:
    """Of every step, without `first` from the second on. `elsewhere` was slept in each, in none of its parts."""
    assert len(found.records) == len(clocked.steps)
    pairs = list(zip(found.records, clocked.steps, strict=True))
    for record, (took, slept) in pairs if first else pairs[1:]:
        told, rest = parts(record), took - sum(slept.values()) - elsewhere
        assert record.step_seconds is not None
        assert record.step_seconds < took
        for part in PARTS:
            seconds = told[part]
            if slept[part]:
                assert seconds is not None, (record.step, part)
                assert slept[part] <= seconds <= slept[part] + rest + 1e-9, (record.step, part, told, took)
            else:
                assert seconds is None or 0.0 <= seconds <= rest + 1e-9, (record.step, part, told, took)
        known = [seconds for seconds in told.values() if seconds is not None]
        assert sum(known) <= record.step_seconds + 1e-9
        shown = parts_of(StepTimes(record.step_seconds, *told.values()))
        assert sum(shown.values()) == pytest.approx(record.step_seconds), "with other they are as high as the step"


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


Feed = Callable[[Watched, Any], Iterator[Any]]
FEEDS: dict[str, Feed] = {
    "attached only": lambda _found, loader: iter(loader),
    "run.batches": lambda found, loader: iter(found.run.batches(loader)),
}


@pytest.mark.parametrize("feed", FEEDS)
def test_every_part_is_where_the_time_was_spent(daemon: FakeDaemon, feed: str) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        for batch in FEEDS[feed](found, slow_loader()):
            loss_of(model, batch).backward()
            optimizer.step()
            clocked.step()
    check(found, clocked, first=feed == "run.batches")


def test_of_a_loop_that_only_attached_the_first_step_begins_with_its_backward(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    with watched(daemon, model, optimizer) as found:
        for batch in slow_loader():
            loss_of(model, batch).backward()
            optimizer.step()
    first = found.records[0]
    assert (first.data_wait_seconds, first.forward_seconds) == (None, None), "they were before"
    assert first.step_seconds is not None
    assert first.step_seconds >= SLEPT["backward"] + SLEPT["optimizer"]


@pytest.mark.parametrize("feed", FEEDS)
def test_the_parts_of_micro_batches_add_up(daemon: FakeDaemon, feed: str) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        for place, batch in enumerate(FEEDS[feed](found, slow_loader(3 * STEPS))):
            (loss_of(model, batch) / 3).backward()
            if place % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                clocked.step(data_wait=3, forward=3, backward=3)
    assert len(clocked.steps) == STEPS
    check(found, clocked, first=feed == "run.batches")


def test_batches_that_come_from_no_loader_have_no_data_wait(daemon: FakeDaemon) -> None:
    model, batches = Slow(), list(slow_loader())
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            clocked.step(data_wait=0)
    check(found, clocked)
    assert found.all("data_wait_seconds") == [None] * STEPS


@pytest.mark.parametrize("overflows", [False, True])
def test_grad_scaler_belongs_to_the_optimizer_whether_it_skips_or_not(daemon: FakeDaemon, overflows: bool) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watched(daemon, model, optimizer) as found:
        for place, batch in enumerate(slow_loader()):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            bad = overflows and place == 2
            if bad:
                model.linear.weight.grad[0, 0] = math.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            clocked.step(optimizer=0 if bad else 1)
    check(found, clocked)
    skipped = [record.step for record in found.records if record.result == "overflow"]
    assert skipped == ([3] if overflows else [])
    assert all(seconds is not None and seconds > 0.0 for seconds in found.all("optimizer_seconds"))


def test_what_a_closure_computes_is_forward_and_backward_not_optimizer(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        for batch in slow_loader():

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            clocked.step(forward=2, backward=2)
    assert found.all("evaluations") == [SlowSGD.evaluations] * STEPS
    check(found, clocked)


def test_a_batch_that_a_closure_draws_is_no_optimizers_time(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        iterator = iter(slow_loader(SlowSGD.evaluations * STEPS))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, next(iterator))
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
            clocked.step(data_wait=2, forward=2, backward=2)
    check(found, clocked)


def test_of_several_optimizers_that_step_in_one_attempt_the_parts_add_up(daemon: FakeDaemon) -> None:
    one, other = Slow(), Slow()
    first, second = (SlowSGD(each.parameters(), lr=0.1) for each in (one, other))
    clocked = Clocked()
    with watched(daemon, nn.ModuleList([one, other]), [first, second]) as found:
        for batch in slow_loader():
            loss_of(one, batch).backward()
            first.step()
            loss_of(other, batch).backward()
            second.step()
            clocked.step(forward=2, backward=2, optimizer=2)
    check(found, clocked)


def test_what_checkpointing_computes_again_is_backward(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, model, optimizer) as found:
        for inputs, targets in slow_loader():
            outputs = checkpoint(model, inputs, use_reentrant=False)
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
            clocked.step(backward=1 + SLEPT["forward"] / SLEPT["backward"])
    check(found, clocked)


def test_a_compiled_model_has_the_same_parts(daemon: FakeDaemon) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    compiled = torch.compile(model, backend="eager")
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    with watched(daemon, compiled, optimizer) as found:
        for inputs, targets in slow_loader():
            outputs = SlowBackward.apply(compiled(inputs))
            time.sleep(SLEPT["forward"])
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()
            clocked.step()
    check(found, clocked)


# ---------------------------------------------------------------- what is no waiting for data


PHASE_SECONDS = 0.030


def evaluate(model: nn.Module, gradients: bool = False) -> None:
    with torch.set_grad_enabled(gradients):
        for batch in slow_loader(2):
            loss_of(model, batch)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("when", ["before the forward", "after the backward"])
@pytest.mark.parametrize("feed", FEEDS)
def test_a_phase_is_no_part_of_any_step(daemon: FakeDaemon, feed: str, when: str, gradients: bool) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    evaluation = 2 * (SLEPT["data_wait"] + SLEPT["forward"]) + PHASE_SECONDS

    def phase() -> None:
        with found.run.phase("eval"):
            evaluate(model, gradients)
            time.sleep(PHASE_SECONDS)

    with watched(daemon, model, optimizer) as found:
        for batch in FEEDS[feed](found, slow_loader()):
            if when == "before the forward":
                phase()
            loss_of(model, batch).backward()
            if when == "after the backward":
                phase()
            optimizer.step()
            clocked.step()
    check(found, clocked, first=feed == "run.batches", elsewhere=evaluation)
    for record, (took, _) in list(zip(found.records, clocked.steps, strict=True))[1:]:
        assert record.step_seconds is not None
        assert record.step_seconds <= took - evaluation


def test_an_evaluation_without_a_phase_is_no_waiting_for_data(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    evaluation = 2 * (SLEPT["data_wait"] + SLEPT["forward"])
    with watched(daemon, model, optimizer) as found:
        for batch in slow_loader():
            loss_of(model, batch).backward()
            optimizer.step()
            clocked.step()
            evaluate(model)
    check(found, clocked, elsewhere=evaluation)


def test_another_threads_loader_is_none_of_the_loops_waiting(daemon: FakeDaemon) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    drawn: list[Any] = []
    with watched(daemon, model, optimizer) as found:
        for batch in list(slow_loader()):
            if found.run.step:
                other = threading.Thread(target=lambda: drawn.extend(slow_loader(1)))
                other.start()
                other.join()
            loss_of(model, batch).backward()
            optimizer.step()
            clocked.step(data_wait=0)
    assert len(drawn) == STEPS - 1
    assert found.all("data_wait_seconds") == [None] * STEPS


def nested_collate(samples: list[Any]) -> Any:
    assert len(list(slow_loader(1))) == 1
    return slow_collate(samples)


@pytest.mark.parametrize("feed", FEEDS)
def test_a_loader_inside_a_loader_is_counted_once(daemon: FakeDaemon, feed: str) -> None:
    model = Slow()
    optimizer, clocked = SlowSGD(model.parameters(), lr=0.1), Clocked()
    nested = DataLoader(Numbers(4 * STEPS), batch_size=4, collate_fn=nested_collate)
    with watched(daemon, model, optimizer) as found:
        for batch in FEEDS[feed](found, nested):
            loss_of(model, batch).backward()
            optimizer.step()
            clocked.step(data_wait=2)
    check(found, clocked, first=feed == "run.batches")


def test_the_seam_at_the_loader_is_taken_out_with_the_run(daemon: FakeDaemon) -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    before = iterator.__next__
    model = Slow()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    with watched(daemon, model, optimizer):
        assert iterator.__next__ is not before
        for batch in slow_loader(1):
            loss_of(model, batch).backward()
            optimizer.step()
    assert iterator.__next__ is before


# ---------------------------------------------------------------- whatever happens in whatever order


EVENTS = st.lists(
    st.sampled_from(
        ["batch", "backward", "step", "closure", "scaler", "skipped", "pausing", "phase", "leave", "pause"]
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_no_part_is_negative_and_together_they_never_exceed_the_step(events: list[str]) -> None:
    timing, phases = Timing(), 0
    clock = time.perf_counter
    for event in events:
        now, attempt = clock(), Attempt()
        if event == "batch":
            timing.begins(now, known=True)
            timing.waited(clock(), clock())
        elif event == "backward":
            timing.begins(now, known=False)
            timing.backward(now, clock(), clock())
        elif event == "phase":
            timing.phase_entered()
            phases += 1
        elif event == "leave" and phases:
            timing.phase_left()
            phases -= 1
        elif event == "pause":
            timing.paused(clock() - now)
        elif event in {"step", "closure", "scaler", "skipped", "pausing"}:
            _step(timing, attempt, event)
            told = [attempt.data_wait_seconds, attempt.forward_seconds, attempt.backward_seconds]
            known = [seconds for seconds in [*told, attempt.optimizer_seconds] if seconds is not None]
            assert min(known, default=0.0) >= 0.0
            assert attempt.step_seconds is None or sum(known) <= attempt.step_seconds + 1e-9


def _step(timing: Timing, attempt: Attempt, kind: str) -> None:
    """As the loop tells of an optimizer's step."""
    clock = time.perf_counter
    if kind in {"scaler", "skipped"}:
        timing.scaler_steps(clock())
    if kind == "skipped":
        timing.scaler_skipped(clock())
    else:
        timing.step_enters(clock())
    timing.opens()
    if kind != "skipped":
        timing.step_starts()
    if kind == "closure":
        timing.evaluates()
        arrived = clock()
        timing.begins(arrived, known=False)
        timing.backward(arrived, clock(), clock())
        began = clock()
        timing.aside(clock() - began)
    if kind == "pausing":
        timing.phase_entered()
        began = clock()
        timing.paused(clock() - began)
        timing.phase_left()
    if kind != "skipped":
        timing.step_ends(clock())
    timing.closes(attempt, clock())
