"""A rank without a training loop: says on the wire exactly what a test wants said."""

import os
import socket
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from sentinel import wire
from sentinel.records import (
    Ack,
    Command,
    FromDaemon,
    FromRank,
    Gap,
    Heartbeat,
    Hello,
    RunEnd,
    RunStart,
    SnapshotNote,
    StepRecord,
    Stored,
    Welcome,
    Word,
)
from sentinel.vocabulary import DropReason, Mode, Quality, Reason, UpdateResult

T = TypeVar("T")
CAN = ["rollback", "skip_data", "replay_data", "pause", "stop"]


class WireClient:
    """One process lifetime of one rank. Numbers its messages; keeps what was not acknowledged, as a client must."""

    def __init__(self, path: Path, run_id: str = "r1", rank: int = 0, world_size: int = 1, nonce: str = "") -> None:
        self.path = path
        self.run_id = run_id
        self.rank = rank
        self.world_size = world_size
        self.nonce = nonce or uuid.uuid4().hex
        self.seq = 0
        self.generation = 0
        self.unacked: list[Any] = []
        self.stored_seq = 0
        self.inbox: list[FromDaemon] = []
        self.welcome: Welcome | None = None
        self._frames = wire.FrameReader()
        self.socket: socket.socket | None = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ the connection

    def hello(self, **changes: Any) -> Hello:
        values: dict[str, Any] = {
            "version": wire.VERSION,
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "nonce": self.nonce,
            "pid": os.getpid(),
            "process_start": psutil.Process().create_time(),
            "last_seq": self.seq,
        }
        return Hello(**{**values, **changes})

    def connect(self) -> Welcome:
        """Say Hello, hear Welcome, send again what the daemon has not stored."""
        self.dial()
        self.put(self.hello())
        self.welcome = self.expect(Welcome)
        self.stored_seq = max(self.stored_seq, self.welcome.stored_seq)
        self._forget_stored()
        for message in list(self.unacked):
            self.put(message)
        return self.welcome

    def dial(self) -> None:
        self.close()
        self._frames = wire.FrameReader()
        self.inbox = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(self.path))

    def put(self, message: FromRank) -> None:
        self.put_bytes(wire.encode(message))

    def put_bytes(self, data: bytes) -> None:
        assert self.socket is not None
        self.socket.sendall(data)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def expect(self, kind: type[T], seconds: float = 10.0, **fields: Any) -> T:
        """The next message of this kind (and with these fields); what else arrives stays in the inbox."""
        deadline = time.monotonic() + seconds
        while True:
            for message in self.inbox:
                if isinstance(message, kind) and all(
                    getattr(message, name) == value for name, value in fields.items()
                ):
                    self.inbox.remove(message)
                    return message
            self._receive(deadline - time.monotonic(), f"{kind.__name__} {fields or ''}")

    def is_cut_off(self, seconds: float = 15.0) -> bool:
        """Whether the daemon closes the connection in time."""
        assert self.socket is not None
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def _receive(self, seconds: float, what: str) -> None:
        assert self.socket is not None
        if seconds <= 0:
            raise AssertionError(f"no {what} in time; got {self.inbox}")
        self.socket.settimeout(seconds)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            raise AssertionError(f"no {what} in time; got {self.inbox}") from None
        if not data:
            raise AssertionError(f"the daemon closed the connection before {what}; got {self.inbox}")
        for body in self._frames.feed(data):
            message = wire.decode_from_daemon(body)
            if isinstance(message, Stored):
                self.stored_seq = max(self.stored_seq, message.seq)
                self._forget_stored()
            self.inbox.append(message)

    def _forget_stored(self) -> None:
        self.unacked = [message for message in self.unacked if _last(message) > self.stored_seq]

    # ------------------------------------------------------------------ messages

    def number(self) -> int:
        self.seq += 1
        return self.seq

    def say(self, message: Any) -> Any:
        """Send a numbered message, and remember it until it is stored."""
        self.unacked.append(message)
        if self.socket is not None:
            self.put(message)
        return message

    def start(
        self, step: int = 0, mode: Mode = Mode.PROTECT, settings: dict[str, Any] | None = None, **more: Any
    ) -> RunStart:
        values: dict[str, Any] = {
            "seq": self.number(),
            "time": time.time(),
            "step": step,
            "name": f"name-of-{self.run_id}",
            "mode": mode,
            "world_size": self.world_size,
            "local_rank": self.rank,
            "pid": os.getpid(),
            "process_start": psutil.Process().create_time(),
            "host": "here",
            "argv": ["train.py"],
            "cwd": "/",
            "git": {},
            "packages": {},
            "config": {},
            "settings": settings or {},
            "devices": [],
            "can": CAN,
        }
        return self.say(RunStart(**{**values, **more}))

    def step(self, step: int, loss: float | None = 2.0, grad_norm: float | None = 1.0, **more: Any) -> StepRecord:
        values: dict[str, Any] = {
            "seq": self.number(),
            "generation": self.generation,
            "step": step,
            "time": time.time(),
            "result": UpdateResult.APPLIED,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": 1e-3,
            "step_seconds": 0.1,
        }
        return self.say(StepRecord(**{**values, **more}))

    def steps(self, first: int, last: int, **more: Any) -> None:
        for step in range(first, last + 1):
            self.step(step, **more)

    def snapshot(self, step: int, quality: Quality = Quality.GOOD, **more: Any) -> SnapshotNote:
        values: dict[str, Any] = {
            "seq": self.number(),
            "time": time.time(),
            "generation": self.generation,
            "step": step,
            "tier": "ram",
            "quality": quality,
            "verified": True,
            "reason": "finite",
            "program_point": "step",
            "size_bytes": 100,
            "seconds": 0.001,
        }
        return self.say(SnapshotNote(**{**values, **more}))

    def end(self, step: int, status: str = "completed") -> RunEnd:
        return self.say(RunEnd(self.number(), time.time(), self.generation, step, status))

    def drop(self, count: int) -> Gap:
        """Lose `count` messages before they were sent, and say so."""
        first = self.seq + 1
        self.seq += count
        return self.say(Gap(first, self.seq, DropReason.OUTBOX_FULL))

    def beat(self, step: int = 0, **more: Any) -> None:
        values = {
            "time": time.time(),
            "step": step,
            "phase": "train",
            "last_seq": self.seq,
            "dropped": {},
            "hook_seconds": 0.0,
        }
        self.put(Heartbeat(**{**values, **more}))

    def ack(self, command: Command, state: str, reason: Reason = Reason.OK, **more: Any) -> Ack:
        values: dict[str, Any] = {"generation": self.generation, "step": command.apply_at - 1}
        return self.say(Ack(self.number(), time.time(), command.id, state, reason, **{**values, **more}))

    def obey(
        self, candidates: list[tuple[int, Quality, str]] | None = None, seconds: float = 10.0
    ) -> tuple[Command, Word]:
        """Carry one rollback (or pause) out as a loop would, up to the applied ack."""
        command = self.expect(Command, seconds)
        self.ack(command, "prepared", candidates=candidates or [])
        word = self.expect(Word, seconds, command_id=command.id)
        assert word.commit, word
        if word.target_step is None:
            self.ack(command, "applied", step=command.apply_at)
        else:
            self.generation += 1
            self.ack(
                command,
                "applied",
                generation=self.generation,
                step=word.target_step,
                target_step=word.target_step,
                skipped_batches=3,
                seconds=0.01,
            )
        return command, word

    def all_stored(self, seconds: float = 10.0) -> None:
        """Wait until the daemon has acknowledged everything sent so far."""
        while self.stored_seq < self.seq:
            self.expect(Stored, seconds)


def _last(message: Any) -> int:
    return message.last_seq if isinstance(message, Gap) else message.seq
