"""The grid of a kernel: its parallel loops, and how programs find their part of them.

    one nest of loops                   one program a tile, the last loop's neighbours next to each other
    several                             one behind the other: a program finds its nest by its number
    few programs that take turns        each makes every so-many-th tile of all nests together
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.lower.common.errors import CannotLower
from hotfuse.tile.program import Loop, LoopKind, Stmt


@dataclass(frozen=True, slots=True)
class GridNest:
    """Parallel loops around a body."""

    loops: tuple[Loop, ...]
    body: tuple[Stmt, ...]

    @property
    def trips(self) -> tuple[int, ...]:
        """Iterations of each."""
        return tuple(_trips(loop) for loop in self.loops)


def nests(body: Sequence[Stmt]) -> list[GridNest]:
    """A kernel's parallel loops with what they are around."""
    found: list[GridNest] = []
    for stmt in body:
        loops: list[Loop] = []
        inner: tuple[Stmt, ...] = (stmt,)
        while len(inner) == 1 and isinstance(inner[0], Loop) and inner[0].kind is LoopKind.PARALLEL:
            loops.append(inner[0])
            inner = inner[0].body
        if not loops:
            return [GridNest((), tuple(body))]  # statements outside of loops: one program does all
        found.append(GridNest(tuple(loops), inner))
    return found


def turns_range(begin: int, count: int, programs: int) -> str:
    """The tiles of a nest that a program makes, where `programs` of them take turns: tiles are numbered through all nests, so the
    programs that were left without one in the last turn of a nest are the first in the next."""
    first = f"(first + {-begin % programs}) % {programs} + {begin}" if begin else "first"
    return f"tl.range({first}, {begin + count}, {programs}, flatten=True)"


def last_value(loop: Loop) -> int:
    """The largest value of a loop variable."""
    assert isinstance(loop.lo, int) and isinstance(loop.hi, int)
    return loop.lo + max(0, (loop.hi - loop.lo - 1) // loop.step) * loop.step


def _trips(loop: Loop) -> int:
    if not isinstance(loop.lo, int) or not isinstance(loop.hi, int) or loop.given is not None:
        raise CannotLower("a loop over the grid has no constant bounds")
    return max(0, -(-(loop.hi - loop.lo) // loop.step))
