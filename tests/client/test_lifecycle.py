"""What the user does with model, optimizer and loader still works, and after detach nothing of ours is left."""

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import sentinel
from sentinel import places
from sentinel.client import interception
from sentinel.records import Mark, RunEnd, SnapshotNote, StepRecord, Word
from sentinel.testing import FakeDaemon
from sentinel.vocabulary import Action, Quality, Reason
from tests.client.training import equal, loader, make, weights
from tests.waiting import until


def train(setup: Any, batches: Any) -> int:
    count = 0
    for inputs, targets in batches:
        setup.optimizer.zero_grad()
        nn.functional.cross_entropy(setup.model(inputs), targets).backward()
        setup.optimizer.step()
        count += 1
    return count


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    seams = (
        torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step,
        torch.nn.Module.load_state_dict,
        torch.optim.Optimizer.load_state_dict,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
    )
    yield
    assert seams == (
        torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step,
        torch.nn.Module.load_state_dict,
        torch.optim.Optimizer.load_state_dict,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_dataloader_workers_work_after_attach(daemon: FakeDaemon, method: str) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    data = loader(size=128, workers=2, multiprocessing_context=method)
    assert train(setup, run.batches(data)) == 8
    assert train(setup, data) == 8
    run.detach()
    assert [record.step for record in daemon.of(StepRecord)] == list(range(1, 17))
    assert len(daemon.of(RunEnd)) == 1


@pytest.mark.parametrize("leave", ["break", "end"])
def test_the_workers_of_a_pass_end_with_it(daemon: FakeDaemon, leave: str) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    before, alive = psutil.Process().children(), 0
    for place, batch in enumerate(run.batches(loader(size=128, workers=2))):
        alive = len(psutil.Process().children()) - len(before)
        if place == 2 and leave == "break":
            break
        train(setup, [batch])
    del batch
    assert alive == 2
    until(lambda: psutil.Process().children() == before, 5.0, "the workers' end")
    run.detach()


def test_a_forked_child_that_trains_and_exits_says_nothing_in_the_parents_name(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    train(setup, list(loader())[:3])
    pid = os.fork()
    if pid == 0:
        train(setup, list(loader())[:2])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    train(setup, list(loader())[:2])
    run.detach()
    assert [record.step for record in daemon.of(StepRecord)] == [1, 2, 3, 4, 5]


def test_saving_copying_and_pickling_work_and_the_copies_are_not_attached(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    train(setup, list(loader())[:3])
    buffer = io.BytesIO()
    torch.save(setup.model, buffer)
    torch.save(setup.optimizer, io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied, optimizer = copy.deepcopy((setup.model, setup.optimizer))
    again = pickle.loads(pickle.dumps(setup.optimizer))
    assert not optimizer._optimizer_step_pre_hooks
    assert not again._optimizer_step_pre_hooks
    nn.functional.cross_entropy(copied(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
    nn.functional.cross_entropy(loaded(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)).backward()
    assert run.step == 3
    fresh = sentinel.attach(copied, optimizer)
    assert fresh.run_id != run.run_id
    fresh.detach()
    run.detach()


def test_fifty_times_attach_and_detach_leave_nothing_behind(
    daemon: FakeDaemon, home: places.Places, torch_as_it_was: None
) -> None:
    setup = make()

    def once() -> None:
        run = sentinel.attach(setup.model, setup.optimizer)
        train(setup, list(loader())[:2])
        run.detach()

    once()
    until(lambda: len(threading.enumerate()) <= 4, what="the fake daemon's threads")
    process = psutil.Process()
    before = (process.num_fds(), sorted(home.home.rglob("*")))
    names = sorted(thread.name for thread in threading.enumerate() if "fake" not in thread.name)
    for _ in range(50):
        once()
    assert not setup.optimizer._optimizer_step_pre_hooks
    assert not setup.optimizer._optimizer_step_post_hooks
    assert all(not p._post_accumulate_grad_hooks for p in setup.model.parameters())
    assert not interception.observers()
    assert sorted(t.name for t in threading.enumerate() if "fake" not in t.name) == names
    until(lambda: process.num_fds() <= before[0] + 2, what="descriptors")
    assert [path for path in sorted(home.home.rglob("*")) if path.is_file()] == [p for p in before[1] if p.is_file()]


def test_a_model_that_the_user_drops_is_not_kept_alive(daemon: FakeDaemon, torch_as_it_was: None) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    train(setup, list(loader())[:3])
    seen = weakref.ref(setup.model)
    del setup
    gc.collect()
    assert seen() is None
    until(lambda: run.detached, 5.0, "the run of a dropped model ends by itself")
    until(lambda: not interception.observers())
    assert daemon.wait_for(lambda: daemon.of(RunEnd))


def test_a_state_loaded_after_attach_is_never_rolled_back_over(daemon: FakeDaemon) -> None:
    saved = make(seed=1)
    train(saved, list(loader())[:5])
    checkpoint = (copy.deepcopy(saved.model.state_dict()), copy.deepcopy(saved.optimizer.state_dict()))
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer, settings={"snapshot": {"every_steps": 10}})
    data = list(loader()) * 2
    loaded: list[torch.Tensor] = []
    command = None
    for batch in run.batches(data):
        if run.step == 12 and not loaded:
            setup.model.load_state_dict(checkpoint[0])
            setup.optimizer.load_state_dict(checkpoint[1])
            loaded = weights(setup.model)
        train(setup, [batch])
        if run.step == 18 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=20, data="replay")
            ack = [None]
            thread = threading.Thread(target=lambda: ack.__setitem__(0, daemon.turn(command)))
            thread.start()
            daemon.wait_for(lambda: run._inbox.turn)
    thread.join()
    run.detach()
    assert ack[0].state == "applied"
    assert ack[0].target_step == 13  # the first boundary after the load
    assert next(record.step for record in daemon.of(StepRecord) if record.generation == 1) == 14
    notes = [note for note in daemon.of(SnapshotNote) if note.quality is Quality.BAD]
    assert {note.step for note in notes} == {0, 10}
    assert {note.reason for note in notes} == {"the loop loaded another state"}


def test_a_checkpoint_loaded_right_after_attach_is_the_base(daemon: FakeDaemon) -> None:
    saved = make(seed=1)
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    setup.model.load_state_dict(saved.model.state_dict())
    with torch.no_grad():
        setup.model[0].bias.fill_(0.25)  # by hand, which no hook sees
    expected = weights(setup.model)
    command, done = None, []
    for batch in run.batches(list(loader()) * 2):
        if command is not None and run.step == 0 and not done:
            done.append(weights(setup.model))
        train(setup, [batch])
        if run.step == 5 and command is None:
            command = daemon.command(Action.ROLLBACK, apply_at=6, target_step=0, data="replay")
            thread = threading.Thread(target=lambda: daemon.turn(command))
            thread.start()
            daemon.wait_for(lambda: run._inbox.turn)
    thread.join()
    run.detach()
    assert done
    assert equal(done[0], expected)


def test_a_marked_window_makes_snapshots_suspect_and_clearing_gives_them_back(daemon: FakeDaemon) -> None:
    setup = make()
    settings = {"snapshot": {"every_steps": 5, "good_after_steps": 5}}
    run = sentinel.attach(setup.model, setup.optimizer, settings=settings)
    for batch in run.batches(list(loader())):
        train(setup, [batch])
        if run.step == 22:
            daemon.send(Mark(0, 12))
            daemon.wait_for(lambda: run._marks)
        if run.step == 25:
            qualities = {one.step: one.quality for one in run._ring.snapshots}
            daemon.send(Mark(0, 12, clear=True))
            daemon.wait_for(lambda: run._marks)
    after = {one.step: one.quality for one in run._ring.snapshots}
    run.detach()
    assert qualities[10] is Quality.GOOD
    assert qualities[15] is qualities[20] is Quality.SUSPECT
    assert Quality.SUSPECT not in after.values()


@pytest.mark.parametrize("stand", ["batches", "hooks"])
def test_pause_holds_the_loop_and_leaves_the_weights_alone(daemon: FakeDaemon, stand: str) -> None:
    clean, setup = make(), make()
    torch.manual_seed(9)
    data = list(loader())
    torch.manual_seed(4)
    train(clean, data)
    run = sentinel.attach(setup.model, setup.optimizer)
    daemon.wait_for(lambda: run._inbox.attempt)
    held: list[float] = []

    def hold() -> None:
        command = daemon.command(Action.PAUSE, apply_at=10)
        ack = daemon.turn(command)
        assert ack.state == "applied", ack
        step = run.step
        held.append(step)
        threading.Event().wait(0.5)
        held.append(run.step)
        daemon.send(Word(command.id, commit=False, reason=Reason.REQUESTED))

    thread = threading.Thread(target=hold)
    thread.start()
    daemon.wait_for(lambda: run._inbox.turn)
    torch.manual_seed(4)
    train(setup, run.batches(data) if stand == "batches" else data)
    thread.join()
    run.detach()
    assert held == [10, 10]
    assert equal(weights(clean.model), weights(setup.model))


def test_a_pause_ends_by_itself_at_its_limit_with_a_stop(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer, settings={"pause": {"limit_seconds": 0.3}})
    daemon.wait_for(lambda: run._inbox.attempt)
    thread = threading.Thread(target=lambda: daemon.turn(daemon.command(Action.PAUSE, apply_at=5)))
    thread.start()
    daemon.wait_for(lambda: run._inbox.turn)
    assert train(setup, run.batches(list(loader()))) == 5
    thread.join()
    run.detach()


def test_stop_ends_run_batches_and_raises_run_stopped_elsewhere(daemon: FakeDaemon) -> None:
    for inside in (True, False):
        setup = make()
        run = sentinel.attach(setup.model, setup.optimizer)
        before = len(daemon.of(RunEnd))
        daemon.wait_for(lambda run=run: run._inbox.attempt)
        thread = threading.Thread(target=lambda: daemon.turn(daemon.command(Action.STOP, apply_at=5)))
        thread.start()
        daemon.wait_for(lambda run=run: run._inbox.turn)
        if inside:
            assert train(setup, run.batches(list(loader()))) == 5
        else:
            with pytest.raises(sentinel.RunStopped) as caught:
                train(setup, list(loader()))
            assert caught.value.code == 0
        assert run.step == 5
        thread.join()
        run.detach()
        end = daemon.wait_for(lambda before=before: daemon.of(RunEnd)[before:])[0]
        assert end.status == "completed"
        assert end.error.startswith("stopped")


def test_a_phase_refuses_turns_and_is_told(daemon: FakeDaemon) -> None:
    setup = make()
    run = sentinel.attach(setup.model, setup.optimizer)
    daemon.wait_for(lambda: run._inbox.attempt)
    with run.phase("eval"):
        ack = daemon.turn(daemon.command(Action.ROLLBACK, apply_at=5))
    run.detach()
    assert (ack.state, ack.reason) == ("refused", "wrong_phase")
