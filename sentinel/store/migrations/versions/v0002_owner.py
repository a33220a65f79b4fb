"""Several daemons may share a database: which of them looks after a rank."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ranks", sa.Column("owner", sa.Text))


def downgrade() -> None:
    op.drop_column("ranks", "owner")
