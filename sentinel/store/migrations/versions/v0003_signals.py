"""More that a step tells: the split of its time, waiting for other ranks, counters, and what is sampled."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = {
    "forward_seconds": sa.Float,
    "communication_wait_seconds": sa.Float,
    "communication_source": sa.Text,
    "grad_norm_local": sa.Float,
    "clip_fraction": sa.Float,
    "scheduler_steps": sa.BigInteger,
    "evaluations": sa.BigInteger,
    "gradients_absent": sa.BigInteger,
    "flops": sa.Float,
    "mfu_ratio": sa.Float,
    "sampled": sa.Text,
}


def upgrade() -> None:
    for name, kind in COLUMNS.items():
        op.add_column("steps", sa.Column(name, kind))


def downgrade() -> None:
    for name in COLUMNS:
        op.drop_column("steps", name)
