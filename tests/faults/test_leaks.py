"""Nobody holds what is gone: plans, models that nobody closed, graphs that the analyzer knew, requests that were answered."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.compile.answer_bodies import ProfileAnswer, message
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.profile.analyzer_memory import AnalyzerMemory
from hotfuse.profile.names import OTHER, Names
from hotfuse.profile.records import Batch, Subject
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.observe import examine, findings
from hotfuse.runtime.observe.call_sampler import CallSampler, shared_here
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup.tier2 import for_sizes
from tests import process
from tests.races import new_plans_win
from tests.runtime.test_pool import light

INLINE = Settings(capture="inline", hot_calls=2, profiles=":memory:")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """What other tests left is not counted, and a collector that comes by itself hides nothing."""
    process.freeze()
    with torch.no_grad():
        yield


def found(kind: type) -> list[object]:
    epochs.quiesce()
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is kind]


def serve_one() -> Any:
    fast = hotfuse.jit(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), settings=INLINE)
    for n in range(40):
        fast(torch.randn(3 + n % 5, 16))
    return fast


def test_models_that_nobody_closed_are_gone_with_their_last_reference() -> None:
    """The analyzer lives as long as the process and tells models of drift: it held each of them, with its instrumented plans."""
    analyzer = shared_here().analyzer
    analyzer._tidy()  # pyright: ignore[reportPrivateUsage] - what went before this test would make room for what comes in it
    before = len(analyzer.names)
    fast = serve_one()
    assert found(Plan) and len(analyzer.names) > before, "else nothing is tested"
    del fast
    assert not found(Engine) and not found(CallSampler) and not found(Plan)
    hotfuse.jit(nn.ReLU(), settings=INLINE)(torch.ones(2))  # whoever comes next tidies up
    assert len(analyzer.names) <= before + 1


def test_a_dropped_graph_is_forgotten_by_the_analyzer() -> None:
    analyzer = shared_here().analyzer
    fast = serve_one()
    engine = fast._engine
    known = len(analyzer.names)
    fast._target[0].register_forward_hook(lambda *_: None)  # another model: every plan goes
    fast(torch.randn(3, 16))
    analyzer._tidy()  # pyright: ignore[reportPrivateUsage]
    present = sum(len(s.entries) for s in engine.sites.values())
    assert len(analyzer.names) <= known - 1 + present


def test_numbers_of_forgotten_graphs_stay_quiet() -> None:
    names, book = Names(), AnalyzerMemory()
    first, second = names.graph("a"), names.graph("b")
    item = names.item(first, "x")
    assert names.signature(first, ((2,),)) != OTHER
    names.forget(first)
    assert names.signature(first, ((2,),)) == OTHER and names.item(first, "y") == 0 and len(names) == 1
    assert names.item_name(first, item) == f"item {item}" and names.shapes(first, 1) is None
    assert names.graph("c") not in (first, second), "a number means one graph for ever"

    def call(graph: int) -> None:
        batch = Batch(1)
        batch.call(Subject(graph, 1, 0, 0), 0, 5, 1)
        book.add(np.frombuffer(batch.record(0), np.uint8).reshape(1, -1))

    call(first)
    call(second)
    book.forget(first)
    call(first)  # of a call that was in it
    assert set(book.graphs) == {second} and set(book.snapshot().graphs) == {second}


def test_a_worker_that_waits_holds_nothing_of_the_request_before() -> None:
    class Subjects:
        pass

    pool = Pool(PoolLimits(1), light, lambda: 0.0, 60.0)
    try:
        about, done = Subjects(), threading.Event()
        gone = weakref.ref(about)

        def answered(_: Future[Any], about: object = about) -> None:
            done.set()

        future = pool.submit(Task("a question", {"say": 1}))
        future.add_done_callback(answered)
        assert future.result(60)[0]["said"] == 1 and done.wait(60)
        del about, answered, future
        for _ in range(12_000):
            if gone() is None:
                break
            threading.Event().wait(0.01)  # the thread may be on its way
        assert gone() is None, sys.getrefcount(gone())
    finally:
        pool.close()


def test_a_question_that_waits_holds_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about partitions come behind all compiling: for minutes, on a busy machine."""
    waiting: list[Future[Any]] = []

    class Never:
        def submit(self, task: Task) -> Future[Any]:
            waiting.append(Future())
            return waiting[-1]

    class Busy:
        pool = Never()

    monkeypatch.setattr(examine, "sized", lambda _settings: Busy)
    monkeypatch.setattr(findings, "MIN_NS", 0)  # there is something to ask about on the fastest machine, too
    fast = serve_one()
    engine = fast._engine
    engine.recorder.on = True
    entry = next(iter(engine.sites.values())).entries[0]
    engine.plans.examiner.raced(entry, entry.plan, entry.samples.inputs())
    assert waiting, "else nothing is tested"
    del entry, engine, fast
    assert not found(Plan)
    waiting[0].set_result(message(ProfileAnswer((), 0)))  # nobody is there to hear it


