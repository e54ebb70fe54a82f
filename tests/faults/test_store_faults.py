"""A profile store whose file is damaged, full, forbidden or locked: callers go on, and the store says what happened."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from hotfuse.base.events import EventLog, Why
from hotfuse.cli import app
from hotfuse.machine.fingerprint import fingerprint, make_fingerprint
from hotfuse.machine.topology import topology
from hotfuse.profile import database, store_schema
from hotfuse.profile.rows import Measurement
from hotfuse.profile.store import Store


def row(i: int = 0) -> Measurement:
    return Measurement(f"k{i}", "gemm", {"n": float(i)}, "f32", 1, 100.0, 0.01, "serve", 1.0 + i)


def filled(path: Path, rows: int = 200) -> None:
    with Store.open(path) as store:
        store.record_measurements([row(i) for i in range(rows)])
        store.vacuum()


def decided(log: EventLog) -> set[Why]:
    return {d.why for d in log.decisions}


@pytest.mark.parametrize("kind", ["not a database", "cut off", "scrambled", "wrong header"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.sqlite"
    filled(path)
    whole = path.read_bytes()
    rng = random.Random(5)
    damaged = {
        "not a database": b"#!/bin/sh\n" * 500,
        "cut off": whole[: len(whole) // 3],
        "scrambled": whole[:100] + bytes(rng.randrange(256) for _ in whole[100:]),
        "wrong header": b"SQLite format 9\0" + whole[16:],
    }[kind]
    path.write_bytes(damaged)
    log = EventLog()
    store = Store.open(path, log)
    store.measurements()
    store.record_measurements([row(7)])
    assert store.measurements()[0].kernel == "k7"
    assert store.path == path and store.counts["corrupt"] >= 1 and Why.STORE_DAMAGED in decided(log)
    (aside,) = [p for p in tmp_path.iterdir() if ".corrupt-" in p.name and not p.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes()[:10] == damaged[:10]  # kept for whoever wants to look
    assert [m.kernel for m in Store.open(path).measurements()] == ["k7"]


def test_damage_while_open(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, 3000)
    store = Store.open(path)
    assert len(store.measurements()) == 3000
    store.close()
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.seek(100)
        f.write(b"\xff" * (size - 100))
    assert store.measurements() == []
    assert store.record_measurements([row(1)]) == 1 and len(store.measurements()) == 1
    assert store.counts["corrupt"] == 1 and store.path == path


def _open_and_write(path: str, n: int, gate: Any) -> None:
    gate.wait()
    store = Store.open(path)
    store.record_measurements([row(n)])
    os._exit(0 if store.path is not None else 1)


def test_processes_that_find_the_same_damage_make_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(b"garbage" * 1000)
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(6)
    workers = [context.Process(target=_open_and_write, args=(str(path), n, gate)) for n in range(6)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert [w.exitcode for w in workers] == [0] * 6
    assert len([p for p in tmp_path.iterdir() if ".corrupt-" in p.name]) == 1
    assert sorted(m.kernel for m in Store.open(path).measurements()) == [f"k{n}" for n in range(6)]


@pytest.mark.parametrize("times", [1, 100])
def test_an_io_error_is_tried_on_a_file_opened_again(tmp_path: Path, times: int) -> None:
    """Such an error is what a process sees whose file another one has just replaced; one that stays leaves memory."""
    told: list[database.Trouble] = []
    failures = iter(range(times))

    def work(connection: Connection) -> int:
        if db.path is not None and next(failures, None) is not None:
            raise OperationalError("select", {}, sqlite3.OperationalError("disk I/O error"))
        return int(connection.execute(select(func.count()).select_from(store_schema.measurements)).scalar() or 0)

    db = database.Database(tmp_path / "p.sqlite", lambda trouble, _: told.append(trouble))
    assert db.read(work) == 0
    stays = times > database.REPLACED
    assert told == [database.Trouble.FULL] * stays and (db.path is None) == stays
    assert db.counts["reopened"] == min(times, database.REPLACED)


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "p.sqlite").mkdir()
    (tmp_path / "plain").write_text("a file where a folder is needed")
    for path in (tmp_path / "p.sqlite", tmp_path / "plain" / "p.sqlite"):
        log = EventLog()
        store = Store.open(path, log)
        assert store.path is None and Why.STORE_UNUSABLE in decided(log)
        assert store.record_measurements([row()]) == 1 and len(store.measurements()) == 1


def _limited(path: str, answer: Any) -> None:
    """A process whose files cannot grow: what a full disk does to SQLite."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store.open(path)
    assert store.path is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 8192, resource.RLIM_INFINITY))
    store.record_measurements([row(i) for i in range(5000)])
    answer.send((store.path is None, len(store.measurements()), store.counts, store.notes))


def test_no_room(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, 10)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_limited, args=(str(path), theirs))
    child.start()
    assert ours.poll(120)
    in_memory, rows, counts, notes = ours.recv()
    child.join(60)
    assert in_memory and rows >= 500 and counts["full"] == 1 and "memory" in notes[0]
    with sqlite3.connect(path) as c:  # what is on disk is whole
        assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _forbidden(path: str, answer: Any) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    store = Store.open(path)
    wrote = store.record_measurements([row()])
    answer.send((store.path is None, wrote, len(store.measurements()), store.counts))


