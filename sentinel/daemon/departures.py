"""End ranks and runs: by their own word, or because their process is gone."""

import asyncio
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from sentinel.daemon import recovery, spool
from sentinel.daemon.core import Core
from sentinel.daemon.deaths import is_alive
from sentinel.daemon.dispatcher import Dispatcher
from sentinel.daemon.pipeline import Pipeline
from sentinel.daemon.rank import Identity, LiveRun, Rank
from sentinel.errors import WireError
from sentinel.places import Places
from sentinel.records import Gap, Hello, Numbered, Origin
from sentinel.store.database import Registration, Store
from sentinel.vocabulary import DropReason, RunStatus

REGISTER_SECONDS = 5.0  # then the client is told to try again

_log = structlog.get_logger()


class Departures:
    """What happens when a rank is over."""

    def __init__(self, core: Core, dispatcher: Dispatcher, pipeline: Pipeline, places: Places) -> None:
        self._fleet, self._writer, self._metrics = core
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._places = places
        pipeline.said_goodbye = self.said_goodbye

    def said_goodbye(self, rank: Rank) -> None:
        """A RunEnd arrived: it is the rank's last word, everything before it is here."""
        self._end(rank, RunStatus.FAILED if rank.end_status == "failed" else RunStatus.COMPLETED)

    async def vanished(self, rank: Rank) -> None:
        """The process is gone and its connection read empty. What it left behind is taken in, the rest is counted."""
        path = self._places.spool(rank.origin.run_id, rank.origin.rank, rank.identity.nonce)
        left = await asyncio.to_thread(_read_if_there, path)
        if left is not None:
            rank.produced_seq = max(rank.produced_seq, left.hello.last_seq)
            self._take_in(rank, left.messages)
        if rank.produced_seq > rank.seen_seq:
            self._lost(rank, rank.produced_seq)
        self._end(rank, RunStatus.LOST)
        if left is not None:
            await self._writer.flushed()  # the spool goes once its content is safe
            path.unlink(missing_ok=True)
        self._fleet.drop(rank)

    async def take_in_spools(self) -> None:
        """At start: the last words of processes that died while no daemon listened."""
        for path in spool.found(self._places.spools):
            left = _read_if_there(path)
            if left is None or is_alive(left.hello.pid, left.hello.process_start):
                continue
            hello = left.hello
            if self._fleet.find(hello.run_id, hello.rank) is not None:
                continue  # known as running; its departure takes the spool in
            rank = await self.register(hello)
            await self.vanished(rank)

    async def register(self, hello: Hello) -> Rank:
        """Enter a rank in database and fleet. Raises TimeoutError while the disk refuses, PermanentError."""
        host = socket.gethostname()

        def enter(store: Store) -> tuple[Registration, bool]:
            registration = store.register_rank(hello, host, time.time())
            state = store.rank_state(Origin(hello.run_id, registration.attempt, hello.rank))
            return registration, state is not None and state.ended

        # In its turn, not at once: the end of an earlier attempt may still be in the queue.
        async with asyncio.timeout(REGISTER_SECONDS):
            registration, ended = await self._writer.after(enter)
        origin = Origin(hello.run_id, registration.attempt, hello.rank)
        rank = Rank(origin, Identity(hello.nonce, hello.pid, hello.process_start), hello.world_size)
        rank.seen_seq = rank.stored_seq = registration.stored_seq
        rank.produced_seq = max(hello.last_seq, registration.stored_seq)
        rank.generation = registration.generation
        rank.ended = ended
        if ended:  # it only wants to hear that everything is stored
            self._fleet.by_origin[origin] = rank
            return rank
        self._fleet.admit(rank)
        self._metrics.rank(hello.run_id, hello.rank).begin()
        return rank

    def _take_in(self, rank: Rank, messages: Iterable[Numbered]) -> None:
        for message in messages:
            if message.seq > rank.seen_seq + 1:
                self._lost(rank, message.seq - 1)
            if message.seq > rank.seen_seq:
                self._pipeline.handle(rank, message)

    def _lost(self, rank: Rank, last_seq: int) -> None:
        self._pipeline.handle(rank, Gap(rank.seen_seq + 1, last_seq, DropReason.PROCESS_DIED))

    def _end(self, rank: Rank, status: RunStatus) -> None:
        if rank.ended:
            return
        self._dispatcher.rank_ended(rank)
        self._pipeline.combining.end(rank)
        self._pipeline.judging.end(rank)
        rank.ended = True
        rank.status = status
        self._metrics.rank(rank.origin.run_id, rank.origin.rank).end()
        _log.info("rank ended", run=rank.origin.run_id, rank=rank.origin.rank, status=status, step=rank.step)
        run = self._fleet.run_of(rank)
        if run is None:
            return
        if not run.ended:
            run.call_the_roll()
            return
        self._pipeline.combining.forget(run.run_id)
        self._fleet.forget(run)
        self._fleet.last_end = time.monotonic()
        ended_at, outcome = time.time(), _status_of(run)
        self._metrics.run_ended(outcome)
        self._writer.alone(lambda store: recovery.close_books(store, run.run_id, outcome, ended_at))


def _status_of(run: LiveRun) -> RunStatus:
    """The worst that became of any rank."""
    found = {rank.status for rank in run.ranks.values()}
    return next(status for status in (RunStatus.FAILED, RunStatus.LOST, RunStatus.COMPLETED) if status in found)


def _read_if_there(path: Path) -> spool.Spool | None:
    try:
        return spool.read(path)
    except FileNotFoundError:
        return None
    except (OSError, WireError) as error:
        _log.warning("a spool cannot be read and is set aside", path=str(path), error=str(error))
        path.rename(path.with_suffix(".unreadable"))
        return None
