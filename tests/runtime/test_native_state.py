"""Models whose code writes to files, arrays, iterators or the system: every call does it, and captures do not count as calls."""

from __future__ import annotations

import array
import asyncio
import collections
import colorsys
import configparser
import csv
import ctypes
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import weakref
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Action, Why
from hotfuse.compile.workers.forked import let_go
from hotfuse.frontends.native_state import native_state
from hotfuse.frontends.process_effects import process_effects
from hotfuse.frontends.side_effects import observed

CALLS = 20


class Effect(nn.Module):
    def __init__(self, effect: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.effect = nn.Linear(8, 8), effect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.effect()
        return self.linear(x)


def reason(fast: Any) -> list[Any]:
    return [d for d in fast._engine.log.decisions if d.action is Action.REFUSE and d.why is Why.SIDE_EFFECT]


def text() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = io.StringIO()
    return lambda: held.write("x"), held.tell


def printed() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = io.StringIO()
    return lambda: print("x", end="", file=held), held.tell


def dumped() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = io.BytesIO()
    return lambda: held.write(json.dumps(1).encode()), held.tell


def rows() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = io.StringIO()
    writer = csv.writer(held, lineterminator="")
    return lambda: writer.writerow("x"), held.tell


def counted() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = np.zeros(4)
    return lambda: held.__setitem__(0, held[0] + 1), lambda: held[0]


def strided() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = np.zeros((4, 4))[:, ::2]
    return lambda: held.__setitem__((1, 1), held[1, 1] + 1), lambda: held[1, 1]


def numbers() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = array.array("l", [0])
    return lambda: held.append(1), lambda: len(held) - 1


def raw() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = bytearray()
    return lambda: held.append(1), lambda: len(held)


def viewed() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = bytearray(1)
    view = memoryview(held)
    return lambda: view.__setitem__(0, view[0] + 1), lambda: held[0]


def native() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = ctypes.c_long(0)
    return lambda: setattr(held, "value", held.value + 1), lambda: held.value


def released() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = threading.Semaphore(0)
    return held.release, lambda: held._value  # pyright: ignore


def queued() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: held.put(1), held.qsize


def items() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = iter(list(range(200)))
    return lambda: next(held), lambda: next(held)


def numbered_items() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = enumerate(map(str, range(200)))
    return lambda: next(held), lambda: next(held)[0]


def chained() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = itertools.chain(n for n in range(200))
    return lambda: next(held), lambda: next(held)


def called() -> tuple[Callable[[], Any], Callable[[], Any]]:
    given = [0]

    def more() -> int:
        given[0] += 1
        return given[0]

    held = iter(more, None)
    return lambda: next(held), lambda: given[0]


def yielding() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def numbered() -> Iterator[int]:
        n = 0
        while True:
            yield (n := n + 1)

    held = numbered()
    return lambda: next(held), lambda: next(held) - 1


def least_recent() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = collections.OrderedDict.fromkeys(range(CALLS + 1))
    return lambda: held.move_to_end(next(iter(held))), lambda: next(iter(held))


def by_object() -> tuple[Callable[[], Any], Callable[[], Any]]:
    key = nn.Identity()
    held = weakref.WeakKeyDictionary({key: 0})
    return lambda: held.__setitem__(key, held[key] + 1), lambda: held[key]


def function() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def counts() -> None:
        counts.calls += 1  # pyright: ignore

    counts.calls = 0  # pyright: ignore
    return counts, lambda: counts.calls  # pyright: ignore


def masked() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = np.ma.zeros(4)
    return lambda: held.__setitem__(0, held[0] + 1), lambda: held[0]


def hashed() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = hashlib.sha256()
    known = {hashlib.sha256(b"x" * n).digest(): n for n in range(99)}
    return lambda: held.update(b"x"), lambda: known[held.digest()]


def pickled() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = io.BytesIO()
    writer = pickle.Pickler(held, 0)
    return lambda: writer.dump(None), lambda: held.getvalue().count(b"N.")


def configured() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = configparser.ConfigParser()
    held["calls"] = {"n": "0"}
    return lambda: held.set("calls", "n", str(held.getint("calls", "n") + 1)), lambda: held.getint("calls", "n")


def awaited() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held: asyncio.Queue[int] = asyncio.Queue()
    return lambda: held.put_nowait(1), held.qsize


def sent() -> tuple[Callable[[], Any], Callable[[], Any]]:
    ours, theirs = socket.socketpair()
    return lambda: ours.send(b"x"), lambda: len(theirs.recv(999))


def sent_as_a_file() -> tuple[Callable[[], Any], Callable[[], Any]]:
    ours, theirs = socket.socketpair()
    file = ours.makefile("wb", buffering=0)
    return lambda: file.write(b"x"), lambda: len(theirs.recv(999))


def piped() -> tuple[Callable[[], Any], Callable[[], Any]]:
    theirs, ours = multiprocessing.Pipe(duplex=False)

    def read() -> int:
        count = 0
        while theirs.poll():
            count += theirs.recv()
        return count

    return lambda: ours.send(1), read


def signalled() -> tuple[Callable[[], Any], Callable[[], Any]]:
    came: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _frame: came.append(number))
    return lambda: signal.raise_signal(signal.SIGUSR2), lambda: len(came)


