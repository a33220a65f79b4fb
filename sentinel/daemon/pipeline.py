"""Handle every message of every rank in order: metrics, database, detectors, and what the judge rules."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from sentinel.daemon import recovery
from sentinel.daemon.connection import Rejected, RejectedError
from sentinel.daemon.core import Core
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.judging import Judging
from sentinel.daemon.norms import Combining
from sentinel.daemon.rank import Rank, Start
from sentinel.records import (
    Ack,
    ControlRequest,
    FromRank,
    Gap,
    Heartbeat,
    Hello,
    PhaseNote,
    Reflex,
    RunEnd,
    RunStart,
    SnapshotNote,
    StepRecord,
    Stored,
    Trouble,
    Word,
)
from sentinel.store.database import Entry
from sentinel.vocabulary import Reason

_log = structlog.get_logger()
_Route = Callable[[Rank, Any], None]


class Pipeline:
    """One per daemon; lives in the event loop. Never raises but for a message that no rank may send here."""

    def __init__(self, core: Core, dispatcher: Dispatcher, judging: Judging) -> None:
        self._fleet, self._writer, self._metrics = core
        self._dispatcher = dispatcher
        self.judging = judging
        self.combining = Combining(self._fleet, self._metrics, judging.observe)
        self._heard: dict[Rank, int] = {}
        self.said_goodbye: Callable[[Rank], None] = _nobody_listens
        self._routes: dict[type, _Route] = {
            StepRecord: self._step,
            Reflex: self.combining.observe,
            SnapshotNote: self.combining.observe,
            RunStart: self._start,
            RunEnd: self._end,
            Ack: self._ack,
            PhaseNote: self._phase,
            Trouble: self._trouble,
        }

    def handle(self, rank: Rank, message: FromRank) -> None:
        """Called for every message of a rank, in the order in which the rank sent them."""
        rank.last_heard = time.monotonic()
        if isinstance(message, Heartbeat):
            rank.beat(message)
            self._measure(rank, message)
        elif isinstance(message, Gap):
            self._gap(rank, message)
        elif isinstance(message, Hello | ControlRequest):
            raise RejectedError(Rejected.UNEXPECTED, f"{type(message).__name__} from a rank that is connected")
        elif message.seq <= rank.seen_seq:
            self._repeated(rank, message.seq)
        else:
            with self._writer.together():
                self._numbered(rank, message)

    def note_heard(self) -> None:
        """Keep what ranks said they produced; called about once a second."""
        news = {
            rank.origin: rank.produced_seq
            for rank in self._fleet.ranks()
            if rank.produced_seq > max(rank.seen_seq, self._heard.get(rank, 0))
        }
        self._heard = {rank: rank.produced_seq for rank in self._fleet.ranks()}
        if news:
            self._writer.later(lambda store: store.heard(news), critical=False)

    # ------------------------------------------------------------------ one message

    def _numbered(self, rank: Rank, message: Any) -> None:
        rank.seen_seq = message.seq
        rank.produced_seq = max(rank.produced_seq, message.seq)
        kind = type(message)
        if kind is StepRecord and message.host_memory_bytes is None and rank.host_memory_bytes is not None:
            message = msgspec.structs.replace(message, host_memory_bytes=rank.host_memory_bytes)
        self._measure(rank, message)
        self._writer.append(
            Entry(rank.origin, message, rank.host_memory_bytes), critical=message.delivery == "critical"
        )
        self._routes[kind](rank, message)

    def _repeated(self, rank: Rank, seq: int) -> None:
        if seq <= rank.stored_seq:
            rank.send(Stored(rank.stored_seq))

    def _gap(self, rank: Rank, gap: Gap) -> None:
        first = max(gap.first_seq, rank.seen_seq + 1)
        if gap.last_seq < first:
            self._repeated(rank, gap.last_seq)
            return
        news = Gap(first_seq=first, last_seq=gap.last_seq, reason=gap.reason)
        rank.seen_seq = gap.last_seq
        rank.produced_seq = max(rank.produced_seq, gap.last_seq)
        self._measure(rank, news)
        self._writer.append(Entry(rank.origin, news), critical=False)

    def _measure(self, rank: Rank, message: Any) -> None:
        if not rank.ended:
            series = self._metrics.rank(rank.origin.run_id, rank.origin.rank)
            self.judging.fuse(rank).guard("metrics", series.take, message)

    def _step(self, rank: Rank, record: StepRecord) -> None:
        rank.saw(record)
        self.combining.observe(rank, record)

    def _start(self, rank: Rank, start: RunStart) -> None:
        self.judging.begin(rank, Start.of(start))
        series = self._metrics.rank(rank.origin.run_id, rank.origin.rank)
        series.new_attempt(start.devices[0] if start.devices else "")

    def _end(self, rank: Rank, end: RunEnd) -> None:
        rank.end_status = end.status
        rank.step = max(rank.step, end.step)
        self.said_goodbye(rank)

    def _ack(self, rank: Rank, ack: Ack) -> None:
        if self._dispatcher.answer(rank, ack):
            return
        if ack.state == "prepared":  # for a daemon that is no more: nobody will ever say the word
            rank.send(Word(ack.command_id, commit=False, reason=Reason.NO_WORD))
        if ack.state == "applied":
            rank.turned(ack)
        self._writer.alone(lambda store: recovery.settle_late(store, ack))

    def _phase(self, rank: Rank, note: PhaseNote) -> None:
        rank.phase = note.phase if note.entered else "train"

    def _trouble(self, rank: Rank, trouble: Trouble) -> None:
        _log.warning("a rank is degraded", what=trouble.what, text=trouble.text, **rank.keys())


def _nobody_listens(rank: Rank) -> None:
    del rank
