"""Read back from the database what an earlier daemon knew: how a rank started, and which commands it left open."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, func, select

from sentinel.daemon.rank import Start
from sentinel.records import Ack, Incident, Origin, StepRecord
from sentinel.sample import Sample
from sentinel.store import engine as engines
from sentinel.store.database import Store
from sentinel.store.intake import read_step
from sentinel.store.norms import PART
from sentinel.store.starts import is_ours
from sentinel.store.tables import acks, attempts, commands, decisions, incidents, ranks, runs, steps
from sentinel.store.values import from_text
from sentinel.vocabulary import Action, IncidentStatus, Mode, Outcome, Reason, RunStatus, UpdateResult

_ENDED_BY_ACK = {"applied": Outcome.APPLIED, "failed": Outcome.FAILED, "aborted": Outcome.ABORTED}


class Unsettled(NamedTuple):
    """A decision whose outcome is not known."""

    decision_id: str
    run_id: str
    committed: bool  # the word to carry it out was said


class Unclosed(NamedTuple):
    """A run whose ranks have all said their last word, though its books are open."""

    run_id: str
    status: RunStatus
    ended_at: float


def start_of(url: str, origin: Origin) -> Start | None:
    """What the rank said when it attached; None if that was never stored."""
    with _reading(url) as connection:
        attempt = (
            connection.execute(
                select(attempts).where(attempts.c.run_id == origin.run_id, attempts.c.attempt == origin.attempt)
            )
            .mappings()
            .one_or_none()
        )
        can = connection.execute(
            select(ranks.c.can).where(
                ranks.c.run_id == origin.run_id, ranks.c.attempt == origin.attempt, ranks.c.rank == origin.rank
            )
        ).scalar()
    if attempt is None or attempt["argv"] is None or can is None:
        return None
    return Start(
        name=attempt["name"],
        mode=Mode(attempt["mode"]),
        world_size=attempt["world_size"],
        can=frozenset(from_text(can)),
        settings=from_text(attempt["settings"]),
        step=attempt["start_step"] or 0,
    )


def recent_steps(url: str, origin: Origin, most: int) -> list[StepRecord]:
    """The rank's latest records of its live generation, oldest first: what detectors learn from after a restart."""
    run_id, attempt, number = origin
    of_rank = (steps.c.run_id == run_id) & (steps.c.attempt == attempt) & (steps.c.rank == number)
    newest = select(func.max(steps.c.generation)).where(of_rank).scalar_subquery()
    question = select(steps).where(of_rank, steps.c.generation == newest).order_by(steps.c.step.desc()).limit(most)
    with _reading(url) as connection:
        rows = [read_step(dict(row)) for row in connection.execute(question).mappings()]
        if any(row["grad_norm_source"] == PART for row in rows):
            norms = _global_norms(connection, origin, rows[-1])
            rows = [{**row, "grad_norm": norms.get(row["step"])} if row["grad_norm"] is None else row for row in rows]
    return [_record(row) for row in reversed(rows)]


def _global_norms(connection: Connection, origin: Origin, oldest: Mapping[str, Any]) -> dict[int, float]:
    """By step, from the parts of all ranks, of the generation of `oldest` and since; without those that miss one."""
    part = steps.c.grad_norm_local
    of_attempt = (steps.c.run_id == origin.run_id) & (steps.c.attempt == origin.attempt)
    since = (steps.c.generation == oldest["generation"]) & (steps.c.step >= oldest["step"])
    world_size = select(attempts.c.world_size).where(
        attempts.c.run_id == origin.run_id, attempts.c.attempt == origin.attempt
    )
    question = (
        select(steps.c.step, func.sum(part * part))
        .where(of_attempt, since, steps.c.grad_norm_source == PART)
        .group_by(steps.c.step)
        .having(func.count(part) == world_size.scalar_subquery())
    )
    return {step: math.sqrt(squares) for step, squares in connection.execute(question)}


def _record(row: Mapping[str, Any]) -> StepRecord:
    values = {name: row[name] for name in StepRecord.__struct_fields__}
    sampled = None if row["sampled"] is None else msgspec.convert(row["sampled"], Sample)
    return StepRecord(**{**values, "result": UpdateResult(row["result"]), "sampled": sampled})


def paused_by(url: str, run_id: str) -> str:
    """The command that paused a run which has not been released since; "" if there is none."""
    released = select(acks.c.command_id).where(acks.c.run_id == run_id, acks.c.state == "released")
    with _reading(url) as connection:
        found = connection.execute(
            select(acks.c.command_id)
            .join(commands, (commands.c.command_id == acks.c.command_id) & (commands.c.state == "prepare"))
            .where(
                acks.c.run_id == run_id,
                acks.c.state == "applied",
                commands.c.action == Action.PAUSE.value,
                acks.c.command_id.not_in(released),
            )
            .order_by(commands.c.time.desc())
        ).scalar()
    return found or ""


