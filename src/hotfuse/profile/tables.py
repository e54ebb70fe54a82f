"""What all parts of the profile store share: the database behind them, rows that can be read, and what happened to the file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Row, Table, insert

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.profile.database import Database, Trouble
from hotfuse.profile.postgres import PostgresDatabase
from hotfuse.profile.store_schema import STEPS, Migration

BATCH = 500
"""Rows of one transaction: others wait for no longer than that takes."""


class Tables:
    """An open database, and reading and writing rows of it."""

    def __init__(self, at: Path | URL | None, log: EventLog | None = None, steps: Sequence[Migration] = STEPS) -> None:
        self.notes: list[str] = []
        """What happened to the file, in words."""
        self.skipped: Counter[str] = Counter()
        """Per table, rows that could not be read."""
        self._numbered: dict[int, dict[str, Any]] = {}
        """Machines by the numbers that were given for them: rows refer to those."""
        self._log = log
        self.database: Database | PostgresDatabase = (
            PostgresDatabase(at) if isinstance(at, URL) else Database(at, self._report, steps, self._renewed)
        )

    def _renewed(self, _connection: Connection) -> None:
        """The database was replaced by one that may hold nothing: put back what rows of this process refer to."""

    def _report(self, trouble: Trouble, detail: str) -> None:
        self.notes.append(f"{trouble.value}: {detail}")
        if self._log is not None:
            why = Why.STORE_DAMAGED if trouble is Trouble.CORRUPT else Why.STORE_UNUSABLE
            self._log.decide(Action.FALLBACK, why, "profile store", trouble=trouble.name.lower(), detail=detail)

    @property
    def path(self) -> Path | None:
        """The file; None where there is none: memory, or a server's database."""
        return self.database.path

    @property
    def counts(self) -> dict[str, int]:
        """How often the file was busy, damaged, full or refused, and rows that could not be read."""
        return {**self.database.counts, **{f"skipped_{t}": n for t, n in self.skipped.items()}}

    # -- rows

    def add_rows(self, table: Table, values: list[dict[str, Any]]) -> None:
        """Add rows, some at a time."""
        for at in range(0, len(values), BATCH):
            part = values[at : at + BATCH]
            self.database.write(lambda c, part=part: c.execute(insert(table), part) and None)

    def rows_of(self, table: str, query: Any, one: Callable[[Row[Any]], Any]) -> list[Any]:
        """Rows that can be read; the others are counted."""
        found = self.database.read(lambda c: c.execute(query).all())
        return [made for r in found if (made := self.checked(table, lambda r=r: one(r))) is not None]

    def checked(self, table: str, make: Callable[[], Any]) -> Any:
        """What a row says; None, counted, where it cannot be read."""
        try:
            return make()
        except (ValueError, TypeError, KeyError) as e:
            self.skipped[table] += 1
            if len(self.notes) < 100:
                self.notes.append(f"a row of {table} was skipped: {e}")
            return None


def new_key(result: Any) -> int:
    """The number of a row that was just added."""
    return int(result.inserted_primary_key[0])
