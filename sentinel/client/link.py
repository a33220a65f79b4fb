"""Talk to the daemon from one background thread: connect, greet, send, receive, tell that we are alive.

The thread owns the connection, the spool and the launcher; the loop only ever touches the outbox. Nothing here raises
into the loop: what goes wrong in the thread ends at one boundary, is told once, and the thread goes on.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sentinel import wire
from sentinel.client.approach import Approach
from sentinel.client.connection import Connection
from sentinel.client.keeper import Keeper
from sentinel.client.launch import Launcher
from sentinel.client.outbox import Outbox
from sentinel.config import Settings
from sentinel.errors import SettingsError, WireError
from sentinel.places import Places
from sentinel.records import (
    Command,
    FromDaemon,
    Gap,
    Heartbeat,
    Hello,
    Mark,
    Numbered,
    Roster,
    Stored,
    Welcome,
    Word,
)
from sentinel.vocabulary import DropReason

TELEMETRY_SECONDS = 0.05  # telemetry waits at most this long for company
HEARTBEAT_SECONDS = 1.0
WELCOME_SECONDS = 5.0  # a daemon that has not greeted by then is stopped, or none of ours
MAX_ERRORS = 20  # of our own code; then the thread gives up
MAX_UNSENT_BYTES = 1 << 16  # encoded ahead of the kernel; the rest waits in the outbox, where it can make room
BATCH_MESSAGES = 64
JOIN_SECONDS = 2.0  # beyond what `close` was given: a disk that hangs must not hold the end of training


class Receiver(Protocol):
    """Implemented by the Run. Everything is called on the link's thread and must return soon."""

    def on_welcome(self, welcome: Welcome) -> None: ...
    def on_command(self, command: Command) -> None: ...
    def on_word(self, word: Word) -> None: ...
    def on_mark(self, mark: Mark) -> None: ...
    def on_roster(self, roster: Roster) -> None: ...
    def on_lost(self) -> None:
        """A connection that had been welcomed is gone."""

    def on_trouble(self, what: str, text: str) -> None:
        """Trouble of the environment, once per `what`: daemon, daemon_ended, spool, wire, link, gave_up."""

    def heartbeat(self) -> Heartbeat: ...


