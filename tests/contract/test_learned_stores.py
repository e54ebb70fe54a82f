"""A worker that is asked about many profile stores keeps few of them open, and loses nothing of the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotfuse.compile import request_context
from hotfuse.compile.learn import learned
from hotfuse.compile.request_context import RequestContext
from hotfuse.hpm.row_cache import RowCache
from hotfuse.ir.text import parse
from hotfuse.profile.rows import Measurement
from hotfuse.profile.store import Store


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    learned.forget()
    yield
    learned.forget()


def open_files(folder: Path) -> int:
    links = (os.path.join("/proc/self/fd", n) for n in os.listdir("/proc/self/fd"))
    return sum(os.readlink(name).startswith(str(folder)) for name in links if os.path.islink(name))


def test_the_oldest_store_is_written_and_closed(tmp_path: Path) -> None:
    for i in range(3 * learned.STORES):
        with request_context.used_by(RequestContext(str(tmp_path / f"{i}.sqlite")).header()):
            found = learned.notes()
            assert found is not None
            found.wrote([Measurement("k", "pointwise", {}, "f32", 1, 1e6 + i, 0.1, "race")])
    assert 0 < open_files(tmp_path) <= 4 * learned.STORES, "the file, its log, its index, and one connection more"
    for i in range(2 * learned.STORES):
        with Store.open(tmp_path / f"{i}.sqlite") as store:
            assert [m.time_ns for m in store.measurements()] == [1e6 + i]


def test_a_store_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    def ask(i: int) -> learned.Notes:
        with request_context.used_by(RequestContext(str(tmp_path / f"{i}.sqlite")).header()):
            found = learned.notes()
        assert found is not None
        return found

    first = ask(0)
    for i in range(learned.STORES):
        ask(i + 1)
    again = ask(0)
    assert again is not first and again.host.machine == first.host.machine
    assert first.store.measurements() == [], "whoever still uses the closed one may go on"


GRAPH = """graph main(%x: f32[64, 64]) {
  %y: f32[64, 64] = aten.tanh.default(%x)
  return %y
}"""


def test_trials_are_counted_when_the_worker_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan waits for the worker while kernels are tried; what they computed and moved is for a model that there is not yet."""
    counted = list[int]()
    count = RowCache.rows
    monkeypatch.setattr(RowCache, "rows", lambda self, found: counted.append(len(found)) or count(self, found))  # pyright: ignore
    path = tmp_path / "p.sqlite"
    with request_context.used_by({"profiles": str(path), "record": True}):
        kept = learned.notes()
        assert kept is not None and kept.ahead is None
        begin = time.time()
        kept.tried("first", parse(GRAPH), {}, 50.0, 60.0)
        tried = time.time()
        assert not counted
        learned.flush()
        assert len(counted) == 1
        for i in range(learned.MAX_TRIALS):
            kept.tried(f"k{i}", parse(GRAPH), {}, 50.0, 60.0)
        assert not kept.trials, "they are not kept without end"
    learned.flush()
    with Store.open(path) as store:
        found = store.measurements(source="race")
    assert len(found) == 2 * (1 + learned.MAX_TRIALS)
    assert all(begin <= m.at <= tried for m in found if m.kernel.startswith("first")), "when it was tried, not when it was written"
