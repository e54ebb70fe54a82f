"""Sampling and instrumented plans: the same outputs, the right records, a budget that holds, and nothing on the call path."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.probe_pass import Probes, compile_all
from hotfuse.base.events import EventLog
from hotfuse.compile.instruments import fetch_counting
from hotfuse.compile.unit import units
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.partition.cut import cut
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.profile import agent as agent_module
from hotfuse.profile.agent import BUDGET, DENSE, Agent, Sampler
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.names import MAX_SIGNATURES, OTHER, Names
from hotfuse.profile.records import Batch, Flag, RecordKind, split
from hotfuse.profile.shown import watched_text
from hotfuse.runtime.observe.call_sampler import DEEP, CallSampler, Shared
from hotfuse.runtime.observe.counted_values import COUNT_AFTER
from hotfuse.runtime.observe.instrument import InstrumentedPlan
from hotfuse.runtime.observe.watch_points import WatchReason, choose, masks
from hotfuse.runtime.plan import Plan
from tests.races import kernels_win, samples_cost_nothing
from tests.seeds import generator

INLINE = Settings(capture="inline", hot_calls=1)

MODEL = """graph main(%x: f32[s0, 16], %keep: bool[s0, 16], %c: bool[]) where (2 <= s0) {
  param %w: f32[16, 16] = "w"
  %h: f32[s0, 16] = aten.linear.default(%x, %w, None)
  %m: f32[s0, 16] = aten.masked_fill.Scalar(%h, %keep, 0.0)
  %r: f32[s0, 16] = aten.relu.default(%m)
  %y: f32[s0, 16] = control.if(%c, [%r, %c]) {
    graph then(%a: f32[s0, 16], %b: bool[]) {
      %t: f32[s0, 16] = aten.tanh.default(%a)
      return %t
    }
    graph else(%a: f32[s0, 16], %b: bool[]) {
      %n: bool[] = aten.logical_not.default(%b)
      %y: f32[s0, 16] = control.if(%n, [%a]) {
        graph then(%p: f32[s0, 16]) {
          %q: f32[s0, 16] = aten.exp.default(%p)
          return %q
        }
        graph else(%p: f32[s0, 16]) {
          %q: f32[s0, 16] = aten.neg.default(%p)
          return %q
        }
      }
      return %y
    }
  }
  %z: f32[s0, 16] = aten.add.Tensor(%y, %x)
  return %z
}
"""
LOOP = """graph main(%x: f32[4], %n: i64[]) {
  %y: f32[4] = control.loop(%n, None, [%x], []) {
    graph body(%i: i64[], %go: bool[], %s: f32[4]) {
      %t: f32[4] = aten.add.Tensor(%s, 1.0)
      return %go, %t
    }
  }
  return %y
}
"""


@pytest.fixture(autouse=True)
def no_clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    with torch.no_grad():
        yield


@functools.cache
def probes() -> Probes:
    return Probes(compile_all())


def graph_of(text: str) -> Graph:
    return verify(parse(text))


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(16, 16) / 4}


def inputs(rows: int = 5, cond: bool = True) -> list[torch.Tensor]:
    return [torch.randn(rows, 16), torch.rand(rows, 16) < 0.5, torch.tensor(cond)]


def sampled(variant: InstrumentedPlan, args: Sequence[Any]) -> tuple[tuple[Any, ...], dict[RecordKind, np.ndarray]]:
    copied: list[list[bytes]] = []

    def publish(batch: Batch) -> None:
        """As the ring does: behind this the batch may be another call's."""
        copied.append([batch.record(i) for i in range(batch.count)])

    done = variant(1, args, publish)
    (records,) = copied
    return done.outs, split(np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1))


def variant_of(plan: Plan, held: dict[str, Any]) -> tuple[InstrumentedPlan, Names, int]:
    names = Names()
    number = names.graph("m")
    return InstrumentedPlan(plan, held, number, names, probes().look), names, number


