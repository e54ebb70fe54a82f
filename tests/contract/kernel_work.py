"""What a tile kernel executes, counted over its loops at given sizes: the truth that counts made before lowering are held to.

    for i in 0..n          n is 10: ten times what is inside
      for v in 0..64 by 16
        %e = map.exp(%x)   f32[16]: 40 executions, 640 elements

Bounds that depend on an outer loop are evaluated for each of its rounds, or in the middle of it where there are very many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.tile.program import Instr, Kernel, Loop, Stmt, Tile, When
from hotfuse.tile.type_rules import block_extents

MAX_ROUNDS = 512
"""Rounds of a loop that are counted one by one where what is inside depends on them."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """By instruction: how often it is executed, and for how many elements."""

    executed: Counter[str] = field(default_factory=Counter[str])
    elements: Counter[str] = field(default_factory=Counter[str])
    multiply_adds: float = 0.0


def kernel_work(kernel: Kernel, sizes: Mapping[str, int]) -> KernelWork:
    """All that a call of these sizes executes; integers that lie in memory are taken as large as they may be."""
    executed, elements = Counter[str](), Counter[str]()
    found = _Counting(executed, elements)
    found.block(kernel.body, dict(sizes), 1.0)
    return KernelWork(executed, elements, found.multiply_adds)


class _Counting:
    """The counts so far."""

    def __init__(self, executed: Counter[str], elements: Counter[str]) -> None:
        self.executed, self.elements, self.multiply_adds = executed, elements, 0.0

    def block(self, body: Sequence[Stmt], env: dict[str, int], times: float) -> None:
        for stmt in body:
            match stmt:
                case Instr():
                    self._instruction(stmt, times)
                case When():
                    if evaluate(stmt.pred, env):
                        self.block(stmt.body, env, times)
                case Loop():
                    self._loop(stmt, env, times)

    def _loop(self, loop: Loop, env: dict[str, int], times: float) -> None:
        first, end = evaluate(loop.lo, env), evaluate(loop.hi, env)
        if loop.given is not None:
            self.block(loop.body, {**env, loop.var: end}, times)
            return
        rounds = max(0, -(-(end - first) // loop.step))
        if not rounds:
            return
        if not _depends(loop.body, loop.var):
            self.block(loop.body, {**env, loop.var: first}, times * rounds)
        elif rounds <= MAX_ROUNDS:
            for n in range(rounds):
                self.block(loop.body, {**env, loop.var: first + n * loop.step}, times)
        else:
            self.block(loop.body, {**env, loop.var: first + rounds // 2 * loop.step}, times * rounds)

    def _instruction(self, instr: Instr, times: float) -> None:
        self.executed[instr.op] += times  # type: ignore[assignment]
        types = [t.type for t in instr.outs] or [a.type for a in instr.args if isinstance(a, Tile)]
        made = math.prod(types[0].shape) if types else 0
        self.elements[instr.op] += made * times  # type: ignore[assignment]
        if instr.op == "mma":
            depth = instr.args[1].type.shape[1] if isinstance(instr.args[1], Tile) else 1
            self.multiply_adds += made * depth * times
        elif instr.op == "mma.memory":
            (rows, columns), (blocks, depth, *_), _ = block_extents(dict(instr.attrs))
            self.multiply_adds += rows * columns * blocks * depth * times


def _depends(body: Sequence[Stmt], var: str) -> bool:
    """Whether bounds or conditions inside read a loop's variable."""
    for stmt in body:
        match stmt:
            case Loop():
                if var in symbols(stmt.lo) or var in symbols(stmt.hi) or _depends(stmt.body, var):
                    return True
            case When():
                if var in symbols(stmt.pred) or _depends(stmt.body, var):
                    return True
            case Instr():
                pass
    return False
