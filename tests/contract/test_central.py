"""The fleet's database: the same store on PostgreSQL, and rows that arrive there once, whatever it does meanwhile."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import NullPool, create_engine, event, make_url, select

from hotfuse.base.errors import InputError
from hotfuse.base.events import EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.machine.fingerprint import Fingerprint, fingerprint
from hotfuse.profile import store_schema as s
from hotfuse.profile import sync as sync_module
from hotfuse.profile.exchange import BATCH, Exchange
from hotfuse.profile.postgres import HEAD, PostgresDatabase, Unreachable
from hotfuse.profile.rows import Measurement, StoredDecision, SubgraphProfile
from hotfuse.profile.store import Store
from hotfuse.profile.store_place import central, location
from hotfuse.profile.sync import CentralSync
from hotfuse.runtime.observe.record import _sync
from tests.postgres import new_database, server_pid

OTHER = Fingerprint((("arch", "x86_64"), ("features", "avx")), (("cores", "64"),))


@pytest.fixture(scope="module")
def url() -> str:
    return new_database()


@pytest.fixture
def fresh() -> str:
    return new_database()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "p.sqlite") as store:
        yield store


def _measured(n: int, family: str = "gemm") -> list[Measurement]:
    return [Measurement(f"k{i}", family, {"flops": float(i)}, "f32", 1, 1e3 + i, 0.01, "serve") for i in range(n)]


def _profile(name: str = "abc") -> SubgraphProfile:
    numbers = (2e3, 1e3, 2e3, 3e3, 4e3, 5e3, 0.5)
    return SubgraphProfile(name, "linear gelu", "16x64", 1, 1, 9, *numbers, "memory", {"source": "derived"})


def test_the_store_is_the_same_on_a_server(url: str) -> None:
    with Store.open(url) as store:
        machine = store.machine(fingerprint(), {"rate": 1})
        assert store.machine(fingerprint()) == machine and store.peaks(machine) == {"rate": 1}
        store.record_measurements(_measured(3), machine)
        assert [m.kernel for m in store.measurements(machine=machine, family="gemm")] == ["k2", "k1", "k0"]
        store.remember("arms", {"a": [1.0, 2.0]}, machine)
        store.remember("arms", {"a": [1.0, 0.5]}, machine)
        assert store.remembered("arms", machine) == {"a": [2.0, 2.5]}
        assert store.save_model("m", {"w": np.arange(6.0).reshape(2, 3)}, {"error": 0.1}, machine) == 1
        found = store.load_model("m", machine=machine)
        assert found is not None and found.arrays["w"].shape == (2, 3) and found.facts == {"error": 0.1}
        store.record_subgraphs([_profile()], machine)
        assert store.subgraphs("ab")[0].ops == "linear gelu" and store.subgraphs("zz") == []
        store.record_decisions([StoredDecision("g", "deploy", "faster")], machine)
        info = store.info()
        assert info["version"] == int(HEAD) and info["bytes"] > 0 and info["rows"]["decisions"] == 1
        assert store.prune(1)["measurements"] == 2 and len(store.measurements()) == 1
        store.vacuum()
        assert {t for t, _ in store.export()} >= {"machines", "measurements", "hpm_arrays", "subgraph_profiles"}


def test_many_begin_a_new_database_at_once(fresh: str) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(Store.open(fresh).machine(OTHER))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert found == [found[0]] * 6


def test_rows_arrive_once_with_who_sent_them(fresh: str, here: Store) -> None:
    machine = here.machine(fingerprint(), {"rate": 2})
    here.record_measurements(_measured(BATCH + 7), machine)
    here.record_subgraphs([_profile()], machine)
    here.record_decisions([StoredDecision("g", "deploy", "faster")], machine)
    here.remember("arms", {"a": [1.0]}, machine)
    with Store.open(fresh) as there:
        exchange = Exchange(here, there)
        assert exchange.waiting() == BATCH + 9
        assert exchange.push() == BATCH + 10 and exchange.push() == 0 and exchange.waiting() == 0
        assert Exchange(here, there).push() == 0  # a process that starts anew
        rows = there.info()["rows"]
        assert rows["measurements"] == BATCH + 7 and rows["subgraph_profiles"] == 1 and rows["memories"] == 1
        host, version, _ = there.origins()[exchange.uid]
        assert host and version and there.subgraphs()[0].origin == exchange.uid
        here.remember("arms", {"a": [2.0]}, machine)
        exchange.push()
        assert there.remembered("arms", there.machine(fingerprint())) == {"a": [3.0]}


def test_a_batch_is_one_short_statement(fresh: str, here: Store) -> None:
    """With an argument for every number it was put together anew each time: tens of milliseconds of the interpreter's lock."""
    machine, odd = here.machine(fingerprint(), {"rate": 2}), 'quotes "\' and \\ and ü, 100% :rows'
    here.record_measurements(_measured(BATCH), machine)
    here.record_subgraphs([_profile(odd)], machine)
    decisions = [StoredDecision("g", "deploy", odd, predicted_ns=ns) for ns in (0.1 + 0.2, 1e300, None, math.inf, math.nan)]
    here.record_decisions(decisions, machine)
    with Store.open(fresh) as there:
        said: list[str] = []
        assert isinstance(there.database, PostgresDatabase)
        event.listen(there.database.engine, "before_cursor_execute", lambda *a: said.append(a[2]))
        Exchange(here, there).push()
        added = [t for t in said if t.startswith("INSERT INTO measurements")]
        assert len(added) == 1 and len(added[0]) < 2000, added[0][:200]
        (own, other), t = (store.measurements(limit=BATCH) for store in (here, there)), s.decisions
        assert [(m.kernel, m.features, m.time_ns, m.at) for m in own] == [(m.kernel, m.features, m.time_ns, m.at) for m in other]
        assert there.subgraphs()[0].subgraph == odd
        rows, sent = (st.database.read(lambda c: c.execute(select(t).order_by(t.c.id)).all()) for st in (here, there))
        assert [(r.why, repr(r.predicted_ns), r.at) for r in rows] == [(r.why, repr(r.predicted_ns), r.at) for r in sent]


