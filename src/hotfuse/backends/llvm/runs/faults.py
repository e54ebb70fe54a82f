"""Faults: what a call's data asked for does not exist. Native code counts them; whoever entered it looks.

    before = faults.count()
    enter(...)
    if faults.count() != before: raise CallFault        the model's own code then answers, and raises in its own words

The count is one word per process that only grows. A call in another thread may add to it at the same time: then this one is
answered by the model's own code without need, but none is ever missed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

from hotfuse.backends.llvm.emission import convert
from hotfuse.backends.llvm.emission.code import lane_mask, vec
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.base.errors import CallFault
from hotfuse.ir.types import DType
from hotfuse.tile.program import Instr, Kernel, Stmt

SYMBOL = "hotfuse_faults"
_cell = ctypes.c_int64(0)
SYMBOLS = {SYMBOL: ctypes.addressof(_cell)}
"""To be bound when code is loaded."""


def count() -> int:
    """Faults of this process so far."""
    return _cell.value


def fail(name: str) -> None:
    """Raise what a kernel could only count."""
    raise CallFault("an index points outside its tensor, or a number is not finite", where=f"kernel {name}")


def can_fault(kernel: Kernel) -> bool:
    """Whether a kernel checks anything."""
    return _checks(kernel.body)


def _checks(stmts: Iterable[Stmt]) -> bool:
    return any(s.op == "require" if isinstance(s, Instr) else _checks(s.body) for s in stmts)


def guarded(kernel: Kernel, enter: Callable[..., None]) -> Callable[..., None]:
    """A way into a kernel that raises CallFault; the same way where it has nothing to check."""
    if not can_fault(kernel):
        return enter
    name = kernel.name

    def checked(*args: int) -> None:
        before = _cell.value
        enter(*args)
        if _cell.value != before:
            fail(name)

    return checked


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
