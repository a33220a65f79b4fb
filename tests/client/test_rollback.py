"""A rollback is exact: the continuation is the run that would have been."""

from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.client.attach import attach
from sentinel.records import Ack, Command, SnapshotNote, StepRecord, Word
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Quality, Reason, UpdateResult
from tests.client.training import Setup, equal, forever, loader, make, weights

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}
SETTINGS = {"snapshot": {"every_steps": 10, "good_after_steps": 5}}


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def fixed(count: int) -> list[Any]:
    """A stream of batches that is the same whoever asks."""
    torch.manual_seed(3)
    return list(forever(loader, count))


def step(setup: Setup, batch: Any, scheduler: Any = None) -> float:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(setup.model(inputs), targets)
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.item()


def commit(daemon: FakeDaemon, command: Command) -> None:
    """Prepare, wait for the answer, commit: the outcome comes when the loop reaches the boundary."""
    daemon.send(command)
    daemon.wait_for(lambda: [ack for ack in daemon.of(Ack) if ack.command_id == command.id])
    prepared = next(ack for ack in daemon.of(Ack) if ack.command_id == command.id)
    assert prepared.state == "prepared", prepared
    candidates = [one for one, _, _ in prepared.candidates if command.onset_step is None or one < command.onset_step]
    target = command.target_step if command.target_step is not None else (candidates or [None])[0]
    daemon.send(Word(command.id, commit=True, reason=Reason.OK, target_step=target))


def outcome(daemon: FakeDaemon, command: Command) -> Ack:
    return daemon.wait_for(
        lambda: next((a for a in daemon.of(Ack) if a.command_id == command.id and a.state != "prepared"), None)
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transient_fault_replayed_ends_bit_identical_to_the_clean_run(
    daemon: FakeDaemon, kind: str, workers: int
) -> None:
    clean = make(OPTIMIZERS[kind])
    schedule = scheduler_of(clean.optimizer)
    data = loader(workers=workers)
    for batch in forever(lambda: data, 80):
        step(clean, batch, schedule)

    faulty = make(OPTIMIZERS[kind])
    schedule = scheduler_of(faulty.optimizer)
    run = attach(faulty.model, faulty.optimizer, scheduler=schedule, settings=SETTINGS)
    data = loader(workers=workers)
    fired, command = False, None
    for _ in range(10):
        for batch in run.batches(data):
            if run.step == 80:
                break
            step(faulty, batch, schedule)
            if run.step == 45 and not fired:  # a transient fault: the weights are broken, once
                fired = True
                with torch.no_grad():
                    faulty.model[0].weight.mul_(3.0)  # type: ignore[index, operator]
                daemon.wait_for(lambda: run.run_id)
                command = daemon.command(Action.ROLLBACK, apply_at=50, onset_step=45, data="replay")
                commit(daemon, command)
        if run.step == 80:
            break
    assert command is not None
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.target_step, ack.skipped_batches, ack.lr_aligned) == ("applied", 40, 0, True)
    assert fired
    assert equal(weights(faulty.model), weights(clean.model))


def test_rolling_back_twice_to_one_snapshot_gives_bit_identical_continuations(daemon: FakeDaemon) -> None:
    setup = make()
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    data = loader()
    commands: list[Command] = []
    ends: list[Any] = []
    for _ in range(20):
        for batch in run.batches(data):
            step(setup, batch)
            if run.step == 35 and len(ends) < 3:
                ends.append(weights(setup.model))
                if len(ends) < 3:
                    again = {"generation": len(commands), "target_step": 20, "data": "replay"}
                    commands.append(daemon.command(Action.ROLLBACK, apply_at=36, **again))
                    commit(daemon, commands[-1])
        if len(ends) == 3:
            break
    run.detach()
    assert [outcome(daemon, command).target_step for command in commands] == [20, 20]
    assert equal(ends[0], ends[1])
    assert equal(ends[1], ends[2])


def test_a_skipped_window_equals_the_clean_run_that_never_saw_it(daemon: FakeDaemon) -> None:
    batches = fixed(60)
    setup = make()
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    command = None
    for batch in run.batches(batches):
        step(setup, batch)
        if run.step == 35 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=36, onset_step=33, data="skip")
            commit(daemon, command)
    run.detach()
    assert command is not None
    ack = outcome(daemon, command)
    assert ack.target_step == 30
    assert ack.skipped_batches == 6  # 31..36: the margin of ten steps reaches back beyond the snapshot

    clean = make()
    for batch in batches[:30]:
        step(clean, batch)
    for batch in batches[36:]:
        step(clean, batch)
    # Dropout draws continue from the snapshot in both.
    assert equal(weights(setup.model), weights(clean.model))


