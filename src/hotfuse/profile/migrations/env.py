"""Alembic runs this: in the connection and transaction that it is given."""

from __future__ import annotations

from alembic import context

from hotfuse.profile.store_schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
