"""Making and rearranging tiles: fill, iota, index, bcast, reshape, transpose, extract, concat.

Rearranging is described lane by lane (which number goes where) and written with as few shuffles as that needs: chunks that
stay whole cost nothing, chunks from one or two sources cost one shuffle, and square transposes go through a butterfly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission.code import Fn, Val, element, iota, row_count, vec
from hotfuse.backends.llvm.emission.convert import literal
from hotfuse.backends.llvm.emission.state import FunctionState, indices, int_attr, ints_attr, lanewise
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Sym
from hotfuse.ir.types import bits
from hotfuse.tile.program import Instr, TileType

Spot = tuple[str, int, int]
"""A number in registers: the chunk's name, its width, the lane."""


def spots(v: Val) -> list[Spot]:
    """Every number of a tile in row-major order."""
    found: list[Spot] = []
    for row in v.rows:
        left = v.cols
        for name, width in zip(row, v.widths, strict=True):
            found.extend((name, width, lane) for lane in range(min(width, left)))
            left -= width
    return found


def assemble(fn: Fn, out: TileType, numbers: Sequence[Spot]) -> Val:
    """The tile whose numbers, in row-major order, are these."""
    cols = out.shape[-1] if out.shape else 1
    widths, ty = fn.widths(cols), element(out.dtype)
    rows: list[list[str]] = []
    known: dict[tuple[Spot, ...], str] = {}
    for r in range(row_count(out.shape)):
        row: list[str] = []
        start = r * cols
        for width in widths:
            lanes = tuple(numbers[start : min(start + width, (r + 1) * cols)])
            if (width, lanes) not in known:
                known[(width, lanes)] = _collect(fn, ty, width, lanes)  # type: ignore[index]
            row.append(known[(width, lanes)])  # type: ignore[index]
            start += width
        rows.append(row)
    return Val(out, rows, widths)


def _collect(fn: Fn, ty: str, width: int, lanes: tuple[Spot, ...]) -> str:
    """One chunk from numbers wherever they are."""
    if width == 1:
        name, source, lane = lanes[0]
        return fn.lane(ty, source, name, lane)
    if all(s == width and n == lanes[0][0] and i == k for k, (n, s, i) in enumerate(lanes)):
        return lanes[0][0]
    if len(set(lanes)) == 1 and len(lanes) > 1:
        name, source, lane = lanes[0]
        return fn.splat(ty, width, fn.lane(ty, source, name, lane))
    pieces: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for at, (name, source, lane) in enumerate(lanes):
        pieces.setdefault((name, source), []).append((at, lane))
    vectors: list[tuple[str, set[int]]] = []
    wide, numbers = vec(ty, width), "poison"
    loose: set[int] = set()
    for (name, source), moves in pieces.items():
        if source == 1:
            for at, _ in moves:
                numbers = fn.val(f"insertelement {wide} {numbers}, {ty} {name}, i64 {at}")
                loose.add(at)
            continue
        order = dict(moves)
        mask = ", ".join(f"i32 {order[k]}" if k in order else "i32 poison" for k in range(width))
        text = f"shufflevector {vec(ty, source)} {name}, {vec(ty, source)} poison, <{width} x i32> <{mask}>"
        vectors.append((fn.val(text), set(order)))
    if loose:
        vectors.append((numbers, loose))
    while len(vectors) > 1:
        vectors = [_blend(fn, wide, width, *pair) for pair in itertools.zip_longest(vectors[::2], vectors[1::2])]
    return vectors[0][0]


def _blend(
    fn: Fn, wide: str, width: int, a: tuple[str, set[int]], b: tuple[str, set[int]] | None
) -> tuple[str, set[int]]:
    if b is None:
        return a
    mask = ", ".join(
        f"i32 {k}" if k in a[1] else f"i32 {width + k}" if k in b[1] else "i32 poison" for k in range(width)
    )
    return fn.val(f"shufflevector {wide} {a[0]}, {wide} {b[0]}, <{width} x i32> <{mask}>"), a[1] | b[1]


# ---- instructions --------------------------------------------------------------------------------------------------------


def emit_fill(s: FunctionState, instr: Instr) -> Val:
    """`fill`: one literal everywhere."""
    out, value = instr.outs[0].type, instr.args[0]
    if not isinstance(value, int | float):
        raise InternalError(f"fill of {value!r}", where=s.kernel.name)
    return lanewise(s.fn, out, [], lambda w, _: literal(s.fn, out.dtype, w, value))


def emit_iota(s: FunctionState, instr: Instr) -> Val:
    """`iota`: counting along an axis from an integer expression."""
    fn, out, axis, start = s.fn, instr.outs[0].type, int_attr(instr, "axis"), instr.args[0]
    if not isinstance(start, int | Sym):
        raise InternalError(f"iota from {start!r}", where=s.kernel.name)
    ty, size = element(out.dtype), bits(out.dtype)
    first = fn.i64(start)
    if size < 64:
        first = str(int(first) % (1 << size)) if first.lstrip("-").isdigit() else fn.val(f"trunc i64 {first} to {ty}")
    widths, rows = fn.widths(out.shape[-1]), list[list[str]]()
    for index in indices(out.shape):
        row: list[str] = []
        at = 0
        for width in widths:
            wide = vec(ty, width)
            counts = iota(ty, width, at) if axis == len(out.shape) - 1 else fn.splat(ty, width, str(index[axis]))
            row.append(fn.val(f"add {wide} {fn.splat(ty, width, first)}, {counts}"))
            at += width
        rows.append(row)
    return Val(out, rows, widths)


