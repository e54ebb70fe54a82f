"""The part of the profile store that is about performance: models as arrays, what came true of predictions, the machine's speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, func, insert, select, update

from hotfuse.base.errors import InputError
from hotfuse.profile import store_schema as s
from hotfuse.profile.rows import SpeedRow, StoredModel, array_from_row, array_to_row, list_from_text, object_from_text
from hotfuse.profile.tables import Tables, new_key


class LearnedTables(Tables):
    """What was learned of a machine."""

    # -- performance models

    def save_model(
        self, name: str, arrays: Mapping[str, Any], facts: Mapping[str, Any] | None = None, machine: int | None = None,
        origin: str = "",
    ) -> int:  # fmt: skip
        """Keep a model as a new version; its number. `origin` is empty for one that was trained here."""
        made = [array_to_row(n, a) for n, a in arrays.items()]
        plain = json.dumps(dict(facts or {}))

        def work(c: Connection) -> int:
            t = s.hpm_models
            version = (c.execute(select(func.max(t.c.version)).where(t.c.name == name)).scalar() or 0) + 1
            about = {"machine_id": machine, "facts": plain, "at": time.time(), "origin": origin}
            values = {"name": name, "version": version, **about}
            key = new_key(c.execute(insert(t).values(**values)))
            if made:
                c.execute(insert(s.hpm_arrays), [{"model_id": key, **row} for row in made])
            return version

        return self.database.write(work)

    def load_model(self, name: str, version: int | None = None, machine: int | None = None) -> StoredModel | None:
        """A model, the newest (of a machine) unless told; None where there is none or its bytes do not fit its description."""
        t, a = s.hpm_models, s.hpm_arrays

        def work(c: Connection) -> tuple[Row[Any], Sequence[Row[Any]]] | None:
            query = select(t).where(t.c.name == name).order_by(t.c.version.desc()).limit(1)
            if machine is not None:
                query = query.where(t.c.machine_id == machine)
            head = c.execute(query if version is None else query.where(t.c.version == version)).first()
            return None if head is None else (head, c.execute(select(a).where(a.c.model_id == head.id)).all())

        found = self.database.read(work)
        if found is None:
            return None
        head, rows = found

        def built() -> StoredModel:
            arrays = {str(r.name): array_from_row(r.dtype, r.shape, bytes(r.data)) for r in rows}
            return StoredModel(
                name, int(head.version), arrays, object_from_text(head.facts), float(head.at), head.machine_id
            )

        return self.checked("hpm_models", built)

    def model_dates(self, name: str, machine: int | None = None) -> dict[int, tuple[float, dict[str, Any]]]:
        """Per version of a model, oldest first, when it was trained and its facts; without its arrays."""
        t = s.hpm_models
        query = select(t.c.version, t.c.at, t.c.facts).where(t.c.name == name).order_by(t.c.version)
        if machine is not None:
            query = query.where(t.c.machine_id == machine)
        rows = self.rows_of("hpm_models", query, lambda r: (int(r.version), float(r.at), object_from_text(r.facts)))
        return {version: (at, facts) for version, at, facts in rows}

    # -- memories

    def remember(self, name: str, more: Mapping[str, Sequence[float]], machine: int | None = None) -> None:
        """Add numbers to those that are remembered under each key: what several processes learned adds up."""
        t = s.memories
        for key, numbers in more.items():
            if not all(map(math.isfinite, numbers)):
                raise InputError(f"{list(numbers)} cannot be remembered as {name} {key!r}")

        def work(c: Connection) -> None:
            for key, numbers in more.items():
                mine = (t.c.name == name) & (t.c.key == key) & (t.c.origin == "") & _of_machine(t, machine)
                row = c.execute(select(t.c.id, t.c.numbers).where(mine)).first()
                old = None if row is None else self.checked("memories", lambda row=row: list_from_text(row.numbers))
                known = old if old is not None and len(old) == len(numbers) else [0.0] * len(numbers)
                sums = [a + b for a, b in zip(known, numbers, strict=True)]
                values = {"numbers": json.dumps(sums), "at": time.time()}
                if row is None:
                    c.execute(insert(t).values(machine_id=machine, name=name, key=key, **values))
                else:
                    c.execute(update(t).where(t.c.id == row.id).values(**values))

        if more:
            self.database.write(work)

    def remembered(self, name: str, machine: int | None = None) -> dict[str, list[float]]:
        """Everything that was added up under a name, here and by those who sent it."""
        t = s.memories
        query = select(t).where((t.c.name == name) & _of_machine(t, machine)).order_by(t.c.key)
        sums: dict[str, list[float]] = {}
        for key, numbers in self.rows_of("memories", query, lambda r: (str(r.key), list_from_text(r.numbers))):
            known = sums.get(key, [0.0] * len(numbers))
            if len(known) == len(numbers):
                sums[key] = [a + b for a, b in zip(known, numbers, strict=True)]
        return sums

    # -- drift

    def record_drift(self, rows: Iterable[SpeedRow], machine: int | None = None) -> None:
        """Add looks at the machine's speed."""
        values = [
            {
                "machine_id": machine if d.machine is None else d.machine, "probe": d.probe, "value": float(d.value),
                "baseline": float(d.baseline), "at": d.at or time.time(),
            }
            for d in rows
        ]  # fmt: skip
        self.add_rows(s.drift, values)

    def drift(self, *, machine: int | None = None, probe: str | None = None, limit: int = 1000) -> list[SpeedRow]:
        """Looks at the machine's speed, newest first."""
        t = s.drift
        query = select(t).order_by(t.c.at.desc(), t.c.id.desc()).limit(limit)
        if machine is not None:
            query = query.where(t.c.machine_id == machine)
        if probe is not None:
            query = query.where(t.c.probe == probe)
        return self.rows_of(
            "drift", query, lambda r: SpeedRow(str(r.probe), float(r.value), float(r.baseline), float(r.at), r.machine_id)
        )


def _of_machine(table: Table, machine: int | None) -> ColumnElement[bool]:
    return table.c.machine_id.is_(None) if machine is None else table.c.machine_id == machine
