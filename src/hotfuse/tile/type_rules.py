"""Type rules: what an instruction's operands must be, and what comes out.

A rule is a function `InstructionUse -> out types`. It raises an InternalError that says what is wrong; else it gives the out types,
from the operands where these determine them, and from the declared outs where they do not (a load's extents, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Sym
from hotfuse.ir.types import DType, bits
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Attr, Buffer, Operand, Tile, TileAccess, TileType

HALVES = (DType.F16, DType.BF16)
FLOATS = (DType.F64, DType.F32, *HALVES)
SIGNED = (DType.I64, DType.I32, DType.I16, DType.I8)
INTS = (*SIGNED, DType.U64, DType.U32, DType.U16, DType.U8)
NUMBERS = (*FLOATS, *INTS)
BITS = (*INTS, DType.BOOL)
ALL = tuple(NUMPY)
MAX_RANK = 3


@dataclass(frozen=True, slots=True)
class InstructionUse:
    """An instruction to be typed; `outs` is None where the out types are to be inferred."""

    op: str
    args: tuple[Operand, ...]
    attrs: Mapping[str, Attr]
    outs: tuple[TileType, ...] | None
    buffers: Mapping[str, Buffer]

    def fail(self, because: str) -> NoReturn:
        """Refuse."""
        raise InternalError(f"{self.op} is wrongly typed", because=because)

    def arity(self, count: int) -> None:
        """Exactly so many operands."""
        if len(self.args) != count:
            self.fail(f"it takes {count} operands, not {len(self.args)}")

    def tile(self, at: int, dtypes: tuple[DType, ...] = ALL) -> TileType:
        """The type of an operand that must be a tile of one of these element types."""
        arg = self.args[at]
        if not isinstance(arg, Tile):
            self.fail(f"operand {at + 1} must be a tile, not {arg}")
        if arg.type.dtype not in dtypes:
            self.fail(f"operand {at + 1} is {show_type(arg.type)}; it takes {', '.join(dtypes)}")
        return arg.type

    def access(self, at: int, rank: int) -> Buffer:
        """The buffer behind an operand that must be an access for a tile of that rank."""
        arg = self.args[at]
        if not isinstance(arg, TileAccess):
            self.fail(f"operand {at + 1} must be a place in memory, not {arg}")
        buffer = self.buffers.get(arg.buffer)
        if buffer is None:
            self.fail(f"there is no buffer {arg.buffer!r}")
        if len(arg.index) != len(buffer.shape):
            self.fail(f"{arg.buffer} has {len(buffer.shape)} dims and is indexed by {len(arg.index)}")
        if len(arg.axes) != rank:
            self.fail(f"the tile has {rank} axes and {arg.buffer} is walked along {len(arg.axes)}")
        if any(not -1 <= a < len(buffer.shape) for a in arg.axes):
            self.fail(f"axes {arg.axes} are not dims of {arg.buffer}, which has {len(buffer.shape)}")
        for name, given in (("step", arg.step), ("valid", arg.valid)):
            if given and len(given) != rank:
                self.fail(f"{len(given)} {name}s are given for {rank} axes")
        return buffer

    def declared(self) -> TileType:
        """The out type, for instructions whose operands do not tell it."""
        if self.outs is None or len(self.outs) != 1:
            self.fail("its one out type must be given")
        return self.outs[0]

    def axis(self, rank: int, name: str = "axis") -> int:
        """An attribute that must name one of so many axes."""
        value = self.attrs[name]
        if not isinstance(value, int) or not 0 <= value < rank:
            self.fail(f"{name} {value} is not one of {rank}")
        return value

    def ints(self, name: str, count: int) -> tuple[int, ...]:
        """An attribute that must be so many integers."""
        value = self.attrs[name]
        if not isinstance(value, tuple) or len(value) != count:
            self.fail(f"{name} {value} must be {count} integers")
        return value

    def number(self, value: object, dtype: DType) -> None:
        """A literal that the element type can hold."""
        if not isinstance(value, int | float):
            self.fail(f"{value} is not a number")
        if dtype in BITS:
            low, high = (0, 1) if dtype is DType.BOOL else (np.iinfo(NUMPY[dtype]).min, np.iinfo(NUMPY[dtype]).max)
            if not math.isfinite(value) or value != int(value) or not low <= value <= high:
                self.fail(f"{value} is not a number of type {dtype.value}")


Rule = Callable[[InstructionUse], tuple[TileType, ...]]


def show_type(t: TileType) -> str:
    """`f32[9, 48]`"""
    return f"{t.dtype.value}[{', '.join(map(str, t.shape))}]"


def broadcast(use: InstructionUse, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The extents that all these reach by repeating extents of 1 and adding leading axes."""
    if all([shape == shapes[0] for shape in shapes]):  # as nearly all are
        return shapes[0]
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError as e:
        raise InternalError(
            f"{use.op} is wrongly typed", because=f"extents {' and '.join(map(str, shapes))} do not broadcast"
        ) from e