def test_without_run_batches_the_scheduler_and_counters_equal_the_clean_runs(daemon: FakeDaemon) -> None:
    batches = fixed(80)
    clean = make(dropout=0.0)
    schedule = scheduler_of(clean.optimizer)
    lrs = []
    for batch in batches[:60]:
        step(clean, batch, schedule)
        lrs.append(schedule.get_last_lr()[0])

    setup = make(dropout=0.0)
    schedule = scheduler_of(setup.optimizer)
    run = sentinel.attach(setup.model, setup.optimizer, scheduler=schedule, settings=SETTINGS)
    command, after = None, []
    for place, batch in enumerate(batches):
        if place == 34:
            command = daemon.command(Action.ROLLBACK, apply_at=36, target_step=20)
            commit(daemon, command)
        step(setup, batch, schedule)
        after.append((run.step, schedule.get_last_lr()[0]))
    assert command is not None
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.target_step, ack.skipped_batches, ack.lr_aligned) == (20, 16, True)
    assert after[35] == (20, pytest.approx(lrs[19], rel=1e-12))
    assert after[36] == (21, pytest.approx(lrs[20], rel=1e-12))
    turn = [record for record in daemon.of(StepRecord) if record.result is UpdateResult.TURN]
    assert [(record.step, record.generation) for record in turn] == [(36, 0)]
    assert {record.generation for record in daemon.of(StepRecord)} == {0, 1}


def test_an_aborted_turn_changes_nothing(daemon: FakeDaemon) -> None:
    setup, other = make(), make()
    batches = fixed(30)
    torch.manual_seed(11)
    for batch in batches:
        step(other, batch)
    torch.manual_seed(11)
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    ack = None
    for place, batch in enumerate(batches):
        if place == 12:
            command = daemon.command(Action.ROLLBACK, apply_at=15, target_step=10)
            daemon.send(command)
            daemon.wait_for(lambda: daemon.of(Ack))
        step(setup, batch)
    ack = outcome(daemon, command)
    run.detach()
    assert (ack.state, ack.reason) == ("aborted", "no_word")
    assert run.step == 30
    assert equal(weights(setup.model), weights(other.model))


def test_a_plateau_scheduler_that_nobody_handed_over_goes_back_too(daemon: FakeDaemon) -> None:
    setup = make()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(setup.optimizer, patience=1000)
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    command, counts = None, []
    for batch in run.batches(fixed(40)):
        if run.step == 25 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20, data="replay")
            commit(daemon, command)
        counts.append((run.step, schedule.last_epoch))
        schedule.step(step(setup, batch))
    assert command is not None
    assert outcome(daemon, command).target_step == 20
    run.detach()
    assert len(counts) == 46
    assert all(attempts == steps for attempts, steps in counts)


@pytest.mark.parametrize("fused", [False, True])
def test_no_snapshot_is_taken_where_grad_scaler_skips(daemon: FakeDaemon, fused: bool) -> None:
    """Its `update` lowers the scale afterwards, which it would not do again after a rollback to there."""
    setup = make(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    run = attach(setup.model, setup.optimizer, settings=SETTINGS)
    command = None
    for place, (inputs, targets) in enumerate(fixed(40)):
        if place == 24:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=22, onset_step=25)
            commit(daemon, command)
        scaler.scale(nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
        if place in {9, 10, 19}:
            next(setup.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(setup.optimizer)
        scaler.update()
        setup.optimizer.zero_grad()
    run.detach()
    assert scaler.get_scale() == 2.0**7
    results = {record.step: record.result for record in daemon.of(StepRecord) if record.generation == 0}
    assert [number for number, result in results.items() if result is UpdateResult.OVERFLOW] == [10, 11, 20]
    assert [note.step for note in daemon.of(SnapshotNote) if note.quality is Quality.PENDING][:2] == [12, 22]


@pytest.mark.parametrize("fused", [False, True])
def test_a_turn_that_falls_on_an_update_that_grad_scaler_skips_is_carried_out(
    daemon: FakeDaemon, fused: bool
) -> None:
    setup = make(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    run = attach(setup.model, setup.optimizer, scaler=scaler, settings=SETTINGS)
    command, after = None, []
    for place, (inputs, targets) in enumerate(fixed(40)):
        if place == 24:
            command = daemon.command(Action.ROLLBACK, apply_at=26, target_step=20)
            commit(daemon, command)
        scaler.scale(nn.functional.cross_entropy(setup.model(inputs), targets)).backward()
        if place == 25:
            next(setup.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(setup.optimizer)
        scaler.update()
        setup.optimizer.zero_grad()
        after.append((run.step, scaler.get_scale(), scaler._get_growth_tracker()))
    assert command is not None
    assert outcome(daemon, command).target_step == 20
    run.detach()
    assert after[25] == after[19] == (20, 2.0**10, 20)
    assert run.step == 34
