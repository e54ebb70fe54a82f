"""Made-up data of a trial: integers that index something name places that there are."""

from __future__ import annotations

import pytest
import torch

from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.variants.trial import attempt, drawn, made_up, places_of
from hotfuse.ir.graph import Value
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.errors import CannotLower

MASK = """graph g(%m: bool[{b}, 6], %i: i64[{b}, 1, 1, 1], %j: i64[6]) {{
  %k: bool[{b}, 1, 1, 6] = aten.index.Tensor(%m, [%i, %j])
  %f: f32[{b}, 1, 1, 6] = aten.to.dtype(%k, f32)
  return %f
}}"""


@pytest.mark.parametrize(("batch", "sizes"), [("1", {}), ("3", {}), ("n", {"n": 1}), ("n", {"n": 4})])
def test_a_batch_of_one_is_indexed_inside(batch: str, sizes: dict[str, int]) -> None:
    """An exported attention mask is read at (row of the batch, column): of a batch of one there is no second row."""
    graph = parse(MASK.format(b=batch))
    piece = piece_of(graph, range(len(graph.nodes)), sizes)
    made = kernel_cache().kernel(piece)
    attempt(piece.normal, made.lowered, made.compiled, piece.sizes, float("inf"))  # an index outside would be a fault


def test_what_indexes_nothing_small_names_two_places() -> None:
    graph, one = parse(MASK.format(b="3")), parse(MASK.format(b="1"))
    assert (places_of(graph, {}), places_of(one, {})) == (2, 1)
    rng, flags = torch.Generator().manual_seed(0), Value("m", TensorType(DType.BOOL, (64,)))
    assert made_up(flags, {}, rng, 1).any()  # truth values are no places
    assert not made_up(Value("i", TensorType(DType.I64, (64,))), {}, rng, 1).any()


QUOTIENT = """graph g(%a: i64[64], %b: i64[64]) {
  %q: i64[64] = aten.floor_divide(%a, %b)
  return %q
}"""
BY_ZERO = """graph g(%a: i64[64], %b: i64[64]) {
  %z: i64[64] = aten.sub.Tensor(%b, %b)
  %r: i64[64] = aten.remainder.Tensor(%a, %z)
  return %r
}"""


SCALED = """graph g(%q: f32[9, 2, 4], %o: i64[3], %s: f32[]) {
  %a: f32[9, 2, 4] = aten.div.Tensor(%q, %s)
  %i: i64[3] = aten.floor_divide(%o, %o)
  return %a, %i
}"""


def tried(text: str) -> None:
    graph = parse(text)
    piece = piece_of(graph, range(len(graph.nodes)), {})
    made = kernel_cache().kernel(piece)
    attempt(piece.normal, made.lowered, made.compiled, piece.sizes, float("inf"))


def test_nothing_is_divided_by_zero() -> None:
    assert bool((drawn(parse(QUOTIENT), {})["b"] != 0).all())
    tried(QUOTIENT)


def test_quotients_of_floats_leave_integers_as_they_are() -> None:
    floats = SCALED.replace("aten.floor_divide(%o, %o)", "aten.add.Tensor(%o, %o)")
    wide = floats.replace("i64[3]", "i64[300]")
    assert not bool(drawn(parse(wide), {})["o"].all()) and bool(drawn(parse(SCALED), {})["o"].all())


def test_data_that_the_library_refuses_refuse_the_kernel_alone() -> None:
    with pytest.raises(CannotLower, match="refuses made-up data"):
        tried(BY_ZERO)


CHECKED = """graph g(%b: bool[1], %x: f32[1], %y: f32[64]) {{
  %n: bool[1] = {op}(%b)
  %i: i64[1] = aten.to.dtype(%n, i64)
  %c: f32[1] = aten.index.Tensor(%x, [%i])
  %r: f32[64] = aten.add.Tensor(%y, %c)
  return %r
}}"""


@pytest.mark.parametrize("op", ["aten.logical_not.default", "aten.clone.default"])
def test_a_check_of_what_calls_bring_is_met_by_another_draw(op: str) -> None:
    """Whichever way the first draw falls, one of the two checks fails on it; groups with one were refused by chance."""
    tried(CHECKED.format(op=op))
