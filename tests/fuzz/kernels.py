"""Random kernels that are well formed and stay inside their buffers, so that they print, verify and run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Loc
from hotfuse.ir.types import DType
from hotfuse.tile import isa
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.isa import Category, InstructionRow
from hotfuse.tile.memory import NUMPY, Array
from hotfuse.tile.program import Attr, Buffer, BufferKind, Kernel, LoopKind, Tile, TileType

PLAIN = ["x", "y", "w", "bias", "M", "N", "k", "acc"]
ODD = ["a b", "%q", '"', "é", "/m/MatMul_0", "0", "for", "yield", "if", "axes", "step", "valid", "float", "max", "f32", "input",
       "load", "a..b", "inf", "_", "\u2028", "\n", "map.add", "parallel", "x."]  # fmt: skip
FLOATS = [0.0, -0.0, 1.0, -2.5, 1e-30, 3e38, math.inf, -math.inf, math.nan]
PURE = [r for r in isa.rows().values() if r.category in (Category.MAP, Category.MOVE, Category.REDUCE, Category.SCAN)]


class Maker:
    """Writes one kernel; `tiles` is what is in scope."""

    def __init__(self, rng: random.Random, odd: bool, dtypes: Sequence[DType], rows: Sequence[InstructionRow]) -> None:
        self.rng, self.odd, self.dtypes, self.rows = rng, odd, dtypes, rows
        self.b = KernelBuilder(self.name() or "k")
        self.tiles: list[Tile] = []
        self.loops: list[tuple[Dim, Dim, int]] = []
        """(variable, size, step) of the loops around."""

    def name(self) -> str:
        return self.rng.choice(ODD if self.odd and self.rng.random() < 0.5 else PLAIN)

    def loc(self) -> Loc:
        if not self.odd or self.rng.random() < 0.7:
            return Loc()
        return Loc(self.rng.choice(["", "m.py", 'a"b']), self.rng.choice([0, 7]), self.rng.choice(["", "fc", "a b"]))

    def size(self) -> Dim:
        if self.rng.random() < 0.4:
            return self.rng.randint(1, 9)
        name = self.b.fresh(self.name())
        self.b._taken.discard(name)  # pyright: ignore[reportPrivateUsage]
        return self.b.size(name)

    def kernel(self) -> Kernel:
        rng, b = self.rng, self.b
        self.sizes = [self.size() for _ in range(rng.randint(1, 2))]
        shape = tuple(self.sizes)
        self.inputs = [self.buffer(shape) for _ in range(rng.randint(1, 3))]
        self.table = b.const(self.name(), rng.choice(self.dtypes), (5, *shape[1:]))
        self.counters = b.output(self.name(), DType.I64, (2,))
        self.scratch = b.scratch(self.name(), rng.choice(self.dtypes), (4, 4))
        with ExitStack() as stack:
            for size in self.sizes:
                step = rng.randint(1, 4)
                kind = rng.choice([LoopKind.SERIAL, LoopKind.PARALLEL])
                scope = stack.enter_context(b.loop(self.name(), 0, size, step, kind))
                self.loops.append((scope.var, size, step))
            self.body(2)
            for _ in range(rng.randint(1, 2)):
                self.output(shape)
        return b.finish()

    def buffer(self, shape: tuple[Dim, ...], kind: BufferKind | None = None) -> Buffer:
        rng = self.rng
        kind = kind or rng.choice([BufferKind.INPUT, BufferKind.CONST])
        stride: tuple[Dim, ...] | None = None
        if len(shape) == 2 and rng.random() < 0.3:
            stride = rng.choice([(1, shape[0]), (expr("+", shape[1], 3), 1)])
        return self.b.buffer(self.name(), kind, rng.choice(self.dtypes), shape, stride)

    # -- places that lie inside

    def where(self) -> dict[str, Any]:
        return {"valid": tuple(remaining(size, var) for var, size, _ in self.loops)}

    def here(self) -> tuple[Dim, ...]:
        return tuple(var for var, _, _ in self.loops)

    def extents(self) -> tuple[int, ...]:
        return tuple(step for _, _, step in self.loops)

    def output(self, shape: tuple[Dim, ...]) -> None:
        tile = self.rng.choice(self.tiles)
        want = self.extents()
        made = self.b.output(self.name(), tile.type.dtype, shape)
        try:
            tile = self.b.bcast(tile, want)
        except InternalError:
            tile = self.b.fill(1, tile.type.dtype, want)
        self.b.store(made, self.here(), tile, **self.where())

    # -- statements

    def body(self, depth: int) -> None:
        b, rng = self.b, self.rng
        for x in self.inputs:
            self.tiles.append(b.load(x, self.here(), self.extents(), **self.where(), **self.fill(x.dtype)))
        for _ in range(rng.randint(1, 9)):
            b.loc = self.loc()
            if depth and rng.random() < 0.3:
                rng.choice([self.carrying, self.condition, self.through_scratch, self.looked_up, self.contracted,
                            self.thrown])(depth)  # fmt: skip
            else:
                self.pure()

    def fill(self, dtype: DType) -> dict[str, float]:
        if self.rng.random() < 0.5:
            return {}
        return {"fill": self.rng.choice(FLOATS) if dtype.value[0] in "fb" and dtype is not DType.BOOL else 1}

    def pure(self) -> None:
        """Any instruction of the table that takes tiles in scope; one that does not fit is left out."""
        rng = self.rng
        row = rng.choice(self.rows)
        if row.name == "index":
            self.tiles.append(self.b.index(expr("+", self.loops[0][0], rng.randint(-3, 3))))
            return
        shape = rng.choice(self.tiles).type.shape
        out = None
        args: list[Any] = self.operands(row)
        if row.name in ("fill", "iota", "bcast", "reshape", "map.cast", "map.bitcast"):
            out = TileType(rng.choice(self.dtypes), shape)
            if row.name in ("bcast", "reshape"):
                out = TileType(args[0].type.dtype, shape)
            if row.name in ("map.cast", "map.bitcast"):
                out = TileType(out.dtype, args[0].type.shape)
            if row.name == "fill":
                args = [rng.choice(FLOATS) if rng.random() < 0.5 else rng.randint(0, 1)]
            if row.name == "iota":
                args = [expr("*", self.loops[-1][0], 2)]
        attrs = {name: self.attr(name, args[0]) for name in row.attrs}
        try:
            self.tiles.append(self.b.emit(row.name, *args, out=out, **attrs))
        except InternalError:
            return

    def operands(self, row: InstructionRow) -> list[Tile]:
        """Tiles of one element type that the instruction takes, where there are any."""
        rng = self.rng
        first = rng.choice([t for t in self.tiles if t.type.dtype in row.dtypes] or self.tiles)
        alike = [t for t in self.tiles if t.type.dtype is first.type.dtype]
        args = [first, *(rng.choice(alike) for _ in range(rng.randint(0, 2) if row.arity < 0 else row.arity - 1))]
        if row.name == "map.select":
            args[0] = self.b.map("ge", rng.choice(self.tiles), 1)
        return args

    def attr(self, name: str, first: object) -> Attr:
        rank = len(first.type.shape) if isinstance(first, Tile) else 1
        match name:
            case "perm":
                return tuple(self.rng.sample(range(rank), rank))
            case "start":
                return (0,) * rank
            case "extent":
                return tuple(self.rng.randint(1, n) for n in first.type.shape) if isinstance(first, Tile) else ()
            case _:
                return self.rng.randint(0, max(rank - 1, 0))

    def inner(self, depth: int) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if depth > 1 and self.rng.random() < 0.2:
                self.condition(depth - 1)
            else:
                self.pure()

    def carrying(self, depth: int) -> None:
        b, rng = self.b, self.rng
        carry = [rng.choice(self.tiles) for _ in range(rng.randint(0, 2))]
        outside = list(self.tiles)
        if rng.random() < 0.4:
            lo: Dim = rng.choice([0, self.loops[0][0]])
            scope = b.loop(self.name(), lo, expr("+", lo, rng.randint(0, 3)), rng.randint(1, 2), LoopKind.UNROLL, carry)
        else:
            scope = b.loop(self.name(), rng.choice([0, -2]), rng.choice([1, 3, self.sizes[0]]), rng.randint(1, 3), carry=carry)
        with scope as loop:
            self.tiles += loop.carried
            self.inner(depth)
            loop.yields(*(rng.choice([t for t in self.tiles if t.type == c.type]) for c in carry))
        self.tiles = [*outside, *loop.outs]

    def condition(self, depth: int) -> None:
        var = self.loops[0][0]
        pred = self.rng.choice([expr("<", var, 2), expr("and", expr("==", expr("%", var, 2), 0), expr("!=", var, 4)),
                                expr("not", expr("<=", self.sizes[-1], 3)), 1])  # fmt: skip
        outside = list(self.tiles)
        with self.b.when(pred):
            self.inner(depth)
        self.tiles = outside

    def through_scratch(self, depth: int) -> None:
        b, dtype = self.b, self.scratch.dtype
        b.store(self.scratch, (0, 0), b.fill(1, dtype, (4, 4)))
        b.store(self.scratch, (1, 3), b.fill(0, dtype, (3,)), axes=(1,), step=(-1,))
        self.tiles.append(b.load(self.scratch, (3, 0), (2, 4), axes=(-1, 1)))
        self.tiles.append(b.load(self.scratch, (3, 3), (2, 2), axes=(0, 1), step=(-2, -1), valid=(None, 1)))

    def looked_up(self, depth: int) -> None:
        b = self.b
        by = b.iota(0, (self.rng.randint(1, 5),), 0, self.rng.choice([DType.I64, DType.I32]))
        index: tuple[Dim, ...] = (0, *self.here()[1:])
        self.tiles.append(b.gather(self.table, index, by, by.type.shape, dim=0, axes=(-1,)))
        b.prefetch(self.table, (4, *(0 for _ in index[1:])), level=2)

    def thrown(self, depth: int) -> None:
        b, rng, dtype = self.b, self.rng, self.scratch.dtype
        b.store(self.scratch, (0, 0), b.fill(1, dtype, (4, 4)))
        by = b.map("rem", b.iota(rng.randint(0, 9), (5,), 0), 4)
        reduce = "none" if dtype is DType.BOOL else rng.choice(["none", "add"])
        b.scatter(self.scratch, (0, 2), by, b.fill(1, dtype, (5,)), dim=0, reduce=reduce, axes=(-1,), valid=(4,))
        self.tiles.append(b.load(self.scratch, (0, 2), (4,), axes=(0,)))
        b.count(self.counters, (1,), rng.choice(self.tiles))

    def contracted(self, depth: int) -> None:
        b, rng = self.b, self.rng
        m, n, k = (rng.randint(1, 3) for _ in range(3))
        acc, of = rng.choice([(DType.F32, DType.F32), (DType.I32, DType.I8)])
        self.tiles.append(b.mma(b.fill(1, acc, (m, n)), b.fill(2, of, (m, k)), b.fill(3, of, (k, n))))
        b.effect("barrier_spill")


def random_kernel(
    rng: random.Random, *, odd: bool = False, dtypes: Sequence[DType] = tuple(NUMPY), rows: Sequence[InstructionRow] = PURE
) -> Kernel:
    """A kernel; `odd` gives it names that must be quoted and source locations, `rows` are what it computes with."""
    return Maker(rng, odd, dtypes, rows).kernel()


def random_sizes(kernel: Kernel, seed: int) -> dict[str, int]:
    """Small sizes."""
    rng = random.Random(seed)
    return {name: rng.randint(1, 9) for name in kernel.sizes}


def random_arrays(kernel: Kernel, sizes: dict[str, int], seed: int) -> dict[str, Array]:
    """Memory for a kernel: numbers between -4 and 4 in what it reads, zeros in what it writes."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for buffer in kernel.buffers:
        if buffer.kind is BufferKind.SCRATCH:
            continue
        shape = [dims.evaluate(d, sizes) for d in buffer.shape]
        stride = [dims.evaluate(d, sizes) for d in buffer.stride]
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        low = 0 if buffer.dtype.value[0] == "u" or buffer.dtype is DType.BOOL else -4
        numbers = rng.integers(low, 4, reach) + (rng.random(reach) if buffer.dtype.value[0] in "fb" else 0)
        if buffer.kind is BufferKind.OUTPUT:
            numbers = np.zeros(reach)
        found[buffer.name] = numbers.astype(NUMPY[buffer.dtype])
    return found
