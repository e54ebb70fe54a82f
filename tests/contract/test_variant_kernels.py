"""Attention by its length, and one thread against several by size: predicted, measured, dispatched natively, remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hotfuse.base.settings import Settings
from hotfuse.compile import request_context
from hotfuse.compile.learn.learned import notes
from hotfuse.compile.learn.measure import core_variants
from hotfuse.compile.request_context import RequestContext
from hotfuse.compile.unit import units
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.variants import breakpoints
from hotfuse.compile.variants.alternatives import (
    ANY_SIZE,
    LIBRARY,
    ONE_THREAD,
    SizeRange,
    VariantQuestion,
    variant_question,
)
from hotfuse.compile.variants.variant_search import VariantDecision, VariantSearch
from hotfuse.fusion.crossover import Crossovers, Interval, Shifts, Variant
from hotfuse.ir.text import parse
from hotfuse.pipeline import compile_tier1
from hotfuse.runtime.plan import Plan
from tests.contract.variant_cases import PRODUCT, forgets, question  # noqa: F401 - a fixture
from tests.races import kernels_win, variants_take

ATTENTION = """
graph main(%q: f32[s1, 4, s0, 32], %k: f32[s1, 4, s0, 32], %v: f32[s1, 4, s0, 32]) where (1 <= s0), (1 <= s1) {
  %y: f32[s1, 4, s0, 32] = aten.scaled_dot_product_attention.default(%q, %k, %v)
  return %y
}
"""
INLINE = Settings(capture="inline")
pytestmark = pytest.mark.usefixtures("forgets")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def cross(text: str, sizes: dict[str, int], measure: Callable[[Variant, int], float] | None, threads: int) -> VariantDecision:
    return question(measure, text, sizes, threads).decide()


def upto(border: int, good: Callable[[str], bool]) -> Callable[[Variant, int], float]:
    """Some ways are better up to a size, the kernel for any size beyond it."""
    return lambda variant, n: 1e-3 if (good(variant.name) if n <= border else variant.name == ANY_SIZE) else 2e-3


def test_attention_is_asked_by_its_queries() -> None:
    graph = parse(ATTENTION)
    piece = piece_of(graph, range(1), {"s0": 64, "s1": 1})
    cache = kernel_cache()
    found = variant_question(piece.normal, cache.core, core_variants(cache.core), piece.sizes, cache.peaks)
    assert not isinstance(found, str)
    assert any(w.name.startswith("cut for") for w in found.variants) and found.turns, "narrower panels for short sequences"
    assert found.env(48)[str(found.size.args[0])] == 48
    fixed = parse(ATTENTION.replace("s0", "64").replace("where (1 <= 64), ", "where "))
    assert isinstance(variant_question(fixed, kernel_cache().core, (), {"s1": 1}, kernel_cache().peaks), str)


def test_short_sequences_get_a_tiling_of_their_own() -> None:
    found = cross(ATTENTION, {"s0": 64, "s1": 1}, upto(24, lambda name: name.startswith("cut for")), 1)
    assert found.variants is not None and found.variants.names[-1] == ANY_SIZE and found.variants.names[0].startswith("cut for")
    assert abs(found.variants.ends[0] - 24) <= 3 and "cut for" in found.variants.predicted and len(found.kernels) == 1


@pytest.mark.parametrize("text", [ATTENTION, PRODUCT], ids=["attention", "product"])
def test_others_are_really_measured_against_the_kernel_for_any_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a prediction has no place for that kernel: nothing was built for it then."""
    predict = VariantSearch._predicted

    def elsewhere(self: VariantSearch, question: VariantQuestion, variants: Sequence[Variant], within: SizeRange) -> Crossovers:
        others = [n for n, w in enumerate(variants) if w.name != ANY_SIZE]
        given = predict(self, question, variants, within)
        return replace(given, intervals=(Interval(1, None, others[0]),)) if others else given

    monkeypatch.setattr(VariantSearch, "_predicted", elsewhere)
    found = cross(text, {"s0": 16, "s1": 1} if "s1" in text else {"s0": 16}, None, 1)
    assert found.notes or found.variants is not None
    assert not any("cannot be measured" in n for n in found.notes), found.notes