def elementwise(count: int, dtypes: tuple[DType, ...], out: DType | None = None) -> Rule:
    """Operands of one element type, broadcast; the result has it too, or a fixed one."""

    def rule(use: InstructionUse) -> tuple[TileType, ...]:
        use.arity(count)
        types = [use.tile(i, dtypes) for i in range(count)]
        if len({t.dtype for t in types}) != 1:
            use.fail(f"operands {', '.join(map(show_type, types))} differ in element type")
        return (TileType(out or types[0].dtype, broadcast(use, *(t.shape for t in types))),)

    return rule


def select(use: InstructionUse) -> tuple[TileType, ...]:
    """A bool tile chooses between two of one type."""
    use.arity(3)
    cond, a, b = use.tile(0, (DType.BOOL,)), use.tile(1), use.tile(2)
    if a.dtype != b.dtype:
        use.fail(f"{show_type(a)} and {show_type(b)} differ in element type")
    return (TileType(a.dtype, broadcast(use, cond.shape, a.shape, b.shape)),)


def cast(use: InstructionUse) -> tuple[TileType, ...]:
    """Any element type to the declared one."""
    use.arity(1)
    return (TileType(use.declared().dtype, use.tile(0).shape),)


def bitcast(use: InstructionUse) -> tuple[TileType, ...]:
    """To an element type of the same size."""
    use.arity(1)
    a, out = use.tile(0), use.declared()
    if bits(a.dtype) != bits(out.dtype) or DType.BOOL in (a.dtype, out.dtype):
        use.fail(f"{a.dtype.value} and {out.dtype.value} do not share their bits")
    return (TileType(out.dtype, a.shape),)


def load(use: InstructionUse) -> tuple[TileType, ...]:
    """Declared extents, the buffer's element type."""
    use.arity(1)
    shape = use.declared().shape
    buffer = use.access(0, len(shape))
    use.number(use.attrs["fill"], buffer.dtype)
    return (TileType(buffer.dtype, shape),)


def store(use: InstructionUse) -> tuple[TileType, ...]:
    """A tile of the buffer's element type; nothing comes out."""
    use.arity(2)
    _stored(use, use.tile(1))
    access = use.args[0]
    if isinstance(access, TileAccess) and -1 in access.axes:
        use.fail("a store cannot repeat an element")
    return ()


def gather(use: InstructionUse) -> tuple[TileType, ...]:
    """A load with an integer tile that broadcasts to the declared extents."""
    use.arity(2)
    shape = use.declared().shape
    buffer = use.access(0, len(shape))
    use.axis(len(buffer.shape), "dim")
    use.number(use.attrs["fill"], buffer.dtype)
    _broadcasts(use, use.tile(1, INTS).shape, shape)
    return (TileType(buffer.dtype, shape),)


def scatter(use: InstructionUse) -> tuple[TileType, ...]:
    """A store with an integer tile that broadcasts to the stored one."""
    use.arity(3)
    tile = use.tile(2)
    buffer = _stored(use, tile)
    use.axis(len(buffer.shape), "dim")
    if use.attrs["reduce"] not in ("none", "add"):
        use.fail(f"reduce {use.attrs['reduce']!r} is neither none nor add")
    if use.attrs["reduce"] == "add" and tile.dtype not in NUMBERS:
        use.fail(f"{tile.dtype.value} cannot be added")
    _broadcasts(use, use.tile(1, INTS).shape, tile.shape)
    return ()


