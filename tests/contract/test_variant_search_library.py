"""A group whose kernel won its trial keeps it, also where timing at other sizes says that the library always wins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hotfuse.compile.variants.alternatives import LIBRARY, SizeRange, VariantQuestion
from hotfuse.compile.variants.variant_search import VariantSearch
from hotfuse.compile.variants.variant_table import LIBRARY as NO_KERNEL
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.fusion.crossover import Crossovers, Interval, Variant
from hotfuse.ir.dims import sym
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType, ScalarKind, ScalarType, TensorType
from hotfuse.runtime.serve.native_plan import _by_size  # pyright: ignore[reportPrivateUsage]
from tests.contract.variant_cases import forgets, question

__all__ = ["forgets"]


@pytest.mark.usefixtures("forgets")
def test_a_choice_between_kernels_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(_self: VariantSearch, _question: VariantQuestion, variants: Sequence[Variant], _within: SizeRange) -> Crossovers:
        return Crossovers("s0", (Interval(0, None, [w.name for w in variants].index(LIBRARY)),))

    monkeypatch.setattr(VariantSearch, "_predicted", predicted)
    found = question(lambda variant, _n: 1e-6 if variant.name == LIBRARY else 1e-3).decide()
    assert found.variants is None and not found.kernels
    assert any("one kernel for all sizes" in n for n in found.notes)


def test_outside_a_run_numbers_among_the_operands_are_sizes() -> None:
    n = sym("n0")
    x = Value("x", TensorType(DType.F32, (n, 4)))
    group = Graph("g", (x, Value("n", ScalarType(ScalarKind.INT, n))), (), (), (x,))
    run = _by_size(group, VariantTable(n, (3,), (NO_KERNEL, 0)), lambda *_: ("kernel",), lambda *_: ("library",))
    assert [run(torch.zeros(k, 4), k)[0] for k in (0, 3, 4)] == ["library", "library", "kernel"]
    assert run(torch.zeros(3, 4), 2)[0] == "kernel", "sizes that contradict each other are the kernel's to refuse"
