"""Products whose last panel has empty vectors: those are left out, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotfuse.ir.dims import sym
from hotfuse.ir.text import parse
from hotfuse.lower.cpu import tiling
from hotfuse.lower.cpu.conv import shape as conv_shape
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.tile.program import Kernel, Tile, instructions
from tests.contract import convolving
from tests.contract.test_lower_contract import CORES, check, core_of, inputs_for, reference, run, text

WIDE = CORES["avx512"]


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_what_is_left_out_is_empty(core: tiling.Core) -> None:
    """Columns that are computed cover all there are, and less than a vector more where the last panel is narrow."""
    narrow = 0
    for n in range(1, 400):
        t = tiling.choose(core, 64, [n], 64, narrow=True)
        computed = n + -n % t.nr if not t.last else n // t.nr * t.nr + t.last
        assert computed >= n and t.last % t.lanes == 0 and t.last < t.nr
        assert not t.last or (computed - n < t.lanes and n > t.nr)
        assert tiling.choose(core, sym("s"), [n], 64, narrow=True).nr == t.nr
        narrow += bool(t.last)
    assert narrow > 20
    assert tiling.choose(core, 64, [100], 64).last == 0


def test_sizes_that_fill_panels_stay_as_they_are() -> None:
    for n in (48, 384, 768, 1536, 3072, 1024, 1000):
        t = tiling.choose(WIDE, 128, [n], 768, narrow=True)
        assert (t.nr, t.last) == (tiling.choose(WIDE, 128, [n], 768).nr, 0)


def _widths(kernel: Kernel) -> set[int]:
    """Columns of the tiles that are multiplied into."""
    return {t.type.shape[-1] for i in instructions(kernel.body) if i.op == "mma" for t in i.args[:1] if isinstance(t, Tile)}


def test_the_kernel_has_both_widths() -> None:
    lowered = lower_contraction(parse(text("linear", "20", 196, 24, "nothing")), WIDE)
    assert _widths(lowered.kernel) == {48, 16}
    assert _widths(lower_contraction(parse(text("linear", "20", 192, 24, "nothing")), WIDE).kernel) == {48}


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("epilogue", ["nothing", "residual", "gelu, residual", "two outputs", "column scale", "mask"])
def test_meaning(core: tiling.Core, epilogue: str) -> None:
    n = next(n for n in range(2 * core.lanes + 1, 400) if tiling.choose(core, 11, [n], 9, narrow=True).last)
    check(text("linear", "11", n, 9, epilogue), core, {}, 9)


@pytest.mark.budget_s(2.5)
@pytest.mark.parametrize("target", host_levels(), ids=lambda t: t.name)
@pytest.mark.parametrize("n", [49, 72, 80, 100, 112, 196])
@pytest.mark.parametrize(("batch", "epilogue"), [("1", "nothing"), ("19", "residual"), ("2, s0", "gelu"), ("s0", "cast")])
def test_native(target: CpuTarget, n: int, batch: str, epilogue: str) -> None:
    for s0 in (0, 1, 13) if "s0" in batch else (0,):
        check(text("linear", batch, n, 33, epilogue), core_of(target), {"s0": s0}, 33, target)


def test_rows_with_gaps() -> None:
    source = """graph g(%x: f32[s0, 5]{*}) { param %w: f32[100, 5] = "w"
      %h: f32[s0, 100] = aten.linear.default(%x, %w) return %h }"""
    for rows in (1, 2, 11):
        check(source, WIDE, {"s0": rows}, 5)


def test_what_is_not_a_number_stays_in_its_column() -> None:
    """Weights that are infinite or no number show in their columns alone, in the last one, too."""
    graph = parse(text("linear", "7", 100, 6, "nothing"))
    values = inputs_for(graph, {})
    values["w"][99, 2], values["w"][64, 0], values["x"][3, 1] = float("nan"), float("inf"), float("inf")
    lowered = lower_contraction(graph, WIDE)
    (got,) = run(lowered, graph, values, {}, None)
    (want,) = reference(graph, values)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert got[:, 99].isnan().all() and not got[:3, :64].isnan().any()


def test_nothing_is_written_behind_the_last_column() -> None:
    """A result whose rows lie next to each other: what a row wrote too much would be the next one's beginning."""
    graph = parse(text("linear", "9", 196, 4, "nothing"))
    values = inputs_for(graph, {})
    lowered = lower_contraction(graph, WIDE)
    for target in (None, *host_levels()[:1]):
        (got,) = run(lowered, graph, values, {}, target)
        assert np.allclose(got.numpy(), reference(graph, values)[0].numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("epilogue", ["residual", "batch norm, silu, residual"])
@pytest.mark.parametrize("channels", [80, 112, 304])
@pytest.mark.parametrize("n", ["1", "s0"])
def test_convolutions_of_single_pixels(epilogue: str, channels: int, n: str) -> None:
    assert conv_shape.product(WIDE, 35, channels, 19).last
    source = convolving.text(size=(5, 7), window=(1, 1), channels=(19, channels), epilogue=epilogue, n=n)
    assert len(_widths(lower_convolution(parse(source), WIDE).kernel)) == 2
    sizes = {"s0": 2} if n == "s0" else {}
    convolving.check(source, WIDE, None, **sizes)
    target = host_levels()[0]
    convolving.check(source, tiling.Core(target.lanes, 32 if target.name in ("avx512", "neon") else 16), target, **sizes)
