"""What a tile kernel holds at once, read off its program: vector registers, and the iterations its outer parallel loops offer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hotfuse.base.errors import ModelError
from hotfuse.ir.dims import evaluate
from hotfuse.ir.types import bits
from hotfuse.tile.program import Instr, Kernel, Loop, LoopKind, Stmt, Tile


def vectors_at_once(kernel: Kernel, vector_bytes: int) -> int:
    """The most vector registers that tiles alive at one point fill; more than the machine has means spilling."""
    return _Pressure(vector_bytes).peak(kernel.body, set(), set())


def parallel_iterations(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """Iterations of the largest outermost parallel loop at these sizes; 1 where there is none or they are not known."""
    return _iterations(kernel.body, sizes)


def _iterations(body: Sequence[Stmt], env: Mapping[str, int]) -> int:
    most = 1
    for stmt in body:
        if not isinstance(stmt, Loop):
            continue
        try:
            first, end = evaluate(stmt.lo, env), evaluate(stmt.hi, env)
        except (KeyError, ZeroDivisionError, ModelError):
            continue
        if stmt.kind is LoopKind.PARALLEL:
            most = max(most, -(-(end - first) // stmt.step))
        else:  # loops of one iteration give names to sizes
            known = end - 1 if stmt.given is not None else first  # a number in memory: as large as it may be
            most = max(most, _iterations(stmt.body, {**env, stmt.var: known}))
    return most


class _Pressure:
    """What is known while a kernel is walked: registers of each tile, and what each block reads. Every level asks again."""

    def __init__(self, vector_bytes: int) -> None:
        self._vector_bytes = vector_bytes
        self._registers: dict[Tile, int] = {}
        self._known: dict[int, set[Tile]] = {}

    def _fill(self, tiles: Iterable[Tile]) -> int:
        """Registers that some tiles take."""
        return sum([self._registers.get(t) or self._of(t) for t in tiles])

    def _of(self, tile: Tile) -> int:
        size = math.prod(tile.type.shape) * bits(tile.type.dtype) // 8
        found = self._registers[tile] = max(1, -(-size // self._vector_bytes))
        return found

    def peak(self, body: Sequence[Stmt], before: set[Tile], after: set[Tile]) -> int:
        """The peak inside a block that begins with some tiles alive and needs some behind it.

        A result may take the registers of an operand that is not needed any more, as accumulators do.
        """
        last: dict[Tile, int] = {t: i for i, stmt in enumerate(body) for t in _read(stmt, self._known)}
        ends: dict[int, list[Tile]] = {0: [t for t in before if t not in last]}  # what nobody reads here ends at once
        for t, i in last.items():
            ends.setdefault(i, []).append(t)
        live = set(before)
        filled = most = self._fill(live)
        for i, stmt in enumerate(body):
            dying = {t for t in ends.get(i, ()) if t in live and t not in after}
            if not isinstance(stmt, Instr):
                outside = _read(stmt, self._known)
                if isinstance(stmt, Loop):
                    first = {t for _, t in stmt.carried}
                    again = outside - first  # what every iteration reads
                    inner = self.peak(stmt.body, {t for t, _ in stmt.carried} | again, set(stmt.yields) | again)
                    through = live - again - (first & dying)
                else:
                    inner = self.peak(stmt.body, outside, outside - dying)
                    through = live - outside
                most = max(most, self._fill(through) + inner)
            made = {t for t in _made(stmt) if (last.get(t, -1) > i or t in after) and t not in live}
            filled += self._fill(made) - self._fill(dying)
            live -= dying
            live |= made
            most = max(most, filled)
        return most


def _made(stmt: Stmt) -> tuple[Tile, ...]:
    return stmt.outs if isinstance(stmt, Instr | Loop) else ()


def _read(stmt: Stmt, known: dict[int, set[Tile]]) -> set[Tile]:
    """Tiles that a statement needs from outside itself; the set is shared, and not to be changed."""
    if isinstance(stmt, Instr):
        return {a for a in stmt.args if isinstance(a, Tile)}
    if id(stmt) in known:
        return known[id(stmt)]
    found: set[Tile] = set(stmt.yields) if isinstance(stmt, Loop) else set()
    inside: set[Tile] = {inner for inner, _ in stmt.carried} if isinstance(stmt, Loop) else set()
    for part in stmt.body:
        found |= _read(part, known)
        inside.update(_made(part))
    found -= inside
    known[id(stmt)] = found | {first for _, first in stmt.carried} if isinstance(stmt, Loop) else found
    return known[id(stmt)]