def emit_index(s: FunctionState, instr: Instr) -> Val:
    """`index`: an integer expression as a number."""
    value = instr.args[0]
    if not isinstance(value, int | Sym):
        raise InternalError(f"index of {value!r}", where=s.kernel.name)
    return Val(instr.outs[0].type, [[s.fn.i64(value)]], (1,))


def emit_bcast(s: FunctionState, instr: Instr) -> Val:
    """`bcast`: repeated along extents of 1 and new leading axes."""
    return lanewise(s.fn, instr.outs[0].type, s.tiles(instr), lambda _, x: x[0])


def emit_reshape(s: FunctionState, instr: Instr) -> Val:
    """`reshape`: other extents for the same numbers."""
    a, out = s.tiles(instr)[0], instr.outs[0].type
    if (out.shape[-1] if out.shape else 1) == a.cols:
        return Val(out, a.rows, a.widths)
    return assemble(s.fn, out, spots(a))


def emit_transpose(s: FunctionState, instr: Instr) -> Val:
    """`transpose`: axis i of the result is axis perm[i] of the operand."""
    fn, a, out, perm = s.fn, s.tiles(instr)[0], instr.outs[0].type, ints_attr(instr, "perm")
    shape = a.type.shape
    if perm[-1:] == (len(shape) - 1,):
        order = _permuted(shape[:-1], perm[:-1])
        return Val(out, [a.rows[i] for i in order], a.widths)
    if shape[-1] % fn.target.lanes == 0 and out.shape[-1] % fn.target.lanes == 0:
        return _blocked(fn, a, out, perm)
    numbers = spots(a)
    return assemble(fn, out, [numbers[i] for i in _permuted(shape, perm)])


def _permuted(shape: Sequence[int], perm: Sequence[int]) -> list[int]:
    """Row-major positions of a permuted tile's elements in the original."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    walk = itertools.product(*(range(shape[p]) for p in perm))
    return [sum(i * strides[p] for i, p in zip(index, perm, strict=True)) for index in walk]


def _blocked(fn: Fn, a: Val, out: TileType, perm: Sequence[int]) -> Val:
    """Transposes square blocks of full vectors, each by a butterfly of log2(lanes) rounds."""
    lanes, shape, ty = fn.target.lanes, a.type.shape, a.ty
    widths = fn.widths(out.shape[-1])
    rows = [["" for _ in widths] for _ in range(row_count(out.shape))]
    row_strides = [math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    out_strides = [math.prod(out.shape[i + 1 : -1]) for i in range(len(out.shape) - 1)]
    turned = perm[-1]
    others = [p for p in range(len(shape) - 1) if p != turned]
    for at in itertools.product(*(range(shape[p]) for p in others)):
        fixed = dict(zip(others, at, strict=True))
        base = sum(fixed[p] * row_strides[p] for p in others)
        for block in range(shape[turned] // lanes):
            for chunk in range(shape[-1] // lanes):
                sources = [a.rows[base + (block * lanes + i) * row_strides[turned]][chunk] for i in range(lanes)]
                for i, name in enumerate(_butterfly(fn, ty, sources)):
                    where = {**fixed, len(shape) - 1: chunk * lanes + i}
                    row = sum(where[p] * out_strides[k] for k, p in enumerate(perm[:-1]))
                    rows[row][block] = name
    return Val(out, rows, widths)


def _butterfly(fn: Fn, ty: str, rows: list[str]) -> list[str]:
    """The transpose of a square of vectors."""
    n = len(rows)
    wide, half = vec(ty, n), 1
    while half < n:
        low = [k if not k & half else n + (k - half) for k in range(n)]
        high = [(k + half) if not k & half else n + k for k in range(n)]
        merged = list(rows)
        for i in range(n):
            if not i & half:
                pair = f"{wide} {rows[i]}, {wide} {rows[i + half]}"
                merged[i] = fn.val(f"shufflevector {pair}, <{n} x i32> <{', '.join(f'i32 {k}' for k in low)}>")
                merged[i + half] = fn.val(f"shufflevector {pair}, <{n} x i32> <{', '.join(f'i32 {k}' for k in high)}>")
        rows, half = merged, half * 2
    return rows


def emit_extract(s: FunctionState, instr: Instr) -> Val:
    """`extract`: a part of a tile."""
    a, out, start = s.tiles(instr)[0], instr.outs[0].type, ints_attr(instr, "start")
    shape = a.type.shape
    numbers = spots(a)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    walk = itertools.product(*(range(first, first + n) for first, n in zip(start, out.shape, strict=True)))
    return assemble(s.fn, out, [numbers[sum(i * k for i, k in zip(at, strides, strict=True))] for at in walk])


def emit_concat(s: FunctionState, instr: Instr) -> Val:
    """`concat`: tiles one behind the other."""
    tiles, out, axis = s.tiles(instr), instr.outs[0].type, int_attr(instr, "axis")
    outer = math.prod(out.shape[:axis])
    sources = [(spots(t), math.prod(t.type.shape[axis:])) for t in tiles]
    numbers: list[Spot] = []
    for i in range(outer):
        for all_, block in sources:
            numbers.extend(all_[i * block : (i + 1) * block])
    return assemble(s.fn, out, numbers)


MOVES: dict[str, Callable[[FunctionState, Instr], Val]] = {
    "fill": emit_fill,
    "iota": emit_iota,
    "index": emit_index,
    "bcast": emit_bcast,
    "reshape": emit_reshape,
    "transpose": emit_transpose,
    "extract": emit_extract,
    "concat": emit_concat,
}
