"""A way to write a kernel statement by statement: names are made unique, types inferred, literals become tiles.

    b = KernelBuilder("bias_relu")
    M, N = b.size("M"), b.size("N")
    x = b.input("x", DType.F32, (M, N))
    bias = b.const("b", DType.F32, (N,))
    y = b.output("y", DType.F32, (M, N))
    with b.parallel("m", M) as m, b.loop("n", 0, N, 16) as n:
        left = [remaining(N, n.var)]
        t = b.load(x, (m.var, n.var), (16,), valid=left)
        t = b.map("add", t, b.load(bias, (n.var,), (16,), valid=left))
        b.store(y, (m.var, n.var), b.map("max", t, 0.0), valid=left)
    kernel = b.finish()

Values that go from one iteration to the next are carried:

    with b.loop("k", 0, K, carry=[zero]) as k:
        (acc,) = k.carried
        ...
        k.yields(b.mma(acc, lhs, rhs))
    (acc,) = k.outs
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr, sym
from hotfuse.ir.graph import Loc
from hotfuse.ir.text import constant
from hotfuse.ir.types import DType
from hotfuse.tile import isa
from hotfuse.tile.program import (
    Attr,
    Buffer,
    BufferKind,
    Instr,
    Kernel,
    Loop,
    LoopKind,
    Operand,
    Stmt,
    Tile,
    TileAccess,
    TileType,
    When,
    row_major,
)
from hotfuse.tile.verify import verify


def remaining(size: Dim, at: Dim) -> Dim:
    """How many elements are left from `at` on: what `valid` is along a loop with a tail."""
    return expr("+", size, expr("*", at, -1))


@dataclass(slots=True)
class LoopScope:
    """A loop while its body is written; afterwards `outs` has the carried tiles' last values."""

    var: Sym
    carried: tuple[Tile, ...]
    outs: tuple[Tile, ...] = ()
    yielded: tuple[Tile, ...] | None = None

    def yields(self, *tiles: Tile) -> None:
        """What the body hands on to the next iteration, in the order of `carried`."""
        self.yielded = tiles


