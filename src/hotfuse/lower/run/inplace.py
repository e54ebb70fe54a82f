"""Whether a kernel may write its result over one of its inputs.

It may where every element of the input is read in the same turn of the same loops that writes the element over it, before it is
written. That is looked up in the tile program, for groups of pointwise ops: their tails are written with `valid`, so no element
is visited twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotfuse.tile.program import Instr, Kernel, Loop, Stmt, TileAccess, When


def may_overwrite(kernel: Kernel | None, read: str, written: str) -> bool:
    """Whether `written` may be the same memory as `read`; `kernel` is None for one that is not pointwise."""
    if kernel is None or len(kernel.buffer(read).shape) != len(kernel.buffer(written).shape):
        return False
    if kernel.buffer(read).dtype is not kernel.buffer(written).dtype:
        return False
    reads: list[tuple[int, int, str, TileAccess]] = []
    writes: list[tuple[int, int, str, TileAccess]] = []
    for block, at, instr in _instructions(kernel.body, [0]):
        for access in instr.args:
            if isinstance(access, TileAccess) and access.buffer in (read, written):
                (reads if access.buffer == read else writes).append((block, at, instr.op, access))
    if not reads or not writes or any(op != "load" for _, _, op, _ in reads) or any(op != "store" for _, _, op, _ in writes):
        return False
    for block, at, _, access in writes:
        if not any(b == block and i < at and _place(a) == _place(access) for b, i, _, a in reads):
            return False
    for block, at, _, access in reads:
        if not any(b == block and i > at and _place(a) == _place(access) for b, i, _, a in writes):
            return False
    return True


def _place(a: TileAccess) -> tuple[object, ...]:
    return a.index, a.axes, a.step, a.valid


def _instructions(stmts: Sequence[Stmt], count: list[int]) -> Iterator[tuple[int, int, Instr]]:
    """Every instruction with the number of its block and its place there."""
    block = count[0]
    count[0] += 1
    for at, stmt in enumerate(stmts):
        match stmt:
            case Instr():
                yield block, at, stmt
            case Loop() | When():
                yield from _instructions(stmt.body, count)
