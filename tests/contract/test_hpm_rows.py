"""Rows of candidates: what is computed again, how kernels are cut, batches against single ones; forests against plain walks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hotfuse.base.errors import InternalError
from hotfuse.compile.learn import measure
from hotfuse.hpm import cuts, forest
from hotfuse.hpm.compiled import tree_walk
from hotfuse.hpm.drawn_problems import draws
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import COLUMN, Candidate, Matrix
from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.lower.cpu.tiling import Core

CORE = Core(16, 32)


def rows(*candidates: Candidate) -> Matrix:
    return RowCache(measure.tile_of).rows(candidates)


def one_row(inner: str = "768", op: str = "mul.Tensor") -> Graph:
    return parse(f"""graph g(%x: f32[128, 768], %r: f32[1, {inner}]) {{
  %a: f32[1, {inner}] = aten.gelu.default(%r)
  %b: f32[1, {inner}] = aten.relu.default(%a)
  %c: f32[128, 768] = aten.{op}(%x, %b)
  return %c
}}""")


def test_what_is_used_by_all_rows_is_computed_for_each() -> None:
    """The library computes it once; where it is the same along a row, so does a kernel, once a row at most."""
    fused, library = rows(Candidate(one_row(), {}, CORE), Candidate(one_row(), {}, None))
    assert fused[COLUMN["erf"]] == 128 * 768 and library[COLUMN["erf"]] == 768
    assert fused[COLUMN["light"]] == 2 * 128 * 768 and library[COLUMN["light"]] == 129 * 768
    (along,) = rows(Candidate(one_row("1"), {}, CORE))
    assert along[COLUMN["erf"]] == 1


def test_through_views_it_is_computed_again_too() -> None:
    graph = parse("""graph g(%x: f32[8, 64], %r: f32[64]) {
  %a: f32[64] = aten.tanh.default(%r)
  %b: f32[8, 64] = aten.expand.default(%a, [8, 64])
  %c: f32[8, 64] = aten.mul.Tensor(%x, %b)
  return %c
}""")
    assert rows(Candidate(graph, {}, CORE))[0, COLUMN["tanh"]] == 8 * 64


def test_what_stands_in_front_of_a_product_is_computed_for_every_panel() -> None:
    graph = parse("""graph g(%x: f32[32, 256]) {
  param %w: f32[480, 256] = "w"
  %h: f32[32, 256] = aten.gelu.default(%x)
  %y: f32[32, 480] = aten.linear.default(%h, %w, None)
  %z: f32[32, 480] = aten.tanh.default(%y)
  return %z
}""")
    fused, library = rows(Candidate(graph, {}, CORE), Candidate(graph, {}, None))
    panels = math.ceil(480 / (fused[COLUMN["tile_vectors"]] * 16))
    assert fused[COLUMN["erf"]] == 32 * 256 * panels and library[COLUMN["erf"]] == 32 * 256
    assert fused[COLUMN["tanh"]] == 32 * 480 == library[COLUMN["tanh"]]


def test_a_batch_is_its_candidates_one_by_one() -> None:
    found = [
        Candidate(p.graph, s, core, threads)
        for p in itertools.islice(draws(11), 60)
        for s in p.sizes
        for core, threads in ((CORE, 1), (Core(8, 32), 2), (None, 1))
    ]
    row_cache = RowCache(measure.tile_of)
    together = row_cache.rows(found)
    assert np.array_equal(together, row_cache.rows(found))
    assert np.array_equal(together, np.vstack([rows(c) for c in found]))
    assert np.array_equal(together[::-1], RowCache(measure.tile_of).rows(found[::-1]))


@pytest.mark.parametrize(
    ("side", "window", "stride", "groups"), [(28, 1, 1, 1), (28, 3, 2, 1), (14, 3, 1, 1), (14, 3, 1, 4)]
)
def test_convolutions_are_cut_as_lowering_cuts_them(side: int, window: int, stride: int, groups: int) -> None:
    """Columns of a panel are in the kernel's own name of its packed weights."""
    b, last = GraphBuilder("group"), Layout((0, 2, 3, 1))
    out = (side + 2 * (window // 2) - window) // stride + 1
    x = b.input("x", TensorType(DType.F32, (1, 64, side, side), last))
    w = b.param("w", TensorType(DType.F32, (96, 64 // groups, window, window)), "w")
    args = (x, w, None, (stride, stride), (window // 2, window // 2), (1, 1), groups)
    y = b.add("aten.conv2d.default", args, TensorType(DType.F32, (1, 96, out, out), last))
    graph = b.finish(y)
    (row,) = rows(Candidate(graph, {}, CORE))
    (panels,) = [p for p in measure.make(graph, CORE).lowered.kernel.buffers if p.name == "panels"]
    width = panels.shape[-1]
    assert isinstance(width, int) and math.ceil(width / 16) == row[COLUMN["tile_vectors"]]
    assert 1 <= row[COLUMN["tile_height"]] <= 14


def test_steps_know_how_wide_a_machine_multiplies() -> None:
    """Where vectors go through in halves, narrow ones reach the same peak; where they do not, they cannot."""
    (wide, narrow) = rows(*(Candidate(next(draws(3, "contraction")).graph, {"n": 256}, Core(n, 32)) for n in (16, 8)))
    table = np.vstack([wide, narrow])
    c = {n: table[:, i] for n, i in COLUMN.items()}
    speeds = ((3e4, 8e5, 1.6e7, 6e7), (2e11, 1e11, 5e10, 2e10), 1e-7, 0.0, True)
    halves, whole = (cuts.steps(c, Roofline(1, flops, *speeds, hz=3e9)) for flops in (32 * 3e9, 64 * 3e9))
    assert np.allclose(halves.cycles / halves.ideal, 1.0, atol=0.3)
    assert whole.cycles[1] / whole.ideal[1] > 1.8


def test_loops_end_in_single_vectors() -> None:
    names = {n: np.zeros(2) for n in COLUMN}
    names |= {
        "lanes": np.array([16.0, 8.0]),
        "width": np.full(2, 88.0),
        "elements": np.full(2, 880.0),
        "bytes_const": np.ones(2),
    }
    found = cuts.loops(names)
    assert found.vectors.tolist() == [6, 11] and found.turns.tolist() == [3, 5] and found.left.tolist() == [2, 3]
    merged = cuts.loops(names | {"bytes_const": np.zeros(2)})
    assert merged.length.tolist() == [880, 880] and merged.count.tolist() == [1, 1]


def test_a_forest_is_walked_as_it_stands() -> None:
    """Against a walk node by node, with numbers that are not finite; a table without its columns is refused."""
    r = np.random.default_rng(3)
    grown = forest.grow(r.normal(size=(200, 12)), r.normal(size=200))
    x = r.normal(size=(40, 12)).astype(np.float32)
    x[3, :], x[4, :], x[5, :] = np.nan, np.inf, -np.inf

    def leaf(at: int, row: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
        while grown.first[at] != at:
            at = int(grown.first[at]) + int(row[grown.feature[at]] > grown.threshold[at])
        return float(grown.value[at])

    want = [grown.base + grown.scale * sum(leaf(int(t), row) for t in grown.roots) for row in x]
    assert np.allclose(grown.predict(x), want, rtol=0, atol=1e-12)
    assert grown.predict(x[:0]).shape == (0,)
    assert np.array_equal(grown.predict(np.asfortranarray(x)), grown.predict(x))
    with pytest.raises(InternalError, match="columns"):
        grown.predict(x[:, : grown.width - 1])


def test_integers_have_the_order_of_the_numbers_they_stand_for() -> None:
    """Of either sign, tiny, infinite; both zeros are one; what is no number exceeds nothing, as in a comparison."""
    single = np.float32
    some = np.array([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, np.inf, -np.inf, 3.4e38, -3.4e38], single)
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 300, np.uint64).astype(np.uint32).view(single)
    x = np.concatenate([some, drawn[np.isfinite(drawn)]])
    keys = tree_walk.ordered(x)
    assert np.array_equal(keys[:, None] > keys, x[:, None] > x)
    assert not (tree_walk.ordered(np.array([np.nan, -np.nan], single))[:, None] > keys).any()
