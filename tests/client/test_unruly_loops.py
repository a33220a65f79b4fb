"""Loops that raise, go on, run in threads or swap their parts are followed, and nothing of theirs is disturbed."""

import copy
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.client.attach import attach
from sentinel.records import Reflex, SnapshotNote, StepRecord, Trouble
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Quality, UpdateResult
from tests.client.test_rollback import SETTINGS
from tests.client.training import FEATURES, equal, loader, make, weights

NAN = float("nan")


class Failing(torch.optim.SGD):
    """Raises inside `step`, after sentinel's hook has run, as often as it is told."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().step(closure)


def train(setup: Any, steps: int) -> list[float]:
    losses = []
    for inputs, targets in list(loader())[:steps]:
        setup.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        loss.backward()
        setup.optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_subclass_whose_step_calls_its_parents_makes_one_attempt(daemon: FakeDaemon) -> None:
    """torch wraps `step` of every class that has been instantiated, so the hooks run twice in one step."""
    make(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert torch.optim.SGD.step.hooked
    assert Failing.step is not torch.optim.SGD.step
    setup = make(lambda parameters: Failing(parameters, lr=0.1))
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    losses = train(setup, 5)
    setup.model[0].weight.grad.fill_(NAN)
    setup.optimizer.step()
    run.detach()
    records = daemon.of(StepRecord)
    assert [record.loss for record in records] == [*map(pytest.approx, losses), None]
    assert [record.result for record in records] == [UpdateResult.APPLIED] * 5 + [UpdateResult.REFLEX]
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(setup.model))
    assert bool(torch.isnan(setup.model[0].weight.grad).all())
    assert not daemon.of(Trouble)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_step_that_raised_is_no_attempt_and_the_next_takes_its_number(
    daemon: FakeDaemon, error: BaseException
) -> None:
    setup = make(lambda parameters: Failing(parameters, lr=0.1))
    run = attach(setup.model, setup.optimizer)
    losses = train(setup, 3)
    setup.optimizer.error = error
    with pytest.raises(type(error)):
        train(setup, 1)
    losses += train(setup, 3)
    run.detach()
    records = daemon.of(StepRecord)
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.loss for record in records] == pytest.approx(losses)
    assert all(record.time > 0 for record in records)
    assert not daemon.of(Trouble)


def test_a_closure_that_raised_leaves_neither_its_gradients_nor_its_loss_behind(daemon: FakeDaemon) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            return super().step(closure)

    setup = make(lambda parameters: Twice(parameters, lr=0.1))
    run = attach(setup.model, setup.optimizer)
    inputs, targets = next(iter(loader()))
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        setup.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(setup.model(inputs), targets)
        loss.backward()
        if len(calls) > 1:
            raise ValueError("the second evaluation")
        setup.model[0].weight.grad.fill_(NAN)  # the reflex sets it aside
        return loss

    with pytest.raises(ValueError, match="second evaluation"):
        setup.optimizer.step(closure)
    assert len(daemon.wait_for(lambda: daemon.of(Reflex))) == 1
    expected = train(setup, 1)
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    run.detach()
    assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert [(record.step, record.loss) for record in daemon.of(StepRecord)] == [(1, pytest.approx(expected[0]))]


def test_a_nan_in_a_later_micro_batch_is_skipped_though_an_earlier_one_was_clipped(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    before = weights(setup.model[4])
    for place, (inputs, targets) in enumerate(list(loader())[:2]):
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        if place == 1:
            setup.model[4].bias.grad.fill_(NAN)
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.optimizer.step()
    run.detach()
    assert len(daemon.of(Reflex)) == 1
    assert equal(before, weights(setup.model[4]))


def test_parameters_replaced_after_attach_are_followed(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    train(setup, 3)
    for place in (0, 4):
        setup.model[place] = copy.deepcopy(setup.model[place])
    setup.optimizer.param_groups[0]["params"] = list(setup.model.parameters())
    losses = train(setup, 3)
    inputs, targets = next(iter(loader()))
    setup.optimizer.zero_grad()
    nn.functional.cross_entropy(setup.model(inputs), targets).backward()
    setup.model[0].weight.grad.fill_(NAN)
    setup.optimizer.step()
    run.detach()
    assert all(bool(torch.isfinite(weight).all()) for weight in weights(setup.model))
    records = daemon.of(StepRecord)
    assert [record.result for record in records] == [UpdateResult.APPLIED] * 6 + [UpdateResult.REFLEX]
    # The first backward after the swap reaches nothing that is known; from the next one on all is seen again.
    assert [record.loss for record in records[4:6]] == pytest.approx(losses[1:])


def test_layers_that_are_unfrozen_later_give_their_loss(daemon: FakeDaemon) -> None:
    setup = make()
    setup.model[0].requires_grad_(False)
    setup.model[1].requires_grad_(False)
    run = attach(setup.model, setup.optimizer)
    train(setup, 3)
    setup.model[0].requires_grad_(True)
    setup.model[4].requires_grad_(False)
    setup.model[4].zero_grad()
    losses = train(setup, 4)
    run.detach()
    assert [record.loss for record in daemon.of(StepRecord)[4:]] == pytest.approx(losses[1:])


def test_two_runs_in_two_threads_keep_their_losses_apart(daemon: FakeDaemon) -> None:
    setups = [make(seed=seed) for seed in (1, 2)]
    runs = [attach(setup.model, setup.optimizer, run_id="threads") for setup in setups]
    barrier = threading.Barrier(2)
    batches = list(loader())[:20]
    losses: dict[int, list[float]] = {0: [], 1: []}

    class Meet(torch.autograd.Function):
        """Both threads are in the middle of their backward at the same time."""

        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            barrier.wait(10)
            return gradient

    def work(number: int) -> None:
        setup = setups[number]
        for inputs, targets in batches:
            setup.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(setup.model[4](Meet.apply(setup.model[:4](inputs))), targets)
            loss = loss * 1e6**number
            loss.backward()
            losses[number].append(loss.item())
            setup.optimizer.step()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.step for run in runs] == [20, 20]
    for run in runs:
        run.detach()
    seen: dict[bool, list[float]] = {True: [], False: []}
    for record in daemon.of(StepRecord):
        seen[record.loss < 1e3].append(record.loss)
    assert seen[True] == pytest.approx(losses[0])
    assert seen[False] == pytest.approx(losses[1])


def test_networks_handed_over_in_a_list_that_only_attach_saw_are_watched_on(daemon: FakeDaemon) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (first, second)]
    run = attach(nn.ModuleList([first, second]), optimizers, settings=SETTINGS)
    gc.collect()
    for _ in range(25):
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(torch.randn(8, 4))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not run.detached
    run.detach()
    assert [record.step for record in daemon.of(StepRecord)] == list(range(1, 26))
    assert {note.step for note in daemon.of(SnapshotNote)} >= {10, 20}
    assert not any(name.startswith("_sentinel") for name in vars(optimizers[0]))


def test_a_copy_that_is_trained_by_itself_reports_nothing(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer)
    expected = train(setup, 2)
    twin = copy.deepcopy(setup)
    train(make(seed=3), 2)
    twin_optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    train(twin._replace(optimizer=twin_optimizer), 2)
    train(twin, 2)
    expected += train(setup, 2)
    run.detach()
    records = daemon.of(StepRecord)
    assert [(record.step, record.loss) for record in records] == list(enumerate(map(pytest.approx, expected), 1))


def test_a_state_loaded_into_something_else_invalidates_nothing(daemon: FakeDaemon) -> None:
    setup, other = make(), make(seed=3)
    ema = torch.optim.swa_utils.AveragedModel(setup.model)
    run = attach(setup.model, setup.optimizer, ema=ema, settings=SETTINGS)
    train(setup, 12)
    other.model.load_state_dict(setup.model.state_dict())
    other.model[0].load_state_dict(setup.model[0].state_dict())
    other.optimizer.load_state_dict(setup.optimizer.state_dict())
    ema.load_state_dict(ema.state_dict())
    train(setup, 1)
    run.detach()
    assert all(note.quality is not Quality.BAD for note in daemon.of(SnapshotNote))


def test_an_optimizer_whose_state_the_user_clears_is_snapshot_and_trained_on(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    train(setup, 12)
    setup.optimizer.state.clear()
    train(setup, 12)
    run.detach()
    assert len(daemon.of(StepRecord)) == 24
    assert not daemon.of(Trouble)


def test_a_loop_that_breaks_off_or_raises_in_the_middle_of_a_pass_goes_on(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    data = loader()
    for _ in range(3):
        for place, batch in enumerate(run.batches(data)):
            if place == 5:
                break
            train_on(setup, batch)
        with pytest.raises(RuntimeError, match="mine"):
            train_once_and_raise(setup, run.batches(data))
    assert run.step == 18
    for inputs, targets in list(data)[:12]:
        train_on(setup, (inputs, targets))
    run.detach()
    assert len(daemon.of(StepRecord)) == 30
    points = {note.program_point for note in daemon.of(SnapshotNote)}
    assert points == {"attach", "batches", "step"}


def train_once_and_raise(setup: Any, batches: Any) -> None:
    for batch in batches:
        train_on(setup, batch)
        raise RuntimeError("mine")


def train_on(setup: Any, batch: Any) -> None:
    inputs, targets = batch
    setup.optimizer.zero_grad()
    nn.functional.cross_entropy(setup.model(inputs), targets).backward()
    setup.optimizer.step()


def test_a_model_moved_to_another_type_is_no_longer_what_the_snapshots_hold(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(model, optimizer, settings=SETTINGS)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        optimizer.zero_grad()
        for _ in range(12):
            model(torch.randn(8, FEATURES, dtype=dtype)).square().mean().backward()
            optimizer.step()
    before = weights(model)
    old = [one for one in run._ring.snapshots if one.step == 10]
    assert old
    assert run._ring.restore(10, "step", None) is None
    assert equal(before, weights(model))
    run.detach()
