"""Step 5 of `profile.store_schema`."""

from __future__ import annotations

from alembic import op

from hotfuse.profile.store_schema import STEPS

revision, down_revision = "5", "4"


def upgrade() -> None:
    """Run the step."""
    STEPS[4].run(op.get_bind())