def by_name(records: np.ndarray, names: Names, graph: int) -> dict[str, Any]:
    return {names.item_name(graph, int(r["item"])): r for r in records}


# --- where to look ----------------------------------------------------------------------------------------------------


def test_points_and_masks() -> None:
    graph = graph_of(MODEL)
    assert masks(graph) == {"keep", "c"}
    points = {p.value: p for p in choose(cut(graph))}
    assert points["keep"].place is WatchReason.MASK and points["keep"].flags == Flag.MASK | Flag.INPUT
    assert (
        points["x"].place is WatchReason.INPUT
        and points["r"].place is WatchReason.RELU
        and points["z"].place is WatchReason.OUTPUT
    )
    assert "w" not in points and "h" not in points
    assert len(choose(cut(graph), budget=2)) == 2
    assert {p.value for p in choose(cut(graph), visible={"z"})} == {"x", "keep", "c", "z"}


def test_planes_of_convolutions_are_rows() -> None:
    graph = graph_of("""graph main(%x: f32[1, 3, 8, 8]) {
      param %w: f32[4, 3, 3, 3] = "w"
      %c: f32[1, 4, 6, 6] = aten.conv2d.default(%x, %w, None)
      %r: f32[1, 4, 6, 6] = aten.relu.default(%c)
      %s: f32[1, 4, 6, 6] = aten.softmax.int(%r, 3)
      return %s
    }""")
    keep = {p.value: p.keep for p in choose(cut(graph))}
    assert keep == {"x": 1, "r": 2, "s": 1}


# --- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cond", [True, False])
def test_a_tier_0_variant(cond: bool) -> None:
    held = weights()
    plan = compile_tier0(graph_of(MODEL), held, INLINE)
    variant, names, g = variant_of(plan, held)
    args = inputs(7, cond)
    args[0][3] = 0
    outs, records = sampled(variant, args)
    for got, want in zip(outs, plan.run(*args), strict=True):
        assert torch.equal(got, want)
    values = by_name(records[RecordKind.VALUE], names, g)
    assert set(values) == {"x", "keep", "c", "r", "y", "z"}
    relu = torch.relu((args[0] @ held["w"].T).masked_fill(args[1], 0.0))
    assert values["r"]["zeros"] == int((relu == 0).sum()) and values["keep"]["valid"] == int(args[1].sum())
    assert values["r"]["max"] == pytest.approx(float(relu.max()), rel=1e-6)
    assert values["z"]["absmax"] == float(outs[0].abs().max()) and tuple(values["z"]["shape"][:2]) == (7, 16)
    control = by_name(records[RecordKind.CONTROL], names, g)
    assert control["if y"]["outcome"] == cond
    assert set(control) == ({"if y"} if cond else {"if y", "if y, 1: if y"})
    if not cond:
        assert control["if y, 1: if y"]["outcome"] == 1
    parts = by_name(records[RecordKind.PARTITION], names, g)
    assert len(parts) == len(plan.partitioning.parts) == 3 and all(p["ns"] > 0 for p in parts.values())
    (call,) = records[RecordKind.CALL]
    assert call["tier"] == 0 and sum(p["ns"] for p in parts.values()) <= call["ns"] and call["cost_ns"] > 0
    assert names.shapes(g, int(call["signature"])) == ((7, 16), (7, 16), ())
    assert variant.failed == 0 and not variant.hidden


@pytest.mark.parametrize("trips", [0, 3])
def test_trips_of_a_loop(trips: int) -> None:
    plan = compile_tier0(graph_of(LOOP), {}, INLINE)
    variant, names, g = variant_of(plan, {})
    (out,), records = sampled(variant, [torch.zeros(4), torch.tensor(trips)])
    assert torch.equal(out, torch.full((4,), float(trips)))
    (loop,) = records[RecordKind.CONTROL]
    assert loop["outcome"] == trips and loop["flags"] == Flag.LOOP and names.item_name(g, int(loop["item"])) == "loop y"


