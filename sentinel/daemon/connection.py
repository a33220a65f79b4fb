"""One client's connection: frames in, messages out, limits on both."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import NamedTuple

from sentinel import wire
from sentinel.errors import WireError
from sentinel.records import FromDaemon, FromRank

PATIENCE_SECONDS = 10.0  # for a half frame to become whole, and for the first message
MOST_UNSENT_BYTES = 1 << 20
QUIET_SECONDS = 0.1  # a dead process's socket that brings nothing for so long is empty
_READ_BYTES = 1 << 16
_UCRED = struct.Struct("3i")


class Rejected(StrEnum):
    """Why a connection was closed by us. A closed set: it is a metric's label."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    TOO_SLOW = "too_slow"
    FOREIGN_USER = "foreign_user"
    OTHER_VERSION = "other_version"
    UNEXPECTED = "unexpected"
    TOO_MANY = "too_many"
    SLOW_CONSUMER = "slow_consumer"
    NOT_STORED = "not_stored"


class RejectedError(Exception):
    """The connection must be closed; carries the reason and what was seen."""

    def __init__(self, reason: Rejected, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int


class Connection:
    """A stream of messages from one client, and the way back to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience_seconds: float) -> None:
        self._reader = reader
        self._writer = writer
        self._patience_seconds = patience_seconds
        self._frames = wire.FrameReader()
        self._received_bytes = 0
        self._greeted = False
        self.slow = False  # it did not read what we sent

    @property
    def peer(self) -> Peer:
        sock: socket.socket = self._writer.get_extra_info("socket")
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return Peer(pid, uid)

    async def messages(self) -> AsyncGenerator[FromRank, None]:
        """Every message until the other end closes. Raises RejectedError for what is not a message of ours."""
        loop = asyncio.get_running_loop()
        deadline: float | None = loop.time() + self._patience_seconds
        while data := await self._read(deadline):
            completed = 0
            for body in self._bodies(data):
                completed += 1
                self._greeted = True
                yield _decoded(body)
            if completed or not self._greeted:
                deadline = self._next_deadline(deadline, loop.time())
            elif deadline is None:
                deadline = loop.time() + self._patience_seconds

    def send(self, message: FromDaemon) -> None:
        """Never blocks. A client that does not read is cut off."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            self.slow = True
            transport.abort()
            return
        self._writer.write(wire.encode(message))

    def close(self, reason: str = "") -> None:
        del reason  # a Link may be told why; a socket has no use for it
        self._writer.close()

    async def flushed(self) -> None:
        """Everything sent has left, or the other end has gone."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def process_died(self) -> None:
        """Nobody writes any more: end the stream once it is read empty.

        A forked child of the process may hold the socket open, so the end of the stream would never come by itself.
        """
        before = -1
        while before != self._received_bytes:
            before = self._received_bytes
            await asyncio.sleep(QUIET_SECONDS)
        if not self._reader.at_eof():
            self._reader.feed_eof()

    async def _read(self, deadline: float | None) -> bytes:
        try:
            async with asyncio.timeout_at(deadline):
                data = await self._reader.read(_READ_BYTES)
        except TimeoutError:
            what = "half a frame" if self._greeted else "no first message"
            raise RejectedError(Rejected.TOO_SLOW, f"{what} within {self._patience_seconds:g} s") from None
        except OSError:
            return b""
        self._received_bytes += len(data)
        return data

    def _bodies(self, data: bytes) -> list[bytes]:
        bodies: list[bytes] = []
        try:
            bodies.extend(self._frames.feed(data))
        except WireError as error:
            raise RejectedError(Rejected.OVERSIZED, str(error)) from None
        return bodies

    def _next_deadline(self, deadline: float | None, now: float) -> float | None:
        """None between frames; a half frame has a fixed time to become whole, however it drips."""
        if not self._greeted:
            return deadline
        return now + self._patience_seconds if self._frames.pending_bytes else None


def _decoded(body: bytes) -> FromRank:
    try:
        return wire.decode_from_rank(body)
    except WireError as error:
        raise RejectedError(Rejected.MALFORMED, str(error)) from None