@dataclass(slots=True)
class KernelBuilder:
    """Collects the parts of one kernel."""

    name: str
    loc: Loc = Loc()
    """Put on every instruction that is added from now on."""
    _sizes: list[str] = field(default_factory=list[str])
    _buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    _blocks: list[list[Stmt]] = field(default_factory=lambda: [[]])
    _taken: set[str] = field(default_factory=set[str])
    _next: dict[str, int] = field(default_factory=dict[str, int])
    _count: int = 0
    _widened: dict[str, Tile] = field(default_factory=dict[str, Tile])
    """Doubles that are 32-bit integers -> those integers."""
    _zeros: set[str] = field(default_factory=set[str])
    """Tiles that are nothing but +0.0."""

    # -- going on with a kernel

    @classmethod
    def of(cls, kernel: Kernel) -> KernelBuilder:
        """A builder of statements to be put into a kernel: its names are taken, its buffers known."""
        made = cls(kernel.name)
        made._sizes, made._buffers = list(kernel.sizes), {b.name: b for b in kernel.buffers}
        names = list(_named(kernel.body))
        made._taken = {*kernel.sizes, *made._buffers, *(n for n, tile in names if not tile)}
        made._count = 1 + max((int(n) for n, tile in names if tile and n.isdigit()), default=-1)
        return made

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All there are, in order."""
        return tuple(self._buffers.values())

    @contextmanager
    def apart(self) -> Generator[list[Stmt]]:
        """Statements that go into a list of their own; what raises inside leaves no open loop behind."""
        found: list[Stmt] = []
        depth = len(self._blocks)
        self._blocks.append(found)
        try:
            yield found
        finally:
            del self._blocks[depth:]

    def splice(self, stmts: Sequence[Stmt]) -> None:
        """Put statements that were written apart where the kernel is now."""
        self._blocks[-1].extend(stmts)

    # -- names, sizes, memory

    def fresh(self, name: str) -> str:
        """The name, with a number behind it when it is taken (by a size, buffer or loop variable)."""
        base = name
        while name in self._taken:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._taken.add(name)
        return name

    def tile(self, type: TileType) -> Tile:
        """A new tile; an instruction or a loop has still to define it."""
        self._count += 1
        return Tile(str(self._count - 1), type)

    def size(self, name: str) -> Sym:
        """A size that calls give; the same name gives the same size."""
        if name not in self._sizes:
            if name in self._taken:
                raise InternalError(f"{name} is already something else in kernel {self.name}")
            self._sizes.append(self.fresh(name))
        return sym(name)

    def buffer(
        self, name: str, kind: BufferKind, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None
    ) -> Buffer:
        """Memory, row-major unless strides are given."""
        shape = tuple(shape)
        made = Buffer(self.fresh(name), kind, dtype, shape, row_major(shape) if stride is None else tuple(stride))
        self._buffers[made.name] = made
        return made

    def input(self, name: str, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None) -> Buffer:
        """Memory that is read."""
        return self.buffer(name, BufferKind.INPUT, dtype, shape, stride)

    def const(self, name: str, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None) -> Buffer:
        """Memory that is read and never changes."""
        return self.buffer(name, BufferKind.CONST, dtype, shape, stride)

    def output(self, name: str, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None) -> Buffer:
        """Memory that is written."""
        return self.buffer(name, BufferKind.OUTPUT, dtype, shape, stride)

    def scratch(self, name: str, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None) -> Buffer:
        """Memory of the kernel's own."""
        return self.buffer(name, BufferKind.SCRATCH, dtype, shape, stride)

    def shared(self, name: str, dtype: DType, shape: Sequence[Dim], stride: Sequence[Dim] | None = None) -> Buffer:
        """Memory of the kernel's own that its threads have in common."""
        return self.buffer(name, BufferKind.SHARED, dtype, shape, stride)

    # -- structure

    @contextmanager
    def loop(
        self,
        var: str,
        lo: Dim,
        hi: Dim,
        step: int = 1,
        kind: LoopKind = LoopKind.SERIAL,
        carry: Sequence[Tile] = (),
    ) -> Generator[LoopScope]:
        """A loop; statements added inside the `with` are its body."""
        inner = tuple(self.tile(t.type) for t in carry)
        scope = LoopScope(sym(self.fresh(var)), inner)
        self._blocks.append([])
        yield scope
        body = tuple(self._blocks.pop())
        yielded = inner if scope.yielded is None else scope.yielded
        scope.outs = tuple(self.tile(t.type) for t in carry)
        carried = tuple(zip(inner, carry, strict=True))
        self._blocks[-1].append(Loop(str(scope.var.args[0]), lo, hi, step, kind, body, carried, yielded, scope.outs))

    @contextmanager
    def given(self, var: str, buffer: Buffer, index: Sequence[Dim], lo: Dim, hi: Dim) -> Generator[Sym]:
        """A number that lies in memory, from `lo` (included) to `hi`, as something to count and to index by inside the `with`."""
        name = self.fresh(var)
        self._blocks.append([])
        yield sym(name)
        body = tuple(self._blocks.pop())
        place = TileAccess(buffer.name, tuple(index))
        self._blocks[-1].append(Loop(name, lo, hi, 1, LoopKind.SERIAL, body, given=place))

    def state(self, name: str, words: int) -> Buffer:
        """Words that outlive the call."""
        return self.buffer(name, BufferKind.STATE, DType.I64, (words,))

    def parallel(self, var: str, hi: Dim, step: int = 1, lo: Dim = 0) -> AbstractContextManager[LoopScope]:
        """A loop whose iterations may run at once."""
        return self.loop(var, lo, hi, step, LoopKind.PARALLEL)

    def unroll(self, var: str, hi: int, carry: Sequence[Tile] = ()) -> AbstractContextManager[LoopScope]:
        """A loop that is written out."""
        return self.loop(var, 0, hi, 1, LoopKind.UNROLL, carry)

    @contextmanager
    def when(self, pred: Dim) -> Generator[None]:
        """Statements that run if a predicate holds."""
        self._blocks.append([])
        yield
        body = tuple(self._blocks.pop())
        self._blocks[-1].append(When(pred, body))

    def finish(self) -> Kernel:
        """The verified kernel."""
        if len(self._blocks) != 1:
            raise InternalError(f"kernel {self.name} has an open loop or condition")
        return verify(Kernel(self.name, tuple(self._sizes), tuple(self._buffers.values()), tuple(self._blocks[0])))

    # -- instructions

    def emit(self, op: str, *args: Operand, out: TileType | None = None, **attrs: Attr) -> Tile:
        """Any instruction with one out; its type is inferred where the operands tell it."""
        return self._add(op, args, out, attrs)[0]

    def effect(self, op: str, *args: Operand, **attrs: Attr) -> None:
        """Any instruction without outs."""
        self._add(op, args, None, attrs)

    def _add(self, op: str, args: tuple[Operand, ...], out: TileType | None, attrs: dict[str, Attr]) -> tuple[Tile, ...]:
        given = tuple((n, constant(a) if isinstance(a, float) else a) for n, a in attrs.items())
        plain = tuple(constant(a) if isinstance(a, float) else a for a in args)
        types = isa.out_types(op, plain, given, None if out is None else (out,), self._buffers)  # type: ignore[arg-type]
        outs = tuple(self.tile(t) for t in types)
        self._blocks[-1].append(Instr(op, plain, outs, given, self.loc))  # type: ignore[arg-type]
        return outs

    def access(
        self,
        buffer: Buffer,
        index: Sequence[Dim],
        rank: int,
        *,
        axes: Sequence[int] | None = None,
        step: Sequence[Dim] = (),
        valid: Sequence[Dim | None] = (),
    ) -> TileAccess:
        """A place in memory; tile axes run along the buffer's last dims unless `axes` says otherwise."""
        last = range(len(buffer.shape) - rank, len(buffer.shape))
        return TileAccess(buffer.name, tuple(index), tuple(last if axes is None else axes), tuple(step), tuple(valid))

    def load(
        self,
        buffer: Buffer,
        index: Sequence[Dim],
        shape: Sequence[int] = (),
        *,
        axes: Sequence[int] | None = None,
        step: Sequence[Dim] = (),
        valid: Sequence[Dim | None] = (),
        fill: float = 0,
    ) -> Tile:
        """A tile of these extents from memory."""
        place = self.access(buffer, index, len(shape), axes=axes, step=step, valid=valid)
        return self.emit("load", place, out=TileType(buffer.dtype, tuple(shape)), **_fill(fill))

    def store(
        self,
        buffer: Buffer,
        index: Sequence[Dim],
        tile: Tile,
        *,
        axes: Sequence[int] | None = None,
        step: Sequence[Dim] = (),
        valid: Sequence[Dim | None] = (),
    ) -> None:
        """A tile to memory."""
        place = self.access(buffer, index, len(tile.type.shape), axes=axes, step=step, valid=valid)
        self.effect("store", place, tile)

    def gather(
        self,
        buffer: Buffer,
        index: Sequence[Dim],
        by: Tile,
        shape: Sequence[int],
        *,
        dim: int,
        axes: Sequence[int] | None = None,
        step: Sequence[Dim] = (),
        valid: Sequence[Dim | None] = (),
        fill: float = 0,
    ) -> Tile:
        """A load whose elements are each moved by `by` along a buffer dim."""
        place = self.access(buffer, index, len(shape), axes=axes, step=step, valid=valid)
        return self.emit("gather", place, by, out=TileType(buffer.dtype, tuple(shape)), dim=dim, **_fill(fill))

    def scatter(
        self,
        buffer: Buffer,
        index: Sequence[Dim],
        by: Tile,
        tile: Tile,
        *,
        dim: int,
        reduce: str = "none",
        axes: Sequence[int] | None = None,
        step: Sequence[Dim] = (),
        valid: Sequence[Dim | None] = (),
    ) -> None:
        """The store that mirrors `gather`."""
        place = self.access(buffer, index, len(tile.type.shape), axes=axes, step=step, valid=valid)
        self.effect("scatter", place, by, tile, dim=dim, reduce=reduce)

    def fill(self, number: float, dtype: DType, shape: Sequence[int] = ()) -> Tile:
        """A tile of one number."""
        made = self.emit("fill", number, out=TileType(dtype, tuple(shape)))
        if number == 0 and math.copysign(1.0, number) > 0 and not shape:
            self._zeros.add(made.name)
        return made

    def map(self, function: str, *args: Tile | float) -> Tile:
        """`map.<function>`; a literal takes the element type of the last tile among the operands. x - 0 is x."""
        if function == "sub" and isinstance(args[0], Tile) and isinstance(args[1], Tile) and args[1].name in self._zeros:
            return args[0]
        types = [a.type for a in args if isinstance(a, Tile)]
        if not types:
            raise InternalError(f"map.{function} needs a tile among its operands")
        return self.emit(
            f"map.{function}", *(a if isinstance(a, Tile) else self.fill(a, types[-1].dtype) for a in args)
        )

    def cast(self, tile: Tile, dtype: DType) -> Tile:
        """The same numbers in another element type; nothing when they have it already.

        Integers of 32 bits that went through doubles (exact sums of bytes) come back as they were, and become floats in one step:
        a double holds them exactly, so both ways round once.
        """
        if dtype in (DType.I32, DType.F32) and tile.name in self._widened:
            tile = self._widened[tile.name]
        if tile.type.dtype is dtype:
            return tile
        made = self.emit("map.cast", tile, out=TileType(dtype, tile.type.shape))
        if dtype is DType.F64 and tile.type.dtype is DType.I32:
            self._widened[made.name] = tile
        return made

    def bitcast(self, tile: Tile, dtype: DType) -> Tile:
        """The same bits in another element type."""
        return self.emit("map.bitcast", tile, out=TileType(dtype, tile.type.shape))

    def reduce(self, function: str, tile: Tile, axis: int) -> Tile:
        """`reduce.<function>`: the axis stays, with extent 1."""
        return self.emit(f"reduce.{function}", tile, axis=axis % max(len(tile.type.shape), 1))

    def scan(self, function: str, tile: Tile, axis: int) -> Tile:
        """`scan.<function>`: inclusive prefixes."""
        return self.emit(f"scan.{function}", tile, axis=axis % max(len(tile.type.shape), 1))

    def mma(self, acc: Tile, a: Tile, b: Tile) -> Tile:
        """acc + a @ b."""
        return self.emit("mma", acc, a, b)

    def mma_memory(self, c: TileAccess, a: TileAccess, b: TileAccess, *, rows: int, columns: int, blocks: int) -> None:
        """c = a @ b in memory: a[blocks, rows, 32], b[16 * blocks, columns, 2]."""
        self.effect("mma.memory", c, a, b, rows=rows, columns=columns, blocks=blocks)

    def iota(self, start: Dim, shape: Sequence[int], axis: int, dtype: DType = DType.I64) -> Tile:
        """start, start + 1, ... along an axis."""
        return self.emit("iota", start, out=TileType(dtype, tuple(shape)), axis=axis)

    def index(self, value: Dim) -> Tile:
        """An integer expression as an i64 number."""
        return self.emit("index", value)

    def bcast(self, tile: Tile, shape: Sequence[int]) -> Tile:
        """Repeated to these extents; nothing when it has them already."""
        if tile.type.shape == tuple(shape):
            return tile
        return self.emit("bcast", tile, out=TileType(tile.type.dtype, tuple(shape)))

    def reshape(self, tile: Tile, shape: Sequence[int]) -> Tile:
        """The same elements with other extents; nothing when it has them already."""
        if tile.type.shape == tuple(shape):
            return tile
        return self.emit("reshape", tile, out=TileType(tile.type.dtype, tuple(shape)))

    def transpose(self, tile: Tile, perm: Sequence[int]) -> Tile:
        """Axis i of the result is axis perm[i]."""
        return self.emit("transpose", tile, perm=tuple(perm))

    def extract(self, tile: Tile, start: Sequence[int], extent: Sequence[int]) -> Tile:
        """A part of a tile."""
        return self.emit("extract", tile, start=tuple(start), extent=tuple(extent))

    def concat(self, tiles: Sequence[Tile], axis: int) -> Tile:
        """Tiles one behind the other."""
        return self.emit("concat", *tiles, axis=axis)

    def prefetch(self, buffer: Buffer, index: Sequence[Dim], level: int = 1, *, write: bool = False) -> None:
        """A hint that an element's line will be wanted."""
        self.effect("prefetch", TileAccess(buffer.name, tuple(index)), level=level, write=int(write))

    def count(self, counters: Buffer, index: Sequence[Dim], tile: Tile) -> None:
        """Add the number of non-zero elements to a counter."""
        self.effect("count", TileAccess(counters.name, tuple(index)), tile)

    def peak(self, counters: Buffer, index: Sequence[Dim], number: Tile) -> None:
        """Raise a counter to a number, if that is greater."""
        self.effect("peak", TileAccess(counters.name, tuple(index)), number)


def _named(stmts: Sequence[Stmt]) -> Generator[tuple[str, bool]]:
    """Every name that statements define, and whether it is a tile's."""
    for s in stmts:
        if isinstance(s, Instr):
            yield from ((t.name, True) for t in s.outs)
            continue
        if isinstance(s, Loop):
            yield s.var, False
            yield from ((t.name, True) for t in (*(inner for inner, _ in s.carried), *s.outs))
        yield from _named(s.body)


def _fill(fill: float) -> dict[str, Attr]:
    return {} if fill == 0 and isinstance(fill, int) else {"fill": fill}
