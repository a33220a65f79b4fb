"""One home has one daemon, and a daemon that left is not seen any more."""

import os
from pathlib import Path

import pytest

from sentinel.daemon import lock as module
from sentinel.daemon.lock import Lock
from sentinel.errors import DaemonRunningError


def test_a_released_lock_leaves_no_file_and_can_be_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = Lock(path)
    with pytest.raises(DaemonRunningError, match=str(os.getpid())):
        Lock(path)
    first.release()
    assert not path.exists()
    Lock(path).release()


def test_a_file_that_its_holder_removed_in_between_is_no_lock(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    real, taken = module.fcntl.flock, []

    def removed_before_it_is_ours(descriptor: int, how: int) -> None:
        if not taken:
            path.unlink()
        taken.append(descriptor)
        real(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", removed_before_it_is_ours)
    held = Lock(path)
    assert len(taken) == 2
    assert path.exists()
    with pytest.raises(DaemonRunningError):
        Lock(path)
    held.release()
