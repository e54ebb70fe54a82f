"""What a tile kernel holds at once, read off its program: vector registers, and the iterations its outer parallel loops offer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hotfuse.base.errors import ModelError
from hotfuse.ir.dims import evaluate
from hotfuse.ir.types import bits
from hotfuse.tile.program import Instr, Kernel, Loop, LoopKind, Stmt, Tile


def vectors_at_once(kernel: Kernel, vector_bytes: int) -> int:
    """The most vector registers that tiles alive at one point fill; more than the machine has means spilling."""
    return _peak(kernel.body, frozenset(), vector_bytes)


def parallel_iterations(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """Iterations of the largest outermost parallel loop at these sizes; 1 where there is none or they are not known."""
    most = 1
    for stmt in kernel.body:
        if isinstance(stmt, Loop) and stmt.kind is LoopKind.PARALLEL:
            try:
                span = evaluate(stmt.hi, sizes) - evaluate(stmt.lo, sizes)
            except (KeyError, ZeroDivisionError, ModelError):
                continue
            most = max(most, -(-span // stmt.step))
    return most


def _vectors(tile: Tile, vector_bytes: int) -> int:
    elements = 1
    for n in tile.type.shape:
        elements *= n
    return max(1, -(-elements * bits(tile.type.dtype) // 8 // vector_bytes))


def _peak(body: Sequence[Stmt], after: frozenset[Tile], vector_bytes: int) -> int:
    """The peak inside a block; `after` are tiles that are still needed behind it."""
    last: dict[Tile, int] = {}
    for i, stmt in enumerate(body):
        for t in _read(stmt):
            last[t] = i
    live: set[Tile] = set(after)
    most = 0
    for i, stmt in enumerate(body):
        live |= {t for t in _made(stmt) if last.get(t, -1) > i or t in after} | {t for t in _read(stmt) if last[t] >= i}
        outside = sum(_vectors(t, vector_bytes) for t in live)
        inside = 0
        if not isinstance(stmt, Instr):
            kept = frozenset(stmt.yields) if isinstance(stmt, Loop) else frozenset[Tile]()
            inside = max(0, _peak(stmt.body, kept, vector_bytes) - sum(_vectors(t, vector_bytes) for t in kept & live))
        most = max(most, outside + inside)
        live -= {t for t in live if last.get(t, -1) <= i and t not in after}
    return most


def _made(stmt: Stmt) -> tuple[Tile, ...]:
    return stmt.outs if isinstance(stmt, Instr | Loop) else ()


def _read(stmt: Stmt) -> Iterator[Tile]:
    """Tiles that a statement uses, from inside its body too."""
    if isinstance(stmt, Instr):
        yield from (a for a in stmt.args if isinstance(a, Tile))
        return
    if isinstance(stmt, Loop):
        yield from (first for _, first in stmt.carried)
        yield from stmt.yields
    for inner in stmt.body:
        yield from _read(inner)
