"""What limits a plan that serves is found from sampled calls, addressed, measured, and learned from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.tierup.improve as improve_module
from hotfuse import Settings
from hotfuse.analysis.resources import work_of
from hotfuse.backends.protocol import Artifact
from hotfuse.base.events import Why
from hotfuse.compile import request_context, requests
from hotfuse.compile.answer_bodies import ProfileAnswer, received
from hotfuse.compile.learn import strategy_history
from hotfuse.compile.learn.learned import notes
from hotfuse.compile.request_context import RequestContext
from hotfuse.hpm.bottleneck import Bottleneck, Ledger, Strategy
from hotfuse.ir.text import show
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.store import Store
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.observe.findings import Finding
from hotfuse.runtime.observe.instrument import InstrumentedPlan
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.specialize.table import AGAINST, AttemptKey
from tests.contract.test_hpm import drawn
from tests.races import kernels_win, new_plans_win, raced
from tests.runtime.test_speed import PEAKS
from tests.runtime.test_tiers import SETTINGS, Compiler, served


def asked(us: float, balance: float = 1.0, **more: Any) -> dict[str, Any]:
    p = drawn(1, "contraction")[0]
    return {"graph": show(p.graph), "sizes": dict(p.sizes[-1]), "library": False, "us": us, "n": 9, "noise": 0.05,
            "balance": balance, "flops": -1, "bytes": -1, **more}  # fmt: skip


def test_partitions_are_diagnosed_and_their_times_kept(tmp_path: Path) -> None:
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with Store.open(place.path) as store:
        store.machine(fingerprint(), PEAKS.to_dict())
    p = drawn(1, "contraction")[0]
    roof_us = (work_of(p.graph, p.sizes[-1]).flops or 0) / 1e11 * 1e6
    parts = [asked(1e6), asked(1e6, balance=0.5), asked(1e6, n=1), asked(2 * roof_us, n=1)]
    header = {"kind": "profile", "threads": 1, "parts": parts, **place.header()}
    answer, _ = received(requests.answer(header, []), ProfileAnswer)
    found = [p.bottleneck for p in answer.parts]
    assert found == ["latency", "imbalance", "latency", "compute"], (
        "a second; the same on uneven threads; near the roof"
    )
    assert answer.parts[0].measured_rooflines and answer.parts[0].hz == PEAKS.hz
    with request_context.used_by(place.header()):
        kept = notes()
        assert kept is not None
        kept.flush()
    with Store.open(place.path) as store:
        rows = store.measurements(source="serve")
    assert len(rows) == 2, "one sample teaches nothing"
    assert rows[0].time_ns == pytest.approx(1e9)


LOPSIDED = """graph main(%x: f32[8], %w: f32[512, 512], %c: bool[]) {
  %y: f32[8] = control.if(%c, [%x, %w]) {
    graph then(%a: f32[8], %b: f32[512, 512]) {
      %r: f32[8] = aten.tanh.default(%a)
      return %r
    }
    graph else(%a: f32[8], %b: f32[512, 512]) {
      %m: f32[512, 512] = aten.mm.default(%b, %b)
      %s: f32[] = aten.sum.default(%m)
      %r: f32[8] = aten.add.Tensor(%a, %s)
      return %r
    }
  }
  return %y
}
"""


def test_a_side_that_nobody_takes_limits_nothing_and_teaches_nothing(tmp_path: Path) -> None:
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with Store.open(place.path) as store:
        store.machine(fingerprint(), PEAKS.to_dict())
    taken = asked(400.0, graph=LOPSIDED, sizes={}, flops=32, bytes=64)
    parts = [taken, {**taken, "flops": 2 * 512**3, "bytes": 3 << 20}, {**taken, "flops": -1, "bytes": -1}]
    header = {"kind": "profile", "threads": 1, "parts": parts, **place.header()}
    answer, _ = received(requests.answer(header, []), ProfileAnswer)
    assert [p.bottleneck for p in answer.parts] == ["latency", "compute", "unknown"]
    with request_context.used_by(place.header()):
        kept = notes()
        assert kept is not None
        kept.flush()
    with Store.open(place.path) as store:
        assert not store.measurements(source="serve"), "what it did is not what its features would say"


VERTICAL = AttemptKey(AGAINST, "vertical against memory", 1)
OLD_S = 0.02
"""How long what serves sleeps in a race."""
FOUND = Finding(1, 0, "tier 1 partition 0", "3x4", 50.0, 0.9, Bottleneck.MEMORY, "70% of memory", 48.0, 3)


class Again(Compiler):
    """Tier-1 plans whose kernels are called what they were asked for with."""

    def __init__(self, same: bool = False) -> None:
        super().__init__()
        self.same, self.asked = same, list[tuple[str, ...]]()

    def __call__(self, *args: Any, **more: Any) -> Plan:
        from dataclasses import replace

        plan = super().__call__(*args)
        only = more["demand"].strategies
        self.asked.append(only)
        name = "k" if self.same else "+".join(only) or "k"
        return replace(plan, artifacts=tuple(Artifact(a.graph, a.run, "llvm", f"{name}: 1 us") for a in plan.artifacts))


def looked_into(
    monkeypatch: pytest.MonkeyPatch, compiler: Again, times: Sequence[float], finding: Finding = FOUND
) -> tuple[Engine, Entry]:
    """A model whose plan of tier 1 was found to be bound by memory; better ones take so many times as long in races."""
    monkeypatch.setattr(strategy_history, "_histories", {})
    left = [0.2, *times]
    raced(monkeypatch, lambda: (OLD_S, OLD_S * (left.pop(0) if left else 2.5)))
    net = nn.Linear(4, 4).eval()
    engine = served(net, compiler, SETTINGS)
    for _ in range(6):
        engine(torch.randn(3, 4))
    (entry,) = next(iter(engine.sites.values())).entries
    assert entry.plan.tier == 1
    entry.findings = (finding,)
    for _ in range(400):
        engine(torch.randn(3, 4))
    return engine, entry


def ledger() -> Ledger:
    (own,) = strategy_history._histories.values()  # pyright: ignore[reportPrivateUsage]
    return own.ledger


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def test_what_limits_a_plan_is_addressed_one_strategy_at_a_time_and_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Again()
    engine, entry = looked_into(monkeypatch, compiler, [2.5, 0.2])
    assert compiler.asked[:3] == [(), ("vertical",), ("tiling",)], "the table's order, as nothing is known"
    rows = ledger().rows
    assert (rows[Bottleneck.MEMORY, Strategy.VERTICAL].helped, rows[Bottleneck.MEMORY, Strategy.TILING].helped) == (
        0,
        1,
    )
    assert entry.plan.artifacts[0].source == "tiling: 1 us"
    said = [d.evidence for d in engine.log.decisions if d.why is Why.BOTTLENECK]
    assert [e["strategy"] for e in said][:2] == ["vertical", "tiling"] and said[0]["bottleneck"] == "memory"
    won = next(d for d in engine.log.decisions if d.why is Why.FASTER and d.evidence.get("strategy"))
    assert won.evidence["strategy"] == "tiling" and won.evidence["helped"] is True


def test_a_plan_that_comes_out_the_same_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    _, entry = looked_into(monkeypatch, Again(same=True), [0.01] * 9)
    assert "changes nothing" in entry.refused[VERTICAL] and not ledger().rows


@pytest.mark.parametrize("change", [{"version": 0}, {"share": 0.1}, {"tier": 0}, {"bottleneck": Bottleneck.UNKNOWN}])
def test_nothing_is_tried_without_cause(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    from dataclasses import replace

    compiler = Again()
    looked_into(monkeypatch, compiler, [0.01] * 9, replace(FOUND, **change))
    assert compiler.asked == [()]


def test_a_strategy_that_failed_again_and_again_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = strategy_history.history_of

    def taught(path: str) -> strategy_history.StrategyHistory:
        own = real(path)
        for strategy in (Strategy.VERTICAL, Strategy.RECOMPUTE, Strategy.HORIZONTAL):
            while own.ledger.promise(Bottleneck.MEMORY, strategy) > 0.1:
                own.ledger.learn(Bottleneck.MEMORY, strategy, 1.0, 2.0)
        return own

    monkeypatch.setattr(improve_module, "history_of", taught)
    compiler = Again()
    engine, entry = looked_into(monkeypatch, compiler, [])
    assert compiler.asked == [(), ("tiling",)]
    assert "helped 0 of" in entry.refused[VERTICAL]
    assert any(d.why is Why.UNPROMISING for d in engine.log.decisions)


def test_a_plan_that_won_is_examined_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody watches its calls; and no clock says which kernels there are, nor how many plans win one after the other."""
    new_plans_win(monkeypatch)
    kernels_win(monkeypatch)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    settings = Settings(profiles=str(tmp_path / "p.sqlite"), capture="inline", hot_calls=1, tiers=1, watch=False)
    with hotfuse.jit(net, settings=settings) as fast:
        fast._engine.recorder.on = True  # pyright: ignore[reportPrivateUsage] - off where everything happens inline
        end, plan = time.monotonic() + 300, dict[str, Any]()
        while not plan.get("findings") and time.monotonic() < end:
            fast(torch.randn(64, 256))
            assert fast.wait(120)
            ((plan,),) = (s["plans"] for s in fast.explain().to_dict()["sites"])
            time.sleep(0.05)
        found = plan["findings"]
        assert {f["tier"] for f in found} == {1} and len(found) == len(plan["partitions"])
        assert sum(f["share"] for f in found) == pytest.approx(1.0, abs=0.01)
        assert fast.stats()["events"]["examinations"] >= 1


