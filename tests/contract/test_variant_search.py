"""Several kernels for one group: which are kept by what was predicted and measured, and the choice that native code makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hotfuse.analysis.resources import Work
from hotfuse.backends import registry
from hotfuse.backends.llvm.runs import size_dispatch
from hotfuse.base.errors import InternalError
from hotfuse.base.settings import Settings
from hotfuse.compile import fetch
from hotfuse.compile.learn.measure import make
from hotfuse.compile.parts import KernelCode
from hotfuse.compile.unit import units
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.variants import variant_search
from hotfuse.compile.variants.alternatives import ANY_SIZE, FEW_ROWS, LIBRARY, SizeRange, allowed, variant_question
from hotfuse.compile.variants.variant_search import VariantDecision
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.fusion import forecast
from hotfuse.fusion.crossover import Crossovers, Interval, Shifts, Variant, crossovers
from hotfuse.ir.dims import parse as dim
from hotfuse.ir.dims import sym
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower import lower
from hotfuse.lower.common.bounds import at_most, bounded
from hotfuse.lower.cpu.tiling import core_for
from hotfuse.lower.run.description import ChoiceStep
from hotfuse.pipeline import compile_tier1
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve.native_plan import assembled
from tests.contract.variant_cases import PRODUCT as TEXT
from tests.contract.variant_cases import forgets, question  # noqa: F401 - a fixture
from tests.races import kernels_win, variants_take

INLINE = Settings(capture="inline")
pytestmark = pytest.mark.usefixtures("forgets")


def cross(measure: Callable[[Variant, int], float], text: str = TEXT, sizes: dict[str, int] | None = None) -> VariantDecision:
    """The outcome where kernels take what a test says."""
    return question(measure, text, sizes).decide()


def until(border: int, other: str = FEW_ROWS) -> Callable[[Variant, int], float]:
    """One way is better up to a size, the kernel for any size beyond it; nothing else is any good."""

    def seconds(variant: Variant, n: int) -> float:
        good = variant.name == (other if n <= border else ANY_SIZE)
        return 1e-3 if good else 2e-3 if variant.name in (other, ANY_SIZE) else 3e-3

    return seconds


# --- deciding ----------------------------------------------------------------------------------------------------------


def test_measured_borders_take_the_place_of_predicted_ones() -> None:
    found = cross(until(20))
    assert (
        found.variants is not None
        and found.variants.names == (FEW_ROWS, ANY_SIZE)
        and found.variants.kernels == (1, 0)
        and len(found.kernels) == 1
    )
    assert abs(found.variants.ends[0] - 20) <= 2 and found.variants.points
    assert (
        FEW_ROWS in found.variants.predicted
        and "measured" in str(found.variants)
        and f"n0 <= {found.variants.ends[0]}" in str(found.variants)
    )


def test_a_way_that_measures_slower_is_not_kept() -> None:
    found = cross(until(0))
    assert found.variants is None and not found.kernels
    assert any("one kernel for all sizes" in note for note in found.notes)


def test_the_library_must_be_better_by_more() -> None:
    """A call that it serves leaves the native run."""

    def close(variant: Variant, n: int) -> float:
        return 0.95e-3 if variant.name == LIBRARY else 1e-3

    kept = cross(close)
    assert kept.variants is None or -1 not in kept.variants.kernels


def test_predictions_are_corrected_by_what_was_measured() -> None:
    shifts = Shifts()
    found = Crossovers("n", (Interval(0, 10, 0), Interval(11, None, 1)))
    assert shifts.corrected(found, ["a", "b"]) == found
    for _ in range(20):
        shifts.learn(("a", "b"), 10, 40)
    moved = shifts.corrected(found, ["a", "b"])
    assert 30 <= (moved.intervals[0].last or 0) <= 40 and moved.intervals[1].first == (moved.intervals[0].last or 0) + 1
    assert shifts.corrected(found, ["b", "a"]) == found, "other ways are not touched by it"
    cross(until(20))
    assert variant_search.shifts.seen, "measuring a group teaches the next prediction"


def test_what_calls_may_bring_is_read_off_guards() -> None:
    size = dim("(s0 * s1)")
    assert allowed(size, [dim("(2 <= s0)"), dim("(s0 <= 8)"), dim("(s1 < 5)")], {}) == SizeRange(0, 32)
    assert allowed(sym("s0"), [dim("(3 <= s0)")], {"s0": 100}) == SizeRange(3, 800)
    assert SizeRange(0, 40).points(6) == [1, 2, 4, 6, 7, 8, 16, 32, 40] and SizeRange(3, 3).points(6) == [3]


def test_groups_whose_sizes_are_known_have_no_question() -> None:
    graph = parse(TEXT.replace("s0", "8").replace(" where (1 <= 8)", ""))
    assert isinstance(variant_question(graph, kernel_cache().core, (), {}, kernel_cache().peaks), str)


def test_a_bound_changes_loops_and_not_results() -> None:
    graph = replace(parse(TEXT), guards=())
    few = bounded(graph, sym("s0"), 4)
    assert at_most(few.guards, sym("s0")) == 4 and at_most(few.guards, sym("s1")) is None
    assert lower(few, kernel_cache().core).kernel != lower(graph, kernel_cache().core).kernel
    assert make(few, kernel_cache().core).lowered.strides == make(graph, kernel_cache().core).lowered.strides


# --- native dispatch ---------------------------------------------------------------------------------------------------


def plan_with(variants: Callable[[int], VariantTable], other: str, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of a group whose other kernel computes something else, so that results show which one ran."""
    graph = parse(TEXT)
    monkeypatch.setattr("hotfuse.compile.unit.units._Unit._by_size", lambda *_: VariantDecision())
    kernels_win(monkeypatch)  # a clock decides nothing here
    found = fetch.finished(fetch.begin(TEXT, {"s0": 16}, INLINE))
    piece = piece_of(parse(TEXT.replace("aten.relu.default", other)), range(2), {"s0": 16})
    made = kernel_cache().kernel(piece)
    more = KernelCode(made.lowered, made.compiled.code, "another")
    general = replace(found.kernels[0], variants=variants(1))
    runs = fetch.fetch_runs(replace(found, kernels=(general, more)), {"s0": 16}, INLINE)
    return assembled(runs, {}, graph, {"s0": 16}, registry.kernels())


