"""Make sure that one home has one daemon."""

import contextlib
import fcntl
import os
from pathlib import Path

from sentinel.errors import DaemonRunningError


class Lock:
    """An exclusive lock on a file, held until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Raises DaemonRunningError when another process holds it."""
        self._path = path
        self._descriptor = _take(path)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Free it and remove the file: while it is still held, so that it is never another daemon's."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def _take(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise DaemonRunningError(
                f"another daemon (pid {holder or 'unknown'}) holds {path}; use it, or end it first"
            ) from None
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # between our open and our lock its holder left and removed it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
