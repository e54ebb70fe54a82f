"""Rows of copies and conversions, and of values made from numbers and positions alone."""

from __future__ import annotations

from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import Coord, shifted
from hotfuse.lower.ops.expand import FLOATS, Computes, Expansion, expands, literal
from hotfuse.lower.ops.views import size
from hotfuse.tile.program import Tile

_OWN = Computes.OWN


@expands(
    """to _to_copy type_as clone contiguous alias detach lift_fresh lift_fresh_copy positive detach_copy alias_copy
    float double half bfloat16 int long bool resolve_conj resolve_neg conj conj_physical real lift""",
    computes=_OWN,
)
def _same(e: Expansion, x: Tile) -> Tile:
    return x


@expands("lower.checked", computes=_OWN)
def _checked(e: Expansion, x: Tile) -> Tile:
    """An index that must be within the extent."""
    return e.evaluator.checked(e.b.cast(x, DType.I64), size(e.arg("extent")))


@expands("copy", "src", _OWN)
def _copy(e: Expansion, x: Tile) -> Tile:
    return x


def _filled(e: Expansion, name: str) -> Tile:
    tile = e.converted(e.arg(name), e.out)
    if tile is None:
        raise CannotLower(f"{e.node.op} is filled with nothing")
    return tile


expands("full full_like new_full", "", _OWN)(lambda e: _filled(e, "fill_value"))
expands("zeros zeros_like new_zeros zero", "", _OWN)(lambda e: literal(e.b, 0, e.out))
expands("ones ones_like new_ones", "", _OWN)(lambda e: literal(e.b, 1, e.out))
expands("scalar_tensor", "", _OWN)(lambda e: _filled(e, "s"))


@expands("fill", "value", _OWN)
def _fill(e: Expansion, value: Tile) -> Tile:
    return _filled(e, "value")


@expands("arange", "", _OWN)
def _arange(e: Expansion) -> Tile:
    """start + i * step, in double precision for floats."""
    start, step = e.arg("start", 0), e.arg("step", 1)
    start, step = 0 if start is None else start, 1 if step is None else step
    (at,) = e.position
    if e.out not in FLOATS:
        terms = tuple((k, f) for k, f in at.terms)
        by = size(step)
        if by == 1:
            return e.evaluator.index_tile(shifted(Coord(at.offset, terms), size(start)))
        return e.map("add", e.map("mul", e.evaluator.index_tile(at), e.b.index(by)), e.b.index(size(start)))
    index = e.b.cast(e.evaluator.index_tile(at), DType.F64)
    first, by = e.converted(start, DType.F64), e.converted(step, DType.F64)
    if first is None or by is None:
        raise CannotLower("arange without numbers")
    return e.map("add", e.map("mul", index, by), first)


def _diagonals(e: Expansion) -> Tile:
    """Column minus row, minus the diagonal asked for."""
    row, column = (e.evaluator.index_tile(c) for c in e.position[-2:])
    return e.map("sub", e.map("sub", column, row), e.b.index(size(e.arg("diagonal", 0))))


@expands("tril", computes=_OWN)
def _tril(e: Expansion, x: Tile) -> Tile:
    return e.map("select", e.map("le", _diagonals(e), 0), x, literal(e.b, 0, x.type.dtype))


@expands("triu", computes=_OWN)
def _triu(e: Expansion, x: Tile) -> Tile:
    return e.map("select", e.map("ge", _diagonals(e), 0), x, literal(e.b, 0, x.type.dtype))


@expands("eye", "", _OWN)
def _eye(e: Expansion) -> Tile:
    row, column = (e.evaluator.index_tile(c) for c in e.position)
    return e.map("eq", row, column)
