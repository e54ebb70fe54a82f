"""`require`: native code counts what a call's data asked for and does not exist (`runs.faults`)."""

from __future__ import annotations

from hotfuse.backends.llvm.emission import convert
from hotfuse.backends.llvm.emission.code import lane_mask, vec
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.backends.llvm.runs.kernel_faults import SYMBOL
from hotfuse.ir.types import DType
from hotfuse.tile.program import Instr


def emit_require(s: FunctionState, instr: Instr) -> None:
    """`require`: one count where some element is false."""
    fn, tile = s.fn, s.tiles(instr)[0]
    fine = ""
    for row in tile.rows:
        left = tile.cols
        for x, width in zip(row, tile.widths, strict=True):
            bits = convert.cast(fn, tile.type.dtype, DType.BOOL, width, x)
            if left < width:  # what lies beyond the tile does not count
                beyond = fn.val(f"xor {vec('i1', width)} {lane_mask(width, left)}, splat (i1 true)")
                bits = fn.val(f"or {vec('i1', width)} {bits}, {beyond}")
            if width > 1:
                bits = fn.call(f"llvm.vector.reduce.and.v{width}i1", "i1", (vec("i1", width), bits))
            fine = bits if not fine else fn.val(f"and i1 {fine}, {bits}")
            left -= width
    fn.module.declared.setdefault(SYMBOL, f"@{SYMBOL} = external global i64")
    wrong, after = fn.labels("fault", "fine")
    fn.do(f"br i1 {fine}, label %{after}, label %{wrong}")
    fn.label(wrong)
    fn.val(f"atomicrmw add ptr @{SYMBOL}, i64 1 monotonic")
    fn.do(f"br label %{after}")
    fn.label(after)
