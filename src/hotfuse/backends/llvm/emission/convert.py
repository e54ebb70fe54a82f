"""Changing element types: casts, and the half-precision formats, which compute in fp32.

bf16 is done with integers everywhere, because the processors' own instruction flushes denormals. f16 uses the conversion
instructions where they were seen to execute, and integers elsewhere: LLVM would call a library that may not be there.
"""

from __future__ import annotations

import numpy as np

from hotfuse.backends.llvm.emission.code import FLOATS, HALVES, UNSIGNED, Fn, Val, element, number, suffix, vec
from hotfuse.backends.llvm.emission.state import FunctionState, lanewise
from hotfuse.ir.types import DType, bits
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Instr


def half_bits(dtype: DType, value: float) -> int:
    """The 16 bits of a literal in half precision."""
    with np.errstate(over="ignore"):
        return int(np.asarray(value).astype(NUMPY[dtype]).view(np.uint16))


def literal(fn: Fn, dtype: DType, width: int, value: float) -> str:
    """A chunk of one number."""
    ty = element(dtype)
    text = str(half_bits(dtype, value)) if dtype in HALVES else number(ty, value)
    return fn.splat(ty, width, text)


def compute_type(dtype: DType) -> DType:
    """What arithmetic on a type is done in."""
    return DType.F32 if dtype in HALVES else dtype


class _Bits:
    """Shorthands for 32-bit integer work on a chunk."""

    def __init__(self, fn: Fn, width: int) -> None:
        self.fn, self.width, self.ty = fn, width, vec("i32", width)

    def const(self, value: int) -> str:
        return self.fn.splat("i32", self.width, str(value))

    def op(self, name: str, a: str, b: str | int) -> str:
        return self.fn.val(f"{name} {self.ty} {a}, {self.const(b) if isinstance(b, int) else b}")

    def pick(self, cond: str, a: str, b: str) -> str:
        return self.fn.val(f"select {vec('i1', self.width)} {cond}, {self.ty} {a}, {self.ty} {b}")

    def to_float(self, a: str) -> str:
        return self.fn.val(f"bitcast {self.ty} {a} to {vec('float', self.width)}")

    def of_float(self, a: str) -> str:
        return self.fn.val(f"bitcast {vec('float', self.width)} {a} to {self.ty}")


def widen(fn: Fn, dtype: DType, width: int, x: str) -> str:
    """A half-precision chunk as fp32; any other chunk as it is."""
    if dtype not in HALVES:
        return x
    if dtype is DType.F16 and _native_f16(fn):
        half = fn.val(f"bitcast {vec('i16', width)} {x} to {vec('half', width)}")
        return fn.val(f"fpext {vec('half', width)} {half} to {vec('float', width)}")
    b = _Bits(fn, width)
    raw = fn.val(f"zext {vec('i16', width)} {x} to {b.ty}")
    if dtype is DType.BF16:
        return b.to_float(b.op("shl", raw, 16))
    magnitude = b.op("shl", b.op("and", raw, 0x7FFF), 13)
    exponent = b.op("and", magnitude, 0x7C00 << 13)
    normal = b.op("add", magnitude, (127 - 15) << 23)
    special = b.op("add", normal, (128 - 16) << 23)
    tiny = b.to_float(b.op("add", normal, 1 << 23))
    exact = b.of_float(
        fn.val(f"fsub {vec('float', width)} {tiny}, {fn.splat('float', width, number('float', 2.0**-14))}")
    )
    result = b.pick(b.op("icmp eq", exponent, 0x7C00 << 13), special, normal)
    result = b.pick(b.op("icmp eq", exponent, 0), exact, result)
    return b.to_float(b.op("or", result, b.op("shl", b.op("and", raw, 0x8000), 16)))


def _native_f16(fn: Fn) -> bool:
    return fn.target.name == "neon" or fn.target.has("f16c")


def narrow(fn: Fn, dtype: DType, width: int, x: str) -> str:
    """An fp32 chunk rounded to half precision, ties to even; for any other type the chunk as it is."""
    if dtype not in HALVES:
        return x
    if dtype is DType.F16 and _native_f16(fn):
        half = fn.val(f"fptrunc {vec('float', width)} {x} to {vec('half', width)}")
        return fn.val(f"bitcast {vec('half', width)} {half} to {vec('i16', width)}")
    b = _Bits(fn, width)
    raw = b.of_float(x)
    if dtype is DType.BF16:
        odd = b.op("and", b.op("lshr", raw, 16), 1)
        rounded = b.op("add", b.op("add", raw, 0x7FFF), odd)
        nan = fn.val(f"fcmp uno {vec('float', width)} {x}, {x}")
        quiet = b.op("or", raw, 0x400000)
        result = b.op("lshr", b.pick(nan, quiet, rounded), 16)
    else:
        magnitude = b.op("and", raw, 0x7FFFFFFF)
        special = b.pick(b.op("icmp ugt", magnitude, 0x7F800000), b.const(0x7E00), b.const(0x7C00))
        magic = ((127 - 15) + (23 - 10) + 1) << 23
        sum_ = fn.val(f"fadd {vec('float', width)} {b.to_float(magnitude)}, {b.to_float(b.const(magic))}")
        tiny = b.op("sub", b.of_float(sum_), magic)
        odd = b.op("and", b.op("lshr", magnitude, 13), 1)
        shifted = b.op("add", b.op("add", magnitude, (((15 - 127) << 23) + 0xFFF) % (1 << 32)), odd)
        result = b.pick(b.op("icmp ult", magnitude, 113 << 23), tiny, b.op("lshr", shifted, 13))
        result = b.pick(b.op("icmp uge", magnitude, (127 + 16) << 23), special, result)
        result = b.op("or", result, b.op("lshr", b.op("and", raw, 0x80000000), 16))
    return fn.val(f"trunc {b.ty} {result} to {vec('i16', width)}")


