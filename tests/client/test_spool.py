"""The spool holds exactly the critical messages that nobody has acknowledged, whatever the disk does."""

import errno
import os
import stat

import pytest

from sentinel import wire
from sentinel.client.spool import Spool
from sentinel.errors import SettingsError
from sentinel.records import Ack, Hello
from sentinel.vocabulary import Reason
from tests.client.recording import spooled

HELLO = Hello(wire.VERSION, "run-1", 0, 1, "n1", 1, 1.0, 0)


def frame(seq: int) -> tuple[int, bytes]:
    return seq, wire.encode(Ack(seq, 1.0, f"c{seq}", "prepared", Reason.OK))


def frames(*numbers: int) -> list[tuple[int, bytes]]:
    return [frame(number) for number in numbers]


def numbers_in(spool: Spool) -> list[int]:
    first, *rest = spooled(spool.path)
    assert first == HELLO
    return [message.seq for message in rest]


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool" / "run-1.0.n1.spool")
    yield made
    made.close()


def test_making_one_touches_nothing(spool) -> None:
    assert not spool.path.parent.exists()
    spool.close()
    assert not spool.path.parent.exists()


def test_the_file_is_private_and_says_whose_it_is(spool) -> None:
    spool.append(HELLO, frames(1, 4))
    assert numbers_in(spool) == [1, 4]
    assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.path.parent.stat().st_mode) == 0o700
    assert spool.written_seq == 4


def test_it_is_written_through_to_the_disk(spool, monkeypatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size) or real(descriptor)
    )
    spool.append(HELLO, frames(1))
    assert synced[-1] == spool.path.stat().st_size


def test_what_is_acknowledged_leaves_the_file(spool) -> None:
    spool.append(HELLO, frames(1, 2, 3, 4))
    spool.acknowledge(1)
    assert numbers_in(spool)[-3:] == [2, 3, 4]
    spool.acknowledge(3)
    assert numbers_in(spool) == [4]
    spool.append(HELLO, frames(5))
    assert numbers_in(spool) == [4, 5]
    spool.acknowledge(99)
    assert numbers_in(spool) == []


def test_appending_goes_on_after_the_file_was_emptied(spool) -> None:
    spool.append(HELLO, frames(1, 2))
    spool.acknowledge(2)
    spool.append(HELLO, frames(3))
    assert numbers_in(spool) == [3]


def test_closing_removes_an_empty_file_and_keeps_a_full_one(spool, tmp_path) -> None:
    spool.append(HELLO, frames(1))
    spool.acknowledge(1)
    spool.close()
    assert not spool.path.exists()
    other = Spool(tmp_path / "spool" / "other.spool")
    other.append(HELLO, frames(2))
    other.close()
    assert numbers_in(other) == [2]


def test_a_backlog_is_not_copied_at_every_acknowledgement(spool, monkeypatch) -> None:
    spool.append(HELLO, frames(*range(1, 201)))
    renames = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: renames.append(paths) or real(*paths))
    for seq in range(1, 200):
        spool.acknowledge(seq)
    assert 1 <= len(renames) <= 10
    assert numbers_in(spool)[-1] == 200


def fail(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_raises_and_leaves_whole_frames_only(spool, monkeypatch) -> None:
    spool.append(HELLO, frames(1))
    real, calls = os.write, []

    def half(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        return real(descriptor, data[: len(data) // 2]) if len(calls) == 1 else fail()

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        spool.append(HELLO, frames(2))
    assert len(calls) == 2, "the fault fired in the middle of a frame"
    monkeypatch.undo()
    assert numbers_in(spool) == [1]
    assert spool.written_seq == 1
    spool.append(HELLO, frames(2))
    assert numbers_in(spool) == [1, 2]


def test_if_half_a_write_cannot_be_taken_back_the_file_is_begun_anew(spool, monkeypatch) -> None:
    spool.append(HELLO, frames(1))
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="No space"):
        spool.append(HELLO, frames(2))
    monkeypatch.undo()
    assert spool.written_seq == 0, "everything must be written again"
    spool.append(HELLO, frames(1, 2))
    assert numbers_in(spool) == [1, 2]


def test_a_rewrite_that_fails_keeps_the_old_file(spool, monkeypatch) -> None:
    spool.append(HELLO, frames(1, 2, 3))
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        spool.acknowledge(2)
    monkeypatch.undo()
    assert numbers_in(spool) == [1, 2, 3]
    assert [path.name for path in spool.path.parent.iterdir()] == [spool.path.name]
    spool.append(HELLO, frames(4))
    spool.acknowledge(3)
    assert numbers_in(spool) == [4]


def test_a_folder_that_others_may_enter_is_refused(spool) -> None:
    spool.path.parent.mkdir(mode=0o755)
    spool.path.parent.chmod(0o755)
    with pytest.raises(SettingsError, match="0700"):
        spool.append(HELLO, frames(1))
    assert not spool.path.exists()