def test_a_batch_that_failed_half_way_is_sent_again_and_arrives_once(
    fresh: str, here: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.record_measurements(_measured(5), here.machine(fingerprint()))
    with Store.open(fresh) as there:
        exchange = Exchange(here, there)
        with monkeypatch.context() as broken:
            broken.setattr("hotfuse.profile.exchange.advance", _raises)
            with pytest.raises(RuntimeError):
                exchange.push()
        assert there.info()["rows"]["measurements"] == 0 and exchange.push() == 5
        assert there.info()["rows"]["measurements"] == 5


def test_rows_behind_a_prune_arrive_too(fresh: str, here: Store) -> None:
    """Where every row left, SQLite would begin to count anew, and the next rows would have numbers that were sent."""
    machine = here.machine(fingerprint())
    here.record_measurements(_measured(5), machine)
    with Store.open(fresh) as there:
        exchange = Exchange(here, there)
        assert exchange.push() == 5
        here.prune(0, since=time.time() + 60)
        here.record_measurements(_measured(3), machine)
        assert exchange.waiting() == 3 and exchange.push() == 3
        assert there.info()["rows"]["measurements"] == 8


def test_memories_of_one_moment_all_arrive(fresh: str, here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a batch that have the same time, as where a clock is coarse."""
    machine, now = here.machine(fingerprint()), time.time()
    with monkeypatch.context() as still:
        still.setattr("time.time", lambda: now)
        here.remember("arms", {f"a{i}": [1.0] for i in range(BATCH + 7)}, machine)
    with Store.open(fresh) as there:
        assert sum(Exchange(here, there).push() for _ in range(3)) == BATCH + 7
        assert len(there.remembered("arms", there.machine(fingerprint()))) == BATCH + 7


def _raises(*_args: object) -> None:
    raise RuntimeError("the connection broke")


def test_what_one_learned_another_with_the_same_hardware_takes_over(fresh: str, here: Store, tmp_path: Path) -> None:
    machine = here.machine(fingerprint())
    here.record_measurements(_measured(4), machine)
    here.record_decisions([StoredDecision("g", "refuse", "slower", evidence={"basis": "b"})], machine)
    here.remember("arms", {"a": [1.0, 5.0]}, machine)
    here.save_model("m", {"w": np.ones(3)}, {}, machine)
    elsewhere = here.machine(OTHER)
    here.record_measurements(_measured(2, "conv"), elsewhere)
    with Store.open(fresh) as there, Store.open(tmp_path / "second.sqlite") as second:
        Exchange(here, there).push()
        mine = second.machine(fingerprint())
        second.remember("arms", {"a": [1.0, 1.0]}, mine)
        exchange = Exchange(second, there)
        assert exchange.pull(fingerprint()) == 7 and exchange.pull(fingerprint()) == 0
        assert len(second.measurements(machine=mine)) == 4  # none of the other machine's
        assert [d.graph for d in second.decisions("g")] == ["g"]
        assert second.remembered("arms", mine) == {"a": [2.0, 6.0]}
        model = second.load_model("m", machine=mine)
        assert model is not None and model.facts["received"] is True
        assert exchange.push() == 1 and there.info()["rows"]["measurements"] == 6  # what was received does not go back
        Exchange(here, there).pull(fingerprint())
        assert here.remembered("arms", machine) == {"a": [2.0, 6.0]} and len(here.measurements(machine=machine)) == 4


def test_a_database_that_is_away_costs_a_decision_and_gets_the_rows_later(tmp_path: Path, here: Store, fresh: str) -> None:
    here.record_measurements(_measured(3), here.machine(fingerprint()))
    log = EventLog(100)
    away = CentralSync(f"postgresql://nobody@/none?host={tmp_path}", here, log, 600, 1000)
    try:
        assert not away.once() and not away.once()
        assert [d.why for d in log.decisions].count(Why.DATABASE_AWAY) == 1
        assert away.stats()["state"].startswith("away: ") and away.stats()["waiting"] == 3
    finally:
        away.stop()
    back = CentralSync(fresh, here, log, 600, 1000)
    try:
        assert back.once() and back.stats()["sent"] == 3 and back.stats()["waiting"] == 0 and back.stats()["state"] == "in use"
    finally:
        back.stop()
    with Store.open(fresh) as there:
        assert there.info()["rows"]["measurements"] == 3


def test_exchanges_leave_calls_alone(tmp_path: Path, here: Store, fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange makes thousands of objects, an error of the database too: no collection of all objects comes of it."""
    usual, during = gc.get_threshold()[2], list[int]()
    push = Exchange.push

    def noted(self: Exchange) -> int:
        during.append(gc.get_threshold()[2])
        return push(self)

    monkeypatch.setattr(Exchange, "push", noted)
    settings = Settings(profiles=fresh, profiles_s=600, cache_dir=tmp_path)
    for url in (fresh, f"postgresql://nobody@/none?host={tmp_path}"):
        sync = _sync(settings.with_(profiles=url), here, EventLog(100))
        assert sync is not None
        try:
            sync.once()
        finally:
            sync.stop()
    assert len(during) >= 2 and min(during) > usual
    assert gc.get_threshold()[2] == usual


def test_a_server_that_says_nothing_is_told_meanwhile(
    here: Store, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A frozen server takes statements and does not answer: the exchange waits, and that it does is the state."""
    monkeypatch.setattr(sync_module, "ANSWERS_S", 0.5)
    sync = CentralSync(fresh, here, EventLog(100), 600, 1000)
    try:
        assert sync.once() and sync.stats()["state"] == "in use"
        os.kill(server_pid(), signal.SIGSTOP)
        _each_child(signal.SIGSTOP)
        try:
            waits = threading.Thread(target=sync.once)
            waits.start()
            waits.join(1.0)
            assert waits.is_alive() and sync.stats()["state"].startswith("away: no answer for")
        finally:
            _each_child(signal.SIGCONT)
            os.kill(server_pid(), signal.SIGCONT)
        waits.join(60)
        assert not waits.is_alive() and sync.stats()["state"] == "in use"
    finally:
        sync.stop()


def _each_child(number: signal.Signals) -> None:
    """To the server's processes that answer connections."""
    for pid in map(int, Path(f"/proc/{server_pid()}/task/{server_pid()}/children").read_text().split()):
        os.kill(pid, number)


FULL = (
    "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS "
    "$$BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full'; END$$",
    "CREATE TRIGGER no_room BEFORE INSERT ON measurements FOR EACH STATEMENT EXECUTE FUNCTION no_room()",
)
SLOW = (
    "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(1); RETURN NULL; END$$",
    "CREATE TRIGGER slow AFTER INSERT ON measurements FOR EACH STATEMENT EXECUTE FUNCTION slow()",
)
KILLED = ("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",)
READ_ONLY = ("ALTER DATABASE {name} SET default_transaction_read_only = on", *KILLED)
WRITABLE = ("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE", "ALTER DATABASE {name} RESET default_transaction_read_only",
            *KILLED)  # fmt: skip


@pytest.mark.parametrize(("fault", "mended", "fails"), [
    (FULL, ("DROP TRIGGER no_room ON measurements",), True),
    (READ_ONLY, WRITABLE, True),
    (KILLED, (), False),
    (SLOW, (), False),
], ids=["full", "read-only", "killed", "slow"])  # fmt: skip
def test_whatever_the_database_does_every_row_arrives_once(
    fresh: str, here: Store, fault: tuple[str, ...], mended: tuple[str, ...], fails: bool
) -> None:
    """A server that refuses rows, may not be written, breaks connections, or takes a second for a statement."""
    name, machine, log = make_url(fresh).database, here.machine(fingerprint()), EventLog(100)
    engine = create_engine(make_url(fresh).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT", poolclass=NullPool)

    def do(statements: tuple[str, ...]) -> None:
        with engine.connect() as c:
            for one in statements:
                c.exec_driver_sql(one.format(name=name))

    sync = CentralSync(fresh, here, log, 600, 1000)
    try:
        assert sync.once()
        do(fault)
        here.record_measurements(_measured(BATCH + 3), machine)
        went = sync.once() or (not fails and sync.once())  # a broken connection may be noticed by using it
        assert went is not fails, sync.stats()
        if fails:
            assert sync.stats()["waiting"] == BATCH + 3 and Why.DATABASE_AWAY in [d.why for d in log.decisions]
            here.record_measurements(_measured(2), machine)  # nobody who measures notices
            do(mended)
            assert sync.once() or sync.once(), sync.stats()
        assert sync.stats()["waiting"] == 0
    finally:
        sync.stop()
    with Store.open(fresh) as there:
        assert there.info()["rows"]["measurements"] == here.info()["rows"]["measurements"]


def test_a_role_that_may_only_write_rows_is_enough_once_the_tables_are_there(fresh: str, here: Store) -> None:
    with Store.open(fresh) as owner:
        owner.info()
        work = (
            "DROP ROLE IF EXISTS replica", "CREATE ROLE replica LOGIN",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO replica",
            "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO replica",
        )  # fmt: skip
        owner.database.write(lambda c: [c.exec_driver_sql(w) for w in work])
        here.record_measurements(_measured(2), here.machine(fingerprint()))
        with Store.open(make_url(fresh).set(username="replica").render_as_string(hide_password=False)) as replica:
            assert Exchange(here, replica).push() == 2
            with pytest.raises(Unreachable, match="cannot be used"):
                replica.database.write(lambda c: c.exec_driver_sql("DROP TABLE drift"))
        owner.database.write(lambda c: [c.exec_driver_sql(w) for w in ("DROP OWNED BY replica", "DROP ROLE replica")])


def test_a_database_of_a_newer_version_is_left_alone(fresh: str) -> None:
    with Store.open(fresh) as store:
        store.info()
        store.database.write(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = '99'"))
    with Store.open(fresh) as again, pytest.raises(InputError, match="newer version"):
        again.info()


def test_no_weights_inputs_or_graphs_are_among_what_travels() -> None:
    from hotfuse.profile.exchange import SENT

    assert not {s.problems.name, s.partition_profiles.name} & {t.name for t in SENT}
    assert {c.name for t in SENT for c in t.c if str(c.type) == "BLOB"} == set()


def test_where_rows_wait_is_a_file_and_passwords_are_not_shown(tmp_path: Path) -> None:
    settings = Settings(profiles="postgresql://user:secret@host/db", cache_dir=tmp_path)
    assert location(settings).startswith(str(tmp_path)) and "secret" not in location(settings)
    assert central(settings) == "postgresql://user:secret@host/db" and central(Settings(profiles="a.sqlite")) is None
    assert "secret" not in PostgresDatabase(make_url("postgresql://user:secret@host/db")).place


def test_an_older_file_gets_the_new_columns(tmp_path: Path) -> None:
    with Store(tmp_path / "old.sqlite", steps=s.STEPS[:3]) as old:
        drop = [f"ALTER TABLE {t} DROP COLUMN origin" for t in ("measurements", "memories")]
        old.database.write(lambda c: [c.exec_driver_sql(d) for d in drop])
    with Store.open(tmp_path / "old.sqlite") as new:
        new.record_measurements(_measured(1), new.machine(fingerprint()))
        rows = new.database.read(lambda c: c.execute(select(s.measurements.c.origin)).all())
        assert [tuple(r) for r in rows] == [("",)] and new.info()["version"] == s.STEPS[-1].version