def test_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    path = folder / "p.sqlite"
    filled(path, 10)
    path.chmod(0o444)
    folder.chmod(0o555)
    for parent in [p for p in folder.parents if Path(tempfile.gettempdir()) in p.parents]:
        parent.chmod(parent.stat().st_mode | 0o055)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_forbidden, args=(str(path), theirs))
    child.start()
    assert ours.poll(120)
    in_memory, wrote, rows, counts = ours.recv()
    child.join(60)
    folder.chmod(0o755)
    assert in_memory and wrote == 1 and rows == 11 and counts["read_only"] == 1  # what was there is known


def _commands(path: str, target: str, answer: Any) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    lines = Path(target).read_text() if Path(target).exists() else ""
    told = [CliRunner().invoke(app, ["db", *args, "--store", path]) for args in (
        ("info",), ("export",), ("export",), ("prune", "--keep", "0"), ("vacuum",), ("import", target))]  # fmt: skip
    answer.send([(d.exit_code, d.stdout, d.stderr) for d in told] + [(len(lines), "", "")])


@pytest.mark.parametrize("log_left", [False, True])
def test_commands_read_a_store_that_cannot_be_written_and_never_say_that_they_changed_it(tmp_path: Path, log_left: bool) -> None:
    folder = tmp_path / "inside"
    path, rows = folder / "p.sqlite", tmp_path / "rows.jsonl"
    filled(path, 10)
    assert CliRunner().invoke(app, ["db", "export", "--store", str(path), "--out", str(rows)]).exit_code == 0
    path.unlink()
    filled(path, 10)
    with contextlib.closing(sqlite3.connect(path)) as held:
        if log_left:
            held.execute("DELETE FROM measurements WHERE id > 5")
            held.commit()
        for file in (path, *(folder.glob("p.sqlite-*") if log_left else ())):
            file.chmod(0o444)
        if not log_left:
            held.close()
        folder.chmod(0o555)
        for parent in [p for p in folder.parents if Path(tempfile.gettempdir()) in p.parents]:
            parent.chmod(parent.stat().st_mode | 0o055)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=_commands, args=(str(path), str(rows), theirs))
        child.start()
        assert ours.poll(120)
        info, first, second, *changes, readable = ours.recv()
        child.join(60)
        folder.chmod(0o755)
    count = 5 if log_left else 10
    assert info[0] == 0 and f"measurements        {count}" in info[1], info
    for code, lines, said in (first, second):
        assert code == 0 and sum('"measurements"' in line for line in lines.splitlines()) == count, said
    names = [json.loads(lines.splitlines()[0])["row"]["uid"] for _, lines, _ in (first, second)]
    assert names[0] == names[1]  # so the same rows are imported once
    assert readable[0] and all(code == 2 and "cannot be written" in said for code, _, said in changes), changes


def test_a_file_that_there_is_no_room_for_is_an_error_and_not_left_half(tmp_path: Path) -> None:
    filled(tmp_path / "p.sqlite", 10)
    done = CliRunner().invoke(app, ["db", "export", "--store", str(tmp_path / "p.sqlite"), "--out", "/dev/full"])
    assert done.exit_code == 2 and "/dev/full cannot be written" in done.stderr and Path("/dev/full").exists()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as c:
        c.execute("BEGIN IMMEDIATE")
        yield
        c.execute("ROLLBACK")


def test_a_lock_that_is_given_back_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = tmp_path / "p.sqlite"
    store = Store.open(path)
    refused, free = threading.Event(), threading.Event()

    def pause(_attempt: int) -> None:
        """As long as it takes, however busy the machine."""
        refused.set()
        assert free.wait(120)

    monkeypatch.setattr(database, "_pause", pause)
    done: list[int] = []
    writer = threading.Thread(target=lambda: done.append(store.record_measurements([row()])))
    with locked(path):
        writer.start()
        assert refused.wait(120)
    free.set()
    writer.join(120)
    assert done == [1] and store.path == path and len(store.measurements()) == 1 and store.counts["retries"] >= 1


def test_a_lock_that_is_never_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = tmp_path / "p.sqlite"
    store = Store.open(path)
    with locked(path):
        assert store.record_measurements([row()]) == 1
        assert store.path is None and store.counts["busy"] == 1 and len(store.measurements()) == 1


@pytest.mark.parametrize("how", ["locked", "damaged"])
def test_rows_of_a_machine_are_taken_by_what_replaces_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its number was given by the file that is gone."""
    monkeypatch.setattr(database, "BUSY_S", 0.01)
    path = tmp_path / "p.sqlite"
    with Store.open(path) as before:
        before.machine(make_fingerprint(topology(), frozenset({"another"})))
    store = Store.open(path)
    number = store.machine(fingerprint(), {"target": "some"})
    if how == "locked":
        with locked(path):
            assert store.record_measurements([row()], number) == 1
    else:
        store.database.engine.dispose()
        path.write_bytes(b"no database" * 1000)
        assert store.record_measurements([row()], number) == 1 and store.path == path
    assert len(store.measurements(machine=number)) == 1 and store.machine(fingerprint()) == number
    assert store.peaks(number) == {"target": "some"} and store.notes


def _killed(path: str) -> None:
    store = Store.open(path)
    i = 0
    while True:
        store.record_measurements([row(i), row(i)])
        i += 1


def test_a_writer_that_is_killed_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, 1)
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        child = context.Process(target=_killed, args=(str(path),))
        child.start()
        time.sleep(0.15)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    store = Store.open(path)
    assert store.path == path and store.notes == []
    assert (len(store.measurements()) - 1) % 2 == 0  # transactions are there wholly or not at all
    with sqlite3.connect(path) as c:
        assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
