"""Models whose code writes to files, arrays, iterators or the system: every call does it, and captures do not count as calls."""

from __future__ import annotations

import array
import collections
import colorsys
import csv
import ctypes
import importlib
import io
import itertools
import json
import os
import queue
import sqlite3
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
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
from hotfuse.frontends.native_state import native_state
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
        least_recent, by_object, function, database, temporary, folders, appended)  # fmt: skip

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


ASKED: dict[str, Callable[[], Any]] = {
    "a clock": lambda: time.perf_counter(),
    "the time": lambda: time.time_ns(),
    "a unique name": uuid.uuid4,
    "a file": lambda: Path(__file__).read_text(),
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
