"""Test a training loop without a daemon: `FakeDaemon` speaks the real wire over a real socket, from a thread.

    places = sentinel.places.find({}, home=tmp_path)
    with FakeDaemon(places.socket) as daemon:
        run = sentinel.attach(model, optimizer, ...)      # with SENTINEL_HOME set to the same home
        ...
        daemon.wait_for(lambda: daemon.of(StepRecord), 5.0)
        ack = daemon.turn(daemon.command(Action.ROLLBACK, apply_at=20))

This module is public: what is documented here stays.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sentinel import wire
from sentinel.errors import WireError
from sentinel.records import (
    Ack,
    Command,
    ControlRequest,
    FromDaemon,
    FromRank,
    Gap,
    Heartbeat,
    Hello,
    Roster,
    Stored,
    Welcome,
    Word,
)
from sentinel.vocabulary import Action, Mode, Quality, Reason

T = TypeVar("T")

# A person watching a pause, or an emergency brake in a test: far beyond any turn.
_COMMAND_LIFE_SECONDS = 60.0


class FakeDaemon:
    """Listens on `path` between `with` and its end; greets every rank and acknowledges what it receives.

    `ack=False`: receives but never acknowledges. `silent=True`: accepts but never answers. `may_act`, `mode`,
    `attempt`, `url` go into the greeting. `stored_seq` is what this daemon has of a rank that it does not know yet.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        ack: bool = True,
        silent: bool = False,
        may_act: bool = True,
        mode: Mode = Mode.PROTECT,
        attempt: int = 1,
        url: str = "",
        stored_seq: int = 0,
    ) -> None:
        self.path = Path(path)
        self.ack = ack
        self.silent = silent
        self.may_act = may_act
        self.messages: list[FromRank] = []  # everything received, in order
        self.errors: list[str] = []  # bytes that were not messages, broken order
        self.connections = 0  # how many clients connected so far
        self._greeting = (attempt, url, mode)
        self._stored: dict[str, int] = {}  # by nonce
        self._stored_at_first = stored_seq
        self._changed = threading.Condition()
        self._reading = threading.Event()
        self._reading.set()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._sequence = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._in_thread(self._accept, self._listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()
        self.path.unlink(missing_ok=True)

    def of(self, kind: type[T]) -> list[T]:
        """The messages of one type received so far, e.g. `daemon.of(StepRecord)`."""
        with self._changed:
            return [message for message in self.messages if isinstance(message, kind)]

    def wait_for(self, predicate: Callable[[], T], seconds: float = 5.0) -> T:
        """The first truthy value of `predicate()`, asked after each message; AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (value := predicate()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not true within {seconds} s; received so far: {self._summary()}")
                self._changed.wait(min(left, 0.05))
            return value

    def send(self, message: FromDaemon) -> None:
        """Send to every connected rank."""
        frame = wire.encode(message)
        with self._changed:
            receivers = list(self._open)
        for receiver in receivers:
            with contextlib.suppress(OSError):
                receiver.sendall(frame)

    def send_bytes(self, data: bytes) -> None:
        """Send raw bytes to every connected rank, to see what it does with nonsense."""
        with self._changed:
            receivers = list(self._open)
        for receiver in receivers:
            receiver.sendall(data)

    def command(self, action: Action, *, apply_at: int, **fields: Any) -> Command:
        """A command for the rank that said hello last, with identity, order and deadline filled in."""
        hello = self.wait_for(lambda: self.of(Hello))[-1]
        self._sequence += 1
        filled: dict[str, Any] = {
            "id": f"command-{self._sequence}",
            "run_id": hello.run_id,
            "attempt": self._greeting[0],
            "generation": 0,
            "sequence": self._sequence,
            "not_after": time.monotonic() + _COMMAND_LIFE_SECONDS,
            "reason": Reason.REQUESTED,
        }
        return Command(action=action, apply_at=apply_at, **{**filled, **fields})

    def turn(self, command: Command, commit: bool = True, seconds: float = 10.0) -> Ack:
        """Prepare, then commit (or abort): returns the final Ack, or the refusal."""
        self.send(command)
        first = self._ack(command, ("prepared", "refused"), seconds)
        if first.state == "refused":
            return first
        reason = Reason.OK if commit else Reason.NO_WORD
        self.send(Word(command.id, commit, reason, target_step=_target(command, first) if commit else None))
        return self._ack(command, ("applied", "failed", "aborted"), seconds)

    def roster(self, connected: int, world_size: int) -> None:
        """Tell every rank how many are connected."""
        self.send(Roster(connected, world_size, connected == world_size))

    def pause_reading(self) -> None:
        """Stop reading, as a stopped daemon does: the clients' sockets fill up."""
        self._reading.clear()

    def resume_reading(self) -> None:
        self._reading.set()

    def disconnect(self) -> None:
        """Close every connection and go on listening."""
        with self._changed:
            closing, self._open = self._open, []
        for connection in closing:
            _close(connection)

    def kill(self) -> None:
        """End at once: nothing more is read, answered or accepted; the socket's path stays, as after SIGKILL."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _close(listener)
        self._reading.set()
        self.disconnect()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._threads.clear()

    def _ack(self, command: Command, states: tuple[str, ...], seconds: float) -> Ack:
        def answer() -> Ack | None:
            acks = (ack for ack in self.of(Ack) if ack.command_id == command.id and ack.state in states)
            return next(acks, None)

        found = self.wait_for(answer, seconds)
        assert found is not None
        return found

    def _in_thread(self, target: Callable[[socket.socket], None], of: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(of,), name="fake-daemon", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                if self._listener is None:
                    connection.close()
                    return
                self._open.append(connection)
                self.connections += 1
                self._changed.notify_all()
            self._in_thread(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        reader, nonce = wire.FrameReader(), ""
        try:
            while data := self._read(connection):
                for body in reader.feed(data):
                    nonce = self._receive(connection, wire.decode_from_rank(body), nonce)
                if self.ack and not self.silent and nonce:
                    connection.sendall(wire.encode(Stored(self._stored[nonce])))
        except WireError as error:
            self.errors.append(str(error))
        except OSError:
            pass  # the rank left, or this daemon was killed
        finally:
            with self._changed:
                if connection in self._open:
                    self._open.remove(connection)
                self._changed.notify_all()
            connection.close()

    def _read(self, connection: socket.socket) -> bytes:
        self._reading.wait()
        data = connection.recv(65536)
        self._reading.wait()  # paused meanwhile: what was read waits with the rest
        return data if self._listener is not None else b""

    def _receive(self, connection: socket.socket, message: FromRank, nonce: str) -> str:
        with self._changed:
            self.messages.append(message)
            if isinstance(message, Hello):
                nonce = message.nonce
                self._stored.setdefault(nonce, self._stored_at_first)
            elif not isinstance(message, Heartbeat | ControlRequest):
                self._store(message, nonce)
            self._changed.notify_all()
        if isinstance(message, Hello) and not self.silent:
            attempt, url, mode = self._greeting
            stored = self._stored[nonce]
            greeting = Welcome(wire.VERSION, message.run_id, attempt, stored, url, self.may_act, mode)
            connection.sendall(wire.encode(greeting))
        return nonce

    def _store(self, message: Any, nonce: str) -> None:
        first, last = (
            (message.first_seq, message.last_seq) if isinstance(message, Gap) else (message.seq, message.seq)
        )
        stored = self._stored.get(nonce, 0)
        if first > stored + 1:
            self.errors.append(f"number {first} came after {stored}, and no gap explains the hole")
        self._stored[nonce] = max(stored, last)

    def _summary(self) -> str:
        counts: dict[str, int] = {}
        for message in self.messages:
            counts[type(message).__name__] = counts.get(type(message).__name__, 0) + 1
        return f"{counts or 'nothing'}, last {self.messages[-1:]}, errors {self.errors}"


def _target(command: Command, prepared: Ack) -> int | None:
    """What the dispatcher would choose for one rank: the step asked for, else the newest snapshot that will do."""
    if command.target_step is not None:
        return command.target_step
    good_enough = (Quality.GOOD, Quality.PENDING) if command.pending_ok else (Quality.GOOD,)
    for step, quality, _ in prepared.candidates:
        if quality in good_enough and (command.onset_step is None or step < command.onset_step):
            return step
    return None


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