@pytest.mark.parametrize("end", [0, 1, 5, 16])
def test_native_code_chooses_by_size(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """relu up to the end, minus it beyond: the sign says which kernel ran."""
    plan = plan_with(lambda n: VariantTable(sym("n0"), (end,), (0, n), ("a", "b")), "aten.neg.default", monkeypatch)
    for m in sorted({0, 1, max(0, end - 1), end, end + 1, 40}):
        a, b = torch.randn(4, m, 40), torch.randn(4, 40, 70)
        product = torch.bmm(a.double(), b.double())
        want = torch.relu(product) if m <= end else -product
        (got,) = plan.run(a, b)
        assert got.shape == want.shape and torch.allclose(got.double(), want, atol=1e-4), f"{m} rows"
    assert plan.counters()["fell_back"] == 0


def test_sizes_of_the_library_leave_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with(
        lambda n: VariantTable(sym("n0"), (3, 8), (n, -1, 0), ("b", "library", "a")), "aten.neg.default", monkeypatch
    )
    for m, fell in ((1, 0), (3, 0), (4, 1), (8, 2), (9, 2), (30, 2)):
        a, b = torch.randn(4, m, 40), torch.randn(4, 40, 70)
        product = torch.bmm(a.double(), b.double())
        (got,) = plan.run(a, b)
        assert torch.allclose(got.double(), -product if m <= 3 else torch.relu(product), atol=1e-4), f"{m} rows"
        assert plan.counters()["fell_back"] == fell, f"{m} rows"


def test_choices_that_make_no_sense_are_refused() -> None:
    for choice in (
        ChoiceStep(sym("n"), (), (None,)),
        ChoiceStep(sym("n"), (3, 3), (None, None, None)),
        ChoiceStep(sym("n"), (1,), ()),
    ):
        with pytest.raises(InternalError, match="variants"):
            size_dispatch.check(choice)


def test_a_dynamic_product_gets_two_kernels_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the way from a graph; which variant wins is by construction."""
    takes = until(5)
    variants_take(monkeypatch, lambda variant, n: takes(variant, n) - 1e-3)
    monkeypatch.setattr(units, "BUDGET_S", math.inf)
    kernels_win(monkeypatch)
    graph = parse(TEXT)
    b = torch.randn(4, 40, 70)
    plan = compile_tier1(graph, {}, [torch.randn(4, 16, 40), b], INLINE)
    assert plan.account is not None and plan.account.counts["dispatched"] == 1 and len(plan.kernels) == 2
    assert any(
        "is several kernels" in line and "predicted" in line and "measured" in line for line in plan.account.units
    )
    for m in (0, 1, 4, 5, 6, 7, 33):
        a = torch.randn(4, m, 40)
        (got,) = plan.run(a, b)
        assert torch.allclose(got.double(), torch.relu(torch.bmm(a.double(), b.double())), atol=1e-4), f"{m} rows"
    ahead = torch.full((4, 2, 40), float("nan"))
    assert plan.run(ahead, b)[0].isnan().all() and plan.counters()["fell_back"] == 0
    off = fetch.begin(TEXT, {"s0": 16}, INLINE)
    off.variants = False
    assert len(fetch.finished(off).kernels) == 1


def test_what_variants_compute_is_counted_once_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[dict[str, int]] = []
    real = forecast.work_of

    def noted(graph: Graph, sizes: dict[str, int]) -> Work:
        counted.append(dict(sizes))
        return real(graph, sizes)

    monkeypatch.setattr(forecast, "work_of", noted)
    graph = parse(TEXT)
    core = core_for(16, many_registers=True)
    variants = [Variant("any size", ((graph, core),)), Variant("the library", ((graph, None),)),
                Variant("fewer rows", ((graph, replace(core, l1=core.l1 // 2)),))]  # fmt: skip
    found = crossovers(variants, "s0", [1, 8, 64], {}, forecast.RooflinePredictor())
    assert counted == [{"s0": 1}, {"s0": 8}, {"s0": 64}] and found.intervals