def unsettled(url: str, owner: str = "") -> list[Unsettled]:
    """Every decision that is still pending, of every run; with `owner` only of those that this daemon looks after."""
    said = select(commands.c.decision_id).where(commands.c.state == "commit")
    cared_for = (
        select(ranks.c.rank)
        .where(ranks.c.run_id == decisions.c.run_id, ranks.c.attempt == decisions.c.attempt, is_ours(owner))
        .exists()
    )
    with _reading(url) as connection:
        rows = connection.execute(
            select(decisions.c.id, decisions.c.run_id, decisions.c.id.in_(said)).where(
                decisions.c.outcome == Outcome.PENDING.value, cared_for
            )
        )
        return [Unsettled(*row) for row in rows]


def unclosed(url: str) -> list[Unclosed]:
    """Runs that an earlier daemon saw end, but could not close any more."""
    later = ranks.alias()
    superseded = (
        select(later.c.attempt)
        .where(later.c.run_id == ranks.c.run_id, later.c.rank == ranks.c.rank, later.c.attempt > ranks.c.attempt)
        .exists()
    )
    question = select(ranks).join(runs, runs.c.run_id == ranks.c.run_id)
    with _reading(url) as connection:
        rows = connection.execute(
            question.where(runs.c.status == RunStatus.RUNNING.value, ~superseded).order_by(ranks.c.run_id)
        ).mappings()
        by_run = {run_id: list(group) for run_id, group in itertools.groupby(rows, key=lambda row: row["run_id"])}
    return [
        Unclosed(
            run_id,
            RunStatus.FAILED if any(row["end_status"] == "failed" for row in group) else RunStatus.COMPLETED,
            max(row["ended_at"] or 0.0 for row in group),
        )
        for run_id, group in by_run.items()
        if all(row["ended"] for row in group)
    ]


def settle(store: Store, decision_id: str, reason: Reason) -> None:
    """Write down what became of a decision: what its last ack says, else aborted. A job of the writer."""
    with _reading(store.url) as connection:
        row = (
            connection.execute(
                select(acks, decisions.c.reason.label("decision_reason"))
                .join(commands, (commands.c.command_id == acks.c.command_id) & (commands.c.state == "prepare"))
                .join(decisions, decisions.c.id == commands.c.decision_id)
                .where(decisions.c.id == decision_id, acks.c.state.in_(_ENDED_BY_ACK))
                .order_by(acks.c.seq.desc())
            )
            .mappings()
            .first()
        )
        apply_at = _apply_at(connection, decision_id)
    if row is None or row["state"] == "aborted":
        store.save_outcome(decision_id, Outcome.ABORTED, Reason(row["reason"]) if row else reason)
        return
    outcome = _ENDED_BY_ACK[row["state"]]
    store.save_outcome(
        decision_id,
        outcome,
        Reason(row["decision_reason"] if outcome is Outcome.APPLIED else row["reason"]),
        apply_at if outcome is Outcome.APPLIED else None,
        row["target_step"],
        row["skipped_batches"],
        row["seconds"],
    )
    if outcome is Outcome.APPLIED and row["target_step"] is not None:
        origin = Origin(row["run_id"], row["attempt"], row["rank"])
        applied_step = apply_at if apply_at is not None else row["step"]
        store.save_generation(
            origin, row["generation"], row["target_step"], applied_step, time.time(), row["decision_reason"]
        )


def settle_late(store: Store, ack: Ack) -> None:
    """An ack about a command of an earlier daemon. A job of the writer, after the ack itself is stored."""
    if ack.state not in _ENDED_BY_ACK:
        return
    with _reading(store.url) as connection:
        decision_id = connection.execute(
            select(commands.c.decision_id).where(
                commands.c.command_id == ack.command_id, commands.c.state == "prepare"
            )
        ).scalar()
    if decision_id is not None:
        settle(store, decision_id, ack.reason)


def close_books(store: Store, run_id: str, status: RunStatus, ended_at: float) -> None:
    """End a run: nothing of it stays pending or open. A job of the writer, after the run's last message."""
    for left in unsettled(store.url):
        if left.run_id == run_id:
            settle(store, left.decision_id, Reason.RUN_ENDED)
    for incident in _open_incidents(store.url, run_id):
        given_up = msgspec.structs.replace(
            incident,
            status=IncidentStatus.GAVE_UP,
            resolved_at=ended_at,
            cause="the run ended before it was resolved",
        )
        store.save_incident(given_up)
    store.end_run(run_id, status, ended_at)


def _open_incidents(url: str, run_id: str) -> Iterator[Incident]:
    with _reading(url) as connection:
        rows = (
            connection.execute(
                select(incidents).where(incidents.c.run_id == run_id, incidents.c.status == IncidentStatus.OPEN.value)
            )
            .mappings()
            .all()
        )
    for row in rows:
        known = {name: row[name] for name in Incident.__struct_fields__}  # the row's own keys are not plain text
        decoded = {name: from_text(row[name]) for name in ("evidence", "ranks")}
        yield msgspec.convert({**known, **decoded}, Incident)


def _apply_at(connection: Connection, decision_id: str) -> int | None:
    return connection.execute(
        select(commands.c.apply_at)
        .where(commands.c.decision_id == decision_id, commands.c.state == "prepare")
        .order_by(commands.c.sequence.desc())
    ).scalar()


@contextmanager
def _reading(url: str) -> Iterator[Connection]:
    engine = engines.reader(url)
    try:
        with engines.plain_errors(url, opened=True), engine.connect() as connection, connection.begin():
            yield connection
    finally:
        engine.dispose()
