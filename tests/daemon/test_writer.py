"""The one thread that writes: in order, in batches, again after a refusal, never silently less."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from sentinel import wire
from sentinel.daemon import writer as writing
from sentinel.daemon.writer import Writer
from sentinel.errors import PermanentError, TemporaryError
from sentinel.records import Gap, Hello, Origin, StepRecord
from sentinel.store.database import Entry, Store
from sentinel.store.history import History
from sentinel.vocabulary import DropReason, UpdateResult

ORIGIN = Origin("r", 1, 0)
HELLO = Hello(wire.VERSION, "r", 0, 1, "n", 1, psutil.Process().create_time(), 0)


class MoodyStore(Store):
    """A store whose disk can be made to refuse."""

    refuses = False
    transactions = 0

    def transaction(self, critical: bool):
        if self.refuses:
            raise TemporaryError("database or disk is full")
        if not self._inside:
            self.transactions += 1
        return super().transaction(critical)


class Bench:
    """A writer on a real database, and what it said was stored."""

    def __init__(self, folder: Path, batch_seconds: float = 0.01) -> None:
        self.url = f"sqlite:///{folder}/s.db"
        self.stored: dict[Origin, int] = {}
        self.store: MoodyStore | None = None
        self.writer = Writer(self._open, batch_seconds, self.stored.update)

    def _open(self) -> Store:
        self.store = MoodyStore.open(self.url)
        return self.store

    def append(self, first: int, last: int, *, critical: bool = False) -> None:
        for seq in range(first, last + 1):
            self.writer.append(Entry(ORIGIN, step(seq)), critical=critical)

    async def until_stored(self, seq: int) -> None:
        async with asyncio.timeout(10):
            while self.stored.get(ORIGIN, 0) < seq:
                await self.writer.flushed()

    def books(self) -> dict:
        with History(self.url) as history:
            return history.conservation("r")[0]


def step(seq: int, **values) -> StepRecord:
    return StepRecord(
        **{"seq": seq, "generation": 0, "step": seq, "time": 1.0, "result": UpdateResult.APPLIED, **values}
    )


def on(folder: Path, body: Callable[[Bench], Awaitable[None]], **settings: float) -> Bench:
    async def run() -> Bench:
        bench = Bench(folder, **settings)
        await bench.writer.start()
        await bench.writer.after(lambda store: store.register_rank(HELLO, "h", 1.0))
        await body(bench)
        assert await bench.writer.close(10)
        return bench

    return asyncio.run(run())


def test_telemetry_goes_in_batches_and_is_acknowledged_afterwards(tmp_path):
    async def body(bench: Bench) -> None:
        assert bench.store is not None
        before = bench.store.transactions
        bench.append(1, 400)
        await bench.until_stored(400)
        assert bench.store.transactions - before < 20

    assert on(tmp_path, body).books()["stored"] == 400


def test_what_is_critical_does_not_wait_for_the_batch(tmp_path):
    async def body(bench: Bench) -> None:
        bench.append(1, 3)
        bench.append(4, 4, critical=True)
        async with asyncio.timeout(5):
            while bench.stored.get(ORIGIN) != 4:
                await asyncio.wait_for(asyncio.to_thread(lambda: None), 1)

    assert on(tmp_path, body, batch_seconds=60.0).stored == {ORIGIN: 4}


def test_an_urgent_job_overtakes_the_queue(tmp_path):
    async def body(bench: Bench) -> None:
        bench.append(1, 200)
        state = await bench.writer.now(lambda store: store.rank_state(ORIGIN))
        assert state is not None
        assert state.stored_seq == 0
        await bench.until_stored(200)

    on(tmp_path, body, batch_seconds=60.0)


def test_a_full_disk_is_tried_again_and_nothing_is_acknowledged_before(tmp_path):
    async def body(bench: Bench) -> None:
        assert bench.store is not None
        bench.store.refuses = True
        bench.append(1, 10, critical=True)
        with pytest.raises(TemporaryError, match="full"):
            await bench.writer.now(lambda store: store.rank_state(ORIGIN))
        assert "full" in bench.writer.trouble
        assert bench.stored == {}
        bench.store.refuses = False
        await bench.until_stored(10)
        assert bench.writer.trouble == ""

    assert on(tmp_path, body).books()["stored"] == 10


def test_a_job_waits_until_the_disk_takes_it(tmp_path):
    async def body(bench: Bench) -> None:
        assert bench.store is not None
        bench.store.refuses = True
        waiting = asyncio.ensure_future(bench.writer.after(lambda store: store.rank_state(ORIGIN)))
        with pytest.raises(TemporaryError):
            await bench.writer.now(lambda store: store.rank_state(ORIGIN))
        assert not waiting.done()
        bench.store.refuses = False
        assert (await asyncio.wait_for(waiting, 10)) is not None

    on(tmp_path, body)


def test_an_entry_that_can_never_be_stored_is_counted_and_the_others_are_kept(tmp_path):
    async def body(bench: Bench) -> None:
        bench.append(1, 2)
        bench.writer.append(Entry(ORIGIN, step(3, reported={"x": object()})), critical=False)
        bench.append(4, 5)
        await bench.until_stored(5)

    books = on(tmp_path, body).books()
    assert (books["produced"], books["stored"], books["dropped"]) == (5, 4, 1)
    assert books["dropped_by_reason"] == {"unexplained": 1}


def test_a_job_that_can_never_run_is_told_to_whoever_waits_and_blocks_nobody(tmp_path):
    def broken(store: Store) -> None:
        raise PermanentError("no such column")

    async def body(bench: Bench) -> None:
        with pytest.raises(PermanentError):
            await bench.writer.after(broken)
        bench.writer.later(broken)
        bench.writer.alone(broken)
        bench.append(1, 3)
        await bench.until_stored(3)

    assert on(tmp_path, body).books()["stored"] == 3


def test_a_full_queue_asks_its_feeders_to_wait_and_lets_them_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MOST_QUEUED", 100)
    monkeypatch.setattr(writing, "ENOUGH_ROOM", 50)

    async def body(bench: Bench) -> None:
        assert bench.store is not None
        bench.store.refuses = True
        bench.append(1, 100)
        assert not bench.writer.has_room
        bench.store.refuses = False
        await asyncio.wait_for(bench.writer.room(), 10)
        await bench.until_stored(100)

    on(tmp_path, body)


def test_closing_writes_what_is_queued(tmp_path):
    async def body(bench: Bench) -> None:
        bench.append(1, 50)
        bench.writer.append(Entry(ORIGIN, Gap(51, 60, DropReason.PROCESS_DIED)), critical=False)

    bench = on(tmp_path, body, batch_seconds=60.0)
    assert bench.stored == {ORIGIN: 60}
    assert (bench.books()["stored"], bench.books()["dropped"]) == (50, 10)


def test_a_store_that_cannot_be_opened_says_why_at_once(tmp_path):
    async def run() -> None:
        bench = Bench(tmp_path / "no" / "such" / "folder")
        (tmp_path / "no").write_text("a file")
        await bench.writer.start()

    with pytest.raises(PermanentError):
        asyncio.run(run())
