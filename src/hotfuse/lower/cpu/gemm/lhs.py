"""The left operand of a product: rows of a tensor, read in place or made ready block by block.

fp32 and fp64 are read number by number where they lie; bytes four at a time. Halves are widened once per block of rows, into
scratch memory that the inner loop then reads: widening a number for every vector it meets would cost more than multiplying.
What the group computes in front of the product is computed block by block too, once for every panel of columns.
fp32 that is to be multiplied as bf16 is rounded once, all rows before the first panel, into memory that threads share: rounding
costs a third of the multiplications that a panel of 48 columns has for a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import mul, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, tensor_type
from hotfuse.lower.cpu.tiling import GemmTiling
from hotfuse.lower.ops.views import shape_of
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile
from hotfuse.tile.type_rules import BLOCK_STEPS

_HALVES = (DType.F16, DType.BF16)
_BYTES = (DType.I8, DType.U8)
_LINE = 16
_PAGE = 1024
"""fp32 numbers of a line and of a page: rows a multiple of pages apart push each other out of the cache."""


Computed = Callable[[Dim, Dim, int, Dim | None, Callable[[Tile], None]], None]
"""What is computed in front of a product: so many numbers of a row from a step of K on, of which some may not exist; what is to be
done with them is written where they are."""


def rows_apart(place: BufferView, shape: tuple[Dim, ...]) -> str:
    """Why rows, all batch dims counted through, have no one step from each to the next; empty where they have."""
    if not place.flat:
        moving = sum(n != 1 for n in shape[:-1])
        return f"are strided in {moving} dims" if moving > 1 else ""
    steps = [(n, s) for n, s in zip(shape[:-1], place.strides[:-1], strict=True) if n != 1]
    even = all(same(outer, mul(n, inner)) for (_, outer), (n, inner) in itertools.pairwise(steps))
    return "" if even else "do not lie one behind the other"


class Left:
    """Rows of x, all batch dims counted through."""

    def __init__(
        self, memory: KernelBuffers, x: Value, k: int, tiling: GemmTiling, *, row_sums: bool = False, paired: bool = False,
        computed: Computed | None = None, m: Dim = 0, block: int = 0,
    ) -> None:  # fmt: skip
        self.b: KernelBuilder = memory.builder
        self.computed = computed
        self.shape, self.k, self.lanes = shape_of(x), k, tiling.lanes
        self.dtype = tensor_type(x).dtype
        self.name = x.name
        self.group = 4 if self.dtype in _BYTES else 2 if paired else 1
        wide = -(-k // self.lanes) * self.lanes
        wide += _LINE if wide % _PAGE == 0 else 0
        self.ready: Buffer | None = None
        self.all_rows: Dim | None = m if paired else None
        """How many rows are made ready before the first panel; None where blocks are, each as it begins."""
        self.block = block
        """Rows of a block for a matrix unit, in one piece for every 32 steps (`lower.cpu.gemm.amx`); 0 for plain rows."""
        self.upto = -(-k // BLOCK_STEPS) * BLOCK_STEPS if block else k
        """Steps that are written: those behind the last are zeros."""
        if block:
            shape = (expr("ceildiv", m, block), self.upto // BLOCK_STEPS, block, BLOCK_STEPS)
            self.ready = self.b.shared("ready", DType.BF16, shape)
        elif paired:
            self.ready = self.b.shared("ready", DType.BF16, (m, wide))
        elif self.dtype in _HALVES:
            self.ready = self.b.scratch("ready", DType.F32, (tiling.mr, wide))
        elif computed is not None:
            self.ready = self.b.scratch("ready", self.dtype, (tiling.mr, wide))
        self.sums: Buffer | None = self.b.scratch("row_sums", DType.I32, (tiling.mr,)) if row_sums else None
        if computed is not None:
            if self.sums is not None or self.dtype in _BYTES:
                raise CannotLower("bytes that are computed in front of a product")
            return
        self.place = memory.place(x)
        self._index, self._axes, self._steps = self._walk(self.place, self.shape)

    def _walk(self, place: BufferView, shape: tuple[Dim, ...]) -> tuple[tuple[int, ...], tuple[int, int], tuple[Dim, Dim]]:
        """How tiles of rows by steps of K lie: index dims of the row and of K, buffer axes, and steps."""
        if place.flat:
            return (0, 0), (0, 0), (self._row_step(place, shape), place.strides[-1])
        if why := rows_apart(place, shape):
            raise CannotLower(f"the rows of %{self.name} {why}")
        along = next((d for d, n in enumerate(shape[:-1]) if n != 1), -1)
        return (along, len(shape) - 1), (along, len(shape) - 1), (1, 1)

    def _row_step(self, place: BufferView, shape: tuple[Dim, ...]) -> Dim:
        """Elements from one row of x to the next, over all batch dims."""
        if why := rows_apart(place, shape):
            raise CannotLower(f"the rows of %{self.name} {why}")
        return next((s for n, s in zip(reversed(shape[:-1]), reversed(place.strides[:-1]), strict=True) if n != 1), 0)

    def read(self, row: Dim, k: Dim, shape: tuple[int, int], valid: Sequence[Dim | None] = ()) -> Tile:
        """Rows by steps of K, as they lie in memory."""
        step, k_step = self._steps
        if self.place.flat:
            at = expr("+", expr("*", row, step), expr("*", k, k_step))
            return self.b.load(self.place.buffer, (at,), shape, axes=self._axes, step=self._steps, valid=valid)
        index: list[Dim] = [0] * len(self.shape)
        if self._index[0] >= 0:
            index[self._index[0]] = row
        index[-1] = k
        return self.b.load(self.place.buffer, index, shape, axes=self._axes, valid=valid)

    def at(self, row: Dim, step: Tile, rows: int) -> Tile:
        """Rows at a step of K that lies in memory; only of rows that are read where they lie."""
        if self.place.flat:
            each, k_step = self._steps
            if k_step != 1:
                raise CannotLower(f"the rows of %{self.name} do not lie in one piece")
            first = expr("*", row, each)
            return self.b.gather(self.place.buffer, (first,), step, (rows, 1), dim=0, axes=self._axes, step=(each, 1))
        index: list[Dim] = [0] * len(self.shape)
        if self._index[0] >= 0:
            index[self._index[0]] = row
        return self.b.gather(self.place.buffer, index, step, (rows, 1), dim=len(self.shape) - 1, axes=self._axes)

    def column(self, row: Dim, k: Dim, rows: int) -> Tile:
        """What is multiplied with one step of B."""
        if self.ready is not None:
            first = row if self.all_rows is not None else 0
            return self.b.load(self.ready, (first, k if self.group == 1 else expr("*", k, self.group)), (rows, self.group))
        if self.group == 1:
            return self.read(row, k, (rows, 1))
        at = expr("*", k, self.group)
        short = self.k % self.group and k == self.k // self.group
        return self.read(row, at, (rows, self.group), valid=(None, self.k % self.group) if short else ())

    @property
    def prepares(self) -> bool:
        """Whether blocks have to be made ready."""
        return self.all_rows is None and (self.ready is not None or self.sums is not None)

    def prepare_all(self) -> None:
        """Make all rows ready that are made ready at once, on several threads."""
        if self.all_rows is None:
            return
        with self.b.parallel("r", self.all_rows) as r:
            self._prepare_row(r.var, r.var)

    def prepare(self, row: Dim, height: Dim) -> None:
        """Make a block of rows ready."""
        with self.b.loop("r", 0, height) as r:
            self._prepare_row(expr("+", row, r.var), r.var)
        if self.computed is not None:
            self.b.effect("forget")  # what functions are made of, for the sake of the sums

    def _prepare_row(self, at: Dim, kept: Dim) -> None:
        """One row, and where it is kept."""
        b, width = self.b, self.lanes
        carry = [b.fill(0, DType.I32, (1, width))] if self.sums is not None else []
        with b.loop("c", 0, self.upto, width, carry=carry) as c:
            left = remaining(self.k, c.var) if self.k % width or self.upto != self.k else None
            if self.computed is not None:
                self.computed(at, c.var, width, left, self._keeper(kept, c.var, left))
            else:
                x = self.read(at, c.var, (1, width), valid=() if left is None else (None, left))
                self._keeper(kept, c.var)(x)
                if self.sums is not None:
                    c.yields(b.map("add", c.carried[0], b.cast(x, DType.I32)))
        if self.sums is not None:
            b.store(self.sums, (kept,), b.reshape(b.reduce("sum", c.outs[0], 1), (1,)))

    def _keeper(self, row: Dim, step: Dim, left: Dim | None = None) -> Callable[[Tile], None]:
        """What puts a part of a row where the inner loop reads it.

        `left` numbers of what was computed exist: groups of steps read more than these, and what was made of missing numbers may
        be no number, which times zero is none either.
        """
        b, shape = self.b, (1, self.lanes)
        at: tuple[Dim, ...] = (row, step)
        if self.block:
            by = ((row, self.block), (step, BLOCK_STEPS))
            at = (*(expr("//", x, n) for x, n in by), *(expr("%", x, n) for x, n in by))

        def keep(x: Tile) -> None:
            if self.ready is None:
                return
            whole = x if len(x.type.shape) == 2 else b.reshape(b.bcast(x, (self.lanes,)), shape)
            if left is not None and self.group > 1:
                exists = b.map("lt", b.iota(0, shape, 1), b.bcast(b.index(left), shape))
                whole = b.map("select", exists, whole, b.fill(0, whole.type.dtype, shape))
            b.store(self.ready, at, b.cast(whole, self.ready.dtype))

        return keep