def named_file() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - held on purpose
    return lambda: held.write("x"), held.tell


def archived() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = zipfile.ZipFile(io.BytesIO(), "w")
    return lambda: held.writestr(f"{len(held.namelist())}", b""), lambda: len(held.namelist())


def database() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = sqlite3.connect(":memory:", check_same_thread=False)
    held.execute("create table calls(n)")
    return lambda: held.execute("insert into calls values(1)"), lambda: held.total_changes


def temporary() -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = tempfile.TemporaryFile("w+")  # noqa: SIM115 - held on purpose
    return lambda: held.write("x"), held.tell


def folders() -> tuple[Callable[[], Any], Callable[[], Any]]:
    place = Path(tempfile.mkdtemp())
    return lambda: (place / str(len(os.listdir(place)))).mkdir(), lambda: len(os.listdir(place))


def appended() -> tuple[Callable[[], Any], Callable[[], Any]]:
    place = Path(tempfile.mkdtemp()) / "calls"

    def append() -> None:
        number = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(number, b"x")
        os.close(number)

    return append, lambda: len(place.read_bytes())


MADE = (text, printed, dumped, rows, counted, strided, numbers, raw, viewed, native, released, queued, items, yielding,
        least_recent, by_object, function, database, temporary, folders, appended, numbered_items, chained, called, masked, hashed,
        pickled, configured, awaited, sent, sent_as_a_file, piped, signalled, named_file, archived)  # fmt: skip

UNWATCHED = (strided, viewed)
"""No look can tell of these at every call, so that nothing is captured."""


@pytest.mark.parametrize("made", MADE)
def test_what_native_code_holds_is_changed_by_every_call(made: Callable[[], Any]) -> None:
    effect, read = made()
    model = Effect(effect)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast:
        for _ in range(CALLS):
            fast(torch.randn(3, 8))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] == 0 and (reason(fast) or made in UNWATCHED)
        captures = fast.stats()["captures"]
        assert 0 <= read() - CALLS <= captures  # a capture in this process runs the code, where nothing can stop it


@pytest.mark.parametrize("capture", ["inline", "background"])
def test_work_that_others_are_given_is_given_by_every_call(capture: Any) -> None:
    """In a fork there is no thread that would do it, and nothing that shows."""
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        model = Effect(lambda: pool.submit(done.append, 1))
        with hotfuse.jit(model, settings=Settings(capture=capture, hot_calls=2)) as fast:
            for _ in range(CALLS):
                fast(torch.randn(3, 8))
                assert fast.wait(60)
            assert reason(fast) and fast.stats()["graph_calls"] == 0
    assert len(done) == CALLS


@pytest.mark.parametrize("buffering", [0, 1, -1])
@pytest.mark.parametrize("flush", [False, True])
def test_files_are_written_by_calls_alone_where_a_fork_captures(tmp_path: Path, buffering: int, flush: bool) -> None:
    path = tmp_path / "calls"
    with path.open("w" if buffering else "wb", buffering=buffering) as file:
        line: Any = "x\n" if buffering else b"x\n"

        def write() -> None:
            file.write(line)
            if flush:
                file.flush()

        model = Effect(write)
        with torch.no_grad(), hotfuse.jit(model, settings=Settings(hot_calls=2)) as fast:
            for _ in range(CALLS):
                fast(torch.randn(3, 8))
                assert fast.wait(60)
            assert reason(fast) and fast.stats()["graph_calls"] == 0
    assert path.read_text() == "x\n" * CALLS


