"""Products of bytes four at a time: `vpdpbusd` adds four products of an unsigned and a signed byte to each 32-bit lane.

The sign that an operand lacks is made by moving it by 128 (flipping the top bit) and taking the difference back:
a b = (a + 128) b - 128 b, and a b = a (b - 128) + 128 a. Everything stays exact.
Where there is no such instruction, the even and the odd bytes of each lane are widened to 16 bits where they stand, and
`vpmaddwd` adds two products to each lane. `vpmaddubsw` takes bytes as they are, but its sums of two products saturate.

Products of 16-bit integers two at a time: what lowering makes of bytes where it widens them beforehand (`Core.dots_bytes`).

Products of bf16 two at a time: `vdpbf16ps` adds two products to each fp32 lane. Lowering makes such pairs only where the user
allows the precision (`Core.precision`).
"""

from __future__ import annotations

from hotfuse.backends.llvm.emission.code import Fn, Val, vec
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget

_BYTES = (DType.I8, DType.U8)
_FLIP = str(0x80808080)
_QUARTERS = str(0x40404040)
"""64 in every byte: twice this is the 128 that a signed byte cannot hold."""


_PAIRS = {(DType.F32, DType.BF16, DType.BF16): "avx512bf16", (DType.I32, DType.I16, DType.I16): "avx2"}
"""What multiplies pairs, by what is summed and multiplied."""


def applies(target: CpuTarget, acc: Val, a: Val, b: Val) -> bool:
    """Whether a product of byte tiles has instructions for all of its chunks and groups of four."""
    if acc.type.dtype is not DType.I32 or a.type.dtype not in _BYTES or b.type.dtype not in _BYTES or a.cols % 4:
        return False
    return min(acc.widths) >= 4 and (target.dots_bytes or target.has("avx2"))


def pairs_apply(target: CpuTarget, acc: Val, a: Val, b: Val) -> bool:
    """Whether a product of bf16 or of 16-bit integers has the instruction for all of its chunks and pairs."""
    needs = _PAIRS.get((acc.type.dtype, a.type.dtype, b.type.dtype))
    return needs is not None and target.has(needs) and min(acc.widths) >= 4 and a.cols % 2 == 0


def emit_pairs(fn: Fn, acc: Val, a: Val, b: Val) -> Val:
    """acc + a @ b over pairs along K, row by row: the panel's vectors stay in registers, a pair of `a` is spread once."""
    rows, dot = [list(r) for r in acc.rows], _dot_words if acc.type.dtype is DType.I32 else _dot_pairs
    for k in range(0, a.cols, 2):
        right = [b.quads[j] if b.quads is not None else _interleaved(fn, [b.rows[k + d][j] for d in range(2)], w, "i16")
                 for j, w in enumerate(acc.widths)]  # fmt: skip
        for i, row in enumerate(rows):
            left = _joined(fn, a, i, k, 2)
            for j, w in enumerate(acc.widths):
                row[j] = dot(fn, w, row[j], fn.splat("i32", w, left), right[j])
    return Val(acc.type, rows, acc.widths)


def _dot_pairs(fn: Fn, width: int, acc: str, a: str, b: str) -> str:
    lanes, raw = vec("i32", width), vec("bfloat", 2 * width)
    sides = [fn.val(f"bitcast {lanes} {x} to {raw}") for x in (a, b)]
    sums = vec("float", width)
    return fn.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * width}", sums, (sums, acc), (raw, sides[0]), (raw, sides[1]))


def _dot_words(fn: Fn, width: int, acc: str, a: str, b: str) -> str:
    lanes, raw = vec("i32", width), vec("i16", 2 * width)
    sides = [fn.val(f"bitcast {lanes} {x} to {raw}") for x in (a, b)]
    return fn.val(f"add {lanes} {acc}, {_madd(fn, width, sides[0], sides[1])}")


def emit_dot(fn: Fn, acc: Val, a: Val, b: Val) -> Val:
    """acc + a @ b over groups of four along K."""
    return _emit_quads(fn, acc, a, b) if fn.target.dots_bytes else _emit_words(fn, acc, a, b)


