"""Rows of another store, from the lines that `hotfuse db export` writes: what was imported before is not added again.

A store names itself in its first line, and rows have the numbers they have there, so how far its rows have come is known here, as
it is for rows that are sent (`profile.exchange`). A line that is not a row of a table we know is the caller's error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any

from sqlalchemy import Connection, LargeBinary, Table, delete, insert, select
from sqlalchemy.exc import SQLAlchemyError

from hotfuse.base.errors import InputError
from hotfuse.profile import store_schema as s
from hotfuse.profile.exchange import advance, cursor
from hotfuse.profile.store import Store
from hotfuse.profile.tables import BATCH, new_key

_TABLES = {t.name: t for t in s.TABLES if t is not s.cursors}
_REPLACED = (s.models, s.problems)
"""Tables with a name instead of a number: a newer row takes the older one's place."""
Line = tuple[int, Table, dict[str, Any]]


class _Import:
    """One file on its way in."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.added: Counter[str] = Counter()
        self._from = ""
        self._machines: dict[int, int] = {}
        self._models: dict[int, int] = {}

    def rows(self, table: Table, lines: list[Line]) -> None:
        def work(c: Connection) -> int:
            last = cursor(c, self._from, table.name) if "id" in table.c else -1
            new = [row for _, _, row in lines if int(row.get("id", 0)) > last]
            if table is s.machines:  # all of them: later rows name them by number
                new = [row for _, _, row in lines]
            added = sum([self._row(c, table, row) for row in new])
            if new and "id" in table.c:
                advance(c, self._from, table.name, max(int(r["id"]) for r in new))
            return added

        try:
            self.added[table.name] += self.store.database.write(work)
        except (SQLAlchemyError, KeyError, ValueError, TypeError, OverflowError) as e:
            raise InputError(f"lines {lines[0][0]} to {lines[-1][0]} cannot be imported", because=str(e).splitlines()[0]) from e

    def _row(self, c: Connection, table: Table, row: dict[str, Any]) -> bool:
        """Add a row; whether it was new here."""
        number, values = int(row.get("id", 0)), {k: v for k, v in row.items() if k != "id"}
        if table is s.origins:
            self._from = str(values["uid"]) if values["own"] else self._from
            new = c.execute(select(table.c.uid).where(table.c.uid == values["uid"])).first() is None
            if new:
                c.execute(insert(table).values(**{**values, "own": 0}))
            return new
        if table is s.machines:
            same = (table.c.identity_key == values["identity_key"]) & (table.c.tuning_key == values["tuning_key"])
            known = c.execute(select(table.c.id).where(same)).scalar()
            self._machines[number] = int(known) if known is not None else new_key(c.execute(insert(table).values(**values)))
            return known is None
        if values.get("machine_id") is not None:
            values["machine_id"] = self._machines[int(values["machine_id"])]
        if "origin" in table.c:
            values["origin"] = values.get("origin") or self._from
        if table in _REPLACED:
            key = next(iter(table.primary_key.columns))
            seen = c.execute(select(table.c.seen_at).where(key == values[key.name])).scalar()
            if seen is not None and float(seen) >= float(values["seen_at"]):
                return False
            c.execute(delete(table).where(key == values[key.name]))
        if table is s.hpm_models:
            newest = select(table.c.version).where(table.c.name == values["name"]).order_by(table.c.version.desc())
            values["version"] = int(c.execute(newest).scalar() or 0) + 1
            self._models[number] = new_key(c.execute(insert(table).values(**values)))
            return True
        if table is s.hpm_arrays:
            values["model_id"] = self._models[int(values["model_id"])]
        c.execute(insert(table).values(**values))
        return True


def import_rows(store: Store, lines: Iterable[str]) -> dict[str, int]:
    """Add the rows of an exported store; how many were new, per table."""
    work = _Import(store)
    for table, group in groupby(_parsed(lines), key=lambda line: line[1]):
        while batch := list(islice(group, BATCH)):
            work.rows(table, batch)
    return dict(work.added)


def _parsed(lines: Iterable[str]) -> Iterator[Line]:
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            name, row = str(found["table"]), dict(found["row"])
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise InputError(f"line {number} is no row", because=str(e), hint="a file that hotfuse db export wrote") from e
        if name == s.cursors.name:
            continue
        table = _TABLES.get(name)
        if table is None or not set(row) <= set(table.c.keys()):
            raise InputError(f"line {number} is no row of a table we know", because=f"table {name!r}, columns {sorted(row)}"[:300])
        for column in table.c:
            if isinstance(column.type, LargeBinary) and isinstance(row.get(column.name), str):
                try:
                    row[column.name] = bytes.fromhex(row[column.name])
                except ValueError as e:
                    raise InputError(f"line {number} cannot be imported", because=str(e)) from e
        yield number, table, row
