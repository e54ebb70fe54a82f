"""Products of bytes four at a time: `vpdpbusd` adds four products of an unsigned and a signed byte to each 32-bit lane.

The sign that an operand lacks is made by moving it by 128 (flipping the top bit) and taking the difference back:
a b = (a + 128) b - 128 b, and a b = a (b - 128) + 128 a. Everything stays exact.
"""

from __future__ import annotations

from hotfuse.backends.llvm.code import Fn, Val, vec
from hotfuse.backends.llvm.target import Target
from hotfuse.ir.types import DType

_BYTES = (DType.I8, DType.U8)
_FLIP = str(0x80808080)
_QUARTERS = str(0x40404040)
"""64 in every byte: twice this is the 128 that a signed byte cannot hold."""


def applies(target: Target, acc: Val, a: Val, b: Val) -> bool:
    """Whether a product of byte tiles has the instruction for all of its chunks and groups of four."""
    if acc.type.dtype is not DType.I32 or a.type.dtype not in _BYTES or b.type.dtype not in _BYTES or a.cols % 4:
        return False
    return min(acc.widths) >= 4 and (target.has("avx512vnni") or target.has("avx-vnni"))


def emit_dot(fn: Fn, acc: Val, a: Val, b: Val) -> Val:
    """acc + a @ b over groups of four along K."""
    signs = (a.type.dtype, b.type.dtype)
    rows = [list(r) for r in acc.rows]
    groups = range(0, a.cols, 4)
    left = {(i, k): _four(fn, a, i, k) for i in range(len(rows)) for k in groups}
    for j, w in enumerate(acc.widths):
        ty = vec("i32", w)
        right = [b.quads[j]] if b.quads is not None else [
            _interleaved(fn, [b.rows[k + d][j] for d in range(4)], w) for k in groups
        ]
        correction = "zeroinitializer"
        if signs == (DType.I8, DType.I8):
            for r in right:
                correction = _dot(fn, w, correction, fn.splat("i32", w, _FLIP), r)
        elif signs == (DType.U8, DType.U8):
            right = [fn.val(f"xor {ty} {r}, {fn.splat('i32', w, _FLIP)}") for r in right]
        for i, row in enumerate(rows):
            total = row[j]
            for k, r in zip(groups, right, strict=True):
                one = left[i, k]
                if signs == (DType.I8, DType.I8):
                    total = _dot(fn, w, total, fn.splat("i32", w, fn.val(f"xor i32 {one}, {_FLIP}")), r)
                elif signs == (DType.I8, DType.U8):
                    total = _dot(fn, w, total, r, fn.splat("i32", w, one))
                else:
                    spread = fn.splat("i32", w, one)
                    total = _dot(fn, w, total, spread, r)
                    if signs == (DType.U8, DType.U8):
                        for _ in range(2):
                            total = _dot(fn, w, total, spread, fn.splat("i32", w, _QUARTERS))
            if correction != "zeroinitializer":
                total = fn.val(f"sub {ty} {total}, {correction}")
            row[j] = total
    return Val(acc.type, rows, acc.widths)


def _dot(fn: Fn, width: int, acc: str, unsigned: str, signed: str) -> str:
    lanes, raw = vec("i32", width), vec("i8", 4 * width)
    sides = [fn.val(f"bitcast {lanes} {x} to {raw}") for x in (unsigned, signed)]
    name = f"llvm.x86.avx512.vpdpbusd.{32 * width}"
    return fn.call(name, lanes, (lanes, acc), (raw, sides[0]), (raw, sides[1]))


def _four(fn: Fn, a: Val, row: int, k: int) -> str:
    """Four neighbours of a row as one 32-bit number; loads of single bytes become one load."""
    total = ""
    for d in range(4):
        wide = fn.val(f"zext i8 {fn.number_at(a, row, k + d)} to i32")
        part = wide if d == 0 else fn.val(f"shl i32 {wide}, {8 * d}")
        total = part if not total else fn.val(f"or i32 {total}, {part}")
    return total


def _interleaved(fn: Fn, rows: list[str], w: int) -> str:
    """Four rows of bytes, their columns side by side, as 32-bit lanes."""
    one, two, all_ = vec("i8", w), vec("i8", 2 * w), vec("i8", 4 * w)
    order = ", ".join(f"i32 {i}" for i in range(2 * w))
    pairs = [fn.val(f"shufflevector {one} {x}, {one} {y}, <{2 * w} x i32> <{order}>") for x, y in (rows[:2], rows[2:])]
    mix = ", ".join(f"i32 {d * w + lane}" for lane in range(w) for d in range(4))
    mixed = fn.val(f"shufflevector {two} {pairs[0]}, {two} {pairs[1]}, <{4 * w} x i32> <{mix}>")
    return fn.val(f"bitcast {all_} {mixed} to {vec('i32', w)}")
