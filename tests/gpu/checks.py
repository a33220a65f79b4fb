"""The checks. Each returns what it saw in a few words, and raises when a promise is broken."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from sentinel.records import Ack, Reflex, StepRecord, Word
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Reason, UpdateResult
from tests.gpu.training import Setup, attached, batches, is_finite, make, records, same, state, step

BAD_STEP = 12


class Check(NamedTuple):
    function: Callable[[str], str]
    needs_cuda: bool = False


def attach_reports_every_step(device: str) -> str:
    setup = make(device, fused=False)
    with attached(setup) as (run, daemon):
        for batch in batches(device, 30):
            step(setup, batch, run)
        run.detach()
        seen = records(daemon, 30)
    assert [record.step for record in seen] == list(range(1, 31))
    assert all(record.loss is not None and record.grad_norm is not None and record.lr == 1e-2 for record in seen)
    assert all(record.result is UpdateResult.APPLIED for record in seen)
    return f"30 records, loss {seen[0].loss:.3f} to {seen[-1].loss:.3f}"


def a_healthy_run_is_bit_identical_with_and_without(device: str) -> str:
    ends = []
    for watched in (False, True):
        setup = make(device, fused=False)
        if watched:
            with attached(setup, every_steps=10) as (run, _):
                for batch in batches(device, 60):
                    step(setup, batch, run)
        else:
            for batch in batches(device, 60):
                step(setup, batch)
        ends.append(state(setup))
    assert same(*ends), "weights differ"
    return "60 steps, snapshots on"


def no_sync_with_a_fused_optimizer(device: str) -> str:
    return _without_sync(device, fused=True)


def no_sync_with_an_unfused_optimizer(device: str) -> str:
    return _without_sync(device, fused=False)


def _without_sync(device: str, *, fused: bool) -> str:
    setup = make(device, fused=fused)
    data = batches(device, 60)
    with attached(setup) as (run, daemon):
        for batch in data[:20]:  # libraries load, the state at attach is copied
            step(setup, batch, run)
        with _syncs_are("error"):
            for batch in data[20:]:
                step(setup, batch, run)
        torch.cuda.synchronize()
        run.detach()
        seen = records(daemon, 60)
    assert all(record.loss is not None for record in seen)
    return "40 steps under set_sync_debug_mode('error'); an error inside sentinel would show as a Trouble"


def a_snapshot_waits_for_the_device_at_most_twice(device: str) -> str:
    setup = make(device, fused=True)
    data = batches(device, 25)
    with attached(setup, every_steps=10) as (run, _):
        for batch in data[:19]:
            step(setup, batch, run)
        with warnings.catch_warnings(record=True) as caught, _syncs_are("warn"):
            warnings.simplefilter("always")
            for batch in data[19:23]:  # the snapshot of step 20 is among them
                step(setup, batch, run)
        count = sum("synchronizing" in str(warning.message) for warning in caught)
    assert count <= 2, f"{count} times"
    return f"{count} times"


def a_bad_step_of_a_fused_optimizer_changes_nothing(device: str) -> str:
    setup = make(device, fused=True)
    data = batches(device, 30)
    with attached(setup) as (run, daemon):
        for batch in data[: BAD_STEP - 1]:
            step(setup, batch, run)
        before = state(setup)[len(setup.model.state_dict()) :], _parameters(setup)
        step(setup, data[BAD_STEP - 1], run, bad=True)
        after = state(setup)[len(setup.model.state_dict()) :], _parameters(setup)
        for batch in data[BAD_STEP:]:
            step(setup, batch, run)
        run.detach()
        seen = records(daemon, 30)
        reflexes = daemon.of(Reflex)
    assert same(before[0], after[0]), "optimizer state changed"
    assert same(before[1], after[1]), "weights changed"
    assert [(one.step, one.action) for one in reflexes] == [(BAD_STEP, Action.SKIP_UPDATE)], reflexes
    assert [record.step for record in seen if record.result is UpdateResult.REFLEX] == [BAD_STEP]
    assert is_finite(setup)
    return f"skipped on the device, told as a reflex of step {BAD_STEP}"


def a_bad_step_of_an_unfused_optimizer_is_undone(device: str) -> str:
    setup = make(device, fused=False)
    finished: dict[int, list[Tensor]] = {}
    went_back: list[tuple[int, int]] = []
    with attached(setup, every_steps=5) as (run, daemon):
        for number, batch in enumerate(batches(device, 40), 1):
            before = run.step
            step(setup, batch, run, bad=number == BAD_STEP)
            if run.step <= before:
                went_back.append((before + 1, run.step))
                assert same(state(setup), finished[run.step]), f"not the state of step {run.step}"
            finished[run.step] = state(setup)
        run.detach()
        reflexes = daemon.of(Reflex)
        generations = {record.generation for record in daemon.of(StepRecord)}
    assert reflexes, "the NaN was never noticed"
    assert {one.action for one in reflexes} == {Action.ROLLBACK}
    assert is_finite(setup), "NaN stayed in the weights"
    assert len(went_back) == 1, f"went back {len(went_back)} times for one fault: {went_back}"
    assert generations == {0, 1}, generations
    return f"went back from step {went_back[0][0]} to {went_back[0][1]}, bit for bit"


def a_bad_step_inside_run_batches_is_undone(device: str) -> str:
    setup = make(device, fused=False)
    with attached(setup, every_steps=5) as (run, daemon):
        for number, batch in enumerate(run.batches(batches(device, 40)), 1):
            step(setup, batch, run, bad=number == BAD_STEP)
        run.detach()
        reflexes = daemon.of(Reflex)
    assert reflexes, "the NaN was never noticed"
    assert is_finite(setup), "NaN stayed in the weights"
    return f"{len(reflexes)} reflex"


def guard_sync_skips_a_bad_step_exactly(device: str) -> str:
    setup = make(device, fused=False)
    data = batches(device, 20)
    with attached(setup, guard="sync") as (run, daemon):
        for batch in data[: BAD_STEP - 1]:
            step(setup, batch, run)
        before = _parameters(setup)
        step(setup, data[BAD_STEP - 1], run, bad=True)
        assert same(before, _parameters(setup)), "weights changed"
        for batch in data[BAD_STEP:]:
            step(setup, batch, run)
        run.detach()
        reflexes = daemon.of(Reflex)
    assert [(one.step, one.action) for one in reflexes] == [(BAD_STEP, Action.SKIP_UPDATE)], reflexes
    return "skipped before the update"


def an_amp_overflow_is_no_reflex(device: str) -> str:
    for fused in (False, True):
        setup = make(device, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        with attached(setup, scaler=scaler) as (run, daemon):
            for number, (inputs, targets) in enumerate(batches(device, 20), 1):
                loss = functional.cross_entropy(setup.model(inputs), targets)
                scaler.scale(loss).backward()
                if number == BAD_STEP:
                    first = next(setup.model.parameters())
                    assert first.grad is not None
                    first.grad.view(-1)[:1].fill_(float("inf"))
                scaler.step(setup.optimizer)
                scaler.update()
                setup.optimizer.zero_grad()
            run.detach()
            seen = records(daemon, 20)
            reflexes = daemon.of(Reflex)
        word = "fused" if fused else "unfused"
        results = [record.step for record in seen if record.result is UpdateResult.OVERFLOW]
        assert scaler.get_scale() == 512.0, "the overflow never happened"
        assert not reflexes, f"{word}: told as a reflex"
        assert results == [BAD_STEP], f"{word}: overflow noted at {results}"
    return "fused and unfused"


def a_replayed_rollback_is_bit_exact(device: str) -> str:
    clean = make(device, fused=False)
    for batch in _loader(device, 60):
        step(clean, batch)
    broken, struck = make(device, fused=False), False
    with attached(broken, every_steps=10) as (run, daemon):
        for batch in run.batches(_loader(device, 60)):
            step(broken, batch, run)
            if run.step == 30 and not struck:
                struck = True
                with torch.no_grad():
                    next(broken.model.parameters()).mul_(1.5)
                _roll_back(run.step + 1, daemon)
        run.detach()
        (outcome,) = [ack for ack in daemon.of(Ack) if ack.state not in {"prepared", "refused"}]
    assert struck
    assert outcome.state == "applied", outcome
    assert same(state(clean), state(broken)), "the continuation differs from the clean run"
    return f"back to step {outcome.target_step} in {outcome.seconds:.3f} s, then as the clean run"


def _roll_back(apply_at: int, daemon: FakeDaemon) -> None:
    command = daemon.command(
        Action.ROLLBACK, apply_at=apply_at, onset_step=30, pending_ok=True, data="replay", target_step=20
    )
    daemon.send(command)
    prepared = daemon.wait_for(lambda: [ack for ack in daemon.of(Ack) if ack.command_id == command.id], 20.0)[0]
    assert prepared.state == "prepared", prepared
    daemon.send(Word(command.id, commit=True, reason=Reason.OK, target_step=20))


def device_memory_is_told(device: str) -> str:
    setup = make(device, fused=True)
    with attached(setup) as (run, daemon):
        for batch in batches(device, 10):
            step(setup, batch, run)
        run.detach()
        last = records(daemon, 10)[-1]
    allocated, reserved, peak = last.memory_allocated_bytes, last.memory_reserved_bytes, last.memory_peak_bytes
    assert allocated is not None
    assert reserved is not None
    assert peak is not None
    assert 0 < allocated <= peak <= reserved
    assert reserved <= torch.cuda.max_memory_reserved()
    return f"{allocated / 2**20:.1f} MiB allocated, {reserved / 2**20:.0f} MiB reserved"


CHECKS = (
    Check(attach_reports_every_step),
    Check(a_healthy_run_is_bit_identical_with_and_without),
    Check(no_sync_with_a_fused_optimizer, needs_cuda=True),
    Check(no_sync_with_an_unfused_optimizer, needs_cuda=True),
    Check(a_snapshot_waits_for_the_device_at_most_twice, needs_cuda=True),
    Check(a_bad_step_of_a_fused_optimizer_changes_nothing),
    Check(a_bad_step_of_an_unfused_optimizer_is_undone, needs_cuda=True),
    Check(a_bad_step_inside_run_batches_is_undone),
    Check(guard_sync_skips_a_bad_step_exactly),
    Check(an_amp_overflow_is_no_reflex),
    Check(a_replayed_rollback_is_bit_exact),
    Check(device_memory_is_told, needs_cuda=True),
)


class _Numbered(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, device: str, count: int) -> None:
        self._batches = batches(device, count)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._batches[index]


def _loader(device: str, count: int) -> "DataLoader[tuple[Tensor, Tensor]]":
    return DataLoader(_Numbered(device, count), batch_size=1, collate_fn=lambda several: several[0])


def _parameters(setup: Setup) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in setup.model.parameters()]


@contextmanager
def _syncs_are(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
