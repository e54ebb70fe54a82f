"""A fleet on one machine: servers that share one PostgreSQL and one store of code (`python -m examples.fleet`)."""
