"""Zeros within rows: a product that multiplies, for a few rows at a time, only the steps of K at which one of them is not zero.

    limit = state[0]                             from which share of such steps on this pays, in thousandths; beyond 1000: never
    for every few rows: steps at which any of them is not zero, as a list      the first rows tell whether others are looked at
    if enough steps are left out:
      parallel panel: for every part of K: for every few rows:
        for k in their list of that part: acc = mma(acc, A[rows, k], B[panel, k, :])
    else:
      the product as it always is

A ReLU leaves zeros at places of their own in every row: with few rows side by side many steps are left out, with many rows a
number of B is used more often. Channels that are zero in all rows are left out either way. A and B are read where they lie, by the
numbers in the list. There is one list for each part of K. So the rows of a panel that several lists read in turns stay in a near
cache, and the next part is prefetched meanwhile. When every few rows read the panel from end to end, it came from a far cache each
time, and that took most of the product's time. Zeros of either sign count, NaN does not; weights must be finite. The limit and
both counters are the words of `lower.cpu.gemm.skipping`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import field, replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.types import DType, bits
from hotfuse.lower.cpu.gemm.gemm import Finish, FinishedTile, Product, let, sums
from hotfuse.lower.cpu.gemm.lhs import Left
from hotfuse.lower.run.kernel_state import LIMIT, NEVER, ROWS_TOGETHER, WHOLE
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_LINE = 64
"""Bytes of a cache line."""
PART = 512
"""Steps of K in a part: 64 columns of so many are 128 KiB, which a second-level cache holds beside the part that is fetched."""
BAND = 64
"""Rows whose sums are kept while the parts of K go by."""


@dataclass(slots=True)
class ActiveSteps:
    """The steps of K that rows have something at, in memory of the kernel's own."""

    b: KernelBuilder
    m: Dim
    k: int
    lanes: int
    left: Left
    """Rows of A, read where they lie."""
    rows: int = ROWS_TOGETHER
    state: Buffer = field(init=False)
    groups: Dim = field(init=False)
    _steps: Buffer = field(init=False)
    _counts: Buffer = field(init=False)
    """Of each group, in all parts."""
    _in_part: Buffer = field(init=False)
    _total: Buffer = field(init=False)

    def __post_init__(self) -> None:
        b = self.b
        self.groups = expr("max", 1, expr("ceildiv", self.m, self.rows))
        self.state = b.state("state", 3)
        self._steps = b.shared("steps", DType.I32, (self.groups, self.parts, PART))
        self._in_part = b.shared("in_part", DType.I64, (self.groups, self.parts))
        self._counts = b.shared("counts", DType.I64, (self.groups,))
        self._total = b.shared("total", DType.I64, (1,))

    @property
    def parts(self) -> int:
        """The number of parts that K is cut into."""
        return -(-self.k // PART)

    @contextlib.contextmanager
    def counted(self) -> Generator[Dim]:
        """Whether enough steps can be left out."""
        b, k = self.b, self.k
        with let(b, "groups", self.groups) as groups, b.given("limit", self.state, (LIMIT,), 0, NEVER + 1) as limit:
            whole = expr("*", groups, k)
            b.store(self._total, (0,), b.index(whole))
            with b.when(expr("<=", limit, WHOLE)):
                self._find(0)
                with b.given("first", self._counts, (0,), 0, k + 1) as first, b.when(self._enough(limit, k, first)):
                    with b.parallel("g", groups, lo=1) as g:
                        self._find(g.var)
                    with b.loop("g", 0, groups, carry=[b.fill(0, DType.I64)]) as g:
                        g.yields(b.map("add", g.carried[0], b.load(self._counts, (g.var,))))
                    b.store(self._total, (0,), g.outs[0])
            with b.given("total", self._total, (0,), 0, expr("+", whole, 1)) as total:
                yield expr("and", expr("<=", limit, WHOLE), self._enough(limit, whole, total))

    @staticmethod
    def _enough(limit: Sym, whole: Dim, kept: Dim) -> Dim:
        return expr("<=", expr("*", limit, whole), expr("*", remaining(whole, kept), WHOLE))

    def _find(self, group: Dim) -> None:
        """The list of one group of rows."""
        b, k, first = self.b, self.k, expr("*", group, self.rows)
        flags = b.scratch("some", DType.I32, (k + self.lanes,))
        exist = None if isinstance(self.m, int) and self.m % self.rows == 0 else remaining(self.m, first)
        with b.loop("c", 0, k, self.lanes) as c:
            shape = (self.rows, self.lanes)
            x = self.left.read(first, c.var, shape, valid=(exist, None if k % self.lanes == 0 else remaining(k, c.var)))
            some = b.reduce("any", b.map("ne", x, b.fill(0, x.type.dtype, shape)), 0)
            b.store(flags, (c.var,), b.reshape(b.cast(some, DType.I32), (self.lanes,)))
        with b.loop("part", 0, self.parts, carry=[b.fill(0, DType.I64)]) as part:
            end = expr("min", k, expr("*", expr("+", part.var, 1), PART))
            with b.loop("k", expr("*", part.var, PART), end, carry=[b.fill(0, DType.I32)]) as at:
                (before,) = at.carried
                b.scatter(self._steps, (group, part.var, 0), before, b.cast(b.index(at.var), DType.I32), dim=2)
                at.yields(b.map("add", before, b.load(flags, (at.var,))))
            here = b.cast(at.outs[0], DType.I64)
            b.store(self._in_part, (group, part.var), here)
            part.yields(b.map("add", part.carried[0], here))
        b.store(self._counts, (group,), part.outs[0])

    def product(self, p: Product, finish: Finish) -> None:
        """The loops over what is left."""
        b, t, band = self.b, p.tiling, BAND // self.rows
        scratch = b.scratch("few_sums", p.acc, (BAND, t.nr))
        with contextlib.ExitStack() as scope:
            panel = scope.enter_context(b.parallel("panel", p.panels)).var
            first = scope.enter_context(b.loop("band", 0, self.groups, band)).var
            here = scope.enter_context(let(b, "here", expr("max", 0, expr("min", band, remaining(self.groups, first)))))
            with b.loop("r", 0, expr("*", here, self.rows)) as r:
                b.store(scratch, (r.var, 0), b.fill(0, p.acc, (1, t.nr)))
            with b.loop("part", 0, self.parts) as part, b.loop("g", 0, here) as g:
                self._add(p, scratch, panel, part.var, g.var, expr("+", first, g.var))
            row = scope.enter_context(let(b, "row", expr("*", first, self.rows)))
            height = expr("max", 0, expr("min", BAND, remaining(self.m, row)))
            finish(FinishedTile(b, scratch, t.nr, height, row, panel))

    def _add(self, p: Product, scratch: Buffer, panel: Dim, part: Dim, place: Dim, group: Dim) -> None:
        """What a part of K adds to the sums of a few rows, which are at a place of their own."""
        b = self.b
        with contextlib.ExitStack() as scope:
            kept = scope.enter_context(b.given("kept", self._in_part, (group, part), 0, PART + 1))
            row = scope.enter_context(let(b, "row", expr("*", group, self.rows)))
            height = scope.enter_context(let(b, "height", expr("max", 0, expr("min", self.rows, remaining(self.m, row)))))
            self._fetch_next(p, panel, part, place)
            some = replace(p, lhs=lambda row, k, rows: self._left(group, part, row, k, rows),
                           b=lambda k: self._right(p, group, part, panel, k), k=kept, prepare=None)  # fmt: skip
            for h in range(self.rows, 0, -1):
                with b.when(expr("==", height, h)) if height != h else contextlib.nullcontext():
                    at = (expr("*", place, self.rows), 0)
                    b.store(scratch, at, b.map("add", sums(b, some, h, row, panel), b.load(scratch, at, (h, p.tiling.nr))))
                if height == h:
                    break

    def _fetch_next(self, p: Product, panel: Dim, part: Dim, place: Dim) -> None:
        """A group's share of the next part's lines: of many rows one needs each, and lists tell no processor where to go on."""
        b, each = self.b, PART * self.rows // BAND
        assert isinstance(p.b, Buffer)
        first = expr("+", expr("*", expr("+", part, 1), PART), expr("*", place, each))
        with b.loop("next", first, expr("+", first, each)) as step:
            for column in range(0, p.tiling.nr, _LINE * 8 // bits(p.b.dtype)):
                b.prefetch(p.b, (panel, step.var, column), level=2)

    def _left(self, group: Dim, part: Dim, row: Dim, k: Dim, rows: int) -> Tile:
        """Rows of A at a step of the list."""
        return self.left.at(row, self.b.load(self._steps, (group, part, k)), rows)

    def _right(self, p: Product, group: Dim, part: Dim, panel: Dim, k: Dim) -> Tile:
        """The row of a panel at a step of the list."""
        b = self.b
        assert isinstance(p.b, Buffer)
        found = b.gather(p.b, (panel, 0, 0), b.load(self._steps, (group, part, k)), (1, p.tiling.nr), dim=1)
        return b.cast(found, p.acc)

    def tell(self, word: int) -> None:
        """Count a side."""
        self.b.count(self.state, (word,), self.b.fill(1, DType.BOOL))
