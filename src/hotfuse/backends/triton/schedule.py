"""What a program of a kernel does when: loads before the loop they are used behind, and loops that several programs share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotfuse.ir.dims import symbols
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.tile.program import Instr, Loop, Stmt, TileAccess

EARLY_ELEMENTS = 4096
"""Of a tile that is loaded before the loop although it is used behind: it takes registers meanwhile."""


def sums(body: Sequence[Stmt], split: int) -> Loop:
    """The one loop of a nest, all of whose results are sums of products that begin at 0: parts of it can be added up apart."""
    loops = [s for s in body if isinstance(s, Loop)]
    if len(loops) != 1 or not isinstance(loops[0].lo, int) or not isinstance(loops[0].hi, int) or loops[0].given is not None:
        raise CannotLower("there is no one loop whose sums programs could share")
    (loop,) = loops
    assert isinstance(loop.lo, int) and isinstance(loop.hi, int)
    if (loop.hi - loop.lo) % (split * loop.step):
        raise CannotLower(f"{loop.hi - loop.lo} steps cannot be shared by {split} programs")
    zeros = {s.outs[0].name for s in body if isinstance(s, Instr) and s.op == "fill" and s.args[0] == 0}
    added = {s.outs[0].name: s.args[0] for s in loop.body if isinstance(s, Instr) and s.op == "mma"}
    for (inner, first), out in zip(loop.carried, loop.yields, strict=True):
        if first.name not in zeros or added.get(out.name) != inner or inner.type.dtype is not DType.F32:
            raise CannotLower("the value that the loop carries is no sum of products")
    return loop


def loads_first(body: Sequence[Stmt]) -> list[Stmt]:
    """What is loaded behind a loop, loaded before it: such loads depend on no loop, as results are never read again."""
    first = next((i for i, s in enumerate(body) if isinstance(s, Loop)), None)
    if first is None:
        return list(body)
    outer = frozenset[str]().union(*(frozenset({s.var}) for s in body if isinstance(s, Loop)))
    early = [s for s in body[first + 1 :] if isinstance(s, Instr) and s.op == "load" and _early(s, outer)]
    return [*body[:first], *early, *(s for s in body[first:] if not any(s is e for e in early))]


def _early(load: Instr, loops: frozenset[str]) -> bool:
    access, tile = load.args[0], load.outs[0].type.shape
    if not isinstance(access, TileAccess) or math.prod(tile) > EARLY_ELEMENTS:
        return False
    dims = (*access.index, *access.step, *(v for v in access.valid if v is not None))
    return not any(symbols(d) & loops for d in dims)
