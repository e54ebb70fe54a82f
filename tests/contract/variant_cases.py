"""Dispatch by size, for tests: a product whose rows only a call tells, and the question about a group asked with a test's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from hotfuse.compile.learn.measure import CompiledCandidate
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.variants import variant_search
from hotfuse.compile.variants.variant_search import VariantSearch
from hotfuse.fusion.crossover import Variant
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.ir.text import parse

PRODUCT = """
graph main(%a: f32[4, s0, 40], %b: f32[4, 40, 70]) where (1 <= s0) {
  %y: f32[4, s0, 70] = aten.bmm.default(%a, %b)
  %z: f32[4, s0, 70] = aten.relu.default(%y)
  return %z
}
"""


@pytest.fixture
def forgets() -> Iterator[None]:
    """What one test taught about borders is nothing to the next."""
    before, variant_search.shifts.seen = variant_search.shifts.seen, {}
    yield
    variant_search.shifts.seen = before


def question(
    measure: Callable[[Variant, int], float] | None, text: str = PRODUCT, sizes: dict[str, int] | None = None, threads: int = 1,
    until: float = math.inf,
) -> VariantSearch:
    """About the one group of a graph, where kernels take what a test says, or what they take if it says nothing."""
    graph = parse(text)
    piece = piece_of(graph, range(len(graph.nodes)), sizes or {"s0": 16})
    b = kernel_cache()
    made = b.kernel(piece)
    general = CompiledCandidate(made.lowered, made.compiled)
    return VariantSearch(piece.normal, general, piece.sizes, b.core, b.peaks, RooflinePredictor(b.peaks),
                    graph.guards,
                    piece.meaning, measure, threads=threads, until=until)  # fmt: skip
