"""Step 4 of `profile.store_schema`."""

from __future__ import annotations

from alembic import op

from hotfuse.profile.store_schema import STEPS

revision, down_revision = "4", "3"


def upgrade() -> None:
    """Run the step."""
    STEPS[3].run(op.get_bind())
