"""A model of the host on a device: transfers in its graph, what it is predicted to take, and the settings that allow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.analysis.placement import placement_cost, with_transfers
from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Kind
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.machine.device_rates import DeviceRates
from hotfuse.partition.cut import CutReason, cut
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.tierup.placement import between_transfers
from hotfuse.specialize.table import PLACED

TEXT = """graph g(%x: f32[s0, 4], %m: f32[s0, 4]) where (2 <= s0) {
  param %w: f32[4] = "w"
  %a: f32[s0, 4] = aten.mul.Tensor(%x, %w)
  %z: f32[4] = aten.zeros.default([4], device=$device(cpu), pin_memory=False)
  %b: f32[s0, 4] = aten.add.Tensor(%a, %z)
  %c: f32[s0, 4] = aten.relu.default(%m)
  return %b, %c, %b
}
"""
SETTINGS = Settings(record=False, idle=False, cache="off")


def test_every_input_and_result_has_a_transfer_and_all_between_is_there() -> None:
    moved = with_transfers(parse(TEXT), "cuda:0")
    verify(moved.graph)
    assert parse(show(moved.graph)) == moved.graph
    kinds = [n.kind is Kind.TRANSFER for n in moved.graph.nodes]
    assert kinds == [True, True, False, False, False, False, True, True]
    assert all("@cuda:0" in show(moved.graph).splitlines()[i] for i in range(1, 8))
    parts = cut(moved.graph).parts
    assert {p.device for p in parts} == {"cuda:0", "cpu"} and any(p.cut is CutReason.TRANSFER for p in parts)
    assert moved.graph.outputs[0] is moved.graph.outputs[2]


@pytest.mark.parametrize("rows", [2, 7])
def test_a_plan_between_transfers_computes_the_same_and_tells_where(rows: int) -> None:
    graph, w = parse(TEXT), torch.randn(4)
    moved = with_transfers(graph, "cpu")  # the host as the device: every step of the way but the copies' target
    body = compile_tier0(moved.inside, {"w": w}, SETTINGS)
    plan = between_transfers(moved, body, {"w": w}, torch.device("cpu"), "placed on cpu")
    x, m = torch.randn(rows, 4), torch.randn(rows, 4)
    for outs in (plan.run(x, m), plan.timed(x, m)[0]):
        assert torch.equal(outs[0], x * w) and torch.equal(outs[1], torch.relu(m)) and torch.equal(outs[2], outs[0])
    assert len(plan.timed(x, m)[1]) == 3 and plan.layers == (PLACED,) and plan.memory.constants == w.nbytes
    assert [p.device for p in plan.partitioning.parts] == ["cpu"] * 3 and plan.notes[0] == "placed on cpu"


def test_predicted_time_counts_transfers_launches_and_the_binding_rate() -> None:
    graph = parse(TEXT)
    slow = DeviceRates(flops=1e12, memory=1e12, to_device=1e6, from_device=1e9)
    fast = DeviceRates(flops=1e12, memory=1e12, to_device=1e12, from_device=1e12)
    one, other = placement_cost(graph, {"s0": 1000}, slow), placement_cost(graph, {"s0": 1000}, fast)
    assert one is not None and other is not None
    assert one.compute_s == other.compute_s and one.transfer_s > 2 * 16000 / 1e6 > other.transfer_s
    assert one.total_s == one.transfer_s + one.compute_s and one.weight_bytes == 16
    more = placement_cost(graph, {"s0": 1_000_000}, fast)
    assert more is not None and more.compute_s > other.compute_s
    assert placement_cost(graph, {}, fast) is None


def test_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().devices == "same"
    monkeypatch.setenv("HOTFUSE_DEVICES", "auto")
    assert Settings().devices == "auto"
    monkeypatch.setenv("HOTFUSE_DEVICES", "gpu")
    with pytest.raises(InputError, match="HOTFUSE_DEVICES='gpu' is not among the choices"):
        Settings()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
@pytest.mark.budget_s(20)
def test_without_a_device_it_is_refused_once_and_the_host_serves() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    with torch.no_grad(), hotfuse.jit(model, settings=SETTINGS.with_(devices="auto", capture="inline")) as fast:
        for _ in range(60):
            x = torch.randn(3, 8)
            assert torch.allclose(fast(x), model(x), atol=1e-5)
        told = fast.explain().to_dict()
        refused = [d for d in told["decisions"] if d["why"] == "there is no device to run on"]
        assert len(refused) == 1, told["decisions"]