class Link:
    """One per Run. `start` returns at once, `close` delivers what is left; between them the loop never waits."""

    def __init__(
        self,
        *,
        places: Places,
        hello: Callable[[], Hello],
        outbox: Outbox,
        receiver: Receiver,
        settings: Settings,
        settings_path: str | None,
        may_start_daemon: bool,
    ) -> None:
        self._places = places
        self._hello = hello
        self._outbox = outbox
        self._receiver = receiver
        self._keeper = Keeper(places, hello, outbox, lambda text: self._trouble("spool", text))
        launcher = None
        if may_start_daemon and settings.daemon.autostart:
            launcher = Launcher(places, settings_path, os.environ, self._trouble)
        self._approach = Approach(places, settings, launcher, lambda text: self._trouble("daemon", text))
        self._connection: Connection | None = None
        self._welcomed = False
        self._welcome_due = self._next_heartbeat = 0.0
        self._thread: threading.Thread | None = None
        self._waker: tuple[socket.socket, socket.socket] | None = None  # (ours to read, anybody's to write)
        self._closing_at: float | None = None  # when to stop trying; None while the run goes on
        self._errors = 0
        self._told: set[str] = set()
        self._news: list[Callable[[], None]] = []  # for the receiver, which may raise: told inside the boundary

    def start(self) -> None:
        """Start the one thread; it dies with the process. A system that refuses it is trouble, not an error."""
        try:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            self._waker = ours, theirs
            self._outbox.wake = self._wake
            thread = threading.Thread(target=self._run, name="sentinel-link", daemon=True)
            thread.start()
            self._thread = thread
        except (OSError, RuntimeError) as error:  # no descriptor or no thread left
            self._drop_waker()
            text = f"the link to the daemon cannot be started: {error} (training goes on unprotected)"
            self._receiver.on_trouble("link", text)

    @property
    def connected(self) -> bool:
        """Whether a daemon has greeted this connection."""
        return self._welcomed

    @property
    def record_kept(self) -> bool:
        """Whether a critical message pushed now is kept by somebody: the daemon or the spool."""
        return self._welcomed or self._keeper.works

    def close(self, seconds: float) -> None:
        """Deliver what is left within `seconds`, spool the critical rest, and leave nothing else behind."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing_at = time.monotonic() + seconds
        self._wake()
        thread.join(seconds + JOIN_SECONDS)

    def abandon(self) -> None:
        """In a forked child: close our copies of the parent's descriptors. Takes no lock, tells nobody."""
        self._thread = None
        self._welcomed = False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._drop_waker()
        self._keeper.abandon()
        self._approach.abandon()

    def _run(self) -> None:
        """The thread, and its one boundary: an error of ours costs the connection, not the thread, up to a limit."""
        while self._errors < MAX_ERRORS:
            try:
                if self._round(time.monotonic()):
                    break
            except Exception as error:  # noqa: BLE001  # nothing of ours may reach the loop or end the thread
                self._errors += 1
                self._lose()
                self._trouble("link", f"the link to the daemon failed: {type(error).__name__}: {error}")
        else:
            self._trouble("gave_up", f"the link to the daemon gave up after {MAX_ERRORS} errors of its own")
        with contextlib.suppress(Exception):  # the end of the same boundary
            self._put_away(time.monotonic())

    def _round(self, now: float) -> bool:
        """Once around; True when there is nothing left to do."""
        while self._news:
            self._news.pop(0)()
        try:
            arrived = self._exchange(now)
        except (OSError, WireError, SettingsError) as error:
            arrived = []
            if isinstance(error, WireError):
                self._trouble("wire", f"the daemon's bytes make no sense: {error}")
            self._lose()
        for message in arrived:
            self._handle(message)
        self._keeper.keep(self._connection is not None, time.monotonic())
        return self._finished(now)

    def _exchange(self, now: float) -> list[FromDaemon]:
        """Connect if it is time, send what there is, wait a moment, return what has come."""
        if self._connection is None and self._approach.due(now):
            self._connection = self._approach.connect(now)
            if self._connection is not None:
                self._connection.send(wire.encode(self._hello()))
                self._welcome_due = now + WELCOME_SECONDS
        if self._welcomed:
            self._send(now)
        self._wait(now)
        if self._connection is None:
            return []
        self._connection.flush()
        if not self._welcomed and now > self._welcome_due:
            self._trouble(
                "daemon", f"a daemon is there but did not answer within {WELCOME_SECONDS} s; is it stopped?"
            )
            raise ConnectionError("no greeting")
        return list(self._connection.receive())

    def _send(self, now: float) -> None:
        connection = self._connection
        assert connection is not None
        while connection.unsent_bytes < MAX_UNSENT_BYTES and (batch := self._outbox.take(BATCH_MESSAGES)):
            for message in batch:
                connection.send(self._frame(message))
            connection.flush()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._approach.look(now)
            if connection.unsent_bytes < MAX_UNSENT_BYTES:
                connection.send(wire.encode(self._receiver.heartbeat()))
                connection.flush()

    def _frame(self, message: Numbered | Gap) -> bytes:
        """The bytes of a message; of a gap in its place if the daemon could not read it and would hang up on us."""
        try:
            frame = wire.encode(message)
            wire.decode_from_rank(frame[4:])
        except WireError as error:
            if isinstance(message, Gap):
                raise
            self._trouble("wire", f"dropped, because it cannot be sent: {error}")
            return wire.encode(self._outbox.discard(message.seq, DropReason.TOO_LARGE))
        return frame

    def _wait(self, now: float) -> None:
        """Until something arrives, the kernel takes more, somebody wakes us, or it is time for the next thing."""
        assert self._waker is not None
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._waker[0], select.POLLIN)
        until = now + TELEMETRY_SECONDS
        if self._connection is not None:
            events = select.POLLIN | (select.POLLOUT if self._connection.unsent_bytes else 0)
            poll.register(self._connection, events)
        elif self._closing_at is None:
            until = max(self._approach.next_try, now)
        poll.poll(max(0.0, until - now) * 1000.0)
        with contextlib.suppress(BlockingIOError):
            self._waker[0].recv(4096)

    def _handle(self, message: FromDaemon) -> None:
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Stored):
            self._keeper.acknowledge(self._outbox.acknowledge(message.seq))
        elif isinstance(message, Command):
            self._receiver.on_command(message)
        elif isinstance(message, Word):
            self._receiver.on_word(message)
        elif isinstance(message, Mark):
            self._receiver.on_mark(message)
        elif isinstance(message, Roster):
            self._receiver.on_roster(message)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.version != wire.VERSION:
            self._trouble(
                "daemon",
                f"the daemon speaks version {welcome.version} of the wire, this process {wire.VERSION}; "
                "install the same train-sentinel for both and restart the daemon",
            )
            self._lose()
            return
        self._outbox.rewind(welcome.stored_seq)
        self._keeper.acknowledge(welcome.stored_seq)
        self._welcomed = True
        self._next_heartbeat = 0.0
        self._approach.succeeded()
        self._receiver.on_welcome(welcome)

    def _lose(self) -> None:
        """Forget the connection; the next try comes after a pause."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._welcomed:
            self._news.append(self._receiver.on_lost)
        self._welcomed = False
        self._approach.failed(time.monotonic())

    def _finished(self, now: float) -> bool:
        if self._closing_at is None:
            return False
        if now >= self._closing_at or self._outbox.settled:
            return True
        self._approach.hurry()
        return self._connection is None and not self._approach.hopeful(now)

    def _put_away(self, now: float) -> None:
        connection, self._connection = self._connection, None
        self._welcomed = False
        if connection is not None:
            connection.close()
        self._drop_waker()
        self._approach.abandon()
        self._keeper.close(now)
        while self._news:
            self._news.pop(0)()

    def _trouble(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._news.append(lambda: self._receiver.on_trouble(what, text))

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody is there to wake
                waker[1].send(b"\0")

    def _drop_waker(self) -> None:
        waker, self._waker = self._waker, None
        for end in waker or ():
            end.close()
