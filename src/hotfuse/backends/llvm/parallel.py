"""Parallel loops: an outlined body, whose parts the threads of a pool take.

A kernel refers to `hf_parallel` by name; the address is bound when the code is loaded: `pool`'s, whose threads nobody waits for
before they have begun. Where there can be no pool, it is a function that does everything on the calling thread,
and `runtime().kind` says so. How many threads a loop may use comes with every call: torch's own number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotfuse.backends.llvm import pool
from hotfuse.backends.llvm.jit import Loaded, compile_object, load_object
from hotfuse.backends.llvm.target import host
from hotfuse.ir.dims import Dim, expr, substitute, symbols
from hotfuse.tile.program import Instr, Loop, Stmt, Tile, TileType, When

SYMBOLS = ("hf_parallel",)
WORK_PER_THREAD = 1 << 15
"""Vector operations that one more thread must have to do: some ten microseconds, about what waking it costs at worst."""
AWAKE_WORK = 1 << 12
"""The same where the loop before was parallel as well, so that threads are awake: about two microseconds."""
PARTS, PARTS_AGAIN = 4, 2
"""Parts per thread: where a loop runs once, and where it is run again and again with little work each time."""
SERIAL_TEXT = """
define void @hf_parallel(ptr %body, ptr %data, i64 %threads, i64 %per) {
  call void %body(ptr %data, i64 0, i64 0, i64 1)
  ret void
}
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where parallel loops run."""

    kind: str
    """`pool`, or `serial` where threads cannot be woken."""
    symbols: Mapping[str, int]
    detail: str
    keep: Loaded | None = None


@functools.cache
def runtime() -> Runtime:
    """The runtime of this process, made once."""
    if why := pool.unavailable():
        loaded = load_object(compile_object(SERIAL_TEXT, host()).code, SYMBOLS)
        return Runtime("serial", {n: loaded.address(n) for n in SYMBOLS}, why, loaded)
    return Runtime("pool", {"hf_parallel": pool.pool().address}, "threads that take parts", pool.pool().loaded)


def parts_per_thread(repeated: bool) -> int:
    """How many parts a thread's share of a loop is cut into, so that others can help one that is held up."""
    return PARTS_AGAIN if repeated else PARTS


_COSTLY = {"exp": 12, "exp2": 10, "expm1": 16, "log": 14, "log2": 16, "log1p": 18, "sin": 24, "cos": 24, "tanh": 20,
           "erf": 24, "pow": 60, "div": 8, "sqrt": 8, "rsqrt": 16, "recip": 8, "rem": 100, "mod": 100, "truncdiv": 40,
           "floordiv": 40}  # fmt: skip


def _vectors(t: TileType, lanes: int) -> int:
    rows, cols = 1, t.shape[-1] if t.shape else 1
    for e in t.shape[:-1]:
        rows *= e
    return rows * -(-cols // lanes)


def _instr_work(instr: Instr, lanes: int) -> int:
    types = [t.type for t in instr.outs] or [a.type for a in instr.args if isinstance(a, Tile)]
    if not types:
        return 1
    work = _vectors(types[0], lanes)
    if instr.op == "mma":
        a = instr.args[1]
        return work * (a.type.shape[1] if isinstance(a, Tile) else 1)
    return work * _COSTLY.get(instr.op.removeprefix("map."), 1)


def work(stmts: tuple[Stmt, ...], lanes: int) -> Dim:
    """An estimate of the vector operations in statements, as an expression over what is known outside them."""
    total: Dim = 0
    for stmt in stmts:
        match stmt:
            case Instr():
                total = expr("+", total, _instr_work(stmt, lanes))
            case When():
                total = expr("+", total, work(stmt.body, lanes))
            case Loop():
                total = expr("+", total, loop_work(stmt, lanes))
    return total


def threads_worth(work: Dim, repeats: Sequence[Dim]) -> Dim:
    """How many threads work deserves that is shared out again in every round of the loops around: the first round wakes them."""
    once = expr("//", work, WORK_PER_THREAD)
    if all(r == 1 for r in repeats):
        return once
    return expr("min", expr("//", expr("*", work, *repeats), WORK_PER_THREAD), expr("//", work, AWAKE_WORK))


def trips(loop: Loop) -> Dim:
    """How often a loop runs."""
    return expr("max", 0, expr("ceildiv", expr("+", loop.hi, expr("*", loop.lo, -1)), loop.step))


def loop_work(loop: Loop, lanes: int) -> Dim:
    """The work of a loop: trips times the body's, for which inner bounds are taken at the first iteration."""
    inside = work(loop.body, lanes)
    if loop.var in symbols(inside):
        inside = substitute(inside, {loop.var: loop.lo})
    return expr("*", trips(loop), inside)
