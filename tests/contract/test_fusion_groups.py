"""Which nodes become one kernel: rows of products that are counted in another way before their epilogue."""

from __future__ import annotations

from hotfuse.fusion.groups import group, reordered
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify


def made(source: str) -> tuple[Graph, list[tuple[str, list[str]]]]:
    """A graph, and per group its kind and what it makes."""
    graph = verify(parse(source))
    groups = group(graph)
    verify(reordered(graph, groups))
    return graph, [(g.kind, [graph.nodes[i].outs[0].name for i in g.nodes]) for g in groups]


HEAD = """graph main(%x: f32[6, 12], %r: f32[2, 3, 20]) {
  param %w: f32[12, 20] = "w"
  param %b: f32[20] = "b"
  %h: f32[6, 20] = aten.addmm.default(%b, %x, %w)
"""


def test_an_epilogue_is_reached_through_a_view() -> None:
    _, found = made(HEAD + """  %v: f32[2, 3, 20] = aten.view.default(%h, [2, 3, 20])
      %g: f32[2, 3, 20] = aten.gelu.default(%v) %y: f32[2, 3, 20] = aten.add.Tensor(%g, %r)
      %z: f32[6, 20] = aten.view.default(%y, [6, 20]) return %z }""")
    assert found == [("contract", ["h", "v", "g", "y"]), ("library", ["z"])]


def test_views_that_nothing_follows_stay_outside() -> None:
    _, found = made(HEAD + """  %v: f32[2, 3, 20] = aten.view.default(%h, [2, 3, 20])
      %u: f32[1, 2, 3, 20] = aten.unsqueeze.default(%v, 0) return %u }""")
    assert found == [("contract", ["h"]), ("library", ["v"]), ("library", ["u"])]


def test_rows_that_become_columns_end_the_kernel() -> None:
    _, found = made(HEAD + """  %v: f32[2, 60] = aten.view.default(%h, [2, 60])
      %g: f32[2, 60] = aten.gelu.default(%v) return %g }""")
    assert ("contract", ["h"]) in found


def test_a_product_of_activations_has_views_before_it_and_an_epilogue_behind() -> None:
    _, found = made("""graph main(%x: f32[2, 3, 8], %y: f32[2, 5, 8], %r: f32[2, 3, 5]) {
      %t: f32[2, 8, 5]{*} = aten.transpose.int(%y, 1, 2)
      %h: f32[2, 3, 5] = aten.bmm.default(%x, %t)
      %s: f32[2, 3, 5] = aten.mul.Tensor(%h, 0.5)
      %z: f32[2, 3, 5] = aten.add.Tensor(%s, %r)
      %p: f32[2, 3, 5] = aten.softmax.int(%z, -1) return %p }""")
    assert found == [("product", ["t", "h", "s", "z"]), ("rows", ["p"])]
