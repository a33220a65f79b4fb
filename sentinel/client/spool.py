"""Keep critical messages on disk while no daemon has acknowledged them.

The file holds wire frames: a Hello that says whose they are, then the messages, oldest first. A daemon that finds the
file of a dead process stores what it misses from it. Used by the link's thread alone (`Keeper`).
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from sentinel import places, wire
from sentinel.records import Hello

# The file is rewritten only when this much of it is acknowledged, so that a long backlog is not copied at every ack.
_REWRITE_RATIO = 0.5


class Spool:
    """A file of one rank and one process lifetime; it exists only while something is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._header_bytes = 0
        self._ends: list[tuple[int, int]] = []  # (seq, offset behind its frame), ascending
        self._acknowledged = 0  # messages at the head of the file that are safe elsewhere
        self.written_seq = 0  # critical messages up to this number are in the file or were acknowledged

    def append(self, hello: Hello, frames: Sequence[tuple[int, bytes]]) -> None:
        """Write (seq, frame) pairs and fsync. Raises OSError, or SettingsError for somebody else's folder.

        When it raises, nothing was added.
        """
        if self._descriptor < 0:
            self._create(hello)
        end = self._end
        try:
            _write_all(self._descriptor, b"".join(frame for _, frame in frames))
            os.fsync(self._descriptor)
        except OSError:
            self._undo(end)
            raise
        for seq, frame in frames:
            end += len(frame)
            self._ends.append((seq, end))
            self.written_seq = max(self.written_seq, seq)

    def acknowledge(self, seq: int) -> None:
        """Messages up to `seq` are safe elsewhere. Raises OSError when the file cannot be shortened."""
        while self._acknowledged < len(self._ends) and self._ends[self._acknowledged][0] <= seq:
            self._acknowledged += 1
        if self._acknowledged == 0:
            return
        if self._acknowledged == len(self._ends):
            self._ends.clear()
            self._acknowledged = 0
            os.ftruncate(self._descriptor, self._header_bytes)
        elif self._acknowledged >= _REWRITE_RATIO * len(self._ends):
            self._rewrite()

    def close(self) -> None:
        """Leave the file if something in it is not acknowledged, else remove it. Never raises."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            if not self._ends:
                self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy of the descriptor and nothing more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def _end(self) -> int:
        return self._ends[-1][1] if self._ends else self._header_bytes

    def _create(self, hello: Hello) -> None:
        header = wire.encode(hello)
        places.make_private(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, header)
            _sync_folder(self.path.parent)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise
        self._descriptor, self._header_bytes = descriptor, len(header)

    def _undo(self, size: int) -> None:
        """Take half a write back; if even that fails, the file is begun anew with everything, next time."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self.abandon()
            self._ends.clear()
            self._acknowledged = self.written_seq = 0

    def _rewrite(self) -> None:
        """Leave out what is acknowledged: a new file takes the old one's name, so that a crash finds one of both."""
        begin = self._ends[self._acknowledged - 1][1]
        shift = begin - self._header_bytes
        content = os.pread(self._descriptor, self._header_bytes, 0)
        content += os.pread(self._descriptor, self._end - begin, begin)
        fresh = self.path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
            fresh.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._ends = [(seq, end - shift) for seq, end in self._ends[self._acknowledged :]]
        self._acknowledged = 0


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
