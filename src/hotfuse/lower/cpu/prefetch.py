"""Rows of data that no cache holds: while one row is worked on, the lines of the next are asked for.

    for row (parallel)
      for k:  ... load x[row, k] ...       if the data is large: prefetch x[row + 1, k], prefetch y[row + 1, k] for writing
      for k:  ... store y[row, k] ...

The processor itself runs ahead of one long stream. Several passes over a row break its streams off at every row's end, and each
row begins by waiting for memory. Where the data lies in a cache anyway, asking costs a few per cent and gains nothing, so that
it happens by size: one comparison, which comes out the same in all of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hotfuse.ir.dims import Dim, expr, substitute, sym, symbols
from hotfuse.ir.types import bits
from hotfuse.lower.cpu.tiling import Core
from hotfuse.tile.program import Buffer, BufferKind, Instr, Kernel, Loop, LoopKind, Stmt, TileAccess, When

BEYOND_CACHES_FACTOR = 8
"""So many times the second-level cache, all that a call reads and writes is taken to lie beyond the caches of a core."""
LINE_BYTES = 64
LEVEL = 2
"""Lines come into the second-level cache: a row ahead is more than the first one keeps."""
_GIVEN = frozenset({BufferKind.INPUT, BufferKind.OUTPUT})


def exceeds_caches(buffers: Iterable[Buffer], core: Core) -> Dim:
    """A predicate: whether what callers give is more than the caches near a core hold."""
    total = expr("+", 0, *(_bytes(b) for b in buffers if b.kind in _GIVEN))
    return expr("<", BEYOND_CACHES_FACTOR * core.l2, total)


def _bytes(buffer: Buffer) -> Dim:
    return expr("*", bits(buffer.dtype) // 8, *buffer.shape)


def with_prefetches(kernel: Kernel, core: Core) -> Kernel:
    """The kernel with lines of the next row asked for where data is large; the same one where its rows have a single pass."""
    pred = exceeds_caches(kernel.buffers, core)
    if pred == 0:
        return kernel
    body = tuple(_rows(kernel, s, pred) if isinstance(s, Loop) and _passes(s) else s for s in kernel.body)
    return kernel if body == kernel.body else replace(kernel, body=body)


def _passes(loop: Loop) -> bool:
    """Whether a loop runs over rows, one after the other, each with several passes; a pass is one or more loops, from 0 on."""
    inner = [s for s in loop.body if isinstance(s, Loop)]
    flat = all(not isinstance(t, Loop) for s in inner for t in s.body)
    many = sum(s.lo == 0 for s in inner) > 1
    return loop.kind is LoopKind.PARALLEL and loop.step == 1 and loop.given is None and flat and many


def _rows(kernel: Kernel, loop: Loop, pred: Dim) -> Loop:
    seen: set[str] = set()
    body = tuple(_pass(kernel, loop.var, s, pred, seen) if isinstance(s, Loop) else s for s in loop.body)
    return replace(loop, body=body)


def _pass(kernel: Kernel, row: str, loop: Loop, pred: Dim, seen: set[str]) -> Loop:
    """One pass over a row, asking for what it is the first to touch."""
    hints: list[Instr] = []
    for instr in (s for s in loop.body if isinstance(s, Instr) and s.op in ("load", "store")):
        access = next(a for a in instr.args if isinstance(a, TileAccess))
        buffer = kernel.buffer(access.buffer)
        if buffer.kind in _GIVEN and buffer.name not in seen and _walks(access, row, loop):
            seen.add(buffer.name)
            hints += _lines(access, buffer, row, loop.step, write=instr.op == "store")
    return replace(loop, body=(*guarded(pred, hints), *loop.body)) if hints else loop


def _walks(access: TileAccess, row: str, loop: Loop) -> bool:
    """Whether an access takes consecutive elements of a row, a step of the loop at a time."""
    named = frozenset[str]().union(*(symbols(d) for d in access.index))
    return {row, loop.var} <= named and access.axes == (len(access.index) - 1,) and access.step in ((), (1,))


def _lines(access: TileAccess, buffer: Buffer, row: str, elements: int, *, write: bool) -> Iterator[Instr]:
    """Hints for the lines of so many elements at the same place of the next row."""
    *outer, last = (substitute(d, {row: expr("+", sym(row), 1)}) for d in access.index)
    for n in range(0, elements, max(1, LINE_BYTES * 8 // bits(buffer.dtype))):
        where = TileAccess(buffer.name, (*outer, expr("+", last, n)))
        yield Instr("prefetch", (where,), (), (("level", LEVEL), ("write", int(write))))


def guarded(pred: Dim, stmts: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Statements under a predicate, which may be known."""
    if isinstance(pred, int):
        return tuple(stmts) if pred else ()
    return (When(pred, tuple(stmts)),)
