"""The first schema: runs and what identifies them, telemetry, what was found, what was done, what was lost."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "runs attempts generations ranks steps system_samples findings incidents decisions commands acks checkpoints"
    " alerts gaps events"
)


def upgrade() -> None:
    _identity()
    _telemetry()
    _judgement()
    _actions()
    _delivery()


def downgrade() -> None:
    for name in TABLES.split():
        op.drop_table(name)


def _identity() -> None:
    _create(
        "runs",
        _key("run_id"),
        _columns(sa.Text, "name mode status host"),
        _columns(sa.BigInteger, "world_size"),
        _columns(sa.Float, "started_at ended_at"),
    )
    _create(
        "attempts",
        _key("run_id", "attempt"),
        _columns(sa.Text, "name mode host argv cwd git packages config settings"),
        _columns(sa.BigInteger, "world_size start_step"),
        _columns(sa.Float, "started_at ended_at"),
    )
    _create(
        "generations",
        _key("run_id", "attempt", "generation"),
        _columns(sa.BigInteger, "target_step applied_step"),
        _columns(sa.Float, "time"),
        _columns(sa.Text, "reason"),
    )
    _create(
        "ranks",
        _key("run_id", "attempt", "rank"),
        _columns(sa.Text, "nonce host devices can end_status error"),
        _columns(sa.BigInteger, "local_rank pid end_step stored_seq stored produced dropped"),
        _columns(sa.Float, "process_start registered_at ended_at"),
        _columns(sa.Boolean, "ended"),
    )


def _telemetry() -> None:
    _create(
        "steps",
        _key("run_id", "attempt", "generation", "step", "rank"),
        _columns(sa.BigInteger, "seq"),
        _columns(sa.Float, "time"),
        _columns(sa.Text, "result"),
        _columns(sa.Float, "loss grad_norm"),
        _columns(sa.Text, "grad_norm_source"),
        _columns(sa.Float, "lr loss_scale step_seconds data_wait_seconds backward_seconds optimizer_seconds"),
        _columns(sa.BigInteger, "applied skipped"),
        _columns(sa.Float, "tokens samples"),
        _columns(sa.BigInteger, "memory_allocated_bytes memory_reserved_bytes memory_peak_bytes host_memory_bytes"),
        _columns(sa.BigInteger, "data_position"),
        _columns(sa.Float, "hook_seconds clip_max_norm"),
        _columns(sa.Text, "optimizers reported nonfinite"),
    )
    _create(
        "system_samples",
        _key("run_id", "attempt", "rank"),
        [sa.Column("time", sa.Float, primary_key=True)],
        _columns(sa.Text, "sample"),
    )
    _create(
        "checkpoints",
        _key("run_id", "attempt", "generation", "step", "rank"),
        [sa.Column("tier", sa.Text, primary_key=True)],
        _columns(sa.Text, "quality reason program_point digest"),
        _columns(sa.BigInteger, "seq size_bytes"),
        _columns(sa.Float, "time seconds"),
        _columns(sa.Boolean, "verified kept"),
    )


def _judgement() -> None:
    _create(
        "findings",
        _row_number(),
        _columns(sa.Text, "run_id incident_id kind severity tier detector summary evidence ranks nonfinite"),
        _columns(sa.BigInteger, "attempt generation rank step onset_step"),
        _columns(sa.Float, "time value expected"),
    )
    _create(
        "incidents",
        _key("id"),
        _columns(sa.Text, "run_id kind severity tier status summary cause evidence ranks"),
        _columns(sa.BigInteger, "attempt generation first_step onset_step last_step"),
        _columns(sa.Float, "opened_at resolved_at"),
    )
    for name in ("findings", "incidents"):
        op.create_index(f"{name}_of_run", name, ["run_id"])


def _actions() -> None:
    _create(
        "decisions",
        _key("id"),
        _columns(sa.Text, "run_id incident_id action reason text data"),
        _columns(sa.BigInteger, "attempt generation rank step onset_step wanted_target_step skip_batches size"),
        _columns(sa.Float, "time limit_seconds factor"),
        _columns(sa.Boolean, "pending_ok"),
        _columns(sa.Text, "outcome outcome_reason"),
        _columns(sa.BigInteger, "applied_step target_step skipped_batches"),
        _columns(sa.Float, "seconds"),
    )
    _create(
        "commands",
        _key("command_id"),
        [sa.Column("state", sa.Text, primary_key=True)],
        _columns(sa.Text, "decision_id run_id action reason body"),
        _columns(sa.BigInteger, "attempt generation sequence apply_at target_step"),
        _columns(sa.Float, "time"),
    )
    _create(
        "acks",
        _key("run_id", "attempt", "rank", "seq"),
        _columns(sa.Text, "command_id state reason text candidates"),
        _columns(sa.BigInteger, "generation step target_step skipped_batches"),
        _columns(sa.Float, "time seconds"),
        _columns(sa.Boolean, "lr_aligned"),
    )
    for name in ("decisions", "commands"):
        op.create_index(f"{name}_of_run", name, ["run_id"])


def _delivery() -> None:
    _create(
        "alerts",
        _key("id"),
        _columns(sa.Text, "run_id incident_id channel state body reason"),
        _columns(sa.BigInteger, "tries"),
        _columns(sa.Float, "time due_at"),
    )
    _create(
        "gaps",
        _key("run_id", "attempt", "rank", "first_seq"),
        _columns(sa.BigInteger, "last_seq"),
        _columns(sa.Text, "reason"),
    )
    _create(
        "events",
        _row_number(),
        _columns(sa.Text, "run_id kind text body"),
        _columns(sa.BigInteger, "attempt generation rank step seq"),
        _columns(sa.Float, "time"),
    )
    for name in ("alerts", "events"):
        op.create_index(f"{name}_of_run", name, ["run_id"])


def _create(name: str, *parts: list[sa.Column[Any]]) -> None:
    op.create_table(name, *(column for part in parts for column in part))


def _key(*names: str) -> list[sa.Column[Any]]:
    return [
        sa.Column(name, sa.Text if name.endswith("_id") or name == "id" else sa.BigInteger, primary_key=True)
        for name in names
    ]


def _columns(kind: type[TypeEngine[Any]], names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names.split()]


def _row_number() -> list[sa.Column[Any]]:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return [sa.Column("number", number, primary_key=True, autoincrement=True)]
