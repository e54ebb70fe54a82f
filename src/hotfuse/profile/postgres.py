"""A PostgreSQL database behind the profile store's tables: the one that a fleet shares.

Its schema is that of the local file (`profile.store_schema`), brought up to date by Alembic, one revision a step. Writers take
turns by an advisory lock, so a transaction sees no other writer, as on SQLite. Every statement has a limit; what goes wrong is
raised, and the caller's to live with: nothing that serves calls is one (`profile.exchange`).
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import JSON, URL, Connection, Engine, Insert, Table, Text, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.sql import bindparam, cast, column, func, insert, select

from hotfuse.base.errors import InputError
from hotfuse.profile.store_schema import STEPS

T = TypeVar("T")
CONNECT_S, STATEMENT_MS = 5, 10_000
LOCK = 0x686F7466757365
"""The advisory lock of writers: "hotfuse" in bytes."""
HEAD = str(STEPS[-1].version)
SCRIPTS = Path(__file__).with_name("migrations")


class Unreachable(InputError):
    """The database cannot be used now; it may be later."""


class PostgresDatabase:
    """A database on a server; connections are made when they are needed."""

    path: Path | None = None
    copied: Path | None = None

    def __init__(self, url: URL) -> None:
        self.url = url.set(drivername="postgresql+psycopg")
        self.counts: Counter[str] = Counter()
        self._pid = os.getpid()
        self._engine = self._made()
        self._ready = False

    @property
    def place(self) -> str:
        """Where it is, without the password."""
        return self.url.set(drivername="postgresql").render_as_string(hide_password=True)

    def _made(self) -> Engine:
        arguments: dict[str, Any] = {}
        given = self.url.query
        if "connect_timeout" not in given:
            arguments["connect_timeout"] = CONNECT_S
        if "options" not in given:
            arguments["options"] = f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}"
        if "tcp_user_timeout" not in given:
            arguments["tcp_user_timeout"] = STATEMENT_MS
        try:
            return create_engine(self.url, connect_args=arguments, pool_size=1, max_overflow=3, pool_pre_ping=True)
        except ImportError as e:
            hint = "pip install 'hotfuse[postgres]'"
            raise InputError("PostgreSQL needs the package 'psycopg'", because=str(e), hint=hint) from e

    @property
    def engine(self) -> Engine:
        """The engine of this process: connections of a parent are not touched after a fork."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction of its own, in which nobody else writes."""

        def alone(c: Connection) -> T:
            c.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
            return work(c)

        return self._tried(alone)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run work that only reads."""
        return self._tried(work)

    def _tried(self, work: Callable[[Connection], T]) -> T:
        try:
            if not self._ready:
                self._upgrade()
            with self.engine.begin() as c:
                return work(c)
        except SQLAlchemyError as e:
            self.counts["failed"] += 1
            cause = e.orig if isinstance(e, DBAPIError) and e.orig is not None else e
            because = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            hint = "whether the server runs, the URL, and what the role may do"
            raise Unreachable(f"the database {self.place} cannot be used", because=because, hint=hint) from e

    def _upgrade(self) -> None:
        """Bring the schema up to date; a role that may not change it can use one that is."""
        with self.engine.begin() as c:
            if _revision(c) != HEAD:
                _run_alembic(c)
        self._ready = True

    def describe(self, c: Connection) -> dict[str, Any]:
        """Facts for `hotfuse db info`."""
        size = c.execute(text("SELECT pg_database_size(current_database())")).scalar()
        return {"version": int(_revision(c) or 0), "journal": "postgresql", "bytes": int(size or 0)}

    def maintain(self) -> None:
        """Give room that deleted rows left back."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
            c.execute(text("VACUUM"))

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()


@functools.cache
def from_text(table: Table) -> Insert:
    """The statement that adds rows to a table, numbered there, as its one argument lists them (`as_text`)."""
    own = [column(k.name, k.type) for k in table.c if k.name != "id"]
    told = func.json_to_recordset(cast(bindparam("rows", type_=Text), JSON)).table_valued(*own)
    return insert(table).from_select([k.name for k in own], select(*told.render_derived("told", with_types=True).c))


def as_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A list of JSON objects, with words for numbers that JSON has not. Each is written by itself: other threads wait meanwhile."""
    spelled = ({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in rows)
    return f"[{','.join(map(json.dumps, spelled))}]"


def _revision(c: Connection) -> str | None:
    if not inspect(c).has_table("alembic_version"):
        return None
    return c.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _run_alembic(c: Connection) -> None:
    """Run the steps that a database lacks, one process at a time."""
    try:
        from alembic import command
        from alembic.config import Config
    except ImportError as e:
        hint = "pip install 'hotfuse[postgres]'"
        raise InputError("a new database needs the package 'alembic'", because=str(e), hint=hint) from e
    c.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
    found = _revision(c)
    if found is not None and int(found) > int(HEAD):
        raise InputError("the database was written by a newer version", because=f"step {found}; this program knows up to {HEAD}")
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = c
    command.upgrade(config, "head")
