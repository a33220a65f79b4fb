"""Route what ranks send into tables, once per message, and enter it in the rank's books."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Dialect, delete, insert, select, update

from sentinel.errors import PermanentError
from sentinel.records import (
    Ack,
    Gap,
    Numbered,
    Origin,
    PhaseNote,
    Reflex,
    RunEnd,
    RunStart,
    SnapshotNote,
    StepRecord,
    Trouble,
)
from sentinel.store import rows, starts
from sentinel.store.accounts import Account, Accounts
from sentinel.store.tables import acks, checkpoints, events, gaps, generations, ranks, steps
from sentinel.store.upsert import upsert
from sentinel.store.values import finite, from_text, put_back
from sentinel.vocabulary import DropReason

_LARGEST = 2**63 - 1  # of an integer column


class Entry(NamedTuple):
    """One message as the daemon received it."""

    origin: Origin
    message: Numbered | Gap
    host_memory_bytes: int | None = None  # the daemon's own measurement, for step records


def take_in(connection: Connection, accounts: Accounts, entries: Sequence[Entry]) -> None:
    """Write a batch in the open transaction. Raises PermanentError for a rank that never registered."""
    batch = _Batch(connection)
    for entry in entries:
        account = accounts.of(connection, entry.origin)
        if account is None:
            raise PermanentError(f"{entry.origin} sent a message before it registered; register_rank comes first")
        batch.add(entry, account)
        accounts.changed(entry.origin)
    batch.write()
    accounts.write(connection)


class _Batch:
    """The rows of one transaction, gathered by table."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps: list[tuple[Any, ...]] = []
        self._events: list[rows.Row] = []
        self._acks: list[rows.Row] = []
        self._snapshots: list[rows.Row] = []
        self._gaps: list[rows.Row] = []

    def add(self, entry: Entry, account: Account) -> None:
        origin, message, _ = entry
        if isinstance(message, Gap):
            for gap in account.lose(message) if message.last_seq <= _LARGEST else ():
                self._gap(origin, gap)
            return
        if not _fits(message):
            self.add(Entry(origin, Gap(message.seq, message.seq, DropReason.TOO_LARGE)), account)
            return
        new, hole = account.admit(message.seq)
        if hole is not None:
            self._gap(origin, hole)
        if new:
            self._route(entry, account)

    def write(self) -> None:
        self._write_steps()
        if self._events:
            self._connection.execute(insert(events), self._events)
        upsert(self._connection, acks, self._acks)
        upsert(self._connection, checkpoints, self._snapshots)
        upsert(self._connection, gaps, self._gaps)

    def _route(self, entry: Entry, account: Account) -> None:
        origin, message, host_memory_bytes = entry
        match message:
            case StepRecord():
                self._step(origin, message, host_memory_bytes, account)
            case SnapshotNote():
                self._snapshots.append(rows.of_snapshot(origin, message))
            case Ack():
                self._acks.append(rows.of_ack(origin, message))
            case Reflex() | PhaseNote() | Trouble():
                self._events.append(rows.of_event(origin, message))
            case RunStart():
                starts.note_start(self._connection, origin, message)
            case RunEnd():
                _note_end(self._connection, origin, message)

    def _step(self, origin: Origin, record: StepRecord, host_memory_bytes: int | None, account: Account) -> None:
        if record.generation > account.generation:
            _note_generation(self._connection, origin, record)
        if not account.advance(record.generation, record.step):
            self._make_room(origin, record)
        self._steps.append(rows.of_step(origin, record, host_memory_bytes))

    def _make_room(self, origin: Origin, record: StepRecord) -> None:
        """Move a stored row of the same key to the events."""
        self._write_steps()
        same = (
            (steps.c.run_id == origin.run_id)
            & (steps.c.attempt == origin.attempt)
            & (steps.c.generation == record.generation)
            & (steps.c.step == record.step)
            & (steps.c.rank == origin.rank)
        )
        old = self._connection.execute(select(steps).where(same)).mappings().one_or_none()
        if old is not None:
            self._events.append(rows.of_replaced_step(read_step(dict(old))))
            self._connection.execute(delete(steps).where(same))

    def _write_steps(self) -> None:
        if not self._steps:
            return
        text, positional = _insert_of_steps(self._connection.dialect)
        if positional:
            self._connection.exec_driver_sql(text, self._steps)
        else:
            named = [dict(zip(rows.STEP_COLUMNS, row, strict=True)) for row in self._steps]
            self._connection.exec_driver_sql(text, named)
        self._steps = []

    def _gap(self, origin: Origin, gap: Gap) -> None:
        run_id, attempt, rank = origin
        where = {"run_id": run_id, "attempt": attempt, "rank": rank}
        self._gaps.append({**where, "first_seq": gap.first_seq, "last_seq": gap.last_seq, "reason": gap.reason.value})


def read_step(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `steps` with its non-finite numbers and its structure back."""
    put_back(row)
    for name in ("optimizers", "reported", "sampled"):
        row[name] = from_text(row[name])
    return row


@cache
def _insert_of_steps(dialect: Dialect) -> tuple[str, bool]:
    # Through the driver: SQLAlchemy's own executemany costs about three times as much per row.
    compiled = insert(steps).compile(dialect=dialect)
    return str(compiled), bool(compiled.positional)


def _fits(message: Numbered) -> bool:
    # The wire carries integers of 64 bits without a sign, no column does.
    return all(-_LARGEST <= value <= _LARGEST for value in msgspec.structs.astuple(message) if type(value) is int)


def _note_generation(connection: Connection, origin: Origin, record: StepRecord) -> None:
    """Make sure a generation that shows up in steps is known; the daemon's own word about it holds."""
    row = {
        "run_id": origin.run_id,
        "attempt": origin.attempt,
        "generation": record.generation,
        "target_step": record.step - 1,
        "applied_step": None,
        "time": finite(record.time),
        "reason": "seen in its first record",
    }
    upsert(connection, generations, [row], keep=True)


def _note_end(connection: Connection, origin: Origin, end: RunEnd) -> None:
    run_id, attempt, rank = origin
    connection.execute(
        update(ranks)
        .where(ranks.c.run_id == run_id, ranks.c.attempt == attempt, ranks.c.rank == rank)
        .values(ended=True, end_status=end.status, error=end.error, end_step=end.step, ended_at=finite(end.time))
    )
