"""The passes of a device, on the CPU: there a recording is the run itself on tensors of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotfuse.backends.cuda.graphs import GraphRun
from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.base.passes import run_all
from hotfuse.base.settings import Settings
from hotfuse.compile.device.late_checks import checked_late
from hotfuse.compile.freeze import WeightedGraph
from hotfuse.compile.parts import GeneratedPlan
from hotfuse.compile.value import FEW_TILINGS, GENERATE, Demand
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ops.own.assume import ASSUME, OtherPath
from hotfuse.pipeline import device_passes as passes
from hotfuse.pipeline.job import Job
from hotfuse.runtime.plan import UNTRIED, Plan
from tests.contract.lowering import group_of
from tests.runtime.test_graph_run import OnCpu, differ

WEIGHT = torch.randn(8, 8)


class CpuBackend:
    kind, records = "cpu", "runs"

    def recorded(self, run: Any, *_: Any) -> GraphRun:
        return GraphRun(run, OnCpu(), differ)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_device_of", lambda _graph: (torch.device("cpu"), CpuBackend()))


def model(*, rests: bool) -> Graph:
    """A product; where it rests on data, calls whose sum is not positive take another way."""
    found = group_of(lambda x: ((x @ WEIGHT).relu(), x.sum() > 0), (torch.randn(4, 8),), constants=True)
    y, holds = found.graph.outputs
    assert isinstance(y, Value) and isinstance(holds, Value)
    if not rests:
        return Graph("main", found.graph.inputs, found.graph.params, found.graph.nodes, (y,))
    out = Value("assumed", y.type)
    nodes = (*found.graph.nodes, Node(Kind.OPERATOR, ASSUME, (y, holds), (out,)))
    return Graph("main", found.graph.inputs, found.graph.params, nodes, (out,))


def weights_of(graph: Graph) -> dict[str, torch.Tensor]:
    return {p.key: WEIGHT for p in graph.params}


def serves(plan: Plan, *, rests: bool) -> None:
    for _ in range(5):
        x = torch.randn(4, 8).abs()
        (got,) = plan.run(x)
        assert torch.allclose(got, (x @ WEIGHT).relu(), atol=1e-5)
    assert plan.counters()["recorded"] == 1 and plan.counters()["replays"] >= 2
    assert (plan.ahead is None) == rests and len(plan.graph.outputs) == 1
    other = -torch.randn(4, 8).abs()
    if rests:
        with pytest.raises(OtherPath):
            plan.run(other)
    else:
        assert torch.allclose(plan.run(other)[0], (other @ WEIGHT).relu(), atol=1e-5)


@pytest.mark.parametrize("rests", [False, True])
def test_library_kernels_are_recorded(rests: bool) -> None:
    graph = model(rests=rests)
    job = Job(Settings(), weights_of(graph), (torch.randn(4, 8),))
    serves(run_all(passes.RECORDED, WeightedGraph(graph, job.weights), job), rests=rests)


@pytest.mark.parametrize(("rests", "few"), [(False, False), (True, False), (False, True)])
def test_generated_kernels_are_recorded(rests: bool, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = model(rests=rests)
    weights = weights_of(graph)

    def generate(late: Graph, *_: Any, **asked: bool) -> GeneratedPlan:
        assert (len(late.outputs) == 2) == rests and late is checked_late(late)
        return GeneratedPlan(late, flat_function(late, meaning, weights)[0], "", (), ("1 kernel",), 3 * asked["few"])

    monkeypatch.setattr("hotfuse.compile.device.device_plan.generate", generate)
    demand = Demand(strategies=(GENERATE, FEW_TILINGS) if few else (GENERATE,))
    job = Job(Settings(), weights, (torch.randn(4, 8),), demand=demand)
    plan = run_all(passes.GENERATED, WeightedGraph(graph, weights), job)
    assert plan.notes == ("1 kernel",) and plan.counters()[UNTRIED] == 3 * few
    serves(plan, rests=rests)