def test_a_tier_1_variant() -> None:
    held = weights()
    plan = compile_tier1(graph_of(MODEL), held, inputs(), INLINE)
    assert plan.tier == 1
    for cond in (True, False):
        variant, names, g = variant_of(plan, held)
        args = inputs(6, cond)
        outs, records = sampled(variant, args)
        for got, want in zip(outs, plan.run(*args), strict=True):
            assert torch.equal(got, want)
        values = by_name(records[RecordKind.VALUE], names, g)
        assert {"x", "keep", "c", "z"} <= set(values)
        assert values["z"]["absmax"] == float(outs[0].abs().max())
        assert len(records[RecordKind.PARTITION]) >= 1 and records[RecordKind.CALL][0]["tier"] == 1
        seen = {n: r["outcome"] for n, r in by_name(records.get(RecordKind.CONTROL, ()), names, g).items()}
        assert seen == ({"if y": 1} if cond else {"if y": 0, "if y, 1: if y": 1}) and not variant.hidden
        outs, records = sampled(variant, args)  # not timed inside, yet branches tell
        assert (
            torch.equal(outs[0], plan.run(*args)[0])
            and by_name(records[RecordKind.CONTROL], names, g)["if y"]["outcome"] == cond
        )
        assert plan.counters()["fell_back"] == 0


CHAIN = """graph main(%x: f32[s0, 16]) {
  param %w: f32[16, 16] = "w"
  %h: f32[s0, 16] = aten.linear.default(%x, %w, None)
  %r: f32[s0, 16] = aten.relu.default(%h)
  %s: f32[s0, 16] = aten.softmax.int(%r, 1)
  %n: f32[s0, 16] = aten.linear.default(%s, %w, None)
  return %n
}
"""


def test_values_inside_native_runs_are_counted_by_their_kernels() -> None:
    held = weights()
    plan = compile_tier1(graph_of(CHAIN), held, inputs()[:1], INLINE)
    assert len(plan.units) == 1 and plan.units[0].native is not None
    variant, names, g = variant_of(plan, held)
    x = torch.randn(9, 16)
    x[4] = 0
    relu = torch.relu(x @ held["w"].T)
    inner = {n for _, names in plan.units[0].native.code.made for n in names}
    hidden = sorted({"r", "s"} & inner)
    assert hidden, "everything is one kernel: there is nothing inside to be seen"
    values: dict[str, Any] = {}
    for n in range(3 * COUNT_AFTER):
        (out,), records = sampled(variant, [x])
        assert torch.equal(out, plan.run(x)[0])
        signature = int(records[RecordKind.CALL][0]["signature"])
        if variant.needs_costs(signature):
            variant.work_out(signature, [x.shape])
        seen = by_name(records[RecordKind.VALUE], names, g)
        assert n >= COUNT_AFTER or not set(hidden) & seen.keys(), "nobody can see it before kernels count"
        values |= seen
        if kernels := variant.wants():
            assert len(kernels) <= len(plan.kernels)
            variant.asked = True
            variant.count_with(fetch_counting(kernels, INLINE))
    exact = {"r": relu, "s": torch.softmax(relu, -1)}
    assert set(hidden) & values.keys(), (hidden, list(values))
    for name in set(hidden) & values.keys():
        r, want = values[name], exact[name]
        assert tuple(r["shape"][:2]) == (9, 16) and r["zeros"] == int((want == 0).sum()) and r["nonfinite"] == 0
        assert r["max"] == pytest.approx(float(want.max()), rel=1e-5) and r["zero_rows"] == -1
    assert plan.counters()["fell_back"] == 0 and variant.failed == 0


