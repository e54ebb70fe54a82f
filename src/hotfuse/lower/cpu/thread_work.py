"""How much work loops hold, and how many threads that is worth: estimates over a tile program, the same for code and for plans."""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.dims import Dim, expr, substitute, symbols
from hotfuse.tile.program import Instr, Loop, Stmt, Tile, TileType, When
from hotfuse.tile.type_rules import block_extents

WORK_PER_THREAD = 1 << 15
"""Vector operations that one more thread must have to do: some ten microseconds, about what waking it costs at worst."""
AWAKE_WORK = 1 << 12
"""The same where threads are awake: the loop before was parallel as well, or the run has a team already. About two microseconds."""
MEETING_WORK = 1 << 11
"""The same where a team's threads are inside already and only meet: half a microsecond or more."""

_COSTLY = {"exp": 12, "exp2": 10, "expm1": 16, "log": 14, "log2": 16, "log1p": 18, "sin": 24, "cos": 24, "tanh": 20,
           "erf": 24, "normal": 20, "pow": 60, "div": 8, "sqrt": 8, "rsqrt": 16, "recip": 8, "rem": 100, "mod": 100, "truncdiv": 40,
           "floordiv": 40}  # fmt: skip


def _vectors(t: TileType, lanes: int) -> int:
    rows, cols = 1, t.shape[-1] if t.shape else 1
    for e in t.shape[:-1]:
        rows *= e
    return rows * -(-cols // lanes)


def _instr_work(instr: Instr, lanes: int) -> int:
    if instr.op == "mma.memory":
        (rows, columns), (blocks, *_), _ = block_extents(dict(instr.attrs))
        return max(rows, 16) * (columns // 16) * blocks  # as many lines of the right operand are read for one row as for sixteen
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
    terms: list[Dim] = []
    for stmt in stmts:
        match stmt:
            case Instr():
                terms.append(_instr_work(stmt, lanes))
            case When():
                terms.append(work(stmt.body, lanes))
            case Loop():
                terms.append(loop_work(stmt, lanes))
    return expr("+", 0, *terms)  # at once: a sum sorts its terms whenever one is added


def threads_worth(work: Dim, repeats: Sequence[Dim]) -> Dim:
    """How many threads work deserves that is shared out again in every round of the loops around: the first round wakes them."""
    once = expr("//", work, WORK_PER_THREAD)
    if all(r == 1 for r in repeats):
        return once
    return expr("min", expr("//", expr("*", work, *repeats), WORK_PER_THREAD), expr("//", work, AWAKE_WORK))


def trips(loop: Loop) -> Dim:
    """How often a loop runs."""
    if loop.given is not None:
        return 1
    return expr("max", 0, expr("ceildiv", expr("+", loop.hi, expr("*", loop.lo, -1)), loop.step))


def halfway(loop: Loop, inside: Dim) -> Dim:
    """What is inside a loop as it is in the middle of its rounds: the first ones of a window over an image see less of it."""
    if loop.var not in symbols(inside):
        return inside
    return substitute(inside, {loop.var: expr("//", expr("+", loop.lo, loop.hi), 2)})


def loop_work(loop: Loop, lanes: int) -> Dim:
    """The work of a loop: trips times the body's, for which inner bounds are taken halfway."""
    return expr("*", trips(loop), halfway(loop, work(loop.body, lanes)))
