"""The run database as its one writer uses it: the daemon's writer thread.

Every method is synchronous and one transaction, unless it runs inside `transaction`. Errors of the database are
TemporaryError (full, busy: try again) or PermanentError (damaged, unwritable); nothing of a failed transaction stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, func, insert, select, update

from sentinel.errors import PermanentError
from sentinel.records import Command, Decision, Finding, Hello, Incident, Origin, Word
from sentinel.store import engine as engines
from sentinel.store import rows, schema, starts
from sentinel.store.accounts import Accounts
from sentinel.store.intake import Entry, take_in
from sentinel.store.starts import Registration, is_ours
from sentinel.store.tables import (
    attempts,
    commands,
    decisions,
    findings,
    generations,
    incidents,
    ranks,
    runs,
    system_samples,
)
from sentinel.store.upsert import upsert
from sentinel.store.values import finite, to_text
from sentinel.vocabulary import Outcome, Reason, RunStatus

__all__ = ["Entry", "RankState", "Registration", "Store"]

T = TypeVar("T")


class RankState(NamedTuple):
    """A rank as the database knows it."""

    origin: Origin
    nonce: str
    host: str
    pid: int
    process_start: float
    stored_seq: int  # everything up to here is stored or recorded as a gap
    stored: int
    produced: int
    dropped: int
    ended: bool  # it said so itself (RunEnd)
    generation: int  # the newest of its attempt


class Store:
    """Writes, and reads what the writer needs. Not for several threads at once."""

    def __init__(self, url: str, engine: Engine, connection: Connection, owner: str) -> None:
        self._url = url
        self._owner = owner
        self._engine = engine
        self._connection = connection
        self._accounts = Accounts()
        self._inside = False
        self._broken = False
        self.on_incident: Callable[[Connection, Incident], None] = _nobody_listens  # in the incident's transaction

    @classmethod
    def open(cls, url: str, owner: str = "") -> Self:
        """Open or create, at the newest schema. `owner`: whose ranks are ours where several daemons share a database.

        Raises SchemaTooNewError, PermanentError, TemporaryError.
        """
        engine = schema.open_writer(url)
        with engines.plain_errors(url):
            return cls(url, engine, engine.connect(), owner)

    @property
    def url(self) -> str:
        return self._url

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def transaction(self, critical: bool) -> Iterator[None]:
        """Group several calls in one commit; `critical` of the outermost decides whether it is FULL-synced."""
        if self._inside:
            with self._part():
                yield
            return
        self._inside, self._broken = True, False
        try:
            with engines.plain_errors(self._url, opened=True):
                engines.set_durability(self._connection, critical=critical)
                with self._connection.begin():
                    yield
                    self._refuse_broken()
        except BaseException:
            self._accounts.forget()
            raise
        finally:
            self._inside = False

    def run(self, job: Callable[[Connection], T], *, critical: bool = True) -> T:
        """One transaction on a table that has a module of its own, such as the outbox of alerts."""
        with self.transaction(critical=critical):
            return job(self._connection)

    # ------------------------------------------------------------ what ranks send

    def register_rank(self, hello: Hello, host: str, time: float) -> Registration:
        """Find or create run, attempt and rank. A new nonce is a new attempt and reopens a run that had ended."""
        with self.transaction(critical=True):
            registration = starts.register(self._connection, hello, host, time, self._owner)
            self._accounts.forget()
            return registration

    def write(self, entries: Sequence[Entry], *, critical: bool) -> None:
        """Store a batch. What is stored already is left out; a hole that no gap explains becomes one, UNEXPLAINED."""
        with self.transaction(critical=critical):
            take_in(self._connection, self._accounts, entries)

    def heard(self, heard: Mapping[Origin, int]) -> None:
        """Note the highest sequence number that each rank said it produced."""
        with self.transaction(critical=False):
            for origin, last_seq in heard.items():
                account = self._accounts.of(self._connection, origin)
                if account is not None and last_seq > account.produced:
                    account.produced = last_seq
                    self._accounts.changed(origin)
            self._accounts.write(self._connection)

    def rank_state(self, origin: Origin) -> RankState | None:
        """The rank, None if it never registered."""
        found = self._rank_states(
            ranks.c.run_id == origin.run_id, ranks.c.attempt == origin.attempt, ranks.c.rank == origin.rank
        )
        return found[0] if found else None

    def running(self) -> list[RankState]:
        """Ranks of ours that have not ended, of runs that have not: each rank's latest attempt only."""
        of_running = select(runs.c.run_id).where(runs.c.status == RunStatus.RUNNING.value)
        latest: dict[tuple[str, int], RankState] = {}
        for state in self._rank_states(ranks.c.run_id.in_(of_running), is_ours(self._owner)):
            latest[state.origin.run_id, state.origin.rank] = state
        return [state for state in latest.values() if not state.ended]

    # ------------------------------------------------------------ what the daemon finds, decides and commands

    def save_finding(self, origin: Origin, finding: Finding, generation: int, time: float, incident_id: str) -> None:
        row = rows.of_finding(origin, finding, generation, time, incident_id)
        with self.transaction(critical=True):
            self._connection.execute(insert(findings), row)

    def save_incident(self, incident: Incident) -> None:
        """Insert, or replace the incident of the same id."""
        with self.transaction(critical=True):
            upsert(self._connection, incidents, [rows.of_incident(incident)])
            self.on_incident(self._connection, incident)

    def save_decision(  # noqa: PLR0917 -- the columns of one row, in their order
        self,
        decision_id: str,
        origin: Origin,
        generation: int,
        time: float,
        decision: Decision,
        outcome: Outcome | None,
    ) -> None:
        row = rows.of_decision(decision_id, origin, generation, time, decision=decision, outcome=outcome)
        with self.transaction(critical=True):
            upsert(self._connection, decisions, [row])

    def save_command(self, command: Command, decision_id: str, time: float) -> None:
        """Before it is sent: a command that nobody knows of is never obeyed."""
        with self.transaction(critical=True):
            upsert(self._connection, commands, [rows.of_command(command, decision_id, time)])

    def save_word(self, word: Word, time: float) -> None:
        """Commit or abort, before it is sent; a row of its own beside the prepare."""
        with self.transaction(critical=True):
            prepared = self._connection.execute(
                select(commands).where(commands.c.command_id == word.command_id, commands.c.state == "prepare")
            ).mappings()
            upsert(self._connection, commands, [rows.of_word(word, dict(prepared.one_or_none() or {}), time)])

    def save_outcome(  # noqa: PLR0917 -- the columns of one row, in their order
        self,
        decision_id: str,
        outcome: Outcome,
        reason: Reason,
        applied_step: int | None = None,
        target_step: int | None = None,
        skipped_batches: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """What became of a decision."""
        with self.transaction(critical=True):
            self._connection.execute(
                update(decisions)
                .where(decisions.c.id == decision_id)
                .values(
                    outcome=outcome.value,
                    outcome_reason=reason.value,
                    applied_step=applied_step,
                    target_step=target_step,
                    skipped_batches=skipped_batches,
                    seconds=finite(seconds),
                )
            )

    def save_generation(  # noqa: PLR0917 -- the columns of one row, in their order
        self, origin: Origin, generation: int, target_step: int, applied_step: int, time: float, reason: str
    ) -> None:
        """History was rewritten: this attempt goes on from `target_step`; older steps after it are history."""
        row = {
            "run_id": origin.run_id,
            "attempt": origin.attempt,
            "generation": generation,
            "target_step": target_step,
            "applied_step": applied_step,
            "time": time,
            "reason": reason,
        }
        with self.transaction(critical=True):
            upsert(self._connection, generations, [row])

    def save_system_sample(
        self, run_id: str, attempt: int, rank: int, time: float, values: Mapping[str, float]
    ) -> None:
        row = {"run_id": run_id, "attempt": attempt, "rank": rank, "time": time, "sample": to_text(dict(values))}
        with self.transaction(critical=False):
            upsert(self._connection, system_samples, [row])

    def end_run(self, run_id: str, status: RunStatus, time: float) -> None:
        """The run and its latest attempt are over."""
        with self.transaction(critical=True):
            self._connection.execute(
                update(runs).where(runs.c.run_id == run_id).values(status=status.value, ended_at=time)
            )
            latest = select(func.max(attempts.c.attempt)).where(attempts.c.run_id == run_id).scalar_subquery()
            self._connection.execute(
                update(attempts)
                .where(attempts.c.run_id == run_id, attempts.c.attempt == latest)
                .values(ended_at=time)
            )

    def _refuse_broken(self) -> None:
        if self._broken:
            raise PermanentError("a part of a transaction failed and was ignored; nothing of it is stored")

    @contextmanager
    def _part(self) -> Iterator[None]:
        # A call that failed half-way must not be committed with the rest, whatever the caller does with its error.
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _rank_states(self, *conditions: Any) -> list[RankState]:
        newest = (
            select(func.max(generations.c.generation))
            .where(generations.c.run_id == ranks.c.run_id, generations.c.attempt == ranks.c.attempt)
            .correlate(ranks)
            .scalar_subquery()
        )
        question = (
            select(ranks, newest.label("generation"))
            .where(*conditions)
            .order_by(ranks.c.run_id, ranks.c.rank, ranks.c.attempt)
        )
        with self.transaction(critical=False):
            return [_rank_state(row) for row in self._connection.execute(question).mappings()]


def _nobody_listens(connection: Connection, incident: Incident) -> None:
    del connection, incident


def _rank_state(row: RowMapping) -> RankState:
    return RankState(
        origin=Origin(row["run_id"], row["attempt"], row["rank"]),
        nonce=row["nonce"],
        host=row["host"],
        pid=row["pid"],
        process_start=row["process_start"] or 0.0,
        stored_seq=row["stored_seq"],
        stored=row["stored"],
        produced=row["produced"],
        dropped=row["dropped"],
        ended=row["ended"],
        generation=row["generation"] or 0,
    )
