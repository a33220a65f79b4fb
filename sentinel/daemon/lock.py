"""Make sure that one home has one daemon."""

import fcntl
import os
from pathlib import Path

from sentinel.errors import DaemonRunningError


class Lock:
    """An exclusive lock on a file, held until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Raises DaemonRunningError when another process holds it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise DaemonRunningError(
                f"another daemon (pid {holder or 'unknown'}) holds {path}; use it, or end it first"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)
