"""Step 5 of `profile.schema`."""

from __future__ import annotations

from alembic import op

from hotfuse.profile.schema import STEPS

revision, down_revision = "5", "4"


def upgrade() -> None:
    """Run the step."""
    STEPS[4].run(op.get_bind())
