# pyright: reportPrivateUsage=false
"""What serving fills has a bound, however many shapes come: every table of the engine is walked, and each cap is run into."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.analysis.call_facts import Dense, Facts, Plain, Ranked, Sized, Typed
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import EventLog, Why
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.ir.types import DType
from hotfuse.lower.common import algebra
from hotfuse.runtime import engine, samples, site
from hotfuse.runtime.observe import examine, record
from hotfuse.runtime.observe.instrument import MAX_COSTS, InstrumentedPlan
from hotfuse.runtime.observe.record import Recorder
from hotfuse.runtime.plans import MAX_EARNED
from hotfuse.runtime.serve import dispatch
from hotfuse.runtime.serve.dispatch import Case, InlineCache
from hotfuse.specialize.table import AttemptKey, sizes_key
from tests.runtime.test_dispatch import routed
from tests.runtime.test_pool import light

INLINE = Settings(capture="inline", hot_calls=2, profiles=":memory:", max_events=64)
GENERAL: Facts = (Plain(0), Typed(0, DType.F32), Ranked(0, 2), Dense(0, 2, None, True))


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.second(torch.relu(self.first(x))), y * 2 + 1


def served(calls: int = 40) -> Any:
    fast = hotfuse.jit(TwoSizes().eval(), settings=INLINE)
    at_random(fast, random.Random(1), calls)
    return fast


def at_random(fast: Any, chance: random.Random, calls: int) -> None:
    with torch.no_grad():
        for _ in range(calls):
            y = torch.randn(chance.randint(1, 60), chance.randint(1, 60))
            fast(torch.randn(chance.randint(1, 90), 8), y.t() if chance.random() < 0.1 else y)


def tables(start: object) -> Counter[str]:
    """Things in the containers that our objects hold, by class and attribute; from one object on, as far as it is ours."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[object] = [start]
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if type(thing).__module__.startswith("hotfuse"):
            for name in _attributes(thing):
                value = getattr(thing, name, None)
                if isinstance(value, dict | list | set | deque):
                    found[f"{type(thing).__name__}.{name}"] += len(cast(Collection[object], value))
        if isinstance(thing, dict | list | set | tuple) or type(thing).__module__.startswith(("hotfuse", "collections")):
            left += gc.get_referents(thing)
        elif callable(thing) and getattr(thing, "__closure__", None):
            left += [cell.cell_contents for cell in thing.__closure__ if cell != type(cell)()]  # type: ignore[attr-defined]
    return found


def _attributes(thing: object) -> list[str]:
    slots = [s for kind in type(thing).__mro__ for s in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(thing, "__dict__", {})]


FURTHER: dict[str, int] = {
    "Names._signatures": 8 * 512,
    "Group.tried": MAX_EARNED * INLINE.max_captures,
    "CallSamples._seen": 4 * samples.MAX_SIGNATURES,  # of a graph; there are two or three
    "EventLog._spans": 4 * INLINE.max_events,
    "Span.evidence": 4 * 4 * INLINE.max_events,  # a few words each
}
"""Tables whose bound is beyond what this traffic reaches."""
SLACK = 24
"""Plans come and go; what grows with calls grows by hundreds."""


def test_no_table_of_a_model_grows_with_the_shapes_of_its_calls() -> None:
    chance = random.Random(5)
    fast = served()
    at_random(fast, chance, 160)
    before = tables(fast._engine)
    assert before["CallSamples._seen"] > 32 and "InlineCache._misses" in before, "else nothing was walked over"
    at_random(fast, chance, 320)
    after = tables(fast._engine)
    grown = {name: (before[name], n) for name, n in after.items() if n > before[name] * 1.25 + SLACK}
    assert {name: n for name, n in grown.items() if name not in FURTHER} == {}
    assert all(after[name] <= bound for name, bound in FURTHER.items())
    fast.close()


def test_the_walk_finds_a_table_that_grows() -> None:
    fast = served()
    before = tables(fast._engine)
    entry = next(iter(fast._engine.sites.values())).entries[0]
    entry.refused.update({AttemptKey("sizes", str(n)): "" for n in range(100)})
    assert tables(fast._engine)["Entry.refused"] - before["Entry.refused"] == 100
    fast.close()


def test_misses_are_counted_by_a_bounded_number_of_facts() -> None:
    """A table's misses name the sizes that its cases are for; tables are exchanged for as long as shapes come."""
    later: list[Callable[[], None]] = []
    cache = InlineCache[int](1, 2, None, lambda _table, free: later.append(free))
    most, missed = dispatch.MAX_MISSES, 0
    for n in range(2, 3 * most):
        cache.add(Case((*GENERAL, Sized(0, 0, n)), n))
        for _ in range(1 + n % 3):
            assert routed(cache, [torch.ones(1, 2)]) is None
            missed += 1
        while later:
            later.pop()()
    assert len(cache._misses) <= most and len(cache.misses()) <= most
    assert sum(cache.misses().values()) == missed, "no miss is lost"
    assert cache.misses()[dispatch.OTHERS] > 0


