"""Two groups over blocks of rows: which operands are taken whole, and what does not work row by row."""

from __future__ import annotations

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.rewrites import MAX_BLOCKS, Rewritten, tiled
from hotfuse.ir.graph import Graph, sources
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify


def cut(text: str, block: int = 16) -> tuple[Graph, Rewritten | str]:
    graph = verify(parse(text))
    return graph, tiled(UseIndex(graph, {}), [0], [1], ("contract", "contract"), block)


def results(graph: Graph) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    data = {
        v.name: torch.randn([int(str(n)) for n in v.type.shape], generator=g)
        for v in sources(graph)
        if isinstance(v.type, TensorType)
    }
    run = LibraryBackend().compile(graph, {p.key: data[p.value.name] for p in graph.params}).run
    return list(run(*[data[v.name] for v in graph.inputs]))


def test_a_weight_of_the_inputs_shape_is_still_a_weight() -> None:
    graph, made = cut("""
graph main(%x: f32[64, 64]) {
  param %w: f32[64, 64] = "w"
  param %v: f32[64, 64] = "v"
  %h: f32[64, 64] = aten.linear.default(%x, %w, None)
  %y: f32[64, 64] = aten.linear.default(%h, %v, None)
  return %y
}
""")
    assert isinstance(made, Rewritten)
    assert sum(n.op == "aten.slice.Tensor" for n in made.graph.nodes) == 4
    for got, want in zip(results(verify(made.graph)), results(graph), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_many_blocks_are_written_out_up_to_a_limit() -> None:
    text = """
graph main(%x: f32[64, 8]) {
  param %w: f32[16, 8] = "w"
  param %v: f32[8, 16] = "v"
  %h: f32[64, 16] = aten.linear.default(%x, %w, None)
  %y: f32[64, 8] = aten.linear.default(%h, %v, None)
  return %y
}
"""
    graph, made = cut(text, 64 // MAX_BLOCKS)
    assert isinstance(made, Rewritten) and sum(n.op == "aten.slice.Tensor" for n in made.graph.nodes) == MAX_BLOCKS
    for got, want in zip(results(verify(made.graph)), results(graph), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert cut(text, 1)[1] == f"64 rows in blocks of 1 are 64 blocks, not 2 to {MAX_BLOCKS}"


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("""
graph main(%x: f32[64, 64]) {
  %h: f32[64, 64] = aten.linear.default(%x, %x, None)
  %y: f32[64, 64] = aten.relu.default(%h)
  return %y
}
""", "%x is read whole, and row by row"),
        ("""
graph main(%x: f32[64, 64], %z: f32[64, 64]) {
  %h: f32[64, 64] = aten.relu.default(%x)
  %y: f32[64, 64] = aten.mm.default(%z, %h)
  return %y
}
""", "%h is read whole, and row by row"),
        ("""
graph main(%x: f32[64, 32], %b: f32[64, 48]) {
  param %w: f32[32, 48] = "w"
  %h: f32[64, 48] = aten.addmm.default(%b, %x, %w)
  %y: f32[64, 48] = aten.relu.default(%h)
  return %y
}
""", "addmm does not work row by row"),
    ],
)  # fmt: skip
def test_what_blocks_would_get_wrong_is_refused(text: str, because: str) -> None:
    assert cut(text)[1] == because


def test_a_bias_without_rows_is_taken_whole() -> None:
    graph, made = cut("""
graph main(%x: f32[64, 32]) {
  param %b: f32[48] = "b"
  param %w: f32[32, 48] = "w"
  %h: f32[64, 48] = aten.addmm.default(%b, %x, %w)
  %y: f32[64, 48] = aten.relu.default(%h)
  return %y
}
""")
    assert isinstance(made, Rewritten)
    for got, want in zip(results(verify(made.graph)), results(graph), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
