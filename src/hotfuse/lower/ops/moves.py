"""Rows of ops that only move elements: another shape, repetition, parts of a value, values put together."""

from __future__ import annotations

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Value
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.algebra import add, mul, normal, not_negative, same, sub
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import ORIGIN, Coord, scaled, shifted, summed
from hotfuse.lower.ops.views import Alias, ConcatPart, Move, Moved, Pieces, broadcast, moves, shape_of, size, tensor
from hotfuse.ops.movement import RESHAPES

# --- the same elements in another shape -------------------------------------------------------------------------------


@moves(
    *RESHAPES, "aten.view_copy", "aten.squeeze_copy", "aten.unsqueeze_copy", "aten._reshape_copy", "aten.atleast_1d",
    "aten.atleast_2d",
)  # fmt: skip
def _reshape(m: Move) -> Moved:
    value, out = m.value(), m.node.outs[0]
    if isinstance(value.type, TensorType) and isinstance(out.type, TensorType) and value.type.dtype is not out.type.dtype:
        raise CannotLower("a view as another element type reads bits")
    return Alias(value, m.space.reshaped(m.position, m.shape, shape_of(value)))


@moves("aten.permute", "aten.permute_copy")
def _permute(m: Move) -> Moved:
    value, order = m.value(), m.arg("dims")
    if not isinstance(order, tuple):
        raise CannotLower(f"permute by {order}")
    at = [ORIGIN] * len(order)
    for c, d in zip(m.position, order, strict=True):
        if not isinstance(d, int):
            raise CannotLower(f"permute by {order}")
        at[d] = c
    return Alias(value, tuple(at))


def _swapped(m: Move, a: int, b: int) -> Moved:
    at = list(m.position)
    if at:
        at[a], at[b] = at[b], at[a]
    return Alias(m.value(), tuple(at))


@moves("aten.transpose", "aten.transpose_copy", "aten.swapaxes", "aten.swapdims")
def _transpose(m: Move) -> Moved:
    names = ("axis0", "axis1") if m.node.op.startswith("aten.swapaxes") else ("dim0", "dim1")
    rank = len(m.position)
    return _swapped(m, m.dim(names[0], rank), m.dim(names[1], rank))


@moves("aten.t", "aten.t_copy", "aten.numpy_T", "aten.mT")
def _t(m: Move) -> Moved:
    if m.node.op.startswith("aten.numpy_T"):
        return Alias(m.value(), tuple(reversed(m.position)))
    return Alias(m.value(), m.position) if len(m.position) < 2 else _swapped(m, -1, -2)


@moves("aten.movedim", "aten.moveaxis")
def _movedim(m: Move) -> Moved:
    rank = len(m.position)
    one = m.arg("source"), m.arg("destination")
    source, destination = ([d % rank for d in ((x,) if isinstance(x, int) else x)] for x in one)  # type: ignore[union-attr, operator]
    rest = iter(d for d in range(rank) if d not in source)
    order = [source[destination.index(d)] if d in destination else next(rest) for d in range(rank)]
    at = [ORIGIN] * rank
    for c, d in zip(m.position, order, strict=True):
        at[d] = c
    return Alias(m.value(), tuple(at))


# --- repetition -------------------------------------------------------------------------------------------------------


@moves("aten.expand", "aten.expand_as", "aten.expand_copy", "aten.broadcast_to")
def _expand(m: Move) -> Moved:
    value = m.value()
    return Alias(value, broadcast(m.position, m.shape, shape_of(value)))


@moves("aten.broadcast_tensors")
def _broadcast_tensors(m: Move) -> Moved:
    values = m.arg("tensors")
    value = tensor(values[m.out] if isinstance(values, tuple) else None, m.node)
    return Alias(value, broadcast(m.position, m.shape, shape_of(value)))


@moves("aten.repeat", "aten.tile")
def _repeat(m: Move) -> Moved:
    value = m.value()
    shape = shape_of(value)
    skip = len(m.shape) - len(shape)
    at: list[Coord] = []
    for c, n, out in zip(m.position[skip:], shape, m.shape[skip:], strict=True):
        at.append(ORIGIN if n == 1 else c if same(n, out) else m.space.apart(c, n)[1])
    return Alias(value, tuple(at))


@moves("aten.repeat_interleave")
def _repeat_interleave(m: Move) -> Moved:
    value, times = m.value(), m.arg("repeats")
    if not isinstance(times, int) or m.arg("dim") is None:
        raise CannotLower("repeat_interleave by a tensor, or of the flattened input")
    d = m.dim("dim", len(m.position))
    return m.moved(value, d, m.space.apart(m.position[d], times)[0])


# --- parts ------------------------------------------------------------------------------------------------------------


