"""Groups in sizes of their own: every size that an input shows has a name, and all others follow from those."""

from __future__ import annotations

import random

import pytest

from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Graph
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import dims_of
from hotfuse.lower.common.own_sizes import anchored, with_own_sizes

BEHIND_STRIDES = """graph group(%x: f32[1, 16, (((s0 + -1) // 2) + 1)]) {
  %y: f32[1, 16, (((s0 + -1) // 2) + 1)] = aten.relu.default(%x)
  %z: f32[((((s0 + -1) // 2) * 16) + 16)] = aten.reshape.default(%y, [-1])
  return %y, %z
}
"""
ONE_MORE_STRIDE = """graph group(%x: f32[1, 16, (((s0 + -1) // 2) + 1)]) {
  %y: f32[1, 16, (((s0 + -1) // 4) + 1)] = aten.max_pool1d.default(%x, [3], [2], [1])
  %z: f32[1, 16, (((s0 + -7) // 8) + 1)] = aten.max_pool1d.default(%y, [3], [2], [0])
  return %y, %z
}
"""
BOTH = """graph group(%a: f32[(((s0 + -1) // 2) + 1)], %b: f32[s0]) {
  %y: f32[(((s0 + -1) // 2) + 1)] = aten.relu.default(%a)
  %z: f32[s0] = aten.relu.default(%b)
  return %y, %z
}
"""
PRODUCT = """graph group(%a: f32[(s0 * s1), 8], %b: f32[s1]) {
  %y: f32[(s0 * s1 * 8)] = aten.reshape.default(%a, [-1])
  %z: f32[s1] = aten.relu.default(%b)
  return %y, %z
}
"""
HIDDEN = """graph group(%a: f32[(s0 * 2)]) {
  %y: f32[s0] = aten.slice.Tensor(%a, 0, 0, 9223372036854775807, 2)
  return %y
}
"""


def values(graph: Graph) -> list[int | object]:
    return [d for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outs)) for d in dims_of(v.type)]


@pytest.mark.parametrize("text", [BEHIND_STRIDES, ONE_MORE_STRIDE, BOTH, PRODUCT, HIDDEN])
def test_sizes_stay_what_they_were(text: str) -> None:
    graph = parse(text)
    own, meaning = with_own_sizes(graph)
    rng = random.Random(0)
    for _ in range(20):
        outside = {"s0": rng.randint(2, 99), "s1": rng.randint(2, 99)}
        inside = outside | {n: evaluate(d, outside) for n, d in meaning.items()}
        for before, after in zip(values(graph), values(own), strict=True):
            assert evaluate(before, outside) == evaluate(after, inside)  # type: ignore[arg-type]


def test_what_lies_behind_a_stride_is_a_size_of_its_own() -> None:
    own, meaning = with_own_sizes(parse(BEHIND_STRIDES))
    assert "%x: f32[1, 16, n0]" in show(own) and "%z: f32[(n0 * 16)]" in show(own)
    assert list(meaning) == ["n0"]


def test_a_stride_behind_strides_follows_from_what_is_shown() -> None:
    own, meaning = with_own_sizes(parse(ONE_MORE_STRIDE))
    assert list(meaning) == ["n0"] and "%y: f32[1, 16, (((n0 + -1) // 2) + 1)]" in show(own)
    assert {s for d in values(own) for s in symbols(d)} == {"n0"}  # type: ignore[arg-type]
    other = ONE_MORE_STRIDE.replace("s0 + -7", "s0 + -25").replace("// 8", "// 32").replace("// 4", "// 16").replace("// 2", "// 8")
    assert show(with_own_sizes(parse(other))[0]) == show(own)


def test_a_size_that_follows_from_another_gets_no_name() -> None:
    own, meaning = with_own_sizes(parse(BOTH))
    assert list(meaning) == ["n0"] and "%a: f32[(((n0 + -1) // 2) + 1)], %b: f32[n0]" in show(own)


def test_products_are_known_as_a_whole() -> None:
    own, meaning = with_own_sizes(parse(PRODUCT))
    assert set(meaning) == {"n0", "n1"} and "%y: f32[(n1 * 8)]" in show(own)


def test_what_no_input_shows_keeps_its_name() -> None:
    own, meaning = with_own_sizes(parse(HIDDEN))
    assert not meaning and {s for d in values(own) for s in symbols(d)} == {"s0"}  # type: ignore[arg-type]


def test_groups_that_differ_only_outside_become_equal() -> None:
    other = BEHIND_STRIDES.replace("(s0 + -1) // 2", "(s7 + -1) // 8")
    assert show(with_own_sizes(parse(BEHIND_STRIDES))[0]) == show(with_own_sizes(parse(other))[0])


def test_a_size_that_no_input_shows_comes_with_an_input_of_the_graph() -> None:
    graph = parse("""graph main(%k: f32[s2], %i: f32[s0, s1], %x: f32[(s0 * s1), 4]) {
  %r: f32[(s0 * s1), 4] = aten.relu.default(%x)
  %y: f32[s0, s1, 4] = aten.view.default(%r, [0, 0, 4])
  %z: f32[s0, s1, 4] = aten.exp.default(%y)
  return %z
}
""")
    piece = extract(graph, [1, 2], "group")
    assert [v.name for v in anchored(graph, piece).inputs] == ["r", "i"]
    assert "%r: f32[(n0 * n1), 4]" in show(with_own_sizes(anchored(graph, piece))[0])
    assert "%y: f32[s0, s1, 4]" in show(with_own_sizes(piece)[0])
    alone = extract(graph, [0], "group")
    assert anchored(graph, alone) == alone
