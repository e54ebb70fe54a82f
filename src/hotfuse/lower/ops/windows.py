"""Movement rows of windows and borders: which element of an operand a window's k-th place is, and what lies outside.

    lower.window(x, dim, start, stride, number, nearest)    element o is x[o * stride + start], a number outside
    lower.unfold(x, dim, start, stride, step, number)       element (o, k) is x[o * stride + start + k * step]
    lower.border(x, dim, before, mode)                      reflect, replicate, circular: places outside name others inside

There are two ways to keep a window inside. Where sizes are numbers, a loop stops where its window begins and ceases to fit,
and what runs in between is not checked (`Pieces`). Otherwise the place is limited to the nearest one inside and, unless that
one belongs to the window anyway (`nearest`), its element replaced (`MaskedElement`); such a place is no sum of counters, so vectors
run along another dim. A window that is `whole` lies inside by construction: zeros were put around what it reads.
"""

from __future__ import annotations

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Node
from hotfuse.lower.common.algebra import add, mul, not_negative, sub
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import Coord, as_dim, scaled, shifted, summed
from hotfuse.lower.ops.views import Alias, ConcatPart, MaskedElement, Move, Moved, Pieces, moves, shape_of, size, tensor


def _ints(node: Node, *at: int) -> tuple[int, ...]:
    found = [node.args[i] for i in at]
    if not all(isinstance(f, int) for f in found):
        raise CannotLower(f"{node.op} of {found}")
    return tuple(int(f) for f in found)  # type: ignore[arg-type]


def _number(node: Node, at: int) -> float:
    number = node.args[at]
    if not isinstance(number, int | float):
        raise CannotLower(f"{number} stands outside")
    return number


def nearest(c: Coord, extent: Dim) -> Coord:
    """The nearest place that exists."""
    return Coord(expr("max", expr("min", as_dim(c), sub(extent, 1)), 0))


def _bounded(m: Move, c: Coord, extent: Dim, content: Alias, safe: Alias, number: float, *, belongs: bool) -> Moved:
    """The element at a place that may lie outside."""
    if m.node.attr("whole", default=False) or m.space.below(c, extent):
        return content
    if m.node.attr("cut", default=False):
        return Pieces(c, (ConcatPart(0, number), ConcatPart(0, content), ConcatPart(extent, number)))
    return safe if belongs else MaskedElement(c, extent, safe, number)


@moves("lower.window")
def _window(m: Move) -> Moved:
    value = tensor(m.node.args[0], m.node)
    dim, start, stride = _ints(m.node, 1, 2, 3)
    extent = shape_of(value)[dim]
    c = shifted(scaled(m.position[dim], stride), start)
    inside, safe = m.moved(value, dim, c), m.moved(value, dim, nearest(c, extent))
    return _bounded(m, c, extent, inside, safe, _number(m.node, 4), belongs=bool(m.node.args[5]))


@moves("lower.unfold")
def _unfold(m: Move) -> Moved:
    value = tensor(m.node.args[0], m.node)
    dim, start, stride, step = _ints(m.node, 1, 2, 3, 4)
    extent = shape_of(value)[dim]
    c = shifted(summed(scaled(m.position[dim], stride), scaled(m.position[dim + 1], step)), start)
    before, after = m.position[:dim], m.position[dim + 2:]
    inside = Alias(value, (*before, c, *after))
    if m.node.attr("whole", default=False) or m.space.below(c, extent):
        return inside
    return MaskedElement(c, extent, Alias(value, (*before, nearest(c, extent), *after)), _number(m.node, 5))


@moves("lower.border")
def _border(m: Move) -> Moved:
    value, dim, before, mode = m.node.args
    value = tensor(value, m.node)
    if not isinstance(dim, int):
        raise CannotLower(f"a border along {dim}")
    extent, left = shape_of(value)[dim], size(before)
    c = m.position[dim]
    at = shifted(c, mul(left, -1))
    first, last = _outside(str(mode), at, extent)
    parts: list[ConcatPart] = []
    if left != 0 and not not_negative(mul(left, -1)):
        parts.append(ConcatPart(0, m.moved(value, dim, first)))
    parts.append(ConcatPart(left, m.moved(value, dim, at)))
    if not not_negative(sub(add(left, extent), m.shape[dim]), m.space.positive):
        parts.append(ConcatPart(add(left, extent), m.moved(value, dim, last)))
    return Pieces(c, tuple(parts))


def _outside(mode: str, at: Coord, extent: Dim) -> tuple[Coord, Coord]:
    """The place inside that stands for one in front of the first element, and for one behind the last."""
    match mode:
        case "reflect":
            return scaled(at, -1), shifted(scaled(at, -1), mul(2, sub(extent, 1)))
        case "replicate":
            return Coord(0), Coord(sub(extent, 1))
        case "circular":
            return shifted(at, extent), shifted(at, mul(extent, -1))
        case _:
            raise CannotLower(f"padding with mode {mode}")
