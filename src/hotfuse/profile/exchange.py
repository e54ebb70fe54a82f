"""Rows between a machine's own file and the database that a fleet shares.

    push    what was measured here, in batches: rows and how far they go are written in one transaction there, so each arrives once
    pull    what others measured on the same hardware: kernels, verdicts, memories, and a performance model where there is none;
            of other hardware the newest kernels, and the model of all machines: what a machine that nobody saw begins with

The file is where everything is written and read; the database only gets what the file has. So it may be away, slow, full or frozen
for as long as it likes: rows wait in the file. Graphs of models, weights and inputs do not travel, hashes and numbers do.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import field
from importlib.metadata import version
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Table, delete, func, insert, select, update

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.profile import store_schema as s
from hotfuse.profile.postgres import as_text, from_text
from hotfuse.profile.store import Store
from hotfuse.profile.tables import new_key

T = TypeVar("T")
SENT: tuple[Table, ...] = (s.measurements, s.decisions, s.subgraph_profiles)
"""Tables whose rows are added and never changed, in the order they travel."""
SENT_UP_TO, RECEIVED = "sent", "received"
"""Whose cursors the file keeps for itself: how far it sent, and how far it received."""
BATCH = 500
"""Rows of one transaction."""
MAX_PULLED = 20_000
"""Rows of one table that one visit brings, the newest."""
MAX_ELSEWHERE, MAX_MACHINES = 1500, 12
"""Rows of a machine with other hardware that one visit brings, and how many such machines: what a model of all is trained on."""


@dataclass(slots=True)
class Exchange:
    """Between one file and one database."""

    local: Store
    central: Store
    sent: int = 0
    received: int = 0
    _machines: dict[int, int] = field(default_factory=dict[int, int])
    """Numbers of machines: here, and there."""
    _uid: str = ""

    @property
    def uid(self) -> str:
        """The file's name among all that send rows."""
        if not self._uid:
            self._uid = self.local.database.write(own_uid)
        return self._uid

    # --- sending ---------------------------------------------------------------------------------

    def push(self) -> int:
        """Send what is new; how many rows there were."""
        before = self.sent
        self._transact(self._introduce)
        for table in SENT:
            while self._push_rows(table) == BATCH:
                pass
        self._push_memories()
        self._push_models()
        return self.sent - before

    def waiting(self) -> int:
        """Rows that were not sent so far, as far as is known here."""
        def work(c: Connection) -> int:
            total = 0
            for t in SENT:
                last = cursor(c, SENT_UP_TO, t.name)
                own = select(func.count()).select_from(t).where((t.c.id > last) & (t.c.origin == ""))
                total += int(c.execute(own).scalar() or 0)
            return total

        return self.local.database.read(work)

    def _introduce(self, c: Connection) -> None:
        """Say who sends."""
        about = {"own": 0, "host": platform.node()[:128], "version": version("hotfuse"), "seen_at": time.time()}
        known = c.execute(select(s.origins.c.uid).where(s.origins.c.uid == self.uid)).first()
        if known is None:
            c.execute(insert(s.origins).values(uid=self.uid, **about))
        else:
            c.execute(update(s.origins).where(s.origins.c.uid == self.uid).values(**about))

    def _push_rows(self, table: Table) -> int:
        def work(c: Connection) -> tuple[int, int]:
            last = cursor(c, self.uid, table.name)
            query = select(table).where((table.c.id > last) & (table.c.origin == "")).order_by(table.c.id).limit(BATCH)
            rows = self.local.database.read(lambda here: here.execute(query).all())
            if not rows:
                return 0, last
            _add(c, table, [self._theirs(c, r) for r in rows])
            advance(c, self.uid, table.name, int(rows[-1].id))
            return len(rows), int(rows[-1].id)

        sent, last = self._transact(work)
        if sent:
            self.local.database.write(lambda c: advance(c, SENT_UP_TO, table.name, last))
        self.sent += sent
        return sent

    def _transact(self, work: Callable[[Connection], T]) -> T:
        """Write there; numbers of machines that are known only if all of it succeeds are not remembered from one to the next."""

        def once(c: Connection) -> T:
            self._machines.clear()
            return work(c)

        return self.central.database.write(once)

    def _theirs(self, c: Connection, row: Row[Any]) -> dict[str, Any]:
        """A row as it stands there: without its number, with the sender and the number of the machine there."""
        return {**_plain(row), "machine_id": self._machine(c, row.machine_id), "origin": self.uid}

    def _machine(self, c: Connection, number: int | None) -> int | None:
        if number is None or number in self._machines:
            return None if number is None else self._machines[number]
        t = s.machines
        mine = self.local.database.read(lambda here: here.execute(select(t).where(t.c.id == number)).first())
        if mine is None:
            return None
        same = (t.c.identity_key == mine.identity_key) & (t.c.tuning_key == mine.tuning_key)
        there = c.execute(select(t.c.id).where(same)).scalar()
        values = _plain(mine)
        if there is None:
            there = new_key(c.execute(insert(t).values(**values)))
        else:
            known = {k: v for k, v in values.items() if k in ("peaks", "seen_at") and v is not None}
            c.execute(update(t).where(t.c.id == there).values(**known))
        self._machines[number] = int(there)
        return int(there)

    def _push_memories(self) -> None:
        """What adds up, as it stands: a row for each sender, which is replaced."""
        t = s.memories

        def work(c: Connection) -> int:
            last = cursor(c, self.uid, t.name)
            rows = self.local.database.read(lambda here: _changed_memories(here, last))
            for r in rows:
                values = self._theirs(c, r)
                who = values["machine_id"]
                machine = t.c.machine_id.is_(None) if who is None else t.c.machine_id == who
                c.execute(delete(t).where((t.c.origin == self.uid) & (t.c.name == r.name) & (t.c.key == r.key) & machine))
                c.execute(insert(t).values(**values))
            if rows:
                advance(c, self.uid, t.name, int(rows[-1].at * 1e6) + 1)
            return len(rows)

        self.sent += self._transact(work)

    def _push_models(self) -> None:
        """Performance models, the newest of each name: others with the same hardware begin with it."""
        t, a = s.hpm_models, s.hpm_arrays

        def work(c: Connection) -> int:
            last = cursor(c, self.uid, t.name)
            query = select(t).where((t.c.id > last) & (t.c.origin == "")).order_by(t.c.id)
            heads = self.local.database.read(lambda here: here.execute(query).all())
            for head in {(h.name, h.machine_id): h for h in heads}.values():
                arrays = self.local.database.read(lambda here, h=head: here.execute(select(a).where(a.c.model_id == h.id)).all())
                values = self._theirs(c, head)
                values["version"] = int(c.execute(select(func.max(t.c.version)).where(t.c.name == head.name)).scalar() or 0) + 1
                key = new_key(c.execute(insert(t).values(**values)))
                parts = ("name", "dtype", "shape", "data")
                if arrays:
                    c.execute(insert(a), [{"model_id": key, **{p: getattr(r, p) for p in parts}} for r in arrays])
            if heads:
                advance(c, self.uid, t.name, int(heads[-1].id))
            return len(heads)

        self.sent += self._transact(work)

    # --- receiving -------------------------------------------------------------------------------

    def pull(self, who: Fingerprint) -> int:
        """Take over what others learned, on the same hardware and elsewhere; how many rows there were."""
        t = s.machines
        same = (t.c.identity_key == who.key) & (t.c.tuning_key == who.tuning_key)
        there = self.central.database.read(lambda c: c.execute(select(t.c.id).where(same)).scalar())
        here, before = self.local.machine(who), self.received
        if there is not None:
            for table in (s.measurements, s.decisions):
                self._pull_rows(table, int(there), here)
            self._pull_memories(int(there), here)
            self._pull_model(int(there), here)
        self._pull_elsewhere(who)
        self._pull_common_models()
        self._pull_origins()
        return self.received - before

    def _pull_elsewhere(self, who: Fingerprint) -> None:
        """Kernels that were measured on other hardware, with the machines they belong to."""
        for other in self.central.machines()[: MAX_MACHINES + 1]:
            print_of = Fingerprint(tuple(sorted(other.identity.items())), tuple(sorted(other.tuning.items())))
            if print_of == who or other.peaks is None:
                continue
            name = f"measurements of {other.name}"
            if rows := self._newer(s.measurements, other.id, name, MAX_ELSEWHERE):
                self._take(s.measurements, rows, self.local.machine(print_of, other.peaks), name)

    def _pull_common_models(self) -> None:
        """The newest performance model of each name that is about no one machine."""
        t, name = s.hpm_models, "models of all machines"
        last = self.local.database.read(lambda c: cursor(c, RECEIVED, name))
        new = t.c.machine_id.is_(None) & (t.c.origin != self.uid) & (t.c.id > last)
        heads = self.central.database.read(lambda c: c.execute(select(t.c.id, t.c.name).where(new).order_by(t.c.id)).all())
        for common in {h.name for h in heads}:
            if (found := self.central.load_model(common)) is not None:
                self.local.save_model(common, found.arrays, {**found.facts, "received": True}, None, origin=RECEIVED)
                self.received += 1
        if heads:
            self.local.database.write(lambda c: advance(c, RECEIVED, name, int(heads[-1].id)))

    def _pull_rows(self, table: Table, there: int, here: int) -> None:
        if rows := self._newer(table, there, table.name, MAX_PULLED):
            self._take(table, rows, here, table.name)

    def _newer(self, table: Table, there: int, name: str, most: int) -> Sequence[Row[Any]]:
        """Others' rows of a machine that were not received so far, newest first."""
        last = self.local.database.read(lambda c: cursor(c, RECEIVED, name))
        others = (table.c.machine_id == there) & (table.c.origin != self.uid) & (table.c.id > last)
        query = select(table).where(others).order_by(table.c.id.desc()).limit(most)
        return self.central.database.read(lambda c: c.execute(query).all())

    def _take(self, table: Table, rows: Sequence[Row[Any]], here: int, name: str) -> None:
        values = [{**_plain(r), "machine_id": here} for r in reversed(rows)]

        def work(c: Connection) -> None:
            for at in range(0, len(values), BATCH):
                c.execute(insert(table), values[at : at + BATCH])
            advance(c, RECEIVED, name, int(rows[0].id))

        self.local.database.write(work)
        self.received += len(rows)

    def _pull_memories(self, there: int, here: int) -> None:
        """Those that have changed: senders' clocks differ, so times only tell a row from an older one of its own."""
        t = s.memories
        others = (t.c.machine_id == there) & (t.c.origin != self.uid)
        found = self.central.database.read(lambda c: c.execute(select(t).where(others).limit(MAX_PULLED)).all())
        own = self.local.database.read(lambda c: c.execute(select(t).where((t.c.machine_id == here) & (t.c.origin != ""))).all())
        known = {(r.origin, r.name, r.key): r.at for r in own}
        rows = [r for r in found if known.get((r.origin, r.name, r.key)) != r.at]

        def work(c: Connection) -> None:
            for r in rows:
                same = (t.c.origin == r.origin) & (t.c.name == r.name) & (t.c.key == r.key) & (t.c.machine_id == here)
                c.execute(delete(t).where(same))
                c.execute(insert(t).values(**{**_plain(r), "machine_id": here}))

        if rows:
            self.local.database.write(work)
            self.received += len(rows)

    def _pull_model(self, there: int, here: int) -> None:
        t = s.hpm_models
        mine = {n for (n,) in self.local.database.read(lambda c: c.execute(select(t.c.name).where(t.c.machine_id == here)).all())}
        names = self.central.database.read(lambda c: c.execute(select(t.c.name).where(t.c.machine_id == there).distinct()).all())
        for (name,) in names:
            if name not in mine and (found := self.central.load_model(name, machine=there)) is not None:
                self.local.save_model(name, found.arrays, {**found.facts, "received": True}, here, origin=RECEIVED)
                self.received += 1

    def _pull_origins(self) -> None:
        rows = self.central.database.read(lambda c: c.execute(select(s.origins).where(s.origins.c.uid != self.uid)).all())

        def work(c: Connection) -> None:
            for r in rows:
                c.execute(delete(s.origins).where(s.origins.c.uid == r.uid))
                c.execute(insert(s.origins).values(**dict(r._mapping)))  # pyright: ignore[reportPrivateUsage]

        self.local.database.write(work)


