"""The tree of a training process: who is in it, and who holds how much."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from sentinel.daemon.probes.processes import TORCH_WORKER, ProcessKind, Tree, tree_of
from tests.daemon.probes.loading_loop import GROWTH_BYTES
from tests.waiting import until

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


@pytest.fixture(params=["fork", "spawn"])
def loading(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The pid of a process that loads data with two workers, one of them leaking."""
    command = [sys.executable, "-m", "tests.daemon.probes.loading_loop", str(tmp_path), request.param]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until((tmp_path / "ready").exists, 90.0, "the workers have loaded")
        yield process.pid
    finally:
        (tmp_path / "stop").touch()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def test_a_leak_is_blamed_on_the_data_worker_that_grows(loading: int) -> None:
    tree = tree_of(loading)
    assert tree is not None
    first, second = tree.workers
    assert {first.name, second.name} == {TORCH_WORKER}
    assert first.uss_bytes - second.uss_bytes > 6 * GROWTH_BYTES
    assert tree.members[0] == tree.members[0]._replace(pid=loading, kind=ProcessKind.TRAINER)
    assert tree.uss_bytes == sum(member.uss_bytes for member in tree.members) > first.uss_bytes


def _hold(bytes_held: int, end: Connection) -> None:
    held = b"x" * bytes_held
    end.send("ready")
    end.recv()
    del held


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_of_multiprocessing_are_data_workers_where_torch_has_none(how: str) -> None:
    context: Any = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    child = context.Process(target=_hold, args=(40 * MIB, theirs))
    child.start()
    try:
        assert ours.poll(60), "the child holds its memory"
        found = [member for member in _tree().members if member.pid == child.pid]
        assert [member.kind for member in found] == [ProcessKind.DATA_WORKER]
        assert found[0].uss_bytes >= 40 * MIB
    finally:
        ours.send("end")
        child.join(20)
    assert child.pid not in {member.pid for member in _tree().members}


def test_another_program_is_no_data_worker() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            until(lambda: psutil.Process(other.pid).name() == "sleep", 10.0, "the program runs")
            kinds = {member.pid: member.kind for member in _tree().members}
            assert kinds[other.pid] is ProcessKind.OTHER
        finally:
            other.kill()


def test_a_process_that_is_gone_has_no_tree() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert tree_of(ended.pid) is None


def _tree() -> Tree:
    found = tree_of(psutil.Process().pid)
    assert found is not None
    return found
