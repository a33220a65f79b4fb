"""Every table of the run database. The migrations build the same schema; a test compares the two.

Conventions: times are unix seconds; a float column that held NaN or infinity is NULL and its name stands in the
row's `nonfinite` column (`sentinel.store.values`); structured values are text in the JSON of that module.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

metadata = MetaData()

# SQLite numbers rows by itself only for a column declared plain INTEGER.
_ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")


def _key(*names: str) -> list[Column[Any]]:
    return [Column(name, Text if name.endswith("id") else BigInteger, primary_key=True) for name in names]


def _columns(kind: type[TypeEngine[Any]], names: str) -> list[Column[Any]]:
    return [Column(name, kind) for name in names.split()]


def _table(name: str, *parts: Sequence[Column[Any] | Index]) -> Table:
    return Table(name, metadata, *(item for part in parts for item in part))


def _numbered() -> list[Column[Any]]:
    return [Column("number", _ROW_NUMBER, primary_key=True, autoincrement=True)]


runs = _table(
    "runs",
    _key("run_id"),
    _columns(Text, "name mode status host"),
    _columns(BigInteger, "world_size"),
    _columns(Float, "started_at ended_at"),
)

# Provenance stands with the attempt: a resumed run may come from another commit.
attempts = _table(
    "attempts",
    _key("run_id", "attempt"),
    _columns(Text, "name mode host argv cwd git packages config settings"),
    _columns(BigInteger, "world_size start_step"),
    _columns(Float, "started_at ended_at"),
)

generations = _table(
    "generations",
    _key("run_id", "attempt", "generation"),
    _columns(BigInteger, "target_step applied_step"),
    _columns(Float, "time"),
    _columns(Text, "reason"),
)

ranks = _table(
    "ranks",
    _key("run_id", "attempt", "rank"),
    _columns(Text, "nonce host devices can end_status error"),
    _columns(BigInteger, "local_rank pid end_step stored_seq stored produced dropped"),
    _columns(Float, "process_start registered_at ended_at"),
    _columns(Boolean, "ended"),
    _columns(Text, "owner"),  # the daemon that looks after it (`location.owner_of`); "" and NULL: whoever comes
)

# The columns after the key are the fields of StepRecord, by name.
steps = _table(
    "steps",
    _key("run_id", "attempt", "generation", "step", "rank"),
    _columns(BigInteger, "seq"),
    _columns(Float, "time"),
    _columns(Text, "result"),
    _columns(Float, "loss grad_norm"),
    _columns(Text, "grad_norm_source"),
    _columns(Float, "lr loss_scale step_seconds data_wait_seconds backward_seconds optimizer_seconds"),
    _columns(BigInteger, "applied skipped"),
    _columns(Float, "tokens samples"),
    _columns(BigInteger, "memory_allocated_bytes memory_reserved_bytes memory_peak_bytes host_memory_bytes"),
    _columns(BigInteger, "data_position"),
    _columns(Float, "hook_seconds clip_max_norm"),
    _columns(Text, "optimizers reported"),
    _columns(Float, "forward_seconds communication_wait_seconds"),
    _columns(Text, "communication_source"),
    _columns(Float, "grad_norm_local clip_fraction"),
    _columns(BigInteger, "scheduler_steps evaluations gradients_absent"),
    _columns(Float, "flops mfu_ratio"),
    _columns(Text, "sampled nonfinite"),
)

system_samples = _table(
    "system_samples",
    _key("run_id", "attempt", "rank"),
    [Column("time", Float, primary_key=True)],
    _columns(Text, "sample"),
)

findings = _table(
    "findings",
    _numbered(),
    _columns(Text, "run_id incident_id kind severity tier detector summary evidence ranks nonfinite"),
    _columns(BigInteger, "attempt generation rank step onset_step"),
    _columns(Float, "time value expected"),
    [Index("findings_of_run", "run_id")],
)

incidents = _table(
    "incidents",
    _key("id"),
    _columns(Text, "run_id kind severity tier status summary cause evidence ranks"),
    _columns(BigInteger, "attempt generation first_step onset_step last_step"),
    _columns(Float, "opened_at resolved_at"),
    [Index("incidents_of_run", "run_id")],
)

# The first two lines: what was decided. The rest: what became of it.
decisions = _table(
    "decisions",
    _key("id"),
    _columns(Text, "run_id incident_id action reason text data"),
    _columns(BigInteger, "attempt generation rank step onset_step wanted_target_step skip_batches size"),
    _columns(Float, "time limit_seconds factor"),
    _columns(Boolean, "pending_ok"),
    _columns(Text, "outcome outcome_reason"),
    _columns(BigInteger, "applied_step target_step skipped_batches"),
    _columns(Float, "seconds"),
    [Index("decisions_of_run", "run_id")],
)

# One row per state of a command: "prepare" is written before it is sent, "commit" or "abort" before the word is.
commands = _table(
    "commands",
    [Column("command_id", Text, primary_key=True), Column("state", Text, primary_key=True)],
    _columns(Text, "decision_id run_id action reason body"),
    _columns(BigInteger, "attempt generation sequence apply_at target_step"),
    _columns(Float, "time"),
    [Index("commands_of_run", "run_id")],
)

acks = _table(
    "acks",
    _key("run_id", "attempt", "rank", "seq"),
    _columns(Text, "command_id state reason text candidates"),
    _columns(BigInteger, "generation step target_step skipped_batches"),
    _columns(Float, "time seconds"),
    _columns(Boolean, "lr_aligned"),
)

checkpoints = _table(
    "checkpoints",
    _key("run_id", "attempt", "generation", "step", "rank"),
    [Column("tier", Text, primary_key=True)],
    _columns(Text, "quality reason program_point digest"),
    _columns(BigInteger, "seq size_bytes"),
    _columns(Float, "time seconds"),
    _columns(Boolean, "verified kept"),
)

alerts = _table(
    "alerts",
    _key("id"),
    _columns(Text, "run_id incident_id channel state body reason"),
    _columns(BigInteger, "tries"),
    _columns(Float, "time due_at"),
    [Index("alerts_of_run", "run_id")],
)

gaps = _table(
    "gaps",
    _key("run_id", "attempt", "rank", "first_seq"),
    _columns(BigInteger, "last_seq"),
    _columns(Text, "reason"),
)

# What happened besides: reflexes, phases, troubles, and rows that a later record of the same key replaced.
events = _table(
    "events",
    _numbered(),
    _columns(Text, "run_id kind text body"),
    _columns(BigInteger, "attempt generation rank step seq"),
    _columns(Float, "time"),
    [Index("events_of_run", "run_id")],
)