def test_work_on_paper() -> None:
    held = weights()
    plan = compile_tier0(graph_of(MODEL), held, INLINE)
    variant, names, g = variant_of(plan, held)
    args = inputs(5)
    _, before = sampled(variant, args)
    signature = int(before[RecordKind.CALL][0]["signature"])
    assert set(before[RecordKind.PARTITION]["flops"]) == {-1} and variant.needs_costs(signature)
    variant.work_out(signature, [tuple(t.shape) for t in args])
    _, after = sampled(variant, args)
    parts = by_name(after[RecordKind.PARTITION], names, g)
    assert parts["partition 0"]["flops"] >= 2 * 5 * 16 * 16 and parts["partition 0"]["bytes"] > 5 * 16 * 4
    assert not variant.needs_costs(signature)


def test_a_look_that_fails_leaves_the_call_alone() -> None:
    def broken(*_a: Any, **_k: Any) -> bool:
        raise RuntimeError("no")

    held = weights()
    plan = compile_tier0(graph_of(MODEL), held, INLINE)
    names = Names()
    variant = InstrumentedPlan(plan, held, names.graph("m"), names, broken)
    args = inputs()
    outs, _ = sampled(variant, args)
    assert torch.equal(outs[0], plan.run(*args)[0]) and variant.failed == 6


def test_an_error_of_the_plan_is_the_callers() -> None:
    held = weights()
    variant, _, _ = variant_of(compile_tier0(graph_of(MODEL), held, INLINE), held)
    published: list[Batch] = []
    with pytest.raises(RuntimeError):
        variant(1, [torch.randn(5, 3), *inputs()[1:]], published.append)
    assert not published
    outs, _ = sampled(variant, inputs())  # and the next call is as ever
    assert outs[0].shape == (5, 16)