def _start(m: Move, arg: Arg, extent: Dim, out: Dim) -> Dim:
    """Where a slice begins; torch counts negative numbers from the end and clamps what lies outside."""
    if arg is None:
        return 0
    start = size(arg)
    if isinstance(start, int) and start < 0:
        if isinstance(extent, int):
            return max(0, extent + start)
        if same(out, -start) or not_negative(add(extent, start), m.space.positive):
            return add(extent, start)
        raise CannotLower(f"whether a slice from {start} begins inside {extent} is not known")
    if not not_negative(start):
        raise CannotLower(f"whether {start} is negative is not known")
    return start


@moves("aten.slice", "aten.slice_copy")
def _slice(m: Move) -> Moved:
    value = m.value()
    d = m.dim("dim", len(m.position), 0)
    step = m.arg("step", 1)
    start = _start(m, m.arg("start"), shape_of(value)[d], m.shape[d])
    return m.moved(value, d, shifted(scaled(m.position[d], size(step)), start))


@moves("aten.narrow", "aten.narrow_copy")
def _narrow(m: Move) -> Moved:
    value = m.value()
    d = m.dim("dim", len(m.position))
    return m.moved(value, d, shifted(m.position[d], _start(m, m.arg("start"), shape_of(value)[d], m.shape[d])))


@moves("aten.select", "aten.select_copy")
def _select(m: Move) -> Moved:
    value = m.value()
    shape = shape_of(value)
    d = m.dim("dim", len(shape))
    index = size(m.arg("index"))
    if isinstance(index, int) and index < 0:
        index = add(shape[d], index)
    elif not not_negative(index):
        raise CannotLower(f"whether {index} is negative is not known")
    return Alias(value, (*m.position[:d], Coord(normal(index)), *m.position[d:]))


@moves("aten.unfold", "aten.unfold_copy")
def _unfold(m: Move) -> Moved:
    """Windows along a dim, their elements in a last one."""
    value, step = m.value(), m.arg("step")
    *windows, inside = m.position
    if not windows or not isinstance(step, int):  # of a number, or by a step that a run tells
        raise CannotLower(f"unfold of {len(windows)} dims by {step}")
    d = m.dim("dimension", len(windows))
    return Alias(value, (*windows[:d], summed(scaled(windows[d], step), inside), *windows[d + 1:]))


@moves("aten.diagonal", "aten.diagonal_copy")
def _diagonal(m: Move) -> Moved:
    value, offset = m.value(), m.arg("offset", 0)
    rank = len(shape_of(value))
    one, two = m.dim("dim1", rank, 0), m.dim("dim2", rank, 1)
    if not isinstance(offset, int) or one == two:
        raise CannotLower(f"a diagonal {offset} beside the main one")
    *rest, along = m.position
    others = iter(rest)
    places = {one: shifted(along, max(0, -offset)), two: shifted(along, max(0, offset))}
    return Alias(value, tuple(places[d] if d in places else next(others) for d in range(rank)))


@moves(
    "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.unsafe_split",
    "aten.unsafe_split_with_sizes", "aten.unsafe_chunk", "aten.split_copy", "aten.split_with_sizes_copy",
)  # fmt: skip
def _split(m: Move) -> Moved:
    value = m.value()
    d = m.dim("dim", len(m.position), 0)
    before = add(*(shape_of(o)[d] for o in m.node.outs[: m.out]))
    return m.moved(value, d, shifted(m.position[d], before))


@moves("aten.unbind", "aten.unbind_copy")
def _unbind(m: Move) -> Moved:
    value = m.value()
    d = m.dim("dim", len(m.position) + 1, 0)
    return Alias(value, (*m.position[:d], Coord(m.out), *m.position[d:]))


@moves("aten.flip", "aten.fliplr", "aten.flipud")
def _flip(m: Move) -> Moved:
    rank = len(m.position)
    dims = {"fliplr": (1,), "flipud": (0,)}.get(m.node.op.split(".")[1], m.arg("dims"))
    if not isinstance(dims, tuple):
        raise CannotLower(f"flip along {dims}")
    turned = {d % rank for d in dims if isinstance(d, int)}
    return Alias(
        m.value(),
        tuple(
            shifted(scaled(c, -1), sub(n, 1)) if d in turned else c
            for d, (c, n) in enumerate(zip(m.position, m.shape, strict=True))
        ),
    )


# --- put together -----------------------------------------------------------------------------------------------------


@moves("aten.cat", "aten.concat", "aten.concatenate")
def _cat(m: Move) -> Moved:
    d = m.dim("dim", len(m.position), 0)
    given = m.arg("tensors")
    parts: list[ConcatPart] = []
    start: Dim = 0
    for arg in given if isinstance(given, tuple) else ():
        value = tensor(arg, m.node)
        shape = shape_of(value)
        if shape == (0,) and len(m.position) != 1:  # torch leaves these out
            continue
        parts.append(ConcatPart(start, m.moved(value, d, shifted(m.position[d], mul(start, -1)))))
        start = add(start, shape[d])
    return Pieces(m.position[d], tuple(parts))


