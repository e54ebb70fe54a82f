"""Step 3 of `profile.store_schema`."""

from __future__ import annotations

from alembic import op

from hotfuse.profile.store_schema import STEPS

revision, down_revision = "3", "2"


def upgrade() -> None:
    """Run the step."""
    STEPS[2].run(op.get_bind())