def test_a_plan_does_not_wait_long_for_an_answer() -> None:
    """Without time nothing is built; with time for one size, that one stands for the others."""
    seen: list[int] = []

    def measure(variant: Variant, n: int) -> float:
        seen.append(n)
        return 1e-3 if variant.name == ANY_SIZE else 2e-3

    late = question(measure, ATTENTION, {"s0": 16, "s1": 1}, until=0.0)
    found = late.decide()
    assert found.variants is None and len(set(seen)) <= 1 and list(late.kernels) in ([ANY_SIZE], [ANY_SIZE, LIBRARY])


def test_one_thread_serves_small_calls_where_that_measured_faster() -> None:
    found = cross(PRODUCT, {"s0": 64}, upto(200, lambda name: name == ONE_THREAD), 2)
    assert found.variants is not None and ONE_THREAD in found.variants.names and found.variants.names[-1] == ANY_SIZE
    assert found.variants.predicted and abs(found.variants.ends[-1] - 200) <= 20
    alone = cross(PRODUCT, {"s0": 64}, upto(200, lambda name: name == ONE_THREAD), 1)
    assert alone.variants is None or ONE_THREAD not in alone.variants.names, "calls have one thread anyway"


def compiled(
    text: str, call: Sequence[torch.Tensor], good: Callable[[str], bool], border: int, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """All the way from a graph; which variant wins is by construction."""
    takes = upto(border, good)
    variants_take(monkeypatch, lambda variant, n: takes(variant, n) - 1e-3)
    monkeypatch.setattr(units, "BUDGET_S", math.inf)
    kernels_win(monkeypatch)
    return compile_tier1(parse(text), {}, call, INLINE)


def test_attention_chooses_natively_and_stays_right(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    threads(1)
    call = [torch.randn(2, 4, 40, 32) for _ in range(3)]
    plan = compiled(ATTENTION, call, lambda name: name.startswith("cut for"), 24, monkeypatch)
    assert plan.account is not None and plan.account.counts["dispatched"] == 1 and len(plan.kernels) == 2
    assert any("is several kernels" in line and "cut for" in line for line in plan.account.units)
    for batch, length in ((1, 1), (2, 7), (1, 23), (3, 24), (1, 25), (2, 33), (1, 130)):
        q, k, v = (torch.randn(batch, 4, length, 32) for _ in range(3))
        (got,) = plan.run(q, k, v)
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        assert (got.double() - want).abs().max() < 2e-5, f"{batch} of {length}"
    assert plan.counters()["fell_back"] == 0


def test_threads_are_chosen_natively_and_stay_right(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    threads(2)
    b = torch.randn(4, 40, 70)
    plan = compiled(PRODUCT, [torch.randn(4, 64, 40), b], lambda name: name == ONE_THREAD, 200, monkeypatch)
    assert sum(k.name.endswith("_one_thread") for k in plan.kernels.values()) == 1
    for rows in (0, 1, 5, 150, 199, 220, 400):
        a = torch.randn(4, rows, 40)
        (got,) = plan.run(a, b)
        assert torch.allclose(got.double(), torch.relu(torch.bmm(a.double(), b.double())), atol=1e-4), f"{rows} rows"
    assert plan.counters()["fell_back"] == 0


def test_borders_are_remembered_by_the_store(tmp_path: Path) -> None:
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with request_context.used_by(place.header()):
        assert notes() is not None and not breakpoints.remembered(Shifts()).seen
        for _ in range(3):
            breakpoints.learn(Shifts(), ("a", "b"), 10, 40)
        found = breakpoints.remembered(Shifts())
        assert found.seen["a", "b"][1] == 3 and found.factor(("a", "b")) == pytest.approx(4 ** (3 / 4))
    own = Shifts()
    with request_context.used_by({"profiles": str(tmp_path / "p.sqlite"), "record": False}):
        breakpoints.learn(own, ("a", "b"), 10, 40)
        assert breakpoints.remembered(own) is own, "a store that is only read learns nothing"