@moves("aten.stack")
def _stack(m: Move) -> Moved:
    d = m.dim("dim", len(m.position), 0)
    given = m.arg("tensors")
    rest = (*m.position[:d], *m.position[d + 1:])
    parts = [ConcatPart(i, Alias(tensor(a, m.node), rest)) for i, a in enumerate(given if isinstance(given, tuple) else ())]
    return Pieces(m.position[d], tuple(parts))


def _overwritten(m: Move, d: int, start: Dim, length: Dim, part: Alias) -> Moved:
    """A value in which a stretch of a dim is another one's."""
    value, given = m.value(), m.value("src")
    if not isinstance(value.type, TensorType) or not isinstance(given.type, TensorType) or value.type.dtype is not given.type.dtype:
        raise CannotLower(f"{m.node.op} converts the values that it writes")
    same_place = Alias(value, m.position)
    parts = [ConcatPart(start, part)]
    if start != 0:
        parts.insert(0, ConcatPart(0, same_place))
    if not same(end := add(start, length), m.shape[d]):
        parts.append(ConcatPart(end, same_place))
    return Pieces(m.position[d], tuple(parts))


@moves("aten.select_scatter")
def _select_scatter(m: Move) -> Moved:
    d = m.dim("dim", len(m.position))
    index = size(m.arg("index"))
    if isinstance(index, int) and index < 0:
        index = add(m.shape[d], index)
    elif not not_negative(index):
        raise CannotLower(f"whether {index} is negative is not known")
    return _overwritten(m, d, normal(index), 1, Alias(m.value("src"), (*m.position[:d], *m.position[d + 1:])))


@moves("aten.slice_scatter")
def _slice_scatter(m: Move) -> Moved:
    given = m.value("src")
    d = m.dim("dim", len(m.position), 0)
    length = shape_of(given)[d]
    if m.arg("step", 1) != 1:
        raise CannotLower("slice_scatter by steps")
    if length == 0:
        return Alias(m.value(), m.position)
    start = _start(m, m.arg("start"), m.shape[d], length)
    return _overwritten(m, d, start, length, m.moved(given, d, shifted(m.position[d], mul(start, -1))))


@moves("aten.roll")
def _roll(m: Move) -> Moved:
    value, by, dims = m.value(), m.arg("shifts"), m.arg("dims", ())
    by, dims = ((x,) if isinstance(x, int) else x for x in (by, dims))
    if not isinstance(by, tuple) or not isinstance(dims, tuple) or len(dims) != 1 or len(by) != 1:
        raise CannotLower("roll along other than one dim")
    return _rolled(m, value, by[0], dims[0])


@moves("lower.roll")
def _roll_one(m: Move) -> Moved:
    """One dim of `roll`: args are the value, by how much, the dim."""
    value, by, dim = m.node.args
    return _rolled(m, tensor(value, m.node), by, dim)


def _rolled(m: Move, value: Value, shift: Arg, dim: Arg) -> Moved:
    if not isinstance(dim, int):
        raise CannotLower(f"roll along {dim}")
    d = dim % len(m.position)
    extent = shape_of(value)[d]
    if not isinstance(extent, int) or not isinstance(shift, int) or not extent:
        raise CannotLower(f"roll by {shift} of {extent}")
    shift %= extent
    c = m.position[d]
    wrapped = ConcatPart(0, m.moved(value, d, shifted(c, extent - shift)))
    return Pieces(c, (wrapped, ConcatPart(shift, m.moved(value, d, shifted(c, -shift))))[0 if shift else 1:])


@moves("lower.alias")
def _alias(m: Move) -> Moved:
    """A result under another name."""
    return Alias(tensor(m.node.args[0], m.node), m.position)


@moves("lower.pad")
def _pad(m: Move) -> Moved:
    """One dim of `constant_pad_nd`: args are the value, the dim, how much before, the number."""
    value, dim, before, number = m.node.args
    value = tensor(value, m.node)
    if not isinstance(dim, int) or not isinstance(number, int | float):
        raise CannotLower(f"padding with {number}")
    extent, out, left = shape_of(value)[dim], m.shape[dim], size(before)
    c = m.position[dim]
    inside = ConcatPart(left, m.moved(value, dim, shifted(c, mul(left, -1))))
    parts: list[ConcatPart] = []
    if left != 0 and not not_negative(mul(left, -1)):
        parts.append(ConcatPart(0, number))
    parts.append(inside)
    if not not_negative(sub(add(left, extent), out), m.space.positive):
        parts.append(ConcatPart(add(left, extent), number))
    return Pieces(c, tuple(parts))
