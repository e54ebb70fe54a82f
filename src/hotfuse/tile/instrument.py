"""Kernels that count what they store: the same program, with `count` and `peak` behind the stores to its outputs.

    instrumented(kernel)   k(sizes) buffers..., arena, counters[5 * outputs] i64

A value that lives and dies inside a native run is seen by nobody else. Per output, counters hold

    elements   stored at all: an output whose elements are not each stored once tells by this that it was not counted right
    zeros, non-finite
    top        the order key of the greatest finite element
    bottom     the complement of the least one's

A key is an integer that is ordered as the numbers are, so that threads can raise it atomically; `ranges` makes numbers of them.
Counters begin as `BLANK`. The buffer `arena` is read by nobody: the caller gives a kernel's own memory behind its buffers, and
counters come behind that, so that plain and counting kernels can be called with the same pointers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

from hotfuse.base.errors import InternalError
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import (
    OWN,
    Buffer,
    BufferKind,
    Instr,
    Kernel,
    Loop,
    Stmt,
    Tile,
    TileAccess,
    When,
    instructions,
)
from hotfuse.tile.verify import verify

WIDTH = 5
"""Counters of one output."""
I64_MIN = -(2**63)
BLANK = (0, 0, 0, I64_MIN, I64_MIN)
FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
"""What has parts that are not finite."""
_BITS = {DType.F32: (DType.I32, 31), DType.F64: (DType.I64, 63)}
_ARENA, _COUNTERS = "arena", "counters"


def outputs(kernel: Kernel) -> tuple[Buffer, ...]:
    """The outputs, in the order in which they are counted."""
    return tuple(b for b in kernel.buffers if b.kind is BufferKind.OUTPUT)


def instrumented(kernel: Kernel) -> Kernel:
    """The counting kernel; raises InternalError where no output can be counted."""
    counted = {b.name: i for i, b in enumerate(outputs(kernel)) if _countable(kernel, b.name)}
    if not counted:
        raise InternalError(f"nothing that {kernel.name} stores can be counted", because="it reads what it wrote, or scatters")
    b = KernelBuilder.of(kernel)
    b.input(_ARENA, DType.U8, (1,))
    counters = b.output(_COUNTERS, DType.I64, (WIDTH * len(outputs(kernel)),))
    body = _walk(b, kernel.body, counters, counted)
    own = tuple(x for x in kernel.buffers if x.kind in OWN)
    given = tuple(x for x in kernel.buffers if x.kind not in OWN)
    added = b.buffers[len(kernel.buffers) :]
    return verify(replace(kernel, name=f"{kernel.name}_counting", buffers=(*given, *added, *own), body=body))


def _countable(kernel: Kernel, name: str) -> bool:
    """Whether an output is only stored to: one that is read again holds something else in between."""
    for instr in instructions(kernel.body):
        for a in instr.args:
            if isinstance(a, TileAccess) and a.buffer == name and instr.op != "prefetch" and (instr.op != "store" or -1 in a.axes):
                return False
    return True


def _walk(b: KernelBuilder, stmts: Sequence[Stmt], counters: Buffer, counted: dict[str, int]) -> tuple[Stmt, ...]:
    found: list[Stmt] = []
    for s in stmts:
        match s:
            case Loop() | When():
                found.append(replace(s, body=_walk(b, s.body, counters, counted)))
            case Instr():
                found.append(s)
                place = s.args[0] if s.op == "store" else None
                if isinstance(place, TileAccess) and place.buffer in counted and isinstance(tile := s.args[1], Tile):
                    with b.apart() as behind:
                        _count(b, tile, place, counters, WIDTH * counted[place.buffer])
                    found += behind
    return tuple(found)


def _count(b: KernelBuilder, tile: Tile, place: TileAccess, counters: Buffer, at: int) -> None:
    """Statements that count one stored tile."""
    dtype, shape = tile.type.dtype, tile.type.shape
    inside = b.fill(1, DType.BOOL, shape)
    for axis, valid in enumerate(place.valid):
        if valid is not None:
            here = b.map("lt", b.iota(0, shape, axis), b.bcast(b.index(valid), shape))
            inside = b.map("and", inside, here)
    b.count(counters, (at,), inside)
    floats = dtype in FLOATS
    v = b.cast(tile, dtype if dtype is DType.F64 else DType.F32 if floats else DType.I64)
    b.count(counters, (at + 1,), b.map("and", inside, b.map("eq", v, 0.0 if floats else 0)))
    finite = inside
    key = v
    if floats:
        finite = b.map("and", inside, b.map("lt", b.map("abs", v), math.inf))
        b.count(counters, (at + 2,), b.map("and", inside, b.map("not", finite)))
        ints, sign = _BITS[v.type.dtype]
        bits = b.bitcast(v, ints)
        key = b.map("xor", bits, b.map("and", b.map("shr", bits, sign), 2**sign - 1))  # of negative numbers all but the sign turns
    least = b.fill(I64_MIN if key.type.dtype is DType.I64 else -(2**31), key.type.dtype, shape)
    for k, ordered in ((3, key), (4, b.map("not", key))):
        top = b.map("select", finite, ordered, least)
        for axis in range(len(shape)):
            top = b.reduce("max", top, axis)
        b.peak(counters, (at + k,), b.cast(b.reshape(top, ()), DType.I64))


def ranges(dtype: DType, top: int, bottom: int) -> tuple[float, float]:
    """The least and the greatest finite element; (inf, -inf) where there is none."""
    none = -(2**31) if dtype in FLOATS and dtype is not DType.F64 else I64_MIN
    if top <= none or bottom <= none:
        return math.inf, -math.inf
    return _number(dtype, ~bottom), _number(dtype, top)


def _number(dtype: DType, key: int) -> float:
    if dtype not in FLOATS:
        return float(key)
    ints, floats, sign = ("<q", "<d", 63) if dtype is DType.F64 else ("<i", "<f", 31)
    bits = key if key >= 0 else key ^ (2**sign - 1)
    return struct.unpack(floats, struct.pack(ints, bits))[0]
