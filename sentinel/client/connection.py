"""One connection to the daemon's socket that never blocks: bytes wait here, not in the caller."""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from sentinel import places, wire
from sentinel.records import FromDaemon

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_CHUNK_BYTES = 1 << 16


class Connection:
    """Connected on return. Every method raises OSError when the connection is gone."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when nobody listens (or too many wait), SettingsError when the place is not private."""
        places.make_private(path.parent)
        self._unsent = bytearray()
        self._reader = wire.FrameReader()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(str(path))
            _check_peer(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """What the kernel did not take yet: the daemon is slow or stopped."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Queue a frame; `flush` sends it."""
        self._unsent += frame

    def flush(self) -> None:
        """Hand to the kernel what it takes."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[:_CHUNK_BYTES], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            del self._unsent[:sent]

    def receive(self) -> Iterator[FromDaemon]:
        """What has arrived. Raises WireError for bytes that are not messages, ConnectionResetError at the end."""
        while True:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            for body in self._reader.feed(data):
                yield wire.decode_from_daemon(body)
            if len(data) < _CHUNK_BYTES:
                return

    def close(self) -> None:
        """Close this process's copy of the descriptor; idempotent."""
        self._socket.close()


def _check_peer(connected: socket.socket) -> None:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in {0, os.geteuid()}:
        raise PermissionError(f"the daemon's socket belongs to user {uid}, not to {os.geteuid()} or root")
