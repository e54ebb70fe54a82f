# pyright: reportPrivateUsage=false
# The moment at which tier 1 is asked for is held back.
"""What tier 1 takes begins before it is asked for, and what is asked for finds it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import CaptureError
from hotfuse.compile.ahead import AheadCompilation
from hotfuse.compile.compilation import Compilation
from hotfuse.pipeline.plan_passes import Units
from hotfuse.profile.glimpse import may_know
from hotfuse.profile.rows import StoredDecision
from hotfuse.profile.store import Store
from hotfuse.runtime.tierup.attempt import AttemptContext
from hotfuse.runtime.tierup.improve import Improver
from tests.runtime.test_units import Waiting, layers

TEXT = layers(3)


def test_what_is_left_begins_nothing_more_and_ends_nothing() -> None:
    pool = Waiting()
    begun = Compilation(pool, TEXT.replace("aten.exp", "aten.sin", 1), {"s0": 4})
    thread = threading.Thread(target=begun.run)
    thread.start()
    with pool.ready:
        assert pool.ready.wait_for(lambda: len(pool.queue) == 2, 60)  # one for the worker and one to go on with
    assert begun.leave() == 0 and not pool.cancelled
    pool.work()  # what a worker is at is answered
    thread.join(60)
    assert not thread.is_alive() and len(pool.units) == 2 and len(begun.graph.codes) == 1


class Endless:
    """A compilation that runs until it is left or cancelled."""

    trust = ledger = history = None

    def __init__(self) -> None:
        self.over, self.begun, self.said = threading.Event(), threading.Event(), list[str]()

    def run(self) -> None:
        self.begun.set()
        assert self.over.wait(60)
        if "cancelled" in self.said:
            raise CaptureError("the compilation was cancelled")

    def leave(self) -> int:
        self.said.append("left")
        self.over.set()
        return 3

    def cancel(self) -> None:
        self.said.append("cancelled")
        self.over.set()


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_it_ends_when_somebody_asks_or_nobody_will(how: str) -> None:
    ahead, made = AheadCompilation(), Endless()
    thread = threading.Thread(target=lambda: ahead.run(TEXT, {"s0": 4}, Settings(), lambda *_: cast(Compilation, made)))
    thread.start()
    assert made.begun.wait(60)
    assert (ahead.leave() == 3) if how == "left" else ahead.stop() is None
    thread.join(60)
    assert made.said == [how] and ahead.leave() == 0, "what is over is not left again"


def test_what_nobody_wants_any_more_never_begins() -> None:
    ahead, made = AheadCompilation(), Endless()
    ahead.stop()
    ahead.run(TEXT, {"s0": 4}, Settings(), lambda *_: cast(Compilation, made))
    assert not made.begun.is_set()


@pytest.mark.parametrize(("heat", "seconds", "begun"), [(2, 9.0, 0), (3, 0.1, 1), (3, 0.0, 1)])
def test_workers_begin_for_graphs_that_are_hot(heat: int, seconds: float, begun: int) -> None:
    asked = list[Any]()
    improve = SimpleNamespace(ahead=lambda *given: asked.append(given))
    plans: Any = SimpleNamespace(settings=Settings(hot_calls=3))
    own: Any = SimpleNamespace(_plans=plans, _context=AttemptContext(plans, cast(Any, None), cast(Any, improve)))
    graph: Any = SimpleNamespace(nodes=(None,) * 8)
    Improver.ahead(own, graph, {}, (), heat=heat, seconds=seconds)
    assert len(asked) == begun


def test_kernels_that_were_made_ahead_are_found_by_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole way: a served model, of which tier 1 is not asked for before a kernel was made ahead."""
    left, made = Units._left, list[int]()

    def late(units: Units) -> int:
        running: Callable[[], Any] = lambda: units._ahead is not None and units._ahead._running  # noqa: E731
        until = time.monotonic() + 60
        while time.monotonic() < until and not (running() and running().graph.codes):
            if units._ahead is not None and not running() and until - time.monotonic() < 30:
                break
            time.sleep(0.005)
        made.append(left(units))
        return made[-1]

    monkeypatch.setattr(Units, "_left", late)
    model = torch.nn.Sequential(*[m for n in range(1, 9) for m in (torch.nn.Linear(32 * n, 32 * n + 32), torch.nn.GELU())]).eval()
    x = torch.randn(8, 32)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(cache_dir=tmp_path, hot_calls=1)) as fast:
        wanted = model.double()(x.double())
        model.float()
        until = time.monotonic() + 90
        while not made and time.monotonic() < until:
            fast(x)
        assert fast.wait(90) and made[0] > 0
        torch.testing.assert_close(fast(x).double(), wanted, rtol=1e-4, atol=1e-5)
        assert "were compiled while tier 0 was built and compared" in str(fast.explain(full=True))


def test_a_store_is_asked_without_the_library_whether_it_may_know_a_graph(tmp_path: Path) -> None:
    place = tmp_path / "odd name #1.sqlite"
    assert not may_know(str(place), "g") and not may_know(":memory:", "g") and not place.exists()
    begun = tmp_path / "begun.sqlite"
    with closing(sqlite3.connect(begun)) as file:
        file.execute("PRAGMA journal_mode=WAL")  # as a worker begins one
    assert not may_know(str(begun), "g")
    assert may_know("postgresql://somewhere/else", "g") and may_know(str(tmp_path / "p.sqlite?mode=ro"), "g")
    Store.open(str(place)).record_decisions([StoredDecision("g", "refuse", "why", "m", {}, None, None, 1.0)])
    assert may_know(str(place), "g") and not may_know(str(place), "another")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE t (a)")
    assert may_know(str(other), "g"), "whoever opens it says what is wrong"
    (tmp_path / "damaged.sqlite").write_bytes(b"no database, by far" * 99)
    assert may_know(str(tmp_path / "damaged.sqlite"), "g")
