"""Alembic's way through the steps of `profile.schema`, for PostgreSQL: one revision a step."""
