"""The data cursor: hand out batches, remember which, and hand them out again after a rollback.

A DataLoader with a map-style dataset is followed by index: its sampler is replaced by a proxy that records the index
lists it issues, and a rewind issues the recorded ones again (the tape). No seeds are needed, a skip loads nothing.
Of any other iterable the batches themselves are kept, within `data.tape_bytes`.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sentinel.client.state import rng_state, set_rng_state
from sentinel.errors import MisuseError

MOST_ENTRIES = 100_000  # index lists kept, whatever the age of the oldest snapshot


class Entry(NamedTuple):
    """One batch as it stands in the stream of data."""

    position: int  # counted from 0 over the whole attempt, epochs included
    payload: Any  # an index list, or the batch itself
    key: object = None  # whose index list it is: only the same loader can hand it out again; None for a batch
    size_bytes: int = 0
    rng: Any = None  # state of the generators when the first batch of an epoch was handed out


def samples_of(entry: Entry) -> int | None:
    """How many samples the batch holds, where that is certain: a batch sampler named every one of them."""
    payload = entry.payload
    named = entry.key is not None and isinstance(payload, list | tuple) and payload
    return len(payload) if named and not isinstance(payload[0], list) else None


class Source(Protocol):
    """One pass over a loader."""

    key: object

    def next(self) -> tuple[Entry, Any]: ...
    def ahead(self) -> list[Entry]: ...
    def resume(self, entries: list[Entry], drop: int) -> None: ...
    def close(self) -> None: ...


class Cursor:
    """Where the run stands in its data. `position` is the number of the next batch."""

    def __init__(self, tape_bytes: int) -> None:
        self.position = 0
        self._fresh = 0  # number of the next batch that no source has taken yet
        self.active = False  # a loop stands inside `run.batches`
        self.source: Source | None = None
        self._tape: deque[Entry] = deque()  # handed out, oldest first
        self._tape_bytes = tape_bytes
        self._held_bytes = 0
        self._after_step: deque[tuple[int, int]] = deque(maxlen=MOST_ENTRIES)  # (step, position after it)
        self._steps_seen = 0

    def open(self, loader: Any) -> Source:
        """Begin a pass. Raises MisuseError for what can be iterated only once."""
        if not hasattr(loader, "__iter__"):
            raise MisuseError(f"run.batches got a {type(loader).__name__}; it needs an iterable of batches")
        if _has_index_sampler(loader):
            return IndexedSource(self, loader)
        iterator = iter(loader)
        if iterator is loader:
            raise MisuseError(
                f"run.batches got a bare iterator ({type(loader).__name__}), which cannot be started again after a "
                "rollback; pass the DataLoader or another object whose iter() begins anew"
            )
        return HeldSource(self, iterator)

    def take_number(self) -> int:
        number, self._fresh = self._fresh, self._fresh + 1
        return number

    def hand_out(self, entry: Entry) -> None:
        self.position = entry.position + 1
        self._tape.append(entry)
        self._held_bytes += entry.size_bytes
        while len(self._tape) > MOST_ENTRIES or self._held_bytes > self._tape_bytes:
            self._held_bytes -= self._tape.popleft().size_bytes

    def step_done(self, step: int) -> None:
        self._after_step.append((step, self.position))

    def trim(self, oldest_position: int | None) -> None:
        """Forget what no snapshot can need any more."""
        while oldest_position is not None and self._tape and self._tape[0].position < oldest_position:
            self._held_bytes -= self._tape.popleft().size_bytes

    def position_after(self, step: int) -> int | None:
        """How many batches had been handed out when that step ended; None if it is not remembered."""
        for known, position in reversed(self._after_step):
            if known <= step:
                return position
        return None

    def can_rewind_to(self, position: int) -> bool:
        """Only if every batch since is remembered, and can be had from the loader that is being read now."""
        if not self.active or self.source is None:
            return False
        key = self.source.key
        since = [entry for entry in self._tape if entry.position >= position]
        whole = position == self.position or (bool(self._tape) and self._tape[0].position <= position)
        return whole and all(entry.key is key for entry in since)

    def rewind(self, position: int, *, skip_from: int | None = None, skip: int | None = None) -> int:
        """Go back to `position` and leave out what is asked; returns the number of batches left out.

        `skip_from`: batches handed out from that position on are left out. `skip`: so many after `position` are,
        whether handed out before or not. Neither: everything is handed out again.
        """
        assert self.source is not None
        done = [entry for entry in self._tape if entry.position >= position]
        self._tape = deque(entry for entry in self._tape if entry.position < position)
        self._held_bytes = sum(entry.size_bytes for entry in self._tape)
        coming = self.source.ahead()
        if skip is not None:
            again, drop = (done + coming)[skip:], max(0, skip - len(done) - len(coming))
            left_out = skip
        elif skip_from is not None:
            again, drop = [entry for entry in done if entry.position < skip_from] + coming, 0
            left_out = len(done) + len(coming) - len(again)
        else:
            again, drop, left_out = done + coming, 0, 0
        self.source.resume(again, drop)
        self.position = again[0].position if again else position
        return left_out

    def rolled_back(self, step: int) -> None:
        while self._after_step and self._after_step[-1][0] > step:
            self._after_step.pop()


class Batches:
    """What `run.batches` returns: an iterator that knows its length where the loader does."""

    def __init__(self, batches: Iterator[Any], loader: Any) -> None:
        self._batches = batches
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._loader)


class HeldSource:
    """Any iterable that can be started anew: the batches are kept."""

    def __init__(self, cursor: Cursor, iterator: Iterator[Any]) -> None:
        self.key: object = None
        self._cursor = cursor
        self._iterator = iterator
        self._queue: deque[Entry] = deque()
        self._first = True

    def next(self) -> tuple[Entry, Any]:
        if self._queue:
            entry = self._queue.popleft()
            if entry.rng is not None:
                set_rng_state(entry.rng)
            return entry, entry.payload
        batch = next(self._iterator)
        rng = rng_state() if self._first else None
        self._first = False
        return Entry(self._cursor.take_number(), batch, None, _size_bytes(batch), rng), batch

    def ahead(self) -> list[Entry]:
        return list(self._queue)

    def resume(self, entries: list[Entry], drop: int) -> None:
        self._queue = deque(entries)
        for _ in range(drop):
            if next(self._iterator, self) is self:
                break
            self._cursor.take_number()

    def close(self) -> None:
        self._queue.clear()
        self._iterator = iter(())  # the loader's own ends with the pass, as in a loop without us


class Tape:
    """Stands in for a loader's sampler: issues what is queued, then what the real one gives, and records it."""

    def __init__(self, real: Any, cursor: Cursor, key: object) -> None:
        self._real = real
        self._live: Iterator[Any] | None = None
        self._cursor = cursor
        self._key = key
        self.queue: deque[Entry] = deque()
        self.issued: deque[Entry] = deque()  # not yet handed out; loaders keep the order

    def __iter__(self) -> Iterator[Any]:
        # Exactly when the loader asks, so that a sampler which draws random numbers here draws them in its old order.
        live = self._live = iter(self._real) if self._live is None else self._live
        return self._serve(live)

    def _serve(self, live: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self.queue:
                entry = self.queue.popleft()
            else:
                try:
                    payload = next(live)
                except StopIteration:
                    return
                entry = Entry(self._cursor.take_number(), payload, self._key, _index_bytes(payload))
            self.issued.append(entry)
            yield entry.payload

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def drop(self, count: int) -> None:
        for _ in range(count):
            if self._live is None or next(self._live, self) is self:
                return
            self._cursor.take_number()


class IndexedSource:
    """A DataLoader whose batches are told by index."""

    def __init__(self, cursor: Cursor, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._real = getattr(loader, self._name)
        self.key: object = loader
        self._tape = Tape(self._real, cursor, loader)
        self._iterator = self._start()
        self._first = True

    def next(self) -> tuple[Entry, Any]:
        batch = next(self._iterator)
        entry = self._tape.issued.popleft()
        if entry.rng is not None:
            set_rng_state(entry.rng)
        elif self._first:
            entry = entry._replace(rng=rng_state())
        self._first = False
        return entry, batch

    def ahead(self) -> list[Entry]:
        return [*self._tape.issued, *self._tape.queue]

    def resume(self, entries: list[Entry], drop: int) -> None:
        self._tape.queue = deque(entries)
        self._tape.issued.clear()
        self._tape.drop(drop)
        if self._loader.num_workers:
            # What the workers have prefetched is void; a new iterator must not disturb the restored generators.
            saved = rng_state()
            self._iterator = self._start()
            set_rng_state(saved)

    def close(self) -> None:
        self._tape.queue.clear()
        self._iterator = iter(())  # and with the loader's own its workers

    def _start(self) -> Iterator[Any]:
        # A DataLoader forbids assignment to its sampler; the iterator reads it once, when it is made.
        vars(self._loader)[self._name] = self._tape
        try:
            persistent = vars(self._loader).get("_iterator")
            if persistent is not None:  # it outlives the pass and would go on with the sampler of its first
                persistent._index_sampler = self._tape
            return iter(self._loader)
        finally:
            vars(self._loader)[self._name] = self._real


def _has_index_sampler(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__ or not getattr(loader, "in_order", True):
        return False
    return loader.batch_sampler is not None or loader.sampler is not None


def _index_bytes(indices: Any) -> int:
    # A list of Python integers takes 8 bytes a place and 28 an integer.
    return 64 + 36 * len(indices) if isinstance(indices, list | tuple) else _size_bytes(indices)


def _size_bytes(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(map(_size_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(_size_bytes, batch))
    with contextlib.suppress(Exception):
        return int(batch.nbytes)
    return 64