def versions_of(entry: Any) -> tuple[tuple[int, ...], Plan]:
    return tuple(7 for _ in entry.symbols), replace(entry.baseline, tier=2)


def test_an_entry_that_went_while_a_version_was_compiled_stays_gone() -> None:
    """Its version would bring it back into the inline cache, where nobody would look for it again."""
    fast = serve_one()
    site = next(iter(fast._engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    cache = site.caches[False]
    site.remove(entry)
    assert not site.admit_version(entry, *versions_of(entry))
    assert all(t.entry is not entry for t in cache.table.targets)


def test_a_version_that_is_withdrawn_while_it_is_admitted_leaves_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails takes all versions away, and waits for nobody."""
    fast = serve_one()
    site = next(iter(fast._engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    cache = site.caches[False]
    add = cache.add

    def meanwhile(case: Any) -> Any:
        site.remove_versions(entry)
        return add(case)

    monkeypatch.setattr(cache, "add", meanwhile)
    assert not site.admit_version(entry, *versions_of(entry))
    assert all(t.version is None for t in cache.table.targets) and not entry.versions


def test_an_entry_that_makes_room_for_a_version_is_forgotten_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = serve_one()
    engine = fast._engine
    site = next(iter(engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    cache = site.caches[False]
    coldest = next(t for t in cache.table.targets if t.entry is not entry and t.signature is None)
    monkeypatch.setattr(cache, "add", lambda _case: (coldest,))
    site.admit_version(entry, *versions_of(entry))
    assert coldest.entry not in site.entries
    engine.plans.let_go()
    assert set(engine.call_sampler._watched) == {e.key for e in site.entries}
    assert engine.log.counts["drop.too_many"] == 1


def consistent(site: Any) -> bool:
    """Whether entries and the inline cache speak of the same versions."""
    routes = {(id(t.entry), t.signature, id(t.version)) for c in site.caches.values() for t in c.table.targets if t.signature}
    return routes == {(id(e), s, id(p)) for e in site.entries for s, p in e.versions.items()}


def test_a_version_that_is_admitted_while_others_are_withdrawn_keeps_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is held by its entry for ever: no call is sent to it, and as it is there, nobody makes another one."""
    fast = serve_one()
    site = next(iter(fast._engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    site.remove_versions(entry)
    signature, plan = versions_of(entry)
    assert site.admit_version(entry, signature, plan)
    later, drop = replace(plan), site._drop

    def meanwhile(entry: Any, which: Any) -> None:
        monkeypatch.undo()
        assert site.admit_version(entry, tuple(n + 1 for n in signature), later)
        drop(entry, which)

    monkeypatch.setattr(site, "_drop", meanwhile)
    site.remove_versions(entry)
    assert list(entry.versions.values()) == [later] and consistent(site)


def test_a_version_that_makes_room_takes_no_newer_one_of_its_sizes_along() -> None:
    fast = serve_one()
    site = next(iter(fast._engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    site.remove_versions(entry)  # whatever it has earned
    signature, plan = versions_of(entry)
    assert site.admit_version(entry, signature, plan)
    old = next(t for t in site.caches[False].table.targets if t.version is plan)
    newer = replace(plan)
    assert site.admit_version(entry, signature, newer)
    site._gone([old])
    assert entry.versions == {signature: newer} and consistent(site)


def test_versions_and_routes_agree_whoever_comes_and_goes() -> None:
    """A thread that admits versions, as jobs do, and two that take them away, as calls that fail do."""
    fast = serve_one()
    site = next(iter(fast._engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    signature, plan = versions_of(entry)
    done = threading.Event()

    def admit() -> None:
        for n in range(150):
            site.admit_version(entry, tuple(d + n % 4 for d in signature), replace(plan))
        done.set()

    def take_away() -> None:
        while not done.is_set():
            site.remove_versions(entry)

    threads = [threading.Thread(target=work) for work in (admit, take_away, take_away)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert done.is_set() and not any(t.is_alive() for t in threads)
    assert consistent(site)


def test_a_version_is_deployed_though_the_one_it_replaces_went_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails takes all versions away while the rarest is looked for: the job raised, and whoever heard held its plan."""
    fast = serve_one()
    engine = fast._engine
    site = next(iter(engine.sites.values()))
    entry = next(e for e in site.entries if e.symbols)
    site.remove_versions(entry)
    assert site.admit_version(entry, *versions_of(entry))
    wanted = next(s for s in entry.samples.shares() if entry.samples.inputs(s) is not None)
    improver, shares = engine._improver, entry.samples.shares

    def meanwhile() -> Any:
        site.remove_versions(entry)
        return shares()

    monkeypatch.setattr(entry.samples, "shares", meanwhile)
    monkeypatch.setattr(engine.plans, "settings", replace(engine.settings, max_versions=1))
    context = replace(improver._context, improve=lambda *_args, **_how: replace(entry.baseline))
    new_plans_win(monkeypatch)
    improver._runner.attempt(entry, for_sizes(context, site, entry, wanted))
    assert set(entry.versions) == {wanted} and consistent(site)
