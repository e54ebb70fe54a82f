"""Where rounding is allowed, the worker measures with which instructions a product is made; here clocks are a test's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hotfuse.backends.llvm.emission.matrix_unit import multiplies_blocks
from hotfuse.base.errors import InternalError
from hotfuse.compile.learn.measure import BoundCall, CompiledCandidate, make
from hotfuse.compile.unit.kernel_cache import KernelCache, host_peaks, piece_of
from hotfuse.compile.variants import precision_variants
from hotfuse.compile.variants.trial import rounded
from hotfuse.compile.variants.variant_search import VariantSearch
from hotfuse.fusion.crossover import Variant
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.ir.text import parse
from hotfuse.lower.cpu.tiling import Core, core_for
from tests.contract.variant_cases import forgets

__all__ = ["forgets"]

CORE = replace(core_for(16, many_registers=True, precision="bf16"), tiles=True)
LAYER = """
graph main(%x: f32[{m}, 40]) where (1 <= s0) {{
  param %w: f32[70, 40] = "w"
  %y: f32[{m}, 70] = aten.linear.default(%x, %w)
  %z: f32[{m}, 70] = aten.relu.default(%y)
  return %z
}}
"""


def clock(monkeypatch: pytest.MonkeyPatch, **us: float) -> list[list[str]]:
    """Kinds take what the test says; what they were asked for is noted."""
    asked: list[list[str]] = []

    def seconds(batch: Sequence[BoundCall]) -> list[float]:
        asked.append([b.group for b in batch])
        for b in batch:
            b.call()  # it runs
        return [us["unit" if "unit" in b.group else "pairs" if "pairs" in b.group else "fp32"] * 1e-6 for b in batch]

    monkeypatch.setattr(precision_variants, "seconds", seconds)
    return asked


def choose(core: Core = CORE) -> precision_variants.Chosen:
    graph = parse(LAYER.format(m=24))
    return precision_variants.chosen(graph, {}, core, make(graph, core))


def test_every_kind_that_a_core_can_do_is_asked() -> None:
    found = [[precision_variants.name(c) for c in precision_variants.kinds(core)] for core in (CORE, replace(CORE, tiles=False))]
    assert found == [["on the matrix unit", "by pairs of bf16", "in fp32"], ["by pairs of bf16", "in fp32"]]
    plain = replace(CORE, precision="fp32", tiles=False)
    assert precision_variants.kinds(plain) == (plain,)


@pytest.mark.parametrize(
    "us, best",
    [
        ({"unit": 10.0, "pairs": 20.0, "fp32": 30.0}, "on the matrix unit"),
        ({"unit": 10.0, "pairs": 9.8, "fp32": 30.0}, "on the matrix unit"),  # within noise the first one stays
        ({"unit": 20.0, "pairs": 10.0, "fp32": 30.0}, "by pairs of bf16"),
        ({"unit": 30.0, "pairs": 20.0, "fp32": 10.0}, "in fp32"),
    ],
)
def test_the_fastest_kind_is_taken(monkeypatch: pytest.MonkeyPatch, us: dict[str, float], best: str) -> None:
    asked = clock(monkeypatch, **us)
    found = choose()
    assert asked == [["on the matrix unit", "by pairs of bf16", "in fp32"]]
    assert precision_variants.name(found.core) == best and found.note.startswith(f"{best}: ")
    assert all(f"{n:.1f} us" in found.note for n in us.values())
    assert multiplies_blocks(found.candidate.lowered.kernel) == (best == "on the matrix unit")
    assert rounded(found.candidate.lowered) == (best != "in fp32")


def test_a_group_without_a_product_of_rounded_numbers_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch)
    graph = parse("graph main(%x: f32[8, 40]) { %y: f32[8, 40] = aten.relu.default(%x) return %y }")
    found = precision_variants.chosen(graph, {}, CORE, make(graph, CORE))
    assert found.core == CORE and not found.note and not asked


def test_what_cannot_be_measured_stays_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: Sequence[BoundCall]) -> list[float]:
        raise InternalError("a clock", because="it stands still")

    monkeypatch.setattr(precision_variants, "seconds", broken)
    found = choose()
    assert found.core == CORE and found.note == "on the matrix unit, unmeasured: it stands still"


def test_a_bench_asks_again_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = KernelCache(CORE, host_peaks(CORE))
    graph = parse(LAYER.format(m="s0"))
    pieces = [piece_of(graph, range(2), {"s0": n}) for n in (1, 64)]
    clock(monkeypatch, unit=20, pairs=10, fp32=30)
    assert precision_variants.name(bench.kernel(pieces[0]).core or CORE) == "by pairs of bf16"
    clock(monkeypatch, unit=10, pairs=20, fp32=30)
    assert precision_variants.name(bench.kernel(pieces[1]).core or CORE) == "on the matrix unit"
    assert precision_variants.name(bench.kernel(pieces[0]).core or CORE) == "by pairs of bf16"


@pytest.mark.usefixtures("forgets")
def test_kinds_cross_where_sizes_are_open() -> None:
    graph = parse(LAYER.format(m="s0"))
    piece = piece_of(graph, range(2), {"s0": 32})
    made = make(piece.normal, CORE)

    def measured(way: Variant, n: int) -> float:
        """Pairs are better up to six rows, whatever was predicted."""
        core = way.pieces[0][1]
        if not isinstance(core, Core) or core.lanes != CORE.lanes or core.registers != CORE.registers or core.l2 != CORE.l2:
            return 1.0  # the library, and other cuts
        return 10e-6 if core.tiles else 1.6e-6 * n if core.precision == "bf16" else 3e-6 * n

    peaks = host_peaks(CORE)
    general = CompiledCandidate(made.lowered, made.compiled)
    found = VariantSearch(piece.normal, general, piece.sizes, CORE, peaks, RooflinePredictor(peaks),
                     graph.guards,
                     piece.meaning, measured, also=precision_variants.kinds(CORE)).decide()  # fmt: skip
    assert found.variants is not None, found.notes
    assert found.variants.ends == (6,) and "by pairs of bf16" in found.variants.names[0] and found.variants.names[1] == "any size"
    (other,) = found.kernels
    assert rounded(other.lowered) and not multiplies_blocks(other.lowered.kernel)