def _emit_words(fn: Fn, acc: Val, a: Val, b: Val) -> Val:
    """By pairs of 16-bit numbers. Row by row, so that a row of `a` is widened once for all columns."""
    rows = [list(r) for r in acc.rows]
    groups = range(0, a.cols, 4)
    right = {(j, k): _words(fn, b.type.dtype, w, _quad(fn, b, j, k, w)) for j, w in enumerate(acc.widths) for k in groups}
    for i, row in enumerate(rows):
        for k in groups:
            one = _joined(fn, a, i, k, 4)
            left = {w: _words(fn, a.type.dtype, w, fn.splat("i32", w, one)) for w in dict.fromkeys(acc.widths)}
            for j, w in enumerate(acc.widths):
                for x, y in zip(left[w], right[j, k], strict=True):
                    row[j] = fn.val(f"add {vec('i32', w)} {row[j]}, {_madd(fn, w, x, y)}")
    return Val(acc.type, rows, acc.widths)


def _words(fn: Fn, dtype: DType, width: int, quads: str) -> tuple[str, str]:
    """The even and the odd bytes of 32-bit lanes as 16-bit numbers."""
    ty = vec("i16", 2 * width)
    whole = fn.val(f"bitcast {vec('i32', width)} {quads} to {ty}")
    by = fn.splat("i16", 2 * width, "8")
    if dtype is DType.U8:
        return fn.val(f"and {ty} {whole}, {fn.splat('i16', 2 * width, '255')}"), fn.val(f"lshr {ty} {whole}, {by}")
    return fn.val(f"ashr {ty} {fn.val(f'shl {ty} {whole}, {by}')}, {by}"), fn.val(f"ashr {ty} {whole}, {by}")


_MADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _madd(fn: Fn, width: int, x: str, y: str) -> str:
    ty = vec("i16", 2 * width)
    return fn.call(_MADD[width], vec("i32", width), (ty, x), (ty, y))


def _emit_quads(fn: Fn, acc: Val, a: Val, b: Val) -> Val:
    """By fours of bytes."""
    signs = (a.type.dtype, b.type.dtype)
    rows = [list(r) for r in acc.rows]
    groups = range(0, a.cols, 4)
    left = {(i, k): _joined(fn, a, i, k, 4) for i in range(len(rows)) for k in groups}
    for j, w in enumerate(acc.widths):
        ty = vec("i32", w)
        right = [_quad(fn, b, j, k, w) for k in groups]
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


def _quad(fn: Fn, b: Val, j: int, k: int, width: int) -> str:
    """A chunk of columns, four bytes of each side by side, as 32-bit lanes."""
    return b.quads[j] if b.quads is not None else _interleaved(fn, [b.rows[k + d][j] for d in range(4)], width, "i8")


def _joined(fn: Fn, a: Val, row: int, k: int, many: int) -> str:
    """Neighbours of a row as one 32-bit number; loads of single ones become one load."""
    total, size = "", 32 // many
    for d in range(many):
        wide = fn.val(f"zext i{size} {fn.number_at(a, row, k + d)} to i32")
        part = wide if d == 0 else fn.val(f"shl i32 {wide}, {size * d}")
        total = part if not total else fn.val(f"or i32 {total}, {part}")
    return total


def _interleaved(fn: Fn, rows: list[str], w: int, ty: str) -> str:
    """Four rows of bytes, or two of bf16, their columns side by side, as 32-bit lanes."""
    one, two, all_ = vec(ty, w), vec(ty, 2 * w), vec(ty, len(rows) * w)
    if len(rows) == 2:
        mix = ", ".join(f"i32 {d * w + lane}" for lane in range(w) for d in range(2))
        mixed = fn.val(f"shufflevector {one} {rows[0]}, {one} {rows[1]}, <{2 * w} x i32> <{mix}>")
        return fn.val(f"bitcast {all_} {mixed} to {vec('i32', w)}")
    order = ", ".join(f"i32 {i}" for i in range(2 * w))
    pairs = [fn.val(f"shufflevector {one} {x}, {one} {y}, <{2 * w} x i32> <{order}>") for x, y in (rows[:2], rows[2:])]
    mix = ", ".join(f"i32 {d * w + lane}" for lane in range(w) for d in range(4))
    mixed = fn.val(f"shufflevector {two} {pairs[0]}, {two} {pairs[1]}, <{4 * w} x i32> <{mix}>")
    return fn.val(f"bitcast {all_} {mixed} to {vec('i32', w)}")