@pytest.mark.parametrize("told", [True, False], ids=["sampled calls know their bytes", "not yet"])
def test_findings_reach_explain_and_the_store(tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not told:
        monkeypatch.setattr(InstrumentedPlan, "needs_costs", lambda *_a: False)
    place = tmp_path / "p.sqlite"
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    with hotfuse.jit(net, settings=Settings(profiles=str(place), tiers=0, watch_rate=1)) as fast:
        end = time.monotonic() + 300
        found: list[dict[str, Any]] = []
        while not found and time.monotonic() < end:
            for _ in range(200):
                fast(torch.randn(64, 256))
            assert fast.wait(120)
            found = [f for s in fast.explain().to_dict()["sites"] for p in s["plans"] for f in p["findings"]]
        first = found[0]
        assert first["tier"] == 0 and first["us"] > 0 and first["bottleneck"] and first["source"] == "derived"
        assert first["counters"]["cycles"] > 0 and first["counters_source"] and first["energy_source"] == "estimated"
        assert 0 <= first["gigabytes_per_s"] < 1e4 and first["traffic_source"].startswith("derived from"), first
        assert "bound by" in str(fast.explain(full=True)) and "GB/s derived from" in str(fast.explain(full=True))
        assert fast.stats()["events"]["examinations"] >= 1
    with Store.open(place) as store:
        (graph,) = {p.graph for g in store.graphs() for p in store.partitions(g)} or {""}
        rows = [p for p in store.partitions(graph) if p.bottleneck]
    assert not graph or (rows and rows[0].evidence["because"])
