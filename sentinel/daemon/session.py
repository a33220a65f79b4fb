"""Serve one rank: greet it, hand its messages to the pipeline, notice when it is gone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import structlog

from sentinel import wire
from sentinel.daemon import recovery
from sentinel.daemon.connection import Connection, Rejected, RejectedError
from sentinel.daemon.core import Core
from sentinel.daemon.deaths import Deaths, is_alive
from sentinel.daemon.departures import Departures
from sentinel.daemon.node import Node
from sentinel.daemon.pipeline import Pipeline
from sentinel.daemon.rank import Rank
from sentinel.errors import SentinelError
from sentinel.records import FromRank, Hello, Origin, Stored, Welcome
from sentinel.store.database import RankState
from sentinel.vocabulary import Mode

LEARN_STEPS = 500  # more than any detector looks back
RETURN_SECONDS = 30.0  # for a rank whose process we cannot see, to come back after its connection ended
_log = structlog.get_logger()


class Sessions:
    """All ranks that are connected, and those expected back."""

    def __init__(
        self,
        core: Core,
        pipeline: Pipeline,
        departures: Departures,
        node: Node,
        *,
        database_url: str,
        mode: Mode,
    ) -> None:
        self._fleet, self._writer, _ = core
        self._pipeline = pipeline
        self._departures = departures
        self._node = node
        self._database_url = database_url
        self._mode = mode
        self._deaths = Deaths()
        self._unwatch: dict[Rank, Callable[[], None]] = {}
        self._admitting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.http_url = ""

    async def serve(self, hello: Hello, connection: Connection, messages: AsyncIterator[FromRank]) -> None:
        """From Hello to the end of the connection."""
        try:
            async with self._admitting:
                rank = await self._admit(hello, connection)
        except (TimeoutError, SentinelError) as error:
            raise RejectedError(Rejected.NOT_STORED, str(error) or "the database does not answer") from None
        try:
            async for message in messages:
                self._pipeline.handle(rank, message)
                if not self._writer.has_room:
                    await self._writer.room()
        finally:
            self._left(rank, connection)

    def stored(self, highest: dict[Origin, int]) -> None:
        """The writer has committed everything up to here."""
        for origin, seq in highest.items():
            rank = self._fleet.by_origin.get(origin)
            if rank is not None and seq > rank.stored_seq:
                rank.stored_seq = seq
                rank.send(Stored(seq))

    async def resume(self, states: list[RankState]) -> None:
        """At start: ranks that were running when an earlier daemon ended. Raises TimeoutError, PermanentError."""
        for state in states:
            run_id, _, number = state.origin
            hello = Hello(
                wire.VERSION, run_id, number, 1, state.nonce, state.pid, state.process_start, last_seq=state.produced
            )
            rank = await self._departures.register(hello)
            await self._remember(rank)
            if is_alive(state.pid, state.process_start):
                self._watch(rank, state.pid)
            else:
                await self._departures.vanished(rank)

    async def close(self) -> None:
        self._deaths.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ arrival

    async def _admit(self, hello: Hello, connection: Connection) -> Rank:
        pid = connection.peer.pid or hello.pid
        known = self._fleet.find(hello.run_id, hello.rank)
        if known is not None and known.identity.nonce != hello.nonce:
            await self._supersede(known)
            known = None
        rank = known or await self._departures.register(hello)
        rank.world_size = hello.world_size
        rank.produced_seq = max(rank.produced_seq, hello.last_seq)
        if rank.link is not None:
            rank.link.close("the same process came back")
        rank.link = connection
        rank.serving = asyncio.current_task()
        await self._node.follow(rank, pid)
        if rank.start is None and rank.stored_seq and not rank.ended:
            await self._remember(rank)
        self._welcome(rank, connection)
        if not rank.ended:
            self._watch(rank, pid)
        return rank

    def _welcome(self, rank: Rank, connection: Connection) -> None:
        run = self._fleet.run_of(rank)
        connection.send(
            Welcome(
                version=wire.VERSION,
                run_id=rank.origin.run_id,
                attempt=rank.origin.attempt,
                stored_seq=rank.stored_seq,
                url=self.http_url,
                may_act=run is not None and run.may_act,
                mode=self._mode,
            )
        )
        if run is not None and run.world_size > 1:
            run.call_the_roll()
        _log.info("rank connected", run=rank.origin.run_id, rank=rank.origin.rank, attempt=rank.origin.attempt)

    async def _remember(self, rank: Rank) -> None:
        """The rank attached to an earlier daemon; it will not introduce itself again."""
        start = await asyncio.to_thread(recovery.start_of, self._database_url, rank.origin)
        run = self._fleet.run_of(rank)
        if start is None or run is None:
            return
        rank.world_size = start.world_size
        learnt_from = await asyncio.to_thread(recovery.recent_steps, self._database_url, rank.origin, LEARN_STEPS)
        self._pipeline.judging.begin(rank, start, learnt_from)
        run.paused_by = await asyncio.to_thread(recovery.paused_by, self._database_url, rank.origin.run_id)

    async def _supersede(self, old: Rank) -> None:
        """Another process speaks for this rank now."""
        if old.link is not None:
            old.link.close("another process took this rank's place")
        self._forget(old)
        old.link = None
        await self._departures.vanished(old)

    # ------------------------------------------------------------------ departure

    def _left(self, rank: Rank, connection: Connection) -> None:
        if rank.link is not connection:
            return  # replaced by a newer connection of the same process
        rank.link = None
        rank.serving = None
        run = self._fleet.run_of(rank)
        if run is not None and run.world_size > 1:
            run.call_the_roll()
        if rank.ended:
            self._forget(rank)
            self._fleet.drop(rank)
        elif rank not in self._unwatch:
            self._spawn(self._expect_back(rank))

    def _watch(self, rank: Rank, pid: int) -> None:
        self._forget(rank)
        self._unwatch[rank] = self._deaths.watch(pid, lambda: self._spawn(self._died(rank)))

    async def _died(self, rank: Rank) -> None:
        self._unwatch.pop(rank, None)
        link, serving = rank.link, rank.serving
        if isinstance(link, Connection) and serving is not None:
            await link.process_died()
            await asyncio.wait({serving})
        if not rank.ended:
            await self._departures.vanished(rank)
        self._forget(rank)

    async def _expect_back(self, rank: Rank) -> None:
        left_at = time.monotonic()
        await asyncio.sleep(RETURN_SECONDS)
        if rank.link is None and rank.last_heard < left_at and not rank.ended:
            await self._departures.vanished(rank)

    def _forget(self, rank: Rank) -> None:
        stop = self._unwatch.pop(rank, None)
        if stop is not None:
            stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