def _stored(use: InstructionUse, tile: TileType) -> Buffer:
    buffer = use.access(0, len(tile.shape))
    if buffer.dtype != tile.dtype:
        use.fail(f"{show_type(tile)} cannot be stored in {buffer.name}, which holds {buffer.dtype.value}")
    return buffer


def _broadcasts(use: InstructionUse, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    if broadcast(use, shape, to) != to:
        use.fail(f"extents {shape} do not broadcast to {to}")


def prefetch(use: InstructionUse) -> tuple[TileType, ...]:
    """One place; level 1 to 3, for reading or writing."""
    use.arity(1)
    use.access(0, 0)
    if use.attrs["level"] not in (1, 2, 3) or use.attrs["write"] not in (0, 1):
        use.fail(f"level {use.attrs['level']} is not 1, 2 or 3, or write {use.attrs['write']} is not 0 or 1")
    return ()


def count(use: InstructionUse) -> tuple[TileType, ...]:
    """A counter, one element of an i64 buffer, and what is counted."""
    use.arity(2)
    use.tile(1)
    buffer = use.access(0, 0)
    if buffer.dtype is not DType.I64:
        use.fail(f"counters are i64, and {buffer.name} holds {buffer.dtype.value}")
    return ()


def peak(use: InstructionUse) -> tuple[TileType, ...]:
    """A counter, one element of an i64 buffer, and one number."""
    if use.tile(1, (DType.I64,)).shape:
        use.fail("it takes one number")
    return count(use)


def require(use: InstructionUse) -> tuple[TileType, ...]:
    """Truth values; nothing comes out."""
    use.arity(1)
    use.tile(0, (DType.BOOL,))
    return ()


def hint(use: InstructionUse) -> tuple[TileType, ...]:
    """No operands, no outs."""
    use.arity(0)
    return ()


def fill(use: InstructionUse) -> tuple[TileType, ...]:
    """One literal, the declared type."""
    use.arity(1)
    use.number(use.args[0], use.declared().dtype)
    return (use.declared(),)


def iota(use: InstructionUse) -> tuple[TileType, ...]:
    """An integer expression, an integer type with that axis."""
    use.arity(1)
    out = use.declared()
    if not isinstance(use.args[0], int | Sym):
        use.fail(f"{use.args[0]} is not an integer expression")
    if out.dtype not in INTS:
        use.fail(f"{out.dtype.value} is not an integer type")
    use.axis(len(out.shape))
    return (out,)


def index(use: InstructionUse) -> tuple[TileType, ...]:
    """An integer expression becomes i64[]."""
    use.arity(1)
    if not isinstance(use.args[0], int | Sym):
        use.fail(f"{use.args[0]} is not an integer expression")
    return (TileType(DType.I64),)


def bcast(use: InstructionUse) -> tuple[TileType, ...]:
    """To declared extents that the operand broadcasts to."""
    use.arity(1)
    a, out = use.tile(0), use.declared()
    _broadcasts(use, a.shape, out.shape)
    return (TileType(a.dtype, out.shape),)


def reshape(use: InstructionUse) -> tuple[TileType, ...]:
    """To declared extents with as many elements."""
    use.arity(1)
    a, out = use.tile(0), use.declared()
    if math.prod(a.shape) != math.prod(out.shape):
        use.fail(f"{show_type(a)} and {show_type(out)} differ in their number of elements")
    return (TileType(a.dtype, out.shape),)


def transpose(use: InstructionUse) -> tuple[TileType, ...]:
    """`perm` names every axis once."""
    use.arity(1)
    a = use.tile(0)
    perm = use.ints("perm", len(a.shape))
    if sorted(perm) != list(range(len(a.shape))):
        use.fail(f"perm {perm} is not a permutation")
    return (TileType(a.dtype, tuple(a.shape[p] for p in perm)),)


def extract(use: InstructionUse) -> tuple[TileType, ...]:
    """A part that lies within the operand."""
    use.arity(1)
    a = use.tile(0)
    start, extent = use.ints("start", len(a.shape)), use.ints("extent", len(a.shape))
    if any(s < 0 or e < 1 or s + e > n for s, e, n in zip(start, extent, a.shape, strict=True)):
        use.fail(f"{extent} elements from {start} do not lie within {show_type(a)}")
    return (TileType(a.dtype, extent),)


def concat(use: InstructionUse) -> tuple[TileType, ...]:
    """Tiles that agree in everything but one extent."""
    if not use.args:
        use.fail("there is nothing to put together")
    types = [use.tile(i) for i in range(len(use.args))]
    first = types[0]
    axis = use.axis(len(first.shape))
    for t in types:
        rest = t.shape[:axis] + t.shape[axis + 1:]
        if t.dtype != first.dtype or rest != first.shape[:axis] + first.shape[axis + 1:]:
            use.fail(f"{show_type(t)} and {show_type(first)} do not fit together along axis {axis}")
    return (TileType(first.dtype, (*first.shape[:axis], sum(t.shape[axis] for t in types), *first.shape[axis + 1:])),)


_ACCUMULATES: dict[DType, tuple[DType, ...]] = {
    DType.F64: (DType.F64,),
    DType.F32: (DType.F32, *HALVES),
    DType.I32: (DType.I32, DType.I16, DType.I8, DType.U8),
    DType.I64: (DType.I64,),
}


def mma(use: InstructionUse) -> tuple[TileType, ...]:
    """acc[M, N], a[M, K], b[K, N]; a and b share their element type, but for i8 and u8, which mix."""
    use.arity(3)
    acc = use.tile(0, tuple(_ACCUMULATES))
    takes = _ACCUMULATES[acc.dtype]
    a, b = use.tile(1, takes), use.tile(2, takes)
    if a.dtype != b.dtype and not {a.dtype, b.dtype} <= {DType.I8, DType.U8}:
        use.fail(f"{show_type(a)} and {show_type(b)} differ in element type")
    if not (len(acc.shape) == len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
            and acc.shape == (a.shape[0], b.shape[1])):  # fmt: skip
        use.fail(f"{show_type(a)} times {show_type(b)} does not add to {show_type(acc)}")
    return (acc,)


BLOCK_STEPS = 32
"""Steps of K in a block of `mma.memory`: what a row of a matrix unit's tile holds."""
BLOCK_COLUMNS = 16
BLOCK_OP = "mma.memory"


def block_extents(attrs: Mapping[str, Attr]) -> tuple[tuple[int, ...], ...]:
    """What `mma.memory` touches: c[rows, columns], a[blocks, rows, 32], b[pairs of steps, columns, 2]."""
    rows, columns, blocks = (attrs[n] for n in ("rows", "columns", "blocks"))
    assert isinstance(rows, int) and isinstance(columns, int) and isinstance(blocks, int)
    return (rows, columns), (blocks, rows, BLOCK_STEPS), (blocks * BLOCK_STEPS // 2, columns, 2)


def mma_memory(use: InstructionUse) -> tuple[TileType, ...]:
    """Places of fp32 sums and of bf16 operands, all of whose elements exist; nothing comes out."""
    use.arity(3)
    for name, unit in (("rows", 1), ("columns", BLOCK_COLUMNS), ("blocks", 1)):
        value = use.attrs[name]
        if not isinstance(value, int) or value < 1 or value % unit:
            use.fail(f"{name} {value} is not a multiple of {unit}")
    for at, (extents, dtype) in enumerate(zip(block_extents(use.attrs), (DType.F32, DType.BF16, DType.BF16), strict=True)):
        buffer, access = use.access(at, len(extents)), use.args[at]
        if buffer.dtype is not dtype:
            use.fail(f"{buffer.name} holds {buffer.dtype.value}, and operand {at + 1} is {dtype.value}")
        if isinstance(access, TileAccess) and (any(v is not None for v in access.valid) or (at == 0 and -1 in access.axes)):
            use.fail(f"elements of {buffer.name} may neither be missing nor be repeated")
    return ()


def reduction(dtypes: tuple[DType, ...], out: DType | None = None) -> Rule:
    """One axis, whose extent becomes 1."""

    def rule(use: InstructionUse) -> tuple[TileType, ...]:
        use.arity(1)
        a = use.tile(0, dtypes)
        axis = use.axis(len(a.shape))
        return (TileType(out or a.dtype, (*a.shape[:axis], 1, *a.shape[axis + 1:])),)

    return rule


def scan(use: InstructionUse) -> tuple[TileType, ...]:
    """One axis, everything stays."""
    use.arity(1)
    a = use.tile(0, NUMBERS)
    use.axis(len(a.shape))
    return (a,)
