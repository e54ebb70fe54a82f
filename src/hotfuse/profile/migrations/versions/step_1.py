"""Step 1 of `profile.store_schema`."""

from __future__ import annotations

from alembic import op

from hotfuse.profile.store_schema import STEPS

revision, down_revision = "1", None


def upgrade() -> None:
    """Run the step."""
    STEPS[0].run(op.get_bind())