def test_many_threads_in_one_variant() -> None:
    held = weights()
    plan = compile_tier0(graph_of(MODEL), held, INLINE)
    variant, names, g = variant_of(plan, held)
    wrong: list[str] = []

    def work(cond: bool, rows: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                args = inputs(rows, cond)
                outs, records = sampled(variant, args)
                control = by_name(records[RecordKind.CONTROL], names, g)
                if control["if y"]["outcome"] != cond or not torch.equal(outs[0], plan.run(*args)[0]):
                    wrong.append("mixed up")
                if any(int(v["rows"]) != rows for n, v in by_name(records[RecordKind.VALUE], names, g).items() if n != "c"):
                    wrong.append("rows of another call")

    threads = [threading.Thread(target=work, args=(bool(i % 2), 3 + i)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# --- when to look -----------------------------------------------------------------------------------------------------


def serve(s: Sampler, calls: int, call_ns: int, cost_ns: int, start: int = 0) -> list[int]:
    """Calls with a fake clock: the numbers of those that were sampled."""
    taken = []
    for number in range(start + 1, start + calls + 1):
        if number >= s.at:
            if s.sampled_ns:
                s.compared(number, call_ns)
            else:
                taken.append(number)
                s.took(number, call_ns + cost_ns, cost_ns // 10)  # most of the cost does not show from inside
    return taken


def test_dense_at_first_then_one_in_64() -> None:
    s = Sampler(64)
    taken = serve(s, 20_000, 1_000_000, 1)
    gaps = np.diff(taken)
    assert taken[0] == DENSE and gaps[:6].max() <= DENSE + 2 and 40 <= gaps[-50:].mean() <= 80
    assert len(set(gaps[-50:])) > 5  # jitter, so that periodic traffic is seen whole
    assert s.overhead < BUDGET


def test_what_costs_more_is_sampled_less() -> None:
    s = Sampler(64)
    taken = serve(s, 200_000, 10_000, 60_000)
    gaps = np.diff(taken)
    assert gaps[-20:].mean() > 1_000 and s.overhead <= 1.2 * BUDGET


def test_slow_models_are_sampled_more_often_while_that_is_cheap() -> None:
    s = Sampler(64)
    assert np.diff(serve(s, 2_000, 50_000_000, 10_000))[-50:].max() <= 4
    dear = Sampler(64)
    assert np.diff(serve(dear, 2_000, 50_000_000, 5_000_000))[-20:].mean() > 15
    assert dear.overhead <= 1.3 * BUDGET


def test_a_cost_that_drowns_in_noise_is_still_paid_for() -> None:
    rng = generator()
    s, call_ns, cost_ns, spent, total = Sampler(64), 200_000_000, 4_000_000, 0, 0
    for number in range(1, 6_001):
        ns = int(call_ns * rng.normal(1, 0.04))
        total += ns
        if number >= s.at:
            if s.sampled_ns:
                s.compared(number, ns)
            else:
                spent += cost_ns
                s.took(number, ns + cost_ns, cost_ns // 20)
    assert spent / total <= 1.6 * BUDGET and s.taken > 100


def test_fast_models_give_no_more_samples_than_there_is_use_for() -> None:
    s = Sampler(64)
    assert np.diff(serve(s, 100_000, 5_000, 0))[-20:].mean() > 1_000


def test_a_change_is_looked_at_closely() -> None:
    s = Sampler(64)
    serve(s, 10_000, 1_000_000, 1)
    s.changed(10_000)
    after = serve(s, 200, 1_000_000, 1, start=10_000)
    assert after[0] <= 10_000 + DENSE + 1 and np.diff(after)[:3].max() <= DENSE + 2


def test_the_agent_and_its_switch() -> None:
    a = Agent(64)
    s = a.sampler(3)
    assert a.sampler(3) is s and not a.due(3, 1) and a.due(3, 4)
    s.took(1, 1010, 3)
    assert a.due(3, 2)  # the plain call to compare with
    s.compared(2, 1000)
    assert not a.due(3, 3) and a.stats()["samples"] == 1 and a.stats()["watching_ns"] == 10
    a.forget(3)
    assert a.stats()["samples"] == 1
    a.off()
    assert not a.due(3, 1 << 40) and not Agent(64, on=False).due(0, 1 << 40)
    assert agent_module.DENSE == 4


# --- the watcher ------------------------------------------------------------------------------------------------------


class World:
    """A watcher with jobs that run when told to."""

    def __init__(self, **changes: Any) -> None:
        self.shared = Shared(Analyzer())
        self.jobs: list[Callable[[], None]] = []
        self.log = EventLog()
        self.call_sampler = CallSampler("m", INLINE.with_(**changes), self.jobs.append, self.log, self.shared)
        self.held = weights()
        self.plan = compile_tier0(graph_of(MODEL), self.held, INLINE)

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def serve(self, calls: int, make: Callable[[int], list[torch.Tensor]], plan: Plan | None = None, start: int = 0) -> int:
        plan = plan or self.plan
        sampler = self.call_sampler.watch(0)
        due = 0
        for number in range(start + 1, start + calls + 1):
            args = make(number)
            if number >= sampler.at:
                due += 1
                outs, seconds = self.call_sampler.run(0, number, plan, self.plan, self.held, args)
                assert seconds > 0
                want = plan.run(*args)
                assert torch.equal(outs[0], want[0]) or torch.allclose(outs[0], want[0], atol=1e-5)
            self.work()
        return due


@pytest.fixture
def world() -> Iterator[World]:
    w = World()
    yield w
    w.call_sampler.close()
    w.shared.analyzer.stop()


def unpaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken whatever they cost on this machine."""
    samples_cost_nothing(monkeypatch)


def test_a_watched_model_from_call_to_snapshot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unpaid(monkeypatch)
    due = world.serve(400, lambda n: inputs(4 + n % 2, n % 10 != 0))
    stats = world.call_sampler.stats()
    assert world.shared.analyzer.flush(120)
    assert due > 20 and 0 < stats["samples_not_ready"] < 4
    assert 0 <= 2 * stats["samples"] - (due - stats["samples_not_ready"]) <= 1  # each with a plain call to compare with
    assert stats["records_dropped"] == 0 and stats["looks_failed"] == 0 and stats["records_by_python"] == 0
    seen = world.call_sampler.seen(0)
    assert seen is not None and seen.samples == stats["samples"] and len(seen.signatures) == 2
    value, accuracy, n = world.call_sampler.predictable(0, "branch", "if y") or (None, 0, 0)
    assert value == 1 and accuracy > 0.6 and n == seen.samples - 1
    assert world.call_sampler.predictable(0, "shape") is not None and world.call_sampler.predictable(7, "shape") is None
    text = world.call_sampler.text()
    for part in ("calls sampled", "m:", "4×16", "% zero", "valid", "if y: then", "partition 0", "expected"):
        assert part in text, text


def test_jobs_that_wait_hold_no_results(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static cache's memory is used again once nobody reads it: a job in a queue that held results kept a device's from it."""
    unpaid(monkeypatch)
    world.serve(8, lambda n: inputs(4))  # there is a variant by now
    sampler, waiting, number = world.call_sampler.watch(0), list[Callable[[], None]](), 8
    while not waiting:
        number += 1
        if number >= sampler.at:
            outs, _ = world.call_sampler.run(0, number, world.plan, world.plan, world.held, inputs(7))  # sizes that are new
            results = [weakref.ref(t) for t in outs]
            del outs
            waiting, world.jobs = world.jobs, []
    assert [r() for r in results] == [None] * len(results)
    waiting[0]()


def test_drift_makes_it_look_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unpaid(monkeypatch)
    monkeypatch.setattr(agent_module, "PER_SECOND", 1e9)  # every call
    world.serve(300, lambda _: inputs(4, True))
    assert world.shared.analyzer.flush(120)
    assert not world.log.counts.get("notice.drift")
    world.serve(300, lambda _: inputs(4, False), start=300)
    assert world.shared.analyzer.flush(120)
    assert world.log.counts["notice.drift"] >= 1
    noticed = next(d for d in world.log.decisions if d.why.name == "DRIFT" and d.evidence["of"] == "outcome")
    assert noticed.evidence["value"] == "if y" and "changed" in world.call_sampler.text()


def test_a_plan_that_hides_its_branches_is_sampled_in_its_baseline_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unpaid(monkeypatch)
    better = replace(compile_tier1(graph_of(MODEL), world.held, inputs(), INLINE), units=())  # of which nothing shows inside
    world.serve(300, lambda n: inputs(4, False), better)
    assert world.shared.analyzer.flush(120)
    seen = world.call_sampler.seen(0)
    assert seen is not None
    tiers = {t.item: t.n for s in seen.signatures for t in s.calls}
    assert 1 <= tiers[0] <= 1 + seen.samples / DEEP and tiers[1] == seen.samples - tiers[0]
    assert tiers[0] == world.call_sampler._watched[0].deep
    (nested,) = [c for c in seen.controls if world.shared.analyzer.names.item_name(0, c.item) == "if y, 1: if y"]
    assert nested.n == tiers[0] and nested.outcomes == ((1, 1.0),)  # which only the baseline shows
    world.call_sampler.keep_only(0, [world.plan])
    assert list(world.call_sampler._watched[0].variants) == [id(world.plan)]


def test_a_plan_withdrawn_while_its_variant_was_made_is_not_kept(world: World) -> None:
    world.serve(10, lambda _: inputs())
    other = compile_tier0(graph_of(MODEL), world.held, INLINE)
    for withdrawn in (False, True):
        world.call_sampler.run(0, 100, other, world.plan, world.held, inputs())  # has a variant made
        assert world.jobs
        if withdrawn:
            world.call_sampler.keep_only(0, [world.plan])
        world.work()
        assert (id(other) in world.call_sampler._watched[0].variants) is not withdrawn
        world.call_sampler.keep_only(0, [world.plan])


def test_a_new_entry_takes_the_variants_of_plans_without_a_route_along() -> None:
    """The cache may have dropped versions of any entry for it."""
    fast = hotfuse.jit(torch.nn.Linear(4, 4).eval(), settings=INLINE.with_(tiers=0))
    with fast:
        for _ in range(3):
            fast(torch.randn(2, 4))
        engine = fast._engine
        (watched,) = engine.call_sampler._watched.values()
        watched.variants[-1] = watched.variants.get(-1)  # of a plan that is gone
        fast(torch.randn(2, 3, 4))
        assert len(engine.call_sampler._watched) == 2 and -1 not in watched.variants, str(fast.explain(full=True))


def test_switched_off_nothing_happens() -> None:
    w = World(watch=False)
    assert w.serve(100, lambda _: inputs()) == 0
    assert w.call_sampler.stats()["samples"] == 0 and not w.jobs and w.shared.analyzer.pid is None
    assert "switched off" in w.call_sampler.text()


def test_a_closed_watcher_lets_calls_pass(world: World) -> None:
    world.serve(10, lambda _: inputs())
    world.call_sampler.close()
    assert world.serve(100, lambda _: inputs(), start=10) == 0
    world.call_sampler.forget(0)
    outs, _ = world.call_sampler.run(0, 1, world.plan, world.plan, world.held, inputs())
    assert outs[0].shape == (5, 16)


def test_without_probes_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import hotfuse.compile.instruments as probes_module

    def broken(_settings: Settings) -> Any:
        raise OSError("no worker")

    monkeypatch.setattr(probes_module, "fetch_probes", broken)
    w = World()
    assert w.serve(200, lambda _: inputs()) <= 3
    assert "watching stopped: OSError: no worker" in w.call_sampler.text()
    w.call_sampler.close()


def test_code_that_looks_outlives_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that begins with kept plans has no worker: one that is started for probes takes seconds, and jobs wait for it."""
    import hotfuse.compile.instruments as fetching

    asked, ask = list[str](), fetching.ask

    def counted(body: Any, *rest: Any) -> Any:
        asked.append(body.kind)
        return ask(body, *rest)

    monkeypatch.setattr(fetching, "ask", counted)
    settings = Settings(cache_dir=tmp_path, cache=str(tmp_path / "code"), threads=1, idle=False)
    plan = compile_tier1(graph_of(CHAIN), weights(), inputs()[:1], INLINE)
    kernels = dict(plan.kernels.items())
    made = [(fetching.fetch_probes(settings), fetching.fetch_counting(kernels, settings)) for _ in range(3)]
    assert asked == ["probes", "counting"]
    assert made[0][1] and all(counting.keys() == made[0][1].keys() for _, counting in made)
    fetching.fetch_counting(dict(list(kernels.items())[:1]), settings)
    fetching.fetch_probes(settings.with_(cache="off"))
    assert asked == ["probes", "counting", *["counting"] * (len(kernels) > 1), "probes"]


def test_probes_are_asked_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was killed at the first attempt must not leave the whole process unwatched."""
    import hotfuse.compile.instruments as probes_module

    fetch, tried = probes_module.fetch_probes, list[int]()

    def lost_once(settings: Settings) -> Any:
        tried.append(1)
        if len(tried) == 1:
            raise OSError("the worker was killed")
        return fetch(settings)

    monkeypatch.setattr(probes_module, "fetch_probes", lost_once)
    w = World()
    w.serve(100, lambda _: inputs())
    assert len(tried) == 2 and not w.shared.failed and w.shared.look is not None
    assert "watching stopped" not in w.call_sampler.text()
    w.call_sampler.close()
    w.shared.analyzer.stop()


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_are_bounded_and_lead_back() -> None:
    names = Names()
    g = names.graph("a")
    assert names.item(g, "x") == names.item(g, "x") and names.item_name(g, names.item(g, "y")) == "y"
    for i in range(MAX_SIGNATURES):
        assert names.signature(g, ((i,),)) == i + 1
    assert names.signature(g, ((-1,),)) == OTHER and names.overflow == 1 and names.shapes(g, OTHER) is None
    assert names.shapes(g, 3) == ((2,),) and names.graph_name(9) == "graph 9" and names.item_name(9, 9) == "item 9"
    assert watched_text() == ""