def test_attempts_that_were_looked_up_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    fast = served()
    graph = next(iter(fast._engine.sites.values())).entries[0].baseline.graph
    asked: list[str] = []
    recorder = Recorder(Settings(profiles=":memory:"), log)
    here = SimpleNamespace(store=SimpleNamespace(decisions=lambda key, _n: asked.append(key) or []))
    monkeypatch.setattr(recorder, "_shared", here)
    monkeypatch.setattr(recorder, "_here", lambda: here)
    monkeypatch.setattr(recorder, "_basis", lambda _rests: "")
    monkeypatch.setattr(record, "MAX_ASKED", 50)
    for n in range(200):
        assert recorder.lost(graph, f"sizes {n}", ((), 1)) is None
    assert len(asked) == 200 and len(recorder._asked) == 50 and not recorder.failed
    recorder.lost(graph, "sizes 199", ((), 1))
    assert len(asked) == 200, "what was asked of late is not asked again"
    fast.close()


def test_refusals_of_an_entry_are_remembered_up_to_a_number() -> None:
    fast = served()
    entry = next(iter(fast._engine.sites.values())).entries[0]
    chance = random.Random(7)
    for n in range(3 * site.MAX_REFUSED):
        entry.mark_refused(sizes_key((n, chance.randint(1, 9))), "it lost")
    entry.mark_refused(AttemptKey("the last"), "it lost")
    assert len(entry.refused) == site.MAX_REFUSED and AttemptKey("the last") in entry.refused
    fast.close()


def test_a_site_that_is_never_hot_keeps_one_job_per_cache() -> None:
    fast = served()
    found = next(iter(fast._engine.sites.values()))
    found.hardening_jobs()
    entry = found.entries[0]
    for _ in range(50):
        found.remove(entry)
        found.admit(entry)
    assert len(found.hardening_jobs()) == 1
    fast.close()


class Named(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, f: torch.Tensor) -> Any:
        return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f


def test_names_in_any_order_are_served_beyond_those_that_are_kept() -> None:
    fast: Any = hotfuse.jit(Named(), settings=INLINE)
    orders = list(itertools.permutations("abcdef"))
    assert len(orders) > engine.MAX_PLAIN
    x = torch.arange(1.0, 7.0)
    with torch.no_grad():
        for order in orders:
            got = fast(**{name: x["abcdef".index(name)].reshape(1) for name in order})
            assert got.item() == 91.0
    assert len(fast._engine._plain) <= engine.MAX_PLAIN
    fast.close()


def test_costs_of_a_signature_are_asked_for_once() -> None:
    variant: Any = InstrumentedPlan.__new__(InstrumentedPlan)
    variant._costs, variant._working_out = {}, set()
    asked = [n for n in [*range(500), *range(500)] if variant.needs_costs(n)]
    assert asked == list(range(MAX_COSTS))


def test_questions_about_an_entry_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Future[Any]] = []

    class Busy:
        class pool:
            @staticmethod
            def submit(_task: Task) -> Future[Any]:
                waiting.append(Future())
                return waiting[-1]

    monkeypatch.setattr(examine, "sized", lambda _settings: Busy)
    fast = served()
    own = fast._engine
    own.recorder.on = True
    entry = next(e for s in own.sites.values() for e in s.entries)
    entry.samples.taken = 0  # it is due whenever somebody asks
    assert own.plans.examiner.due(entry)
    with torch.no_grad():
        own.plans.examiner.raced(entry, entry.plan, entry.samples.inputs())
    assert len(waiting) == 1 and not own.plans.examiner.due(entry)
    waiting[0].set_exception(CaptureError("the worker died", why=Why.WORKER_DIED))
    assert own.plans.examiner.due(entry)
    own.recorder.on = False
    fast.close()


def test_a_refusal_that_is_remembered_holds_nothing_of_those_who_heard_it() -> None:
    """An exception that is raised again and again holds the frames of all who raised it, with the plans they were at."""
    pool = Pool(PoolLimits(1), light, lambda: 0.0, 60.0)
    try:
        task = Task("deadly", {"die": 1}, timeout=60.0, tries=2, key="deadly")
        heard: list[CaptureError] = []
        for _ in range(3):
            with pytest.raises(CaptureError) as caught:
                pool.submit(task).result(60)
            heard.append(caught.value)
        assert pool.counts()["refused"] >= 2, "else it was not remembered"
        assert len({id(e) for e in heard}) == 3 and len({e.what for e in heard}) == 1
        kept = list(pool._poison.values())
        assert all(e.__traceback__ is None and e.__cause__ is None and e.__context__ is None for e in kept)
    finally:
        pool.close()


def test_arithmetic_of_sizes_is_remembered_up_to_a_number() -> None:
    for known in (algebra._terms, algebra.normal, algebra.divide, algebra._not_negative):
        assert 0 < (known.cache_info().maxsize or 0) <= 1 << 18, "each holds a tree of some hundred bytes"
