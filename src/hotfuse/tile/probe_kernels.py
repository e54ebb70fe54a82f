"""The kernels that look at a value: one pass over a two-dimensional view of it gives every statistic of a record.

    probe(R, C, S)  x[R, C] (rows S elements apart), seen[C] -> counts[7] i64, ranges[3] f64

Elements are counted in registers; what is counted per row (all zero, all equal, anything valid) and per column (zero in every
row) goes through `count`. `valid` is what a mask lets through: anything but zero in a mask of integers or booleans, what is not
hugely negative in one that is added. Minimum and maximum are those of the finite elements.
"""

from __future__ import annotations

import math

from hotfuse.base.errors import InternalError
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Kernel, Tile

DTYPES = (DType.F32, DType.F64, DType.F16, DType.BF16, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL)
"""What can be looked at."""
MASKED = -9000.0
"""An added mask holds 0 for what counts and something below this for what does not (-1e4, -65504, -1e9, -inf)."""
_WIDE = {DType.F64: 16, DType.I64: 16}
_FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
_LIMITS = {DType.I64: (-(2**63), 2**63 - 1), DType.I32: (-(2**31), 2**31 - 1)}


def name(dtype: DType) -> str:
    """What the kernel of an element type is called."""
    return f"probe_{dtype.value}"


def _computed(dtype: DType) -> DType:
    """The type to compare in."""
    if dtype in (DType.F64, DType.F32, DType.I64, DType.I32):
        return dtype
    return DType.F32 if dtype in _FLOATS else DType.I32


def probe(dtype: DType) -> Kernel:
    """The kernel for values of an element type."""
    if dtype not in DTYPES:
        raise InternalError(f"no probe for {dtype.value}")
    inner = _computed(dtype)
    floats = dtype in _FLOATS
    low, high = (-math.inf, math.inf) if floats else _LIMITS[inner]
    width = _WIDE.get(inner, 32)
    b = KernelBuilder(name(dtype))
    rows, cols, pitch = b.size("R"), b.size("C"), b.size("S")
    x = b.input("x", dtype, (rows, cols), (pitch, 1))
    seen = b.output("seen", DType.U8, (cols,))
    counts = b.output("counts", DType.I64, (7,))
    ranges = b.output("ranges", DType.F64, (3,))

    nothing = b.fill(0, DType.I64)
    for i in range(7):
        b.store(counts, (i,), nothing)
    with b.loop("c0", 0, cols, width) as c:
        b.store(seen, (c.var,), b.fill(0, DType.U8, (width,)), valid=[remaining(cols, c.var)])

    zero32 = b.fill(0, DType.I32, (width,))
    one32 = b.fill(1, DType.I32, (width,))
    lowest, highest = b.fill(high, inner, (width,)), b.fill(low, inner, (width,))
    no, yes = b.fill(0, DType.BOOL, (width,)), b.fill(1, DType.BOOL, (width,))
    lane = b.iota(0, (width,), 0)

    def tally(total: Tile, flags: Tile) -> Tile:
        return b.map("add", total, b.map("select", flags, one32, zero32))

    with b.loop("r", 0, rows, carry=[lowest, highest, zero32, zero32, zero32]) as r:
        first = b.bcast(b.cast(b.load(x, (r.var, 0), ()), inner), (width,))
        with b.loop("c", 0, cols, width, carry=[*r.carried, no, yes, no]) as c:
            least, most, zeros, odd, valid, nonzero, equal, passes = c.carried
            left = [remaining(cols, c.var)]
            v = b.cast(b.load(x, (r.var, c.var), (width,), valid=left), inner)
            inside = b.map("lt", lane, b.bcast(b.index(remaining(cols, c.var)), (width,)))
            is_zero = b.map("eq", v, 0.0 if floats else 0)
            if floats:
                finite = b.map("lt", b.map("abs", v), math.inf)
                odd = tally(odd, b.map("and", inside, b.map("not", finite)))
                counted = b.map("and", inside, finite)
                let_through = b.map("and", inside, b.map("gt", v, MASKED))
            else:
                counted = inside
                let_through = b.map("and", inside, b.map("not", is_zero))
            least = b.map("min", least, b.map("select", counted, v, b.fill(high, inner, (width,))))
            most = b.map("max", most, b.map("select", counted, v, b.fill(low, inner, (width,))))
            zeros = tally(zeros, b.map("and", inside, is_zero))
            valid = tally(valid, let_through)
            filled = b.map("and", inside, b.map("not", is_zero))
            equal = b.map("and", equal, b.map("or", b.map("eq", v, first), b.map("not", inside)))
            before = b.load(seen, (c.var,), (width,), valid=left)
            b.store(seen, (c.var,), b.map("or", before, b.cast(filled, DType.U8)), valid=left)
            c.yields(least, most, zeros, odd, valid, b.map("or", nonzero, filled), equal, b.map("or", passes, let_through))
        *totals, nonzero, equal, passes = c.outs
        b.count(counts, (1,), b.map("not", b.reduce("any", nonzero, 0)))
        b.count(counts, (4,), b.reduce("all", equal, 0))
        b.count(counts, (6,), b.reduce("any", passes, 0))
        r.yields(*totals)
    least, most, zeros, odd, valid = r.outs
    for at, total in ((0, zeros), (3, odd), (5, valid)):
        b.store(counts, (at,), b.reshape(b.reduce("sum", b.cast(total, DType.I64), 0), ()))
    with b.loop("c2", 0, cols, width) as c:
        left = [remaining(cols, c.var)]
        b.count(counts, (2,), b.map("eq", b.load(seen, (c.var,), (width,), valid=left, fill=1), 0))
    bottom = b.cast(b.reshape(b.reduce("min", least, 0), ()), DType.F64)
    top = b.cast(b.reshape(b.reduce("max", most, 0), ()), DType.F64)
    some = b.map("le", bottom, top)
    largest = b.map("max", b.map("abs", bottom), b.map("abs", top))
    b.store(ranges, (0,), b.map("select", some, bottom, b.fill(math.inf, DType.F64)))
    b.store(ranges, (1,), b.map("select", some, top, b.fill(-math.inf, DType.F64)))
    b.store(ranges, (2,), b.map("select", some, largest, b.fill(0.0, DType.F64)))
    return b.finish()