def _to_odd_f32(fn: Fn, width: int, x: str) -> str:
    """fp64 to fp32, inexact results made odd, so that rounding again to half precision is as good as rounding once."""
    b, wide, bit = _Bits(fn, width), vec("double", width), vec("i1", width)
    near = fn.val(f"fptrunc {wide} {x} to {vec('float', width)}")
    back = fn.val(f"fpext {vec('float', width)} {near} to {wide}")
    inexact = fn.val(f"fcmp one {wide} {back}, {x}")
    over = fn.val(f"fcmp ogt {wide} {absolute(fn, 'double', width, back)}, {absolute(fn, 'double', width, x)}")
    down = b.op("sub", b.of_float(near), fn.val(f"zext {bit} {over} to {b.ty}"))
    return b.to_float(b.op("or", down, fn.val(f"zext {bit} {inexact} to {b.ty}")))


def absolute(fn: Fn, ty: str, width: int, x: str) -> str:
    """A float without its sign."""
    return fn.call(f"llvm.fabs.{suffix(ty, width)}", vec(ty, width), (vec(ty, width), x))


def to_i64(fn: Fn, dtype: DType, width: int, x: str) -> str:
    """An integer chunk as i64."""
    if bits(dtype) == 64:
        return x
    how = "zext" if dtype in UNSIGNED else "sext"
    return fn.val(f"{how} {vec(element(dtype), width)} {x} to {vec('i64', width)}")


def cast(fn: Fn, source: DType, target: DType, width: int, x: str) -> str:
    """A chunk in another element type: floats truncate to integers, anything non-zero is true."""
    if source is target:
        return x
    if source in HALVES:
        return cast(fn, DType.F32, target, width, widen(fn, source, width, x))
    ty = vec(element(source), width)
    if target is DType.BOOL:
        zero = literal(fn, source, width, 0)
        return fn.val(f"fcmp une {ty} {x}, {zero}" if source in FLOATS else f"icmp ne {ty} {x}, {zero}")
    if target in HALVES:
        if source is DType.F64 and target is DType.F16:  # bf16 goes through fp32, as in torch
            return narrow(fn, target, width, _to_odd_f32(fn, width, x))
        return narrow(fn, target, width, cast(fn, source, DType.F32, width, x))
    to = vec(element(target), width)
    if source in FLOATS:
        if target in FLOATS:
            return fn.val(f"{'fpext' if source is DType.F32 else 'fptrunc'} {ty} {x} to {to}")
        return _float_to_int(fn, source, target, width, x)
    if target in FLOATS:
        return fn.val(f"{'uitofp' if source in UNSIGNED else 'sitofp'} {ty} {x} to {to}")
    have, want = 1 if source is DType.BOOL else bits(source), bits(target)
    if have == want:
        return x
    if have > want:
        return fn.val(f"trunc {ty} {x} to {to}")
    return fn.val(f"{'zext' if source in UNSIGNED else 'sext'} {ty} {x} to {to}")


def _float_to_int(fn: Fn, source: DType, target: DType, width: int, x: str) -> str:
    """Through a signed type that holds the target, as compiled C does; only u64 needs the unsigned conversion."""
    ty = vec(element(source), width)
    if target is DType.U64:
        return fn.val(f"fptoui {ty} {x} to {vec('i64', width)}")
    through = 64 if target in (DType.I64, DType.U32) else 32
    whole = fn.val(f"fptosi {ty} {x} to {vec(f'i{through}', width)}")
    if through == bits(target):
        return whole
    return fn.val(f"trunc {vec(f'i{through}', width)} {whole} to {vec(element(target), width)}")


def emit_cast(s: FunctionState, instr: Instr) -> Val:
    """`map.cast`."""
    a, out = s.tiles(instr)[0], instr.outs[0].type
    return lanewise(s.fn, out, [a], lambda w, x: cast(s.fn, a.type.dtype, out.dtype, w, x[0]))


def emit_bitcast(s: FunctionState, instr: Instr) -> Val:
    """`map.bitcast`: half precision is held by its bits already."""
    a, out = s.tiles(instr)[0], instr.outs[0].type
    source, to = element(a.type.dtype), element(out.dtype)

    def one(width: int, x: list[str]) -> str:
        return x[0] if source == to else s.fn.val(f"bitcast {vec(source, width)} {x[0]} to {vec(to, width)}")

    return lanewise(s.fn, out, [a], one)
