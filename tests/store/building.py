"""Build small runs in a database of their own."""

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import text

from sentinel import wire
from sentinel.records import Decision, Hello, Incident, Origin, RunEnd, RunStart, SnapshotNote, StepRecord
from sentinel.store import schema
from sentinel.store.database import Entry, Store
from sentinel.vocabulary import (
    Action,
    IncidentStatus,
    Kind,
    Mode,
    Outcome,
    Quality,
    Reason,
    RunStatus,
    Severity,
    Tier,
    UpdateResult,
)

RUN = "run-a1"
RANK0 = Origin(RUN, 1, 0)
START = 1_700_000_000.0


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder / 'sentinel.db'}"


def hello(run_id: str = RUN, rank: int = 0, nonce: str = "n1", last_seq: int = 0, world_size: int = 1) -> Hello:
    return Hello(wire.VERSION, run_id, rank, world_size, nonce, 4321, 1.5, last_seq)


def start(seq: int = 1, step: int = 0, name: str = "gpt", **other: Any) -> RunStart:
    fields: dict[str, Any] = {
        "mode": Mode.PROTECT,
        "world_size": 1,
        "local_rank": 0,
        "pid": 4321,
        "process_start": 1.5,
        "host": "box",
        "argv": ["train.py", "--lr", "0.1"],
        "cwd": "/somewhere",
        "git": {"commit": "abc123", "dirty": True},
        "packages": {"torch": "2.13"},
        "config": {"lr": 0.1, "limit": float("inf")},
        "settings": {},
        "devices": ["cpu"],
        "can": ["rollback"],
    }
    return RunStart(seq=seq, time=START, step=step, name=name, **(fields | other))


def record(seq: int, step: int, generation: int = 0, **other: Any) -> StepRecord:
    fields = {"time": START + seq, "result": UpdateResult.APPLIED, "loss": 2.0, "step_seconds": 0.5}
    return StepRecord(seq=seq, generation=generation, step=step, **(fields | other))


def snapshot(seq: int, step: int, quality: Quality = Quality.GOOD, generation: int = 0, **other: Any) -> SnapshotNote:
    fields = {"tier": "ram", "verified": True, "reason": "50 clean steps", "program_point": "step"}
    sizes = {"size_bytes": 100, "seconds": 0.01}
    return SnapshotNote(
        seq=seq, time=START + seq, generation=generation, step=step, quality=quality, **(fields | sizes | other)
    )


def entries(*messages: Any, origin: Origin = RANK0) -> list[Entry]:
    return [Entry(origin, message) for message in messages]


def incident(kind: Kind = Kind.LOSS_SPIKE, incident_id: str = "i1", **other: Any) -> Incident:
    fields: dict[str, Any] = {
        "run_id": RUN,
        "attempt": 1,
        "generation": 0,
        "severity": Severity.CRITICAL,
        "tier": Tier.T2,
        "ranks": (0,),
        "first_step": 7,
        "onset_step": 6,
        "last_step": 8,
        "status": IncidentStatus.RESOLVED,
        "summary": "the loss jumped to 9.1, expected 2.0",
        "cause": "poisoned data",
        "evidence": {"z": float("inf"), "losses": [2.0, float("nan")]},
        "opened_at": START + 7,
        "resolved_at": START + 30.25,
    }
    return Incident(id=incident_id, kind=kind, **(fields | other))


def rolled_back_run(folder: Path) -> Store:
    """Eight steps, a spike at 6, a rollback to 4 skipping three batches, six more steps, the end: 21 messages."""
    store = Store.open(url_in(folder))
    store.register_rank(hello(), "box", START)
    first = [record(seq, seq - 1) for seq in range(2, 10)]
    store.write(entries(start(), *first, snapshot(10, 4)), critical=True)
    store.save_incident(incident())
    rollback = Decision(
        Action.ROLLBACK, Reason.CONFIRMED, "roll back and skip", incident_id="i1", step=8, onset_step=6
    )
    store.save_decision("d1", RANK0, 0, START + 8, rollback, Outcome.PENDING)
    store.save_generation(RANK0, 1, 4, 9, START + 9, "rollback")
    store.save_outcome("d1", Outcome.APPLIED, Reason.OK, 9, 4, 3, 0.25)
    nothing = Decision(Action.NONE, Reason.COOLDOWN, "too soon", incident_id="i1", step=9)
    store.save_decision("d2", RANK0, 1, START + 9, nothing, None)
    pause = Decision(Action.PAUSE, Reason.REQUESTED, "a person asked", step=10)
    store.save_decision("d3", RANK0, 1, START + 10, pause, Outcome.REFUSED)
    again = [record(seq, seq - 6, generation=1) for seq in range(11, 20)]
    store.write(entries(*again, snapshot(20, 10, Quality.PENDING, generation=1)), critical=False)
    store.write(entries(RunEnd(21, START + 40, 1, 13, "completed")), critical=True)
    store.end_run(RUN, RunStatus.COMPLETED, START + 40)
    return store


def make_older(url: str, revision: str) -> None:
    """Create the database as an earlier version left it, with one finished run, `kept`."""
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    with schema.open_writer(url).connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
        connection.execute(text("INSERT INTO runs (run_id, name, status) VALUES ('kept', '', 'completed')"))
        connection.execute(text("INSERT INTO attempts (run_id, attempt) VALUES ('kept', 1)"))
        connection.execute(
            text("INSERT INTO generations (run_id, attempt, generation, target_step) VALUES ('kept', 1, 0, 0)")
        )
    assert schema.revision_of(url) == revision
