"""Reductions and scans along one axis, and the contraction of register tiles.

Floats are combined in fp32 or fp64; half precision widens first and rounds once. Along the last axis chunks are combined as
vectors, then halved until one number is left; lanes that do not exist are replaced by the neutral element.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hotfuse.backends.llvm.emission import convert, dot
from hotfuse.backends.llvm.emission.arith import ARITHMETIC, Chunk, Function
from hotfuse.backends.llvm.emission.code import FLOATS, HALVES, UNSIGNED, Fn, Val, iota, lane_mask, vec
from hotfuse.backends.llvm.emission.state import FunctionState, int_attr, lanewise
from hotfuse.ir.types import DType
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Instr, TileType

Emit = Callable[[FunctionState, Instr], Val]
_COMBINE: dict[str, Function] = {
    "sum": ARITHMETIC["add"], "prod": ARITHMETIC["mul"], "max": ARITHMETIC["max"], "min": ARITHMETIC["min"],
    "any": ARITHMETIC["or"], "all": ARITHMETIC["and"],
}  # fmt: skip


def neutral(name: str, dtype: DType) -> float:
    """What changes nothing when combined."""
    if name in ("max", "min"):
        if dtype in FLOATS:
            return -math.inf if name == "max" else math.inf
        limits = np.iinfo(NUMPY[dtype])
        return int(limits.min if name == "max" else limits.max)
    return {"sum": 0, "prod": 1, "any": 0, "all": 1}[name]


def _split(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Rows as (outer, along the axis, inner); the axis is not the last one."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 : -1])


def _widened(fn: Fn, a: Val) -> Val:
    dtype = a.type.dtype
    if dtype not in HALVES:
        return a
    return lanewise(fn, TileType(DType.F32, a.type.shape), [a], lambda w, x: convert.widen(fn, dtype, w, x[0]))


def _narrowed(fn: Fn, a: Val, out: TileType) -> Val:
    if out.dtype not in HALVES:
        return Val(out, a.rows, a.widths)
    return lanewise(fn, out, [a], lambda w, x: convert.narrow(fn, out.dtype, w, x[0]))


def across(c: Chunk, combine: Function, x: str) -> str:
    """The lanes of a chunk combined into one number, by halves."""
    fn, width = c.fn, c.width
    while width > 1:
        whole = Chunk(fn, c.dtype, width)
        half = width // 2
        mask = ", ".join(f"i32 {half + k}" for k in range(half))
        if half == 1:
            ty = vec(whole.ty.split(" x ")[1].rstrip(">"), 1)
            low, high = fn.lane(ty, width, x, 0), fn.lane(ty, width, x, 1)
        else:
            low = fn.val(f"shufflevector {whole.ty} {x}, {whole.ty} poison, {iota_mask(0, half)}")
            high = fn.val(f"shufflevector {whole.ty} {x}, {whole.ty} poison, <{half} x i32> <{mask}>")
        x = combine(Chunk(fn, c.dtype, half), [low, high])
        width = half
    return x


def iota_mask(start: int, width: int) -> str:
    """A shuffle mask of neighbours."""
    return f"<{width} x i32> {iota('i32', width, start)}"


def _only_present(c: Chunk, x: str, present: int, other: float) -> str:
    return x if present >= c.width else c.pick(lane_mask(c.width, present), x, c.const(other))


def _along_rows(fn: Fn, a: Val, axis: int, combine: Function) -> list[list[str]]:
    """Rows combined lane by lane."""
    outer, extent, inner = _split(a.type.shape, axis)
    dtype = a.type.dtype
    rows: list[list[str]] = []
    for o in range(outer):
        for i in range(inner):
            found = list(a.rows[o * extent * inner + i])
            for e in range(1, extent):
                more = a.rows[(o * extent + e) * inner + i]
                found = [combine(Chunk(fn, dtype, w), [x, y]) for w, x, y in zip(a.widths, found, more, strict=True)]
            rows.append(found)
    return rows


def _row_total(fn: Fn, a: Val, row: list[str], combine: Function, name: str) -> str:
    """One row combined into one number."""
    dtype = a.type.dtype
    by_width: dict[int, str] = {}
    left = a.cols
    for w, x in zip(a.widths, row, strict=True):
        c = Chunk(fn, dtype, w)
        x = _only_present(c, x, left, neutral(name, dtype))
        by_width[w] = combine(c, [by_width[w], x]) if w in by_width else x
        left -= w
    totals = [across(Chunk(fn, dtype, w), combine, x) for w, x in by_width.items()]
    result = totals[0]
    for t in totals[1:]:
        result = combine(Chunk(fn, dtype, 1), [result, t])
    return result


def emit_reduce(name: str) -> Emit:
    """The emission of `reduce.<name>`."""

    def emit(s: FunctionState, instr: Instr) -> Val:
        fn, out, axis = s.fn, instr.outs[0].type, int_attr(instr, "axis")
        a = _widened(fn, s.tiles(instr)[0])
        combine = _COMBINE[name]
        if axis < len(a.type.shape) - 1:
            result = Val(TileType(a.type.dtype, out.shape), _along_rows(fn, a, axis, combine), a.widths)
        else:
            totals = [[_row_total(fn, a, row, combine, name)] for row in a.rows]
            result = Val(TileType(a.type.dtype, out.shape), totals, (1,))
        return _narrowed(fn, result, out)

    return emit


def _beats(c: Chunk, x: str, best: str, *, greater: bool) -> str:
    """Whether a later element replaces the best so far: it is better, or the first NaN."""
    if not c.real:
        sign = "u" if c.dtype in UNSIGNED else "s"
        return c.op(f"icmp {sign}{'gt' if greater else 'lt'}", x, best)
    better = c.op("fcmp ogt" if greater else "fcmp olt", x, best)
    first_nan = c.flags("and", c.op("fcmp uno", x, x), c.op("fcmp ord", best, best))
    return c.flags("or", better, first_nan)


def emit_arg(name: str) -> Emit:
    """The emission of `reduce.argmax` and `reduce.argmin`: the first best index; NaN is better than anything."""
    greater = name == "max"

    def emit(s: FunctionState, instr: Instr) -> Val:
        fn, out, axis = s.fn, instr.outs[0].type, int_attr(instr, "axis")
        a = _widened(fn, s.tiles(instr)[0])
        if axis < len(a.type.shape) - 1:
            return Val(out, _arg_rows(fn, a, axis, greater=greater), a.widths)
        return Val(out, [[_arg_row(fn, a, row, greater=greater)] for row in a.rows], (1,))

    return emit


def _arg_rows(fn: Fn, a: Val, axis: int, *, greater: bool) -> list[list[str]]:
    outer, extent, inner = _split(a.type.shape, axis)
    rows: list[list[str]] = []
    for o in range(outer):
        for i in range(inner):
            row: list[str] = []
            for at, w in enumerate(a.widths):
                c, index = Chunk(fn, a.type.dtype, w), Chunk(fn, DType.I64, w)
                best, where = a.rows[o * extent * inner + i][at], index.const(0)
                for e in range(1, extent):
                    x = a.rows[(o * extent + e) * inner + i][at]
                    wins = _beats(c, x, best, greater=greater)
                    best, where = c.pick(wins, x, best), index.pick(wins, index.const(e), where)
                row.append(where)
            rows.append(row)
    return rows


def _arg_row(fn: Fn, a: Val, row: list[str], *, greater: bool) -> str:
    """The first lane that equals the best, or that is NaN if the best is."""
    name, dtype = "max" if greater else "min", a.type.dtype
    best = _row_total(fn, a, row, _COMBINE[name], name)
    none = 2**62
    found, left, start = "", a.cols, 0
    for w, x in zip(a.widths, row, strict=True):
        c, index = Chunk(fn, dtype, w), Chunk(fn, DType.I64, w)
        top = fn.splat(a.ty, w, best)
        if c.real:
            is_top = c.flags("or", c.op("fcmp oeq", x, top), c.op("fcmp uno", x, x))
        else:
            is_top = c.op("icmp eq", x, top)
        if left < w:
            is_top = c.flags("and", is_top, lane_mask(w, left))
        here = index.pick(is_top, iota("i64", w, start), index.const(none))
        least = across(index, ARITHMETIC["min"], here)
        found = ARITHMETIC["min"](Chunk(fn, DType.I64, 1), [found, least]) if found else least
        left, start = left - w, start + w
    return found


def emit_scan(name: str) -> Emit:
    """The emission of `scan.<name>`: every element combined with all before it."""

    def emit(s: FunctionState, instr: Instr) -> Val:
        fn, out, axis = s.fn, instr.outs[0].type, int_attr(instr, "axis")
        a = _widened(fn, s.tiles(instr)[0])
        combine, dtype = _COMBINE[name], a.type.dtype
        rows = [list(r) for r in a.rows]
        if axis < len(a.type.shape) - 1:
            outer, extent, inner = _split(a.type.shape, axis)
            for o in range(outer):
                for e in range(1, extent):
                    for i in range(inner):
                        at = (o * extent + e) * inner + i
                        rows[at] = [
                            combine(Chunk(fn, dtype, w), [x, y])
                            for w, x, y in zip(a.widths, rows[at - inner], rows[at], strict=True)
                        ]
        else:
            rows = [_scan_row(fn, a, row, combine, name) for row in rows]
        return _narrowed(fn, Val(TileType(dtype, out.shape), rows, a.widths), out)

    return emit


def _scan_row(fn: Fn, a: Val, row: list[str], combine: Function, name: str) -> list[str]:
    """Doubling shifts within a chunk, then the chunk before is added as one number."""
    dtype, done, carry = a.type.dtype, list[str](), ""
    for w, x in zip(a.widths, row, strict=True):
        c, by = Chunk(fn, dtype, w), 1
        while by < w:
            mask = ", ".join(f"i32 {k - by if k >= by else w}" for k in range(w))
            shifted = fn.val(f"shufflevector {c.ty} {x}, {c.ty} {c.const(neutral(name, dtype))}, <{w} x i32> <{mask}>")
            x = combine(c, [shifted, x])
            by *= 2
        if carry:
            x = combine(c, [fn.splat(a.ty, w, carry), x])
        carry = fn.lane(a.ty, w, x, w - 1)
        done.append(x)
    return done


def emit_mma(s: FunctionState, instr: Instr) -> Val:
    """`mma`: acc + a @ b; each number of a is spread over a row of b and multiplied into the accumulator's vectors."""
    fn = s.fn
    acc, a, b = s.tiles(instr)
    if dot.applies(fn.target, acc, a, b):
        return dot.emit_dot(fn, acc, a, b)
    if dot.pairs_apply(fn.target, acc, a, b):
        return dot.emit_pairs(fn, acc, a, b)
    dtype = acc.type.dtype
    wide_a, wide_b = _as(fn, a, dtype), _as(fn, b, dtype)
    rows = [list(r) for r in acc.rows]
    for k in range(a.cols):
        for i in range(acc.type.shape[0]):
            one = fn.number_at(wide_a, i, k)
            for j, w in enumerate(acc.widths):
                c = Chunk(fn, dtype, w)
                x, y = fn.splat(acc.ty, w, one), wide_b.rows[k][j]
                rows[i][j] = multiply_add(c, x, y, rows[i][j])
    return Val(acc.type, rows, acc.widths)


def multiply_add(c: Chunk, x: str, y: str, z: str) -> str:
    """x * y + z, fused only where that is an instruction."""
    if c.real:
        return c.call("fma", x, y, z) if c.fn.target.fma else c.op("fadd", c.op("fmul", x, y), z)
    return c.op("add", c.op("mul", x, y), z)


def _as(fn: Fn, v: Val, dtype: DType) -> Val:
    """The tile in the accumulator's type; number tiles stay numbers."""
    if v.type.dtype is dtype:
        return v
    rows = [[convert.cast(fn, v.type.dtype, dtype, w, x) for w, x in zip(v.widths, row, strict=True)] for row in v.rows]
    return Val(TileType(dtype, v.type.shape), rows, v.widths)