_PLACE = Path(tempfile.mkdtemp()) / "saved"
ASKED: dict[str, Callable[[], Any]] = {
    "a clock": lambda: time.perf_counter(),
    "the time": lambda: time.time_ns(),
    "a unique name": uuid.uuid4,
    "a file": lambda: Path(__file__).read_text(),
    "a file of torch's": lambda: torch.save({}, _PLACE),
    "another thread": lambda: threading.Thread(target=int).start(),
    "a program": lambda: subprocess.run(["true"], check=True),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_the_system_answers_is_asked_by_every_call(asked: str) -> None:
    with torch.no_grad(), hotfuse.jit(Effect(ASKED[asked]), settings=Settings(capture="inline", hot_calls=2)) as fast:
        for _ in range(CALLS):
            fast(torch.randn(3, 8))
            assert fast.wait(60)
        assert reason(fast) and fast.stats()["graph_calls"] == 0


def test_what_is_held_and_not_used_costs_no_plan() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lock, self.turns = nn.Linear(8, 8), threading.Lock(), iter("abc")
            self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - held on purpose
            self.event, self.table, self.stream = threading.Event(), np.arange(4.0), io.StringIO("kept")
            self.log = {"lock": threading.Condition(), "queue": queue.Queue[int]()}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                return self.linear(x)

    with torch.no_grad(), hotfuse.jit(Holds(), settings=Settings(capture="inline", hot_calls=2)) as fast:
        for _ in range(8):
            fast(torch.randn(3, 8))
            assert fast.wait(60)
        assert not reason(fast) and fast.stats()["graph_calls"] > 0


def test_iterators_are_read_where_they_stand() -> None:
    more = itertools.chain([1] * 9, [2] * 9), itertools.islice(range(20), 20)
    for held in (itertools.cycle([1.0, 2.0, 3.0]), itertools.count(), *more):
        read = native_state(held)
        assert read is not None
        for _ in range(7):
            before = read()
            assert read() == before
            next(held)
            assert read() != before


def test_a_file_that_is_read_shows_what_waits_in_it_unwritten(tmp_path: Path) -> None:
    with (tmp_path / "waiting").open("w") as file:
        file.write("abc")
        read = native_state(file)
        assert read is not None
        before = read()
        assert (tmp_path / "waiting").read_text() == ""  # reading its state wrote nothing
        file.write("d")
        assert read() != before


def test_imports_and_the_library_are_nobodys_effects() -> None:
    with observed() as seen:
        threading.Condition().acquire(timeout=1)
        queue.Queue[int](1).put(1, timeout=1)
        importlib.reload(colorsys)
    assert not seen.done
    before = time.perf_counter
    with observed() as seen:
        assert time.perf_counter is not before
        time.perf_counter()
        with pytest.raises(CaptureError, match="reads a file"):
            Path(__file__).read_text()
    assert time.perf_counter is before and len(seen.done) == 2


def test_a_module_imported_meanwhile_keeps_functions_that_tell_nobody_later() -> None:
    with observed() as seen:
        kept, saved = time.perf_counter, socket.socket.send
        kept()
    assert len(seen.done) == 1 and kept is not time.perf_counter and saved is not socket.socket.send
    assert "send" not in vars(socket.socket)  # it is inherited, as before
    kept()
    ours, theirs = socket.socketpair()
    saved(ours, b"x")
    assert len(seen.done) == 1 and theirs.recv(9) == b"x"


def test_traces_of_two_threads_that_overlap_leave_nothing_behind() -> None:
    before, begin, entered, leave = time.perf_counter, threading.Event(), threading.Event(), threading.Event()
    other: list[str] = []

    def trace() -> None:
        begin.wait(60)
        with process_effects(other.append):
            entered.set()
            leave.wait(60)
            time.perf_counter()

    thread = threading.Thread(target=trace)
    thread.start()
    own: list[str] = []
    with process_effects(own.append):
        begin.set()
        assert entered.wait(60)
        time.perf_counter()
    assert time.perf_counter is not before  # the other thread's is under way
    time.perf_counter()
    leave.set()
    thread.join(60)
    assert time.perf_counter is before and (len(own), len(other)) == (1, 1)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def test_what_is_deleted_as_the_interpreter_ends_may_ask_the_system() -> None:
    assert run("""
        import os, sys, torch
        from hotfuse.frontends.side_effects import observed

        class Last:
            def __del__(self, listed=os.listdir, put=os.write):
                listed("/")
                put(1, b"listed")

        torch.last = Last()
        with observed():
            pass
    """) == "listed"  # fmt: skip


@pytest.mark.parametrize("refusal", ["RuntimeError", "PermissionError"])
def test_where_another_hook_forbids_ours_nothing_is_captured(refusal: str) -> None:
    assert "an audit hook of the process forbids others" in run(f"""
        import sys
        def only(event, args):
            if event == "sys.addaudithook":
                raise {refusal}("no other hooks")
        sys.addaudithook(only)
        from hotfuse.base.errors import CaptureError
        from hotfuse.frontends.side_effects import observed
        try:
            with observed():
                pass
        except CaptureError as e:
            print(e)
    """)


@pytest.mark.parametrize("missing", ["memory", "everything"])
def test_descriptors_of_a_fork_lead_away_from_files_where_memory_has_no_names(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any, **_named: Any) -> Any:
        raise OSError("too many open files")

    monkeypatch.delattr(os, "memfd_create", raising=False)
    if missing == "everything":
        monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with (tmp_path / "servers").open("wb", buffering=0) as file, Path(os.devnull).open("rb+", buffering=0) as nowhere:
        let_go(file.fileno(), nowhere.fileno())
        file.write(b"x")
        assert file.tell() == (1 if missing == "memory" else 0)
    assert (tmp_path / "servers").read_bytes() == b""
