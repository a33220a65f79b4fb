"""Waiting for other ranks, as far as one process can show it; with several ranks see end_to_end/test_waiting."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sentinel
from sentinel.client import collectives
from sentinel.client.probes.communication import Ear
from sentinel.records import StepRecord
from sentinel.testing import FakeDaemon
from tests.client.training import FEATURES

STEPS = 5


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seams() -> list[object]:
    return [dist.Work.wait, DistributedDataParallel._sync_buffers, DistributedDataParallel.__init__]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, FEATURES)).sum().backward()
        dist.barrier()
        optimizer.step()


def test_alone_in_the_world_nobody_is_waited_for_so_the_wait_is_absent(daemon: FakeDaemon, group: None) -> None:
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sentinel.attach(model, optimizer)
    train(model, optimizer)
    run.detach()
    records = daemon.of(StepRecord)
    assert len(records) == STEPS
    assert {(one.communication_wait_seconds, one.communication_source) for one in records} == {(None, None)}


def test_after_detach_torch_is_as_it_was_and_nobody_listens(daemon: FakeDaemon, group: None) -> None:
    before = seams()
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sentinel.attach(model, optimizer)
    assert all(now is not then for now, then in zip(seams(), before, strict=True)), "no seam was put in place"
    train(model, optimizer)
    run.detach()
    assert all(now is then for now, then in zip(seams(), before, strict=True))
    assert collectives._listeners == ()


def test_a_model_around_the_attached_one_is_found(group: None) -> None:
    inner = nn.Linear(FEATURES, 1)
    assert collectives.wrappers_of(inner) == []
    wrapped = DistributedDataParallel(inner)
    assert collectives.wrappers_of(inner) == [wrapped]
    assert collectives.wrappers_of(wrapped) == [wrapped]
    assert collectives.wrappers_of(nn.Linear(1, 1)) == []


def test_a_wait_within_a_wait_counts_once_and_only_on_the_loops_thread() -> None:
    ear, steps = Ear(), []
    ear.thread = threading.get_ident()
    inner = collectives._timed(lambda _self: steps.append("inner"))
    outer = collectives._timed(inner)
    collectives.listen(ear)
    try:
        outer(None)
        assert (ear.count, steps) == (1, ["inner"])
        thread = threading.Thread(target=outer, args=(None,))
        thread.start()
        thread.join()
        assert (ear.count, len(steps)) == (1, 2)
        ear.paused = True
        outer(None)
        assert (ear.count, len(steps)) == (1, 3)
    finally:
        collectives.ignore(ear)


def test_an_error_in_a_collective_passes_through_and_leaves_no_trace() -> None:
    def fail(_self: object) -> None:
        raise RuntimeError("connection closed by peer")

    ear = Ear()
    ear.thread = threading.get_ident()
    collectives.listen(ear)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed by peer"):
                collectives._timed(fail)(None)
        assert ear.count == 2
    finally:
        collectives.ignore(ear)


@pytest.mark.parametrize(("device", "seen"), [("cpu", True), ("meta", False)])
def test_a_wait_is_seen_where_the_backend_holds_up_the_host(
    group: None, monkeypatch: pytest.MonkeyPatch, device: str, seen: bool
) -> None:
    assert not collectives.wait_is_seen(torch.device("cpu")), "there is nobody to wait for"
    monkeypatch.setattr(collectives, "world_size", lambda: 2)  # the peer does not matter here
    assert collectives.wait_is_seen(torch.device(device)) is seen
    monkeypatch.setattr(collectives, "BLOCKING", frozenset({"mpi"}))
    assert not collectives.wait_is_seen(torch.device(device))