def _add(c: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of one table, in one statement: each may take a second. PostgreSQL reads them from one argument; a statement with an
    argument for every number is put together anew each time, which takes the interpreter lock from calls for tens of milliseconds.
    """
    if c.dialect.name == "postgresql":
        c.execute(from_text(table), {"rows": as_text(rows)})
    else:
        c.execute(insert(table), rows)


def _plain(row: Row[Any]) -> dict[str, Any]:
    return {k: v for k, v in row._mapping.items() if k != "id"}  # pyright: ignore[reportPrivateUsage]


def _changed_memories(c: Connection, after_us: int) -> Sequence[Row[Any]]:
    """A batch of what was added up here since a time, and all that was in the batch's last microsecond: the cursor passes it."""
    t = s.memories
    changed = select(t).where((t.c.at > after_us / 1e6) & (t.c.origin == "")).order_by(t.c.at)
    last = c.execute(changed.with_only_columns(t.c.at).offset(BATCH - 1).limit(1)).scalar()
    return c.execute(changed if last is None else changed.where(t.c.at <= (int(last * 1e6) + 1) / 1e6)).all()


def own_uid(c: Connection, made: str | None = None) -> str:
    """A store's name among all that send rows, made at first use; `made` is used if it has none yet."""
    t = s.origins
    found = c.execute(select(t.c.uid).where(t.c.own == 1)).scalar()
    if found is None:
        found = made or uuid.uuid4().hex
        c.execute(insert(t).values(uid=found, own=1, host=platform.node()[:128], version=version("hotfuse"), seen_at=time.time()))
    return str(found)


def cursor(c: Connection, origin: str, name: str) -> int:
    """Up to which row of a table somebody's rows have arrived."""
    t = s.cursors
    return int(c.execute(select(t.c.last).where((t.c.origin == origin) & (t.c.name == name))).scalar() or 0)


def advance(c: Connection, origin: str, name: str, last: int) -> None:
    """They have arrived up to this one."""
    t = s.cursors
    mine = (t.c.origin == origin) & (t.c.name == name)
    if c.execute(update(t).where(mine).values(last=last)).rowcount == 0:
        c.execute(insert(t).values(origin=origin, name=name, last=last))
