# pyright: reportPrivateUsage=false
"""Weights that were measured while a plan served reach whoever plans for its graph, under traffic as it comes; when they are not
what it was planned by, the graph is planned again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import Why
from hotfuse.compile.unit import units
from hotfuse.compile.value import Demand
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.profile.traffic import MeasuredPiece, TrafficSeen
from hotfuse.runtime.observe.graph_weights import MAX_KEPT, MIN_SAMPLES, GraphWeights
from hotfuse.runtime.tierup.strategies import MAX_REPLANS, weights_moved
from hotfuse.specialize.table import REPLANNED
from tests.races import kernels_win

PATIENCE_S = 90.0
"""Within which samples come on however busy a machine; nothing is said of how long it takes."""


class Perceptron(nn.Module):
    """Some kernels behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two products with something between them, which is no part of either."""
        return torch.softmax(self.b(torch.softmax(self.a(x), -1).cumsum(-1)), -1)


def entry_of(fast: Any) -> Any:
    (entry,) = [e for s in fast._engine.sites.values() for e in s.entries]
    return entry


def called_until(fast: Any, done: Callable[[], bool]) -> bool:
    """Call with other data each time, as default settings have it watched, until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not done() and time.monotonic() < end:
        for _ in range(100):
            fast(torch.randn(8, 64))
        fast._engine.call_sampler._shared.analyzer.flush()
    return done()


def test_weights_arrive_at_the_planner_under_default_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """From calls through sampling, the analyzer and examination to a request for a plan, and to the groups they are weights of."""
    kernels_win(monkeypatch)
    told: list[TrafficSeen] = []
    plan = units._plan

    def planning(text: str, sizes: Any, seen: TrafficSeen) -> Any:
        told.append(seen)
        return plan(text, sizes, seen)

    monkeypatch.setattr(units, "_plan", planning)
    settings = Settings(capture="inline", hot_calls=2, race_s=0.01)
    model = Perceptron().eval()
    with hotfuse.jit(model, settings=settings) as fast, torch.no_grad():
        assert called_until(fast, lambda: any(d.why is Why.WEIGHTS_MOVED for d in fast._engine.log.decisions))
        entry = entry_of(fast)
        assert not told[0].pieces, "nothing had served when its first plan was made"
        pieces = told[-1].pieces
        assert len(told) > 1 and pieces and min(p.n for p in pieces) >= MIN_SAMPLES and sum(p.us for p in pieces) > 0
        assert entry.replans == 1 and REPLANNED in entry.refused, "there is no better grouping of three kernels"
        assert "weights: " in fast.explain(full=True).text(full=True)
        costs, served = SeenCosts(told[-1]), entry.plan
        index = UseIndex(served.graph, {})
        found = [costs.measured(index, range(p.first, p.last), library=served.artifacts[p.index].backend != "llvm")
                 for p in served.partitioning.parts]  # fmt: skip
        assert any(f is not None for f in found), "they are weights of groups as planners know them"
        x = torch.randn(8, 64)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def piece(graph: str, us: float, n: int = 20) -> MeasuredPiece:
    return MeasuredPiece(graph, {}, library=False, us=us, noise=0.1, n=n, bytes=0, cycles=None, uj=0.0)


def test_shares_of_the_time_say_whether_weights_moved() -> None:
    then = [piece("a", 10.0), piece("b", 30.0)]
    assert GraphWeights(tuple(then)).moved(then) == 0.0
    slower = GraphWeights((piece("a", 15.0), piece("b", 45.0)))
    assert slower.moved(then) == 0.0, "everything became slower alike: no other plan would be better"
    assert GraphWeights((piece("a", 30.0), piece("b", 10.0))).moved(then) == pytest.approx(0.5)
    assert GraphWeights((piece("c", 30.0), piece("a", 10.0))).moved(then) == pytest.approx(0.75), "nobody had measured it"
    assert GraphWeights(tuple(then)).moved([]) == 1.0 and GraphWeights().moved(then) == 0.0


def test_weights_outlive_the_plan_that_they_were_measured_in() -> None:
    """A planner that is told of both groupings compares measurements with measurements."""
    first = GraphWeights().updated([piece("a", 10.0)])
    second = first.exchanged()
    assert second.serving == () and not second.steady() and [p.graph for p in second.pieces()] == ["a"]
    third = second.updated([piece("b", 5.0)]).updated([piece("b", 6.0)])
    assert [(p.graph, p.us) for p in third.pieces()] == [("b", 6.0), ("a", 10.0)]
    many = GraphWeights()
    for i in range(3 * MAX_KEPT):
        many = many.exchanged().updated([piece(str(i), 1.0)])
    assert len(many.pieces()) <= MAX_KEPT


def test_a_graph_is_planned_again_as_often_as_that_may_tell_anything() -> None:
    account: Any = SimpleNamespace(seen=TrafficSeen(pieces=(piece("a", 10.0), piece("b", 30.0))))
    entry: Any = SimpleNamespace(plan=SimpleNamespace(tier=1, account=account), layers=(), replans=0, planned_by=None,
                                 weighed=GraphWeights((piece("a", 30.0), piece("b", 10.0))))  # fmt: skip
    assert weights_moved(entry) == pytest.approx(0.5)
    entry.planned_by = entry.weighed.pieces()
    assert weights_moved(entry) == 0.0, "planned by them, whatever came of it"
    entry.weighed = GraphWeights((piece("a", 11.0), piece("b", 29.0)))
    assert weights_moved(entry) > 0, "and moved since"
    entry.replans = MAX_REPLANS
    assert weights_moved(entry) == 0.0
    entry.replans, entry.weighed = 0, GraphWeights((piece("a", 11.0, MIN_SAMPLES - 1), piece("b", 29.0)))
    assert weights_moved(entry) == 0.0, "too few samples"
    entry.weighed, entry.layers = GraphWeights((piece("a", 11.0), piece("b", 29.0))), ("a layer",)
    assert weights_moved(entry) == 0.0


def test_planning_that_comes_to_the_groups_that_serve_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse.base.errors import CaptureError
    from hotfuse.compile.fetch import begin, finished

    kernels_win(monkeypatch)
    settings = Settings(capture="inline")
    text = "graph main(%x: f32[8, 64]) {\n  %y: f32[8, 64] = aten.tanh(%x)\n  return %y\n}"
    first = begin(text, {}, settings)
    finished(first)
    assert first.grouping
    again = begin(text, {}, settings, replace(Demand(), serving=first.grouping))
    with pytest.raises(CaptureError) as raised:
        finished(again)
    assert raised.value.why is Why.SAME_PLAN and not again.graph.codes
