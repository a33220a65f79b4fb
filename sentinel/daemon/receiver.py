"""Accept connections on the Unix socket, keep out what is not ours, and hand each to the one who serves it."""

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import structlog

from sentinel import wire
from sentinel.daemon.connection import PATIENCE_SECONDS, Connection, Rejected, RejectedError
from sentinel.records import ControlReply, ControlRequest, FromRank, Hello

MOST_CONNECTIONS = 1024
_SPARE_DESCRIPTORS = 256  # database, HTTP, process handles
_log = structlog.get_logger()

ServeRank = Callable[[Hello, Connection, AsyncGenerator[FromRank, None]], Awaitable[None]]
Answer = Callable[[ControlRequest], Awaitable[ControlReply]]


class Receiver:
    """The listening socket. One bad client never disturbs another."""

    def __init__(
        self,
        path: Path,
        serve: ServeRank,
        answer: Answer,
        count: Callable[[Rejected], None],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._path = path
        self._serve = serve
        self._answer = answer
        self._count = count
        self._patience_seconds = patience_seconds
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Called while the home's lock is held, so a socket file that exists is a dead daemon's."""
        _allow_descriptors(MOST_CONNECTIONS + _SPARE_DESCRIPTORS)
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._accept, self._path, backlog=MOST_CONNECTIONS)
        finally:
            os.umask(before)

    def stop(self) -> None:
        """Accept no more; what is connected goes on."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End every connection."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self._open)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        connection = Connection(reader, writer, self._patience_seconds)
        try:
            await self._attend(connection)
        except RejectedError as error:
            self._reject(error.reason, str(error))
        except asyncio.CancelledError:
            pass  # the daemon leaves; nothing is awaited behind this
        except Exception:  # noqa: BLE001 - one connection's failure is not the daemon's
            _log.exception("a connection failed")
        finally:
            if connection.slow:
                self._reject(Rejected.SLOW_CONSUMER, "did not read what it was sent")
            self._open.discard(task)
            connection.close()

    async def _attend(self, connection: Connection) -> None:
        if len(self._open) > MOST_CONNECTIONS:
            raise RejectedError(Rejected.TOO_MANY, f"more than {MOST_CONNECTIONS} connections")
        peer = connection.peer
        if peer.uid not in (os.getuid(), 0):
            raise RejectedError(Rejected.FOREIGN_USER, f"user {peer.uid} is not {os.getuid()}")
        async with contextlib.aclosing(connection.messages()) as messages:
            first = await anext(messages, None)
            if first is None:
                return
            _check_version(first)
            if isinstance(first, ControlRequest):
                connection.send(await self._answer(first))
                await connection.flushed()
            elif isinstance(first, Hello):
                await self._serve(first, connection, messages)
            else:
                raise RejectedError(Rejected.UNEXPECTED, f"{type(first).__name__} before Hello")

    def _reject(self, reason: Rejected, text: str) -> None:
        self._count(reason)
        _log.warning("connection closed", reason=reason, text=text)


def _check_version(first: FromRank) -> None:
    version = getattr(first, "version", wire.VERSION)
    if version != wire.VERSION:
        raise RejectedError(Rejected.OTHER_VERSION, f"wire version {version}; this daemon speaks {wire.VERSION}")


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
