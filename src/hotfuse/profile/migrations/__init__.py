"""Alembic's way through the steps of `profile.store_schema`, for PostgreSQL: one revision a step."""
