"""What pieces and kernels use of the machine, and the criteria that decide whether two are tried as one."""

from __future__ import annotations

from typing import Any

import pytest

from hotfuse.analysis.registers import parallel_iterations, vectors_at_once
from hotfuse.analysis.resources import (
    Bound,
    CorePeaks,
    ResourceUse,
    Work,
    library_seconds,
    roofline_seconds,
    used,
    work_of,
)
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.fusion.criteria import Criterion, FusionSide, judge
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType
from hotfuse.lower import lower
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import BufferKind

PEAKS = CorePeaks(flops_per_s=1e9, bytes_per_s=1e9, cache_bytes_per_s=1e9, l2=1000, call_s=0.0)

LAYER = """
graph main(%x: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[32, 64] = "w"
  %h: f32[s0, 32] = aten.linear.default(%x, %w, None)
  %y: f32[s0, 32] = aten.tanh.default(%h)
  return %y
}
"""


def test_work_of_a_piece() -> None:
    work = work_of(parse(LAYER), {"s0": 10})
    assert work.nodes == 2 and work.largest == 10 * 32 * 4
    assert work.traffic == 4 * (10 * 64 + 32 * 64 + 10 * 32)
    assert work.moved == 4 * (10 * 64 + 32 * 64 + 10 * 32 + 2 * 10 * 32)
    assert work.flops is not None and work.flops >= 2 * 10 * 32 * 64
    assert work.working_set == work.traffic + work.largest
    assert Work.from_dict(work.to_dict()) == work
    unknown = work_of(parse(LAYER), {})
    assert unknown.flops is None and unknown.traffic is None and unknown.working_set is None
    assert roofline_seconds(unknown, PEAKS) is None and library_seconds(parse(LAYER), {}, PEAKS) is None


def test_of_a_table_only_what_is_picked_counts() -> None:
    graph = parse("""
graph main(%i: i64[s0]) where (2 <= s0) {
  param %t: f32[30000, 64] = "t"
  %y: f32[s0, 64] = aten.embedding.default(%t, %i)
  return %y
}
""")
    work = work_of(graph, {"s0": 8})
    assert work.traffic == 8 * 8 + 2 * 8 * 64 * 4 and work.moved == work.traffic


@pytest.mark.parametrize(("flops", "traffic", "us", "bound"), [
    (900, 100, 1.0, Bound.COMPUTE), (100, 900, 1.0, Bound.MEMORY), (10, 10, 1.0, Bound.LATENCY), (None, 5, 1.0, Bound.UNKNOWN),
    (900, None, 1.0, Bound.UNKNOWN), (900, 100, 0.0, Bound.UNKNOWN),
])  # fmt: skip
def test_what_binds_a_kernel(flops: int | None, traffic: int | None, us: float, bound: Bound) -> None:
    use = used(Work(1, flops, traffic, traffic, 0), us, PEAKS)
    assert use.bound is bound
    if bound is Bound.COMPUTE:
        assert use.utilization == pytest.approx(0.9)
    assert use.to_dict()["bound"] == bound.value


def test_what_outgrows_the_cache_runs_at_the_pace_of_memory() -> None:
    peaks = CorePeaks(bytes_per_s=1e9, cache_bytes_per_s=10e9, l2=1000)
    assert peaks.bandwidth(1000) == 10e9 and peaks.bandwidth(1001) == 1e9


def test_registers_and_parallel_iterations_of_a_kernel() -> None:
    lowered = lower(parse(LAYER), kernel_cache().core)
    width = kernel_cache().core.lanes * 4
    vectors = vectors_at_once(lowered.kernel, width)
    assert kernel_cache().core.registers // 2 <= vectors <= kernel_cache().core.registers + 8
    assert parallel_iterations(lowered.kernel, {"s0": 2000}) > 1
    few, many = (parallel_iterations(_rows().kernel, {"n": n}) for n in (16, 160))
    assert many > few >= 1
    assert parallel_iterations(_rows().kernel, {}) == 1


def _rows() -> Any:
    text = "graph g(%x: f32[n, 64]) {\n  %y: f32[n, 64] = aten.softmax.int(%x, -1)\n  return %y\n}\n"
    return lower(parse(text), kernel_cache().core)


def test_tiles_that_are_alive_together_are_counted_together() -> None:
    def kernel(order: str) -> Any:
        b = KernelBuilder("k")
        x = b.buffer("x", BufferKind.INPUT, DType.F32, (256,), (1,))
        y = b.buffer("y", BufferKind.OUTPUT, DType.F32, (256,), (1,))
        if order == "all first":
            tiles = [b.load(x, (16 * i,), (16,)) for i in range(8)]
            for i, t in enumerate(tiles):
                b.store(y, (16 * i,), t)
        else:
            for i in range(8):
                b.store(y, (16 * i,), b.load(x, (16 * i,), (16,)))
        return b.finish()

    assert vectors_at_once(kernel("all first"), 64) == 8
    assert vectors_at_once(kernel("one by one"), 64) == 1
    assert vectors_at_once(kernel("all first"), 16) == 32


def side(kind: str = "rows", us: float = 10.0, bound: Bound = Bound.MEMORY, **changes: Any) -> FusionSide:
    nodes = changes.pop("nodes", 2)
    given = {"scratch": 0, "vectors": 4, "parallel": 16, **changes}
    return FusionSide(kind, ResourceUse(Work(nodes, 1, 1, 1, 0), us, bound, 0.5, **given))


def why(verdict: Any, criterion: Criterion) -> Any:
    return next(r for r in verdict.reasons if r.criterion is criterion)


def test_criteria_accept_and_refuse_with_reasons() -> None:
    peaks = CorePeaks(l2=1 << 20)
    good = judge(side(), side(), 4 << 20, 2, peaks)
    assert good.accepted and "outgrow" in good.because and len(good.reasons) == 6
    assert good.saving_us > 2 * (4 << 20) / peaks.bytes_per_s * 1e6
    for a, b, text in (
        (side("contract"), side("attention"), "contract and attention"),
        (side(nodes=40), side(nodes=40), "80 nodes"),
        (side(vectors=30), side(vectors=30), "60 vectors"),
        (side(scratch=200 << 10), side(scratch=200 << 10), "scratch"),
    ):
        verdict = judge(a, b, 4 << 20, 2, peaks)
        assert not verdict.accepted and text in verdict.because
        assert not why(verdict, Criterion.LIMITS).holds


def test_small_values_in_cache_are_not_worth_a_long_kernel() -> None:
    verdict = judge(side(us=5000.0), side(us=20.0), 300 << 10, 2, CorePeaks(l2=1 << 20))
    assert not verdict.accepted and "expected saving" in verdict.because and "stay in" in verdict.because


def test_complements_hide_each_other_and_parallelism_must_remain() -> None:
    peaks = CorePeaks()
    both = judge(side(bound=Bound.COMPUTE), side(bound=Bound.MEMORY), 0, 2, peaks)
    same = judge(side(bound=Bound.MEMORY), side(bound=Bound.MEMORY), 0, 2, peaks)
    assert both.saving_us > same.saving_us and why(both, Criterion.COMPLEMENT).holds
    assert not why(same, Criterion.COMPLEMENT).holds
    narrow = judge(side(parallel=1), side(parallel=64), 4 << 20, 8, peaks)
    assert not narrow.accepted and "1 iterations left for 8 threads" in narrow.because
    assert judge(side(parallel=1), side(parallel=1), 4 << 20, 8, peaks).accepted  # nothing is lost that was there
