"""Rows of zeros: a product that finds them first, and multiplies only the others where that pays.

    limit = state[0]                             from which share of zero rows on skipping pays, in thousandths; beyond 1000: never
    for every row: is any element not zero?     one read of A, of a row that is not zero only its beginning
    order = rows that are not zero, then those that are
    if enough rows are zero:
      the product over the first rows of `order`, gathered block by block
      the epilogue of sums of zero for the others
    else:
      the product as it always is

A row of zeros, of either sign, has sums of +0 with weights that are finite, which the builder of such a kernel checks. NaN is not
zero. The limit is a word of memory, so that who serves can move it, or switch the search off, without another kernel; the two
words behind it count how often each side ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.gemm.gemm import Finish, FinishedTile, let
from hotfuse.lower.cpu.gemm.lhs import Computed
from hotfuse.lower.run.kernel_state import LIMIT, NEVER, WHOLE
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_AT_ONCE = 4
"""Vectors of a row that are looked at in one step."""
_TASK = 16
"""Rows of zeros that one task finishes."""


@dataclass(slots=True)
class ActiveRows:
    """The rows of A by whether they are zero, in memory of the kernel's own."""

    b: KernelBuilder
    m: Dim
    k: int
    lanes: int
    part: Computed
    """A part of a row of A."""
    state: Buffer = field(init=False)
    _some: Buffer = field(init=False)
    _order: Buffer = field(init=False)
    _count: Buffer = field(init=False)

    def __post_init__(self) -> None:
        b, room = self.b, expr("max", 1, self.m)
        self.state = b.state("state", 3)
        self._some = b.shared("some", DType.I64, (room,))
        self._order = b.shared("order", DType.I64, (room,))
        self._count = b.shared("active", DType.I64, (1,))

    @contextlib.contextmanager
    def counted(self) -> Generator[tuple[Sym, Dim]]:
        """How many rows are not zero, and whether enough are that they are to be skipped."""
        b, m = self.b, self.m
        with b.given("limit", self.state, (LIMIT,), 0, NEVER + 1) as limit:
            with b.when(expr("<=", limit, WHOLE)):
                self._look()
                self._sort()
            with b.when(expr("<", WHOLE, limit)):
                b.store(self._count, (0,), b.index(m))
            with b.given("active", self._count, (0,), 0, expr("+", m, 1)) as active:
                zero = expr("+", m, expr("*", active, -1))
                yield active, expr("<=", expr("*", limit, m), expr("*", zero, WHOLE))

    def _look(self) -> None:
        """Whether each row has something in it; the rest of a row whose beginning has is not read."""
        b, width = self.b, min(_AT_ONCE, -(-self.k // self.lanes)) * self.lanes
        with b.parallel("r", self.m) as r:
            row = r.var
            left = None if self.k >= width else self.k
            self.part(row, 0, width, left, lambda x: b.store(self._some, (row,), self._any(x, width, left)))
            if self.k <= width:
                return
            with b.given("begun", self._some, (row,), 0, 2) as begun:
                end = expr("*", self.k, expr("+", 1, expr("*", begun, -1)))
                with b.loop("c", width, end, width) as c:
                    rest = None if self.k % width == 0 else remaining(self.k, c.var)

                    def note(x: Tile) -> None:
                        found = b.map("max", b.load(self._some, (row,)), self._any(x, width, rest))
                        b.store(self._some, (row,), found)

                    self.part(row, c.var, width, rest, note)

    def _any(self, x: Tile, width: int, left: Dim | None) -> Tile:
        """1 where a part of a row has an element that is not zero, of those that exist."""
        b = self.b
        whole = x if len(x.type.shape) == 2 else b.reshape(b.bcast(x, (width,)), (1, width))
        some = b.map("ne", whole, 0.0)
        if left is not None:
            some = b.map("and", some, b.map("lt", b.iota(0, (1, width), 1), b.bcast(b.index(left), (1, width))))
        return b.cast(b.reshape(b.reduce("any", some, 1), ()), DType.I64)

    def _sort(self) -> None:
        """Rows that are not zero from the front on, the others from the back."""
        b, m = self.b, self.m
        with b.loop("r", 0, m, carry=[b.fill(0, DType.I64)]) as r:
            (before,) = r.carried
            some = b.load(self._some, (r.var,))
            behind = b.map("add", b.index(expr("+", m, -1, expr("*", r.var, -1))), before)
            at = b.map("select", b.cast(some, DType.BOOL), before, behind)
            b.scatter(self._order, (0,), at, b.index(r.var), dim=0)
            r.yields(b.map("add", before, some))
        b.store(self._count, (0,), r.outs[0])

    @contextlib.contextmanager
    def place(self, row: Dim) -> Generator[Dim]:
        """Which row of A is the n-th in order."""
        with self.b.given("place", self._order, (row,), 0, expr("max", 1, self.m)) as found:
            yield found

    def gathered(self, row: Dim, step: Dim, width: int, left: Dim | None, then: Callable[[Tile], None]) -> None:
        """A part of the n-th row in order."""
        with self.place(row) as at:
            self.part(at, step, width, left, then)

    def tell(self, word: int) -> None:
        """Count a side."""
        self.b.count(self.state, (word,), self.b.fill(1, DType.BOOL))

    def rest(self, active: Dim, panels: Dim, nr: int, acc: DType, finish: Finish) -> None:
        """What becomes of sums of zero, for every row of zeros."""
        b, m = self.b, self.m
        tasks = expr("ceildiv", expr("+", m, expr("*", active, -1)), _TASK)
        with b.parallel("task", expr("*", tasks, panels)) as task, let(b, "panel", expr("%", task.var, panels)) as panel:
            first = expr("+", active, expr("*", expr("//", task.var, panels), _TASK))
            with (
                let(b, "first", first) as begin,
                b.loop("r", begin, expr("min", m, expr("+", begin, _TASK))) as r,
                self.place(r.var) as row,
            ):
                finish(FinishedTile(b, b.fill(0, acc, (1, nr)), nr, 1, row, panel))
