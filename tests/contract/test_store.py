"""The profile store: what goes in comes out, from many threads and processes, through every step of the schema."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.profile.database import Database
from hotfuse.profile.rows import Measurement, PartitionProfile, SpeedRow, StoredDecision, array_from_row, array_to_row
from hotfuse.profile.store import Store
from hotfuse.profile.store_place import location
from hotfuse.profile.store_schema import STEPS, Migration, NewerSchema, migrate, version_of

WHO = Fingerprint((("arch", "x86_64"),), (("cores", "2"),))


LAST = max(s.version for s in STEPS)


def test_a_file_of_the_first_version_gets_what_came_later(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Store(path, steps=STEPS[:1]).close()
    with Store.open(path) as store:
        store.record_problem("a", "graph", {"n": 3})
        store.record_problem("a", "graph again", {})
        store.record_problem("b", "other", {"n": 4})
        assert store.problems() == [("other", {"n": 4}), ("graph again", {})] and store.info()["version"] == LAST


def row(i: int = 0, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "kernel": f"k{i}", "family": "gemm", "features": {"flops": 1e9, "n": float(i)}, "dtype": "f32", "threads": 1,
        "time_ns": 100.0 + i, "noise": 0.01, "source": "calibrate", "at": 1000.0 + i,
    }  # fmt: skip
    return Measurement(**(values | changes))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "deep" / "p.sqlite")


def test_measurements_come_back(store: Store) -> None:
    machine = store.machine(WHO)
    assert store.record_measurements([row(i, family="conv" if i % 2 else "gemm") for i in range(1200)], machine) == 1200
    everything = store.measurements()
    assert [m.time_ns for m in everything] == [100.0 + i for i in reversed(range(1200))]
    assert everything[-1] == row(0, machine=machine)
    assert {m.family for m in store.measurements(family="conv")} == {"conv"}
    assert len(store.measurements(machine=machine, limit=7)) == 7
    assert store.measurements(machine=machine + 1) == []
    assert len(store.measurements(since=2000.0)) == 200
    assert [m.kernel for m in store.measurements(kernel="k3")] == ["k3"]
    store.record_measurements([row(source="serve", at=0.0)])
    assert abs(store.measurements(source="serve")[0].at - time.time()) < 60


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "1", None])
def test_features_are_finite_numbers(store: Store, wrong: Any) -> None:
    with pytest.raises(InputError, match="finite number"):
        store.record_measurements([row(features={"x": wrong})])
    with pytest.raises(InputError, match="come from"):
        store.record_measurements([row(source="rumour")])
    assert store.measurements() == []


def test_a_machine_has_one_number_and_its_peaks(store: Store) -> None:
    first = store.machine(WHO)
    assert store.machine(WHO, {"fma": {"f32": 1.5}}) == first and store.peaks(first) == {"fma": {"f32": 1.5}}
    assert store.machine(WHO) == first and store.peaks(first) == {"fma": {"f32": 1.5}}
    assert store.machine(Fingerprint(WHO.identity, (("cores", "4"),))) != first
    assert store.peaks(first + 17) is None


def test_graphs_partitions_decisions_and_drift(store: Store) -> None:
    machine = store.machine(WHO)
    store.record_graph("g", "old")
    store.record_graph("g", "new")
    assert store.graphs() == {"g": "new"}
    profile = PartitionProfile("g", "p", "1x2", 5, 10.0, 8.0, 9.0, 14.0, 1e3, 2e3, "memory", 5.0, machine)
    other = PartitionProfile("g", "q", "1x2", 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, at=5.0)
    store.record_partitions([profile, other])
    store.record_partitions([profile, other])  # takes the place of the first
    assert store.partitions("g") == [profile, other]
    assert store.partitions("g", machine) == [profile] and store.partitions("h") == []
    said = StoredDecision("g", "deploy", "faster", "plan", {"us": 3, "why": None, "ok": True}, 2.0, 3.0, 9.0)
    store.record_decisions([said])
    assert store.decisions("g") == [said] and store.decisions("h") == []
    seen = SpeedRow("fma", 2.0, 1.0, 4.0, machine)
    store.record_drift([seen, SpeedRow("l2", 1.0, 1.0, 5.0)])
    assert store.drift(probe="fma") == [seen] and seen.ratio == 2.0
    assert [d.probe for d in store.drift()] == ["l2", "fma"] and store.drift(machine=machine) == [seen]


def test_models_are_arrays_with_versions(store: Store) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "big endian": np.array([1, 2, 3], dtype=">i4"),
        "turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "empty": np.zeros((0, 4)),
        "number": np.array(7, dtype=np.uint8),
        "truth": np.array([True, False]),
    }
    assert store.save_model("forest", arrays, {"mape": 0.1}) == 1
    assert store.save_model("forest", {"a": np.ones(2)}) == 2
    found = store.load_model("forest", 1)
    assert found is not None and found.facts == {"mape": 0.1} and found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found.arrays[name], array) and found.arrays[name].shape == array.shape
        assert found.arrays[name].flags.writeable and found.arrays[name].dtype.isnative
    newest = store.load_model("forest")
    assert newest is not None and newest.version == 2 and list(store.model_dates("forest")) == [1, 2]
    assert store.load_model("other") is None and store.load_model("forest", 9) is None
    with pytest.raises(InputError, match="plain numbers"):
        store.save_model("bad", {"o": np.array([object()])})


@given(
    st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_arrays_survive(dtype: str, shape: list[int], draw: Any) -> None:
    kind = np.dtype(dtype)
    raw = bytes(draw.randrange(2 if dtype == "b1" else 256) for _ in range(math.prod(shape) * kind.itemsize))
    array = np.frombuffer(raw, kind).reshape(shape)
    made = array_to_row("x", array)
    assert array_from_row(made["dtype"], made["shape"], made["data"]).tobytes() == raw


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("O8", "[1]", b"8" * 8), ("f4", "[2]", b"abcd"), ("f4", "[-1]", b""), ("f4", "{}", b""), ("f4", "[true]", b"abcd"),
     ("f4", "[1e0]", b"abcd"), ("V4", "[1]", b"abcd"), ("f4, (2,)", "[1]", b"abcd")],
)  # fmt: skip
def test_arrays_that_are_none_are_refused(dtype: str, shape: str, data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        array_from_row(dtype, shape, data)


def test_rows_that_somebody_damaged_are_skipped_and_counted(store: Store) -> None:
    store.record_measurements([row(i) for i in range(5)])
    store.save_model("forest", {"a": np.ones(3)})
    store.machine(WHO, {"x": 1})
    assert store.path is not None
    with sqlite3.connect(store.path) as c:
        for i, text in enumerate(('{"x": "__import__(1)"}', "[1]", "not json", '{"x": NaN}'), 1):
            c.execute("UPDATE measurements SET features = ? WHERE id = ?", (text, i))
        c.execute("UPDATE hpm_arrays SET shape = '[99]'")
        c.execute("UPDATE machines SET peaks = '3'")
    assert [m.kernel for m in store.measurements()] == ["k4"]
    assert store.load_model("forest") is None and store.peaks(1) is None
    assert store.counts == {"skipped_measurements": 4, "skipped_hpm_models": 1, "skipped_machines": 1}


# --- the schema


def test_steps_run_once_in_order(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Store.open(path).record_measurements([row()])
    ran: list[int] = []

    def step(n: int) -> Migration:
        def run(c: Connection) -> None:
            ran.append(n)
            c.exec_driver_sql(f"ALTER TABLE measurements ADD COLUMN extra{n} INTEGER DEFAULT {n}")

        return Migration(n, f"step {n}", run)

    a, b = LAST + 1, LAST + 2
    newer = Store(path, steps=(*STEPS, step(b), step(a)))
    assert ran == [a, b] and newer.info()["version"] == b
    assert [m.kernel for m in newer.measurements()] == ["k0"]
    assert Store(path, steps=(*STEPS, step(a), step(b))).info()["version"] == b and ran == [a, b]


def test_older_names_become_those_of_today(tmp_path: Path) -> None:
    """What an older program kept is found under the names that this one asks for."""
    path = tmp_path / "p.sqlite"
    with Store(path, steps=STEPS[:4]) as old:
        facts = {"roofs": {"mape": 0.3}, "tells_ways_apart": True, "because": "roofs, by name"}
        old.save_model("m", {"ways_roots": np.arange(3), "roots": np.arange(2)}, facts)
        old.remember("borders", {"few rows | any size": [1.0, 0.5, 0.0]})
        old.remember("other", {"k": [1.0]})
    with Store.open(path) as new:
        found = new.load_model("m")
        assert found is not None and sorted(found.arrays) == ["roots", "tilings_roots"]
        assert dict(found.facts) == {"rooflines": {"mape": 0.3}, "tells_tilings_apart": True, "because": "roofs, by name"}
        assert new.remembered("breakpoints") == {"few rows | any size": [1.0, 0.5, 0.0]} and not new.remembered("borders")
        assert new.remembered("other") == {"k": [1.0]} and new.info()["version"] == LAST


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Store.open(path).record_measurements([row()])

    def run(c: Connection) -> None:
        c.exec_driver_sql("DROP TABLE measurements")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Store(path, steps=(*STEPS, Migration(LAST + 1, "breaks", run)))
    again = Store.open(path)
    assert again.info()["version"] == LAST and len(again.measurements()) == 1


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    Store(path, steps=(*STEPS, Migration(99, "future", lambda c: None))).close()
    before = path.read_bytes()
    store = Store.open(path)
    assert store.path is None and "newer version" in store.notes[0] and store.counts["newer"] == 1
    assert store.record_measurements([row()]) == 1 and len(store.measurements()) == 1  # in memory
    assert path.read_bytes() == before
    with pytest.raises(NewerSchema), Database(None, lambda *_: None)._engine.connect() as c:  # pyright: ignore[reportPrivateUsage]
        assert version_of(c) == LAST
        migrate(c, (Migration(0, "older program", lambda _: None),))


# --- the file


def test_places(tmp_path: Path) -> None:
    assert location(Settings(cache_dir=tmp_path)) == str(tmp_path / "profiles.sqlite")
    assert location(Settings(profiles="here.db")) == "here.db"
    assert Store.open(f"sqlite:///{tmp_path}/u.sqlite").path == tmp_path / "u.sqlite"
    for memory in (":memory:", "sqlite://", "sqlite:///:memory:"):
        store = Store.open(memory)
        assert store.path is None and store.record_measurements([row()]) == 1 and len(store.measurements()) == 1
    for wrong in ("oracle://host/db", "://", "mysql://x", "postgresql://:::"):
        with pytest.raises(InputError, match="profile store"):
            Store.open(wrong)


def test_info_prune_vacuum_export(store: Store) -> None:
    machine = store.machine(WHO)
    store.record_measurements([row(i, features={"text": float(i)}) for i in range(3000)], machine)
    store.save_model("forest", {"a": np.ones(2, np.float32)})
    store.record_graph("g", "name")
    info = store.info()
    assert info["journal"] == "wal" and info["rows"]["measurements"] == 3000 and info["version"] == LAST
    lines = list(store.export())
    assert len(lines) == 3000 + 1 + 1 + 1 + 1
    json.dumps(lines)
    (array,) = [values for table, values in lines if table == "hpm_arrays"]
    assert bytes.fromhex(array["data"]) == np.ones(2, np.float32).tobytes()
    before = store.info()["bytes"]
    assert store.prune(10) == {"measurements": 2990, "decisions": 0, "drift": 0, "subgraph_profiles": 0}
    store.vacuum()
    assert [m.kernel for m in store.measurements(limit=1)] == ["k2999"]
    assert store.info()["rows"]["measurements"] == 10 and store.info()["bytes"] < before / 4


# --- many writers


def _write(path: str, who: int, rows: int, gate: Any) -> None:
    store = Store.open(path)
    gate.wait()
    for i in range(rows):
        store.record_measurements([row(i, kernel=f"w{who}", family=f"f{who % 3}")])
    os._exit(0 if store.path is not None and not store.notes else 1)


def test_eight_processes_write_and_nothing_is_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "p.sqlite")  # all of them find no file, so they also race for beginning it
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(8)
    workers = [context.Process(target=_write, args=(path, n, 500, gate)) for n in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert [w.exitcode for w in workers] == [0] * 8
    store = Store.open(path)
    found = store.measurements()
    assert len(found) == 4000
    for n in range(8):
        assert sorted(m.time_ns for m in found if m.kernel == f"w{n}") == [100.0 + i for i in range(500)]


def test_threads_and_a_fork_share_a_store(store: Store) -> None:
    def work(n: int) -> None:
        for i in range(20):
            store.record_measurements([row(i, kernel=f"t{n}")])
            store.measurements(kernel=f"t{n}", limit=1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=work, args=(9,))
    child.start()
    work(8)
    child.join(60)
    assert child.exitcode == 0
    assert len(store.measurements()) == 120


def test_memory_is_shared_by_threads() -> None:
    store = Store.open(":memory:")
    threads = [
        threading.Thread(target=lambda: store.record_measurements([row(i) for i in range(50)])) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(store.measurements()) == 200


def test_memories_add_up_over_processes(tmp_path: Path) -> None:
    with Store.open(tmp_path / "p.sqlite") as one, Store.open(tmp_path / "p.sqlite") as two:
        machine = one.machine(WHO)
        one.remember("arms", {"vertical": [1.0, 0.5], "split": [1.0, -1.0]}, machine)
        two.remember("arms", {"vertical": [2.0, 0.25]}, machine)
        two.remember("arms", {"vertical": [9.0, 9.0]})
        assert one.remembered("arms", machine) == {"split": [1.0, -1.0], "vertical": [3.0, 0.75]}
        assert one.remembered("arms") == {"vertical": [9.0, 9.0]} and one.remembered("other", machine) == {}
        with pytest.raises(InputError):
            one.remember("arms", {"vertical": [math.nan, 0.0]}, machine)


def test_a_model_is_the_newest_of_its_machine(store: Store) -> None:
    here, there = store.machine(WHO), store.machine(Fingerprint(WHO.identity, (("cores", "4"),)))
    store.save_model("m", {"a": np.zeros(1)}, {"n": 1}, here)
    store.save_model("m", {"a": np.ones(1)}, {"n": 2}, there)
    mine, newest = store.load_model("m", machine=here), store.load_model("m")
    assert mine is not None and mine.version == 1 and newest is not None and newest.version == 2
    assert [(v, facts) for v, (_, facts) in store.model_dates("m", here).items()] == [(1, {"n": 1})]
