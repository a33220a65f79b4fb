"""Begin runs, attempts and ranks: who is this process, and what identifies its run."""

from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, func, or_, select, true, update

from sentinel.records import Hello, Origin, RunStart
from sentinel.store.tables import attempts, generations, ranks, runs
from sentinel.store.upsert import upsert
from sentinel.store.values import finite, to_text
from sentinel.vocabulary import RunStatus


class Registration(NamedTuple):
    """Where a rank stands."""

    attempt: int  # 1 for the first process lifetime of this rank
    stored_seq: int  # what it need not send again
    generation: int


def register(connection: Connection, hello: Hello, host: str, time: float, owner: str) -> Registration:
    """Find or create the attempt of this process: its nonce's position among those of its rank; now `owner`'s."""
    nonces = list(
        connection.execute(
            select(ranks.c.nonce)
            .where(ranks.c.run_id == hello.run_id, ranks.c.rank == hello.rank)
            .order_by(ranks.c.attempt)
        ).scalars()
    )
    if hello.nonce in nonces:
        origin = Origin(hello.run_id, nonces.index(hello.nonce) + 1, hello.rank)
    else:
        origin = Origin(hello.run_id, len(nonces) + 1, hello.rank)
        _create(connection, origin, hello, host, time)
    return _welcome_back(connection, origin, hello, owner)


def is_ours(owner: str) -> ColumnElement[bool]:
    """The condition on `ranks` that this daemon looks after them, or nobody in particular."""
    return true() if not owner else or_(ranks.c.owner == owner, ranks.c.owner == "", ranks.c.owner.is_(None))


def note_start(connection: Connection, origin: Origin, start: RunStart) -> None:
    """Store provenance. Rank 0 speaks for the run; another rank does until rank 0 has spoken."""
    run_id, attempt, rank = origin
    of_attempt = (attempts.c.run_id == run_id) & (attempts.c.attempt == attempt)
    known = connection.execute(select(attempts.c.argv).where(of_attempt)).scalar() is not None
    connection.execute(
        update(ranks)
        .where(ranks.c.run_id == run_id, ranks.c.attempt == attempt, ranks.c.rank == rank)
        .values(
            host=start.host,
            devices=to_text(start.devices),
            can=to_text(start.can),
            local_rank=start.local_rank,
            pid=start.pid,
            process_start=finite(start.process_start),
        )
    )
    if known and rank != 0:
        return
    shared = {"name": start.name, "mode": start.mode.value, "host": start.host, "world_size": start.world_size}
    connection.execute(update(runs).where(runs.c.run_id == run_id).values(**shared))
    structured = {name: to_text(getattr(start, name)) for name in ("argv", "git", "packages", "config", "settings")}
    connection.execute(
        update(attempts)
        .where(of_attempt)
        .values(**shared, **structured, cwd=start.cwd, start_step=start.step, started_at=finite(start.time))
    )
    if attempt == 1:
        connection.execute(update(runs).where(runs.c.run_id == run_id).values(started_at=finite(start.time)))
    first = {"run_id": run_id, "attempt": attempt, "generation": 0, "target_step": start.step}
    upsert(connection, generations, [first])


def _create(connection: Connection, origin: Origin, hello: Hello, host: str, time: float) -> None:
    run_id, attempt, rank = origin
    run = {"run_id": run_id, "name": "", "status": RunStatus.RUNNING.value, "host": host, "started_at": time}
    upsert(connection, runs, [{**run, "world_size": hello.world_size}], keep=True)
    # A new process lifetime goes on with a run that had ended.
    connection.execute(update(runs).where(runs.c.run_id == run_id).values(status=run["status"], ended_at=None))
    of_attempt = {"run_id": run_id, "attempt": attempt}
    begun = {**of_attempt, "host": host, "started_at": time, "world_size": hello.world_size}
    upsert(connection, attempts, [begun], keep=True)
    first = {
        **of_attempt,
        "generation": 0,
        "target_step": None,
        "applied_step": None,
        "time": time,
        "reason": "start",
    }
    upsert(connection, generations, [first], keep=True)
    process = {"nonce": hello.nonce, "pid": hello.pid, "process_start": finite(hello.process_start)}
    books = {"stored_seq": 0, "stored": 0, "produced": 0, "dropped": 0}
    row = {**of_attempt, "rank": rank, "host": host, "registered_at": time, "ended": False, **process, **books}
    upsert(connection, ranks, [row])


def _welcome_back(connection: Connection, origin: Origin, hello: Hello, owner: str) -> Registration:
    run_id, attempt, rank = origin
    of_rank = (ranks.c.run_id == run_id) & (ranks.c.attempt == attempt) & (ranks.c.rank == rank)
    books = connection.execute(select(ranks.c.stored_seq, ranks.c.produced, ranks.c.ended).where(of_rank)).one()
    produced = max(hello.last_seq, books.produced)
    connection.execute(update(ranks).where(of_rank).values(produced=produced, owner=owner))
    if not books.ended:
        # It was given up as lost, and here it is.
        connection.execute(
            update(runs)
            .where(runs.c.run_id == run_id, runs.c.status == RunStatus.LOST.value)
            .values(status=RunStatus.RUNNING.value, ended_at=None)
        )
    generation = connection.execute(
        select(func.max(generations.c.generation)).where(
            generations.c.run_id == run_id, generations.c.attempt == attempt
        )
    ).scalar()
    return Registration(attempt, books.stored_seq, generation or 0)
