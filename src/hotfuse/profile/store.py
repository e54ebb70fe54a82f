"""The profile store: what was measured, predicted and decided, kept for the next process.

    store = Store.open(settings.profiles or path)
    machine = store.machine(fingerprint())
    store.record_measurements([Measurement(...), ...], machine=machine)
    rows = store.measurements(machine=machine, family="gemm")

It never fails a caller over the state of its file: see `profile.database` for what happens instead, `store.notes` for what did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import URL, Connection, Row, Table, delete, func, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from hotfuse.base.errors import InputError
from hotfuse.base.events import EventLog
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.profile import store_schema as s
from hotfuse.profile.learned_tables import LearnedTables
from hotfuse.profile.rows import (
    SOURCES,
    Measurement,
    PartitionProfile,
    StoredDecision,
    StoredMachine,
    SubgraphProfile,
    numbers_from_text,
    numbers_to_text,
    object_from_text,
)
from hotfuse.profile.tables import BATCH, new_key

TIMES = ("mean_ns", "p10_ns", "p50_ns", "p90_ns", "bytes", "flops")
"""Numbers that profiles have in common."""


def store_place(place: str | os.PathLike[str]) -> Path | URL | None:
    """The file or server that a path or URL names; None is memory."""
    text = os.fspath(place)
    if "://" not in text:
        return None if text == ":memory:" else Path(text).expanduser()
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as e:
        hint = "a path, sqlite:///path or postgresql://user@host/database"
        raise InputError(f"the profile store {text!r} cannot be understood", because=str(e), hint=hint) from e
    if url.get_backend_name() == "postgresql":
        return url
    if url.get_backend_name() != "sqlite":
        raise InputError(
            f"the profile store cannot be a {url.get_backend_name()} database",
            because="only SQLite and PostgreSQL are supported",
            hint="a path, sqlite:///path or postgresql://user@host/database",
        )
    return Path(url.database).expanduser() if url.database and url.database != ":memory:" else None


class Store(LearnedTables):
    """An open store; safe to use from several threads, and after a fork."""

    @classmethod
    def open(cls, place: str | os.PathLike[str], log: EventLog | None = None) -> Store:
        """Open or begin the store at a path, `sqlite:///path` or `postgresql://…`; `:memory:` keeps nothing."""
        return cls(store_place(place), log)

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- machines

    def machine(self, who: Fingerprint, peaks: Mapping[str, Any] | None = None) -> int:
        """The number of a machine, which is added or brought up to date; measured peaks are kept with it."""

        def work(c: Connection) -> int:
            t = s.machines
            mine = (t.c.identity_key == who.key) & (t.c.tuning_key == who.tuning_key)
            changes: dict[str, Any] = {"seen_at": time.time()}
            if peaks is not None:
                changes["peaks"] = json.dumps(peaks)
            found = c.execute(select(t.c.id).where(mine)).scalar()
            if found is not None:
                c.execute(update(t).where(t.c.id == found).values(**changes))
                return int(found)
            return new_key(c.execute(insert(t).values(**values, **changes)))

        values = {
            "identity_key": who.key, "tuning_key": who.tuning_key,
            "identity": json.dumps(dict(who.identity)), "tuning": json.dumps(dict(who.tuning)),
        }  # fmt: skip
        number = self.database.write(work)
        known = {} if peaks is None else {"peaks": json.dumps(peaks)}
        self._numbered[number] = {**self._numbered.get(number, {}), **values, **known}
        return number

    def _renewed(self, connection: Connection) -> None:
        """Machines keep the numbers that this process knows them by."""
        for number, values in self._numbered.items():
            connection.execute(insert(s.machines).prefix_with("OR IGNORE").values(id=number, seen_at=time.time(), **values))

    def machines(self) -> list[StoredMachine]:
        """All that are known, the most recently seen first."""

        def one(r: Row[Any]) -> StoredMachine:
            peaks = None if r.peaks is None else object_from_text(r.peaks)
            identity, tuning = ({str(k): str(v) for k, v in object_from_text(t).items()} for t in (r.identity, r.tuning))
            return StoredMachine(int(r.id), f"{r.identity_key[:8]}-{r.tuning_key[:8]}", identity, tuning, peaks, float(r.seen_at))

        return self.rows_of("machines", select(s.machines).order_by(s.machines.c.seen_at.desc()), one)

    def peaks(self, machine: int) -> dict[str, Any] | None:
        """What was measured of a machine's limits, if anything was."""
        t = s.machines
        text = self.database.read(lambda c: c.execute(select(t.c.peaks).where(t.c.id == machine)).scalar())
        return self.checked("machines", lambda: object_from_text(text)) if text else None

    # -- measurements

    def record_measurements(self, rows: Iterable[Measurement], machine: int | None = None) -> int:
        """Add rows; how many there were."""
        values: list[dict[str, Any]] = []
        for m in rows:
            if m.source not in SOURCES:
                raise InputError(f"measurements come from {', '.join(SOURCES)}, not {m.source!r}")
            values.append(
                {
                    "machine_id": machine if m.machine is None else m.machine, "kernel": m.kernel, "family": m.family,
                    "features": numbers_to_text(m.features), "dtype": m.dtype, "threads": m.threads,
                    "time_ns": float(m.time_ns), "noise": float(m.noise), "source": m.source, "at": m.at or time.time(),
                }
            )  # fmt: skip
        self.add_rows(s.measurements, values)
        return len(values)

    def measurements(
        self, *, machine: int | None = None, family: str | None = None, source: str | Sequence[str] | None = None,
        kernel: str | None = None, threads: int | None = None, since: float | None = None, limit: int | None = None,
    ) -> list[Measurement]:  # fmt: skip
        """The rows that fit, newest first."""
        t = s.measurements
        query = select(t).order_by(t.c.at.desc(), t.c.id.desc())
        for column, wanted in (
            (t.c.machine_id, machine),
            (t.c.family, family),
            (t.c.kernel, kernel),
            (t.c.threads, threads),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if source is not None:
            query = query.where(t.c.source.in_([source] if isinstance(source, str) else source))
        if since is not None:
            query = query.where(t.c.at >= since)

        def one(r: Row[Any]) -> Measurement:
            if r.source not in SOURCES:
                raise ValueError(f"source {r.source!r}")
            features = numbers_from_text(r.features)
            return Measurement(
                str(r.kernel), str(r.family), features, str(r.dtype), int(r.threads), float(r.time_ns), float(r.noise), r.source,
                float(r.at), r.machine_id,
            )  # fmt: skip

        return self.rows_of("measurements", query if limit is None else query.limit(limit), one)

    def measured_threads(self, machine: int) -> set[int]:
        """Numbers of threads that a machine's rows were measured with."""
        t = s.measurements
        query = select(t.c.threads).where(t.c.machine_id == machine).distinct()
        return {int(n) for (n,) in self.database.read(lambda c: c.execute(query).all())}

    # -- problems

    def record_problem(self, key: str, graph: str, sizes: Mapping[str, int]) -> None:
        """Remember a group that a model was cut into, as text, with the sizes of a call: calibration measures it."""

        def work(c: Connection) -> None:
            c.execute(delete(s.problems).where(s.problems.c.key == key))
            c.execute(
                insert(s.problems).values(key=key, graph=graph, sizes=numbers_to_text(sizes), seen_at=time.time())
            )

        self.database.write(work)

    def problems(self, limit: int = 200) -> list[tuple[str, dict[str, int]]]:
        """Groups of models that were served, newest first: their graphs as text, and sizes."""
        query = select(s.problems).order_by(s.problems.c.seen_at.desc()).limit(limit)

        def one(r: Row[Any]) -> tuple[str, dict[str, int]]:
            return str(r.graph), {n: int(v) for n, v in numbers_from_text(r.sizes).items()}

        return self.rows_of("problems", query, one)

    # -- models and their partitions

    def record_graph(self, graph: str, name: str) -> None:
        """Remember a model by the hash of its graph."""

        def work(c: Connection) -> None:
            c.execute(delete(s.models).where(s.models.c.graph == graph))
            c.execute(insert(s.models).values(graph=graph, name=name, seen_at=time.time()))

        self.database.write(work)

    def graphs(self) -> dict[str, str]:
        """Names of known models by graph."""
        query = select(s.models.c.graph, s.models.c.name)
        return {r.graph: r.name for r in self.database.read(lambda c: c.execute(query).all())}

    def record_partitions(self, rows: Iterable[PartitionProfile], machine: int | None = None) -> None:
        """Put profiles in the place of older ones of the same partition, signature and machine."""
        t = s.partition_profiles
        given = list(rows)

        def work(c: Connection) -> None:
            for p in given:
                who = machine if p.machine is None else p.machine
                same = (t.c.graph == p.graph) & (t.c.partition == p.partition) & (t.c.signature == p.signature)
                c.execute(delete(t).where(same, t.c.machine_id.is_(None) if who is None else t.c.machine_id == who))
                values = {n: getattr(p, n) for n in p.__slots__ if n not in ("machine", "at", "evidence")}
                evidence = json.dumps(dict(p.evidence))
                c.execute(insert(t).values(machine_id=who, at=p.at or time.time(), evidence=evidence, **values))

        if given:
            self.database.write(work)

    def partitions(self, graph: str, machine: int | None = None) -> list[PartitionProfile]:
        """The profiles of a model's partitions."""
        t = s.partition_profiles
        query = select(t).where(t.c.graph == graph).order_by(t.c.partition, t.c.signature)
        if machine is not None:
            query = query.where(t.c.machine_id == machine)

        def one(r: Row[Any]) -> PartitionProfile:
            numbers = {
                n: float(getattr(r, n)) for n in ("mean_ns", "p10_ns", "p50_ns", "p90_ns", "bytes", "flops", "at")
            }
            return PartitionProfile(
                graph=r.graph, partition=r.partition, signature=r.signature, calls=int(r.calls), bottleneck=r.bottleneck,
                evidence=object_from_text(r.evidence), machine=r.machine_id, **numbers,
            )  # fmt: skip

        return self.rows_of("partition_profiles", query, one)

    # -- pieces of models, by what they compute

    def record_subgraphs(self, rows: Iterable[SubgraphProfile], machine: int) -> None:
        """Add profiles: the history of a piece is all of its rows."""
        same = ("subgraph", "ops", "sizes", "threads", "tier", "calls", "share", "bottleneck", *TIMES)
        values = [
            {**{n: getattr(p, n) for n in same}, "evidence": json.dumps(dict(p.evidence)), "machine_id": machine,
             "at": p.at or time.time()}
            for p in rows
        ]  # fmt: skip
        self.add_rows(s.subgraph_profiles, values)

    def subgraphs(self, subgraph: str = "", machine: int | None = None, limit: int = 1000) -> list[SubgraphProfile]:
        """Profiles of pieces whose hash begins so, the newest first."""
        t = s.subgraph_profiles
        query = select(t).where(t.c.subgraph.startswith(subgraph, autoescape=True)).order_by(t.c.at.desc(), t.c.id.desc())
        if machine is not None:
            query = query.where(t.c.machine_id == machine)
        return self.rows_of("subgraph_profiles", query.limit(limit), _subgraph)

    def top_subgraphs(self, machine: int | None, limit: int) -> list[tuple[SubgraphProfile, float, int]]:
        """The pieces that took most time: the newest profile of each, the nanoseconds of all sampled calls, and how many."""
        t = s.subgraph_profiles
        key = (t.c.subgraph, t.c.machine_id, t.c.sizes, t.c.threads, t.c.tier)
        total = func.sum(t.c.mean_ns * t.c.calls).label("total")
        query = select(func.max(t.c.id).label("newest"), total, func.sum(t.c.calls).label("calls")).group_by(*key)
        if machine is not None:
            query = query.where(t.c.machine_id == machine)
        found = self.database.read(lambda c: c.execute(query.order_by(total.desc()).limit(limit)).all())
        newest = {r.newest: (float(r.total), int(r.calls)) for r in found}
        rows = select(t).where(t.c.id.in_(newest))
        made = self.rows_of("subgraph_profiles", rows, lambda r: (_subgraph(r), *newest[r.id]))
        return sorted(made, key=lambda m: -m[1])

    def rows_by_machine(self) -> dict[int, int]:
        """Measurements of each machine."""
        t = s.measurements
        query = select(t.c.machine_id, func.count()).where(t.c.machine_id.is_not(None)).group_by(t.c.machine_id)
        return {int(m): int(n) for m, n in self.database.read(lambda c: c.execute(query).all())}

    def origins(self) -> dict[str, tuple[str, str, float]]:
        """Host, version and when it was last heard of, of every store that rows came from."""
        found = self.database.read(lambda c: c.execute(select(s.origins)).all())
        return {str(r.uid): (str(r.host), str(r.version), float(r.seen_at)) for r in found}

    # -- decisions

    def record_decisions(self, rows: Iterable[StoredDecision], machine: int | None = None) -> None:
        """Add decisions."""
        values = [
            {
                "graph": d.graph, "action": d.action, "why": d.why, "subject": d.subject, "evidence": json.dumps(dict(d.evidence)),
                "predicted_ns": d.predicted_ns, "measured_ns": d.measured_ns, "at": d.at or time.time(), "machine_id": machine,
            }
            for d in rows
        ]  # fmt: skip
        self.add_rows(s.decisions, values)

    def decisions(self, graph: str | None = None, limit: int = 1000) -> list[StoredDecision]:
        """Decisions, newest first."""
        t = s.decisions
        query = select(t).order_by(t.c.at.desc(), t.c.id.desc()).limit(limit)

        def one(r: Row[Any]) -> StoredDecision:
            evidence = object_from_text(r.evidence)
            return StoredDecision(
                r.graph, r.action, r.why, r.subject, evidence, r.predicted_ns, r.measured_ns, float(r.at)
            )

        return self.rows_of("decisions", query if graph is None else query.where(t.c.graph == graph), one)

    # -- the file

    def info(self) -> dict[str, Any]:
        """What the store holds and how it is kept."""

        def work(c: Connection) -> dict[str, Any]:
            rows = {t.name: int(c.execute(select(func.count()).select_from(t)).scalar() or 0) for t in s.TABLES}
            return {**self.database.describe(c), "rows": rows}

        return {
            "path": self.database.place,
            **self.database.read(work),
            "counts": self.counts,
            "notes": list(self.notes),
        }

    def prune(self, keep: int, since: float | None = None) -> dict[str, int]:
        """Keep only the newest rows of tables that grow with use, and none from before a time; gives how many were dropped.

        The row with the highest number stays. SQLite would give its number to another row, and readers that remember up to
        which number they sent or imported would take the new row for the old one."""

        def work(c: Connection) -> dict[str, int]:
            dropped: dict[str, int] = {}
            for t in s.GROWING:
                older = delete(t).where(t.c.id < select(func.max(t.c.id)).scalar_subquery())
                dropped[t.name] = 0 if since is None else c.execute(older.where(t.c.at < since)).rowcount
                if int(c.execute(select(func.count()).select_from(t)).scalar() or 0) > keep:
                    newest = select(t.c.id).order_by(t.c.at.desc(), t.c.id.desc()).limit(keep)
                    dropped[t.name] += c.execute(older.where(t.c.id.not_in(newest))).rowcount
            return dropped

        return self.database.write(work)

    def vacuum(self) -> None:
        """Give room that deleted rows left back to the system."""
        self.database.maintain()

    def export(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every row of every table as (table, plain values); bytes as hexadecimal text."""
        for table in s.TABLES:
            last = -1
            while rows := self._page(table, last):
                for r in rows:
                    values = dict(r._mapping)  # pyright: ignore[reportPrivateUsage]
                    yield table.name, {k: v.hex() if isinstance(v, bytes) else v for k, v in values.items()}
                if "id" not in table.c:
                    break
                last = int(rows[-1].id)

    def _page(self, table: Table, after: int) -> Sequence[Row[Any]]:
        query = select(table)
        if "id" in table.c:
            query = query.where(table.c.id > after).order_by(table.c.id).limit(BATCH)
        return self.database.read(lambda c: c.execute(query).all())


def _subgraph(r: Row[Any]) -> SubgraphProfile:
    numbers = {n: float(getattr(r, n)) for n in (*TIMES, "share", "at")}
    return SubgraphProfile(
        str(r.subgraph), str(r.ops), str(r.sizes), int(r.threads), int(r.tier), int(r.calls), bottleneck=str(r.bottleneck),
        evidence=object_from_text(r.evidence), machine=r.machine_id, origin=str(r.origin), **numbers,
    )  # fmt: skip
