"""What the daemon knows, right now, of every run and every rank. Memory only; the database is the record."""

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from sentinel.records import Ack, FromDaemon, Heartbeat, Origin, Roster, RunStart, StepRecord
from sentinel.vocabulary import Mode, RunStatus

DEFAULT_STEP_SECONDS = 1.0  # until the first step was timed
DEFAULT_ROUND_TRIP_SECONDS = 0.03  # until the first prepare came back; two commits to disk are part of it
_SMOOTHING = 0.2


class Link(Protocol):
    """The way back to a rank."""

    def send(self, message: FromDaemon) -> None: ...

    def close(self, reason: str) -> None: ...


class Start(NamedTuple):
    """What a rank said of itself when it attached, as far as the daemon acts on it."""

    name: str
    mode: Mode
    world_size: int
    can: frozenset[str]
    settings: dict[str, Any]
    step: int

    @classmethod
    def of(cls, start: RunStart) -> "Start":
        return cls(start.name, start.mode, start.world_size, frozenset(start.can), start.settings, start.step)


class Identity(NamedTuple):
    """Which process a rank is."""

    nonce: str
    pid: int
    process_start: float


class Rank:
    """One rank of one attempt, alive or just gone."""

    def __init__(self, origin: Origin, identity: Identity, world_size: int) -> None:
        self.origin = origin
        self.identity = identity
        self.world_size = world_size
        self.start: Start | None = None
        self.link: Link | None = None
        self.seen_seq = 0  # highest number handled; what is at or below it is a repetition
        self.stored_seq = 0  # highest number known to be in the database
        self.produced_seq = 0  # highest number we ever heard of
        self.step = 0
        self.generation = 0
        self.phase = "train"
        self.step_seconds = DEFAULT_STEP_SECONDS
        self.round_trip_seconds = DEFAULT_ROUND_TRIP_SECONDS
        self.host_memory_bytes: int | None = None
        self.margin_steps = 0  # of the run's own settings
        self.pause_limit_seconds = 0.0
        self.last_heard = time.monotonic()
        self.end_status = ""  # "completed" or "failed" once it said so
        self.ended = False
        self.status = RunStatus.RUNNING
        self.serving: asyncio.Task[None] | None = None  # reads its connection
        self._timed = False

    @property
    def connected(self) -> bool:
        return self.link is not None and not self.ended

    def keys(self) -> dict[str, Any]:
        """What tells it apart in a log line."""
        run_id, attempt, number = self.origin
        return {"run": run_id, "attempt": attempt, "rank": number, "step": self.step, "generation": self.generation}

    def send(self, message: FromDaemon) -> None:
        """To the rank, if it is connected; what it misses it asks for again."""
        if self.link is not None:
            self.link.send(message)

    def saw(self, record: StepRecord) -> None:
        if record.generation < self.generation:
            return
        if record.generation > self.generation:
            self.generation, self.step = record.generation, record.step
        self.step = max(self.step, record.step)
        seconds = record.step_seconds
        if seconds is not None and math.isfinite(seconds) and seconds > 0:
            share = _SMOOTHING if self._timed else 1.0
            self.step_seconds += share * (seconds - self.step_seconds)
            self._timed = True

    def beat(self, heartbeat: Heartbeat) -> None:
        self.step = max(self.step, heartbeat.step)
        self.phase = heartbeat.phase
        self.produced_seq = max(self.produced_seq, heartbeat.last_seq)

    def turned(self, ack: Ack) -> None:
        """History was rewritten: steps count from the ack's on."""
        self.generation, self.step = ack.generation, ack.step

    def took(self, seconds: float) -> None:
        """A prepare was answered after so long. The slow ones count at once, the quick ones by and by."""
        if seconds > self.round_trip_seconds:
            self.round_trip_seconds = seconds
        else:
            self.round_trip_seconds += _SMOOTHING * (seconds - self.round_trip_seconds)


class LiveRun:
    """A run with at least one rank that has not ended."""

    def __init__(self, run_id: str, sequence: int) -> None:
        self.run_id = run_id
        self.attempt = 0
        self.ranks: dict[int, Rank] = {}
        self.sequence = sequence  # of the last command
        self.paused_by = ""  # the command that paused it
        self.order = 0  # the youngest run is the latest one

    @property
    def world_size(self) -> int:
        return max((rank.world_size for rank in self.ranks.values()), default=1)

    @property
    def connected(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.connected]

    @property
    def first(self) -> Rank:
        return self.ranks[min(self.ranks)]

    @property
    def name(self) -> str:
        start = self.first.start
        return start.name if start else ""

    @property
    def may_act(self) -> bool:
        return len(self.connected) >= self.world_size

    @property
    def ended(self) -> bool:
        return all(rank.ended for rank in self.ranks.values())

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def call_the_roll(self) -> None:
        """Tell every rank how many of the world are here."""
        roster = Roster(connected=len(self.connected), world_size=self.world_size, may_act=self.may_act)
        for rank in self.connected:
            rank.send(roster)


class Fleet:
    """All live runs of this daemon."""

    def __init__(self) -> None:
        self.runs: dict[str, LiveRun] = {}
        self.ever = False  # a client has come at least once
        self.last_end = time.monotonic()  # when a run last ended
        self.by_origin: dict[Origin, Rank] = {}  # also those that have ended but are still connected
        self._admitted = 0

    def admit(self, rank: Rank) -> LiveRun:
        """Put a new rank in its place; an older process of the same rank is replaced."""
        run_id, attempt, number = rank.origin
        run = self.runs.get(run_id)
        if run is None:
            # Wall-clock milliseconds keep the sequence growing over a restart of the daemon.
            run = self.runs[run_id] = LiveRun(run_id, sequence=int(time.time() * 1000))
        run.ranks[number] = rank
        run.attempt = max(run.attempt, attempt)
        self._admitted += 1
        run.order = self._admitted
        self.ever = True
        self.by_origin[rank.origin] = rank
        return run

    def find(self, run_id: str, number: int) -> Rank | None:
        run = self.runs.get(run_id)
        return run.ranks.get(number) if run else None

    def run_of(self, rank: Rank) -> LiveRun | None:
        """The run in which this very rank still has its place."""
        run = self.runs.get(rank.origin.run_id)
        return run if run and run.ranks.get(rank.origin.rank) is rank else None

    def drop(self, rank: Rank) -> None:
        """Nothing more will come from it or go to it."""
        if rank.ended and rank.link is None and self.by_origin.get(rank.origin) is rank:
            del self.by_origin[rank.origin]

    def forget(self, run: LiveRun) -> None:
        if self.runs.get(run.run_id) is run:
            del self.runs[run.run_id]

    def ranks(self) -> Iterator[Rank]:
        for run in list(self.runs.values()):
            yield from list(run.ranks.values())
