"""Write to the database from one thread, in order and in batches, so that the event loop never waits for a disk."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import structlog

from sentinel.daemon import batch
from sentinel.daemon.batch import Item
from sentinel.errors import TemporaryError
from sentinel.records import Origin
from sentinel.store.database import Entry, Store

BATCH_ENTRIES = 512
MOST_QUEUED = 16_384  # beyond this the sockets are not read until the disk has caught up
ENOUGH_ROOM = MOST_QUEUED // 2
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0

T = TypeVar("T")
Job = Callable[[Store], T]
_log = structlog.get_logger()


class Writer:
    """The single writer. All public methods belong to the event loop's thread.

    `append` and `later` keep their order and are tried again until the disk takes them; `now` jumps the queue, is
    committed before it returns and is tried once, so that a command is either written down or not sent.
    """

    def __init__(
        self, open_store: Callable[[], Store], batch_seconds: float, on_stored: Callable[[dict[Origin, int]], None]
    ) -> None:
        self._open_store = open_store
        self._batch_seconds = batch_seconds
        self._on_stored = on_stored
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._urgent: deque[Item] = deque()
        self._group: int | None = None  # items put so far in the block of `together`; None outside of it
        self._hurry = False  # something in the queue must not wait for its batch
        self._oldest = 0.0
        self._retry_at = 0.0
        self._pauses = _pauses()
        self._closing = False
        self._room: asyncio.Event = asyncio.Event()
        self._room.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="sentinel-writer", daemon=True)
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.trouble = ""  # why nothing can be written at the moment; "" while all is well

    async def start(self) -> None:
        """Open the store in the thread that will use it. Raises what `Store.open` raises."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._opened)

    def append(self, entry: Entry, *, critical: bool) -> None:
        """Queue one message. Look at `has_room` before reading more of them."""
        self._put(Item(entry, None, None, critical), hurry=critical)

    def later(self, job: Job[Any], *, critical: bool = True) -> None:
        """Run `job` after everything queued so far; tried again until the disk takes it."""
        self._put(Item(None, job, None, critical), hurry=critical)

    def alone(self, job: Job[Any]) -> None:
        """Like `later`, once everything before it is committed: for a job that reads what was written."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.add_done_callback(_log_failure)
        self._put(Item(None, job, future, True), hurry=True)

    async def after(self, job: Job[T]) -> T:
        """Like `later`, and wait for the result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Item(None, job, future, True), hurry=True)
        return await asyncio.wrap_future(future)

    async def flushed(self) -> None:
        """Everything queued so far is committed."""
        await self.after(_nothing)

    async def now(self, job: Job[T]) -> T:
        """Run `job` before everything queued. Raises TemporaryError when the disk does not take it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._changed:
            if self._closing:
                raise TemporaryError("the database is closed; this daemon is leaving")
            self._urgent.append(Item(None, job, future, True))
            self._changed.notify()
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """One commit for what is queued in this block: a message is never acknowledged without its consequences."""
        with self._changed:  # the writer's thread takes nothing meanwhile; it only ever holds this for a moment
            self._group = 0
            try:
                yield
            finally:
                self._group = None

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest thing not yet written."""
        return time.monotonic() - self._oldest if self._queue else 0.0

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until the queue may grow again."""
        await self._room.wait()

    async def close(self, seconds: float) -> bool:
        """Write what is queued and close the store. False if `seconds` did not suffice."""
        self._room.clear()  # whoever feeds us waits from now on
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, seconds)
        return not self._thread.is_alive() and not self._queue

    def _put(self, item: Item, *, hurry: bool) -> None:
        with self._changed:
            first = not self._queue
            if self._group is not None:
                item = item._replace(follows=self._group > 0)
                self._group += 1
            self._queue.append(item)
            if first:
                self._oldest = time.monotonic()
            self._hurry = self._hurry or hurry
            if first or hurry or len(self._queue) == BATCH_ENTRIES:
                self._changed.notify()
        if len(self._queue) >= MOST_QUEUED:
            self._room.clear()

    # ------------------------------------------------------------------ the writer's thread

    def _work(self) -> None:
        try:
            store = self._open_store()
        except BaseException as error:  # noqa: BLE001 - the event loop gets it, whatever it is
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            while self._wait():
                while self._urgent:
                    self._run_urgent(store, self._urgent.popleft())
                if self._is_due():
                    self._write_batch(store)
        finally:
            _close(store)

    def _wait(self) -> bool:
        """Sleep until there is something to do. False when all is written and we are to leave."""
        with self._changed:
            while not self._urgent and not self._is_due():
                if self._closing and not self._queue:
                    return False
                self._changed.wait(self._seconds_until_due())
        return True

    def _is_due(self) -> bool:
        if not self._queue or time.monotonic() < self._retry_at:
            return False
        return self._hurry or self._closing or self._seconds_until_due() == 0 or len(self._queue) >= BATCH_ENTRIES

    def _seconds_until_due(self) -> float | None:
        if not self._queue:
            return None
        due = max(self._retry_at, 0.0 if self._hurry or self._closing else self._oldest + self._batch_seconds)
        return max(0.0, due - time.monotonic())

    def _run_urgent(self, store: Store, item: Item) -> None:
        assert item.job is not None
        try:
            result = item.job(store)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            if isinstance(error, TemporaryError):
                self._note_trouble(error)
            batch.fail(item, error)
            return
        self.trouble = ""
        batch.succeed(item, result)

    def _write_batch(self, store: Store) -> None:
        with self._changed:
            items = list(itertools.islice(self._queue, BATCH_ENTRIES))
            rest = itertools.islice(self._queue, BATCH_ENTRIES, None)
            items += itertools.takewhile(lambda item: item.follows, rest)
            self._hurry = len(self._queue) > len(items)
        group = list(itertools.takewhile(lambda item: item.future is None, items)) or items[:1]
        if len(group) < len(items):
            self._hurry = True
        try:
            batch.write(store, group)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was written and it is tried again
            self._refused(error)
            return
        for _ in group:
            self._queue.popleft()
        self._retry_at = 0.0
        self._pauses = _pauses()
        self.trouble = ""
        self._oldest = time.monotonic()
        self._tell(self._on_stored, batch.highest(item.entry for item in group if item.entry is not None))
        if len(self._queue) <= ENOUGH_ROOM and not self._closing and not self._room.is_set():
            self._tell(self._room.set)

    def _refused(self, error: Exception) -> None:
        pause = next(self._pauses)
        self._note_trouble(error)
        with self._changed:
            self._hurry = True
            self._retry_at = time.monotonic() + pause

    def _note_trouble(self, error: Exception) -> None:
        text = batch.in_words(error)
        if not self.trouble:
            _log.error("database refuses writes", error=text)
        self.trouble = text

    def _tell(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop has closed: nobody is left to be told
            return


def _nothing(store: Store) -> None:
    del store


def _log_failure(future: "concurrent.futures.Future[Any]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("a write was refused for good", error=batch.in_words(error), exc_info=error)


def _close(store: Store) -> None:
    try:
        store.close()
    except Exception:  # noqa: BLE001 - leaving anyway; the database recovers from its own log
        _log.exception("the database did not close cleanly")


def _pauses() -> "itertools.chain[float]":
    doubling = (FIRST_RETRY_SECONDS * 2**n for n in range(5))
    return itertools.chain(doubling, itertools.repeat(LAST_RETRY_SECONDS))
