"""Tile programs as frozen data: kernels made of loops and instructions over small tiles held in registers.

    kernel ::= name(sizes...) buffers { stmt... }
    stmt   ::= instr | loop | when
    loop   ::= outs = for var in lo..hi step s [parallel | serial | unroll] carry (inner = init, ...) { stmt... yield tile... }
             | for var in lo..hi at access { stmt... }                 one round: var is the integer that lies there
    when   ::= if pred { stmt... }
    instr  ::= tiles = op(operands) {attrs}
    tile   ::= dtype x static extents; f32[9, 48] lives in registers, f32[] is one number
    access ::= buffer[index...] walking tile axis a along buffer dim axes[a], with valid[a] elements present

All index arithmetic is `ir.dims` expressions over loop variables and the kernel's sizes, so a program is shape-generic when
sizes are symbols and specialized when they are numbers: one description serves both tiers. Elements of a tile beyond
`valid` do not exist in memory: loads give `fill` there and stores skip them, which is how tails are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from enum import StrEnum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Loc
from hotfuse.ir.types import DType


@dataclass(frozen=True, slots=True)
class TileType:
    """A tile: element type and static extents, outermost first; `()` is a single number."""

    dtype: DType
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """A value in registers, assigned once."""

    name: str
    type: TileType

    def __hash__(self) -> int:
        return hash(self.name)


class BufferKind(StrEnum):
    """Whose memory a buffer is."""

    INPUT = "input"
    OUTPUT = "output"
    CONST = "const"
    """Prepared once, such as packed weights."""
    SCRATCH = "scratch"
    """Private to the kernel; one copy per thread when used inside a parallel loop."""
    SHARED = "shared"
    """Private to the kernel; all threads see the same copy, so that one parallel loop may read what another wrote."""
    STATE = "state"
    """Words that outlive a call: the kernel's owner sets them, and the kernel counts there."""


OWN = frozenset({BufferKind.SCRATCH, BufferKind.SHARED})
"""Memory that no caller gives."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory: element (i, j, ...) lies `i*stride[0] + j*stride[1] + ...` elements behind its base."""

    name: str
    kind: BufferKind
    dtype: DType
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]


def row_major(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The strides of a dense buffer, last dimension fastest."""
    strides: list[Dim] = []
    step: Dim = 1
    for extent in reversed(shape):
        strides.append(step)
        step = expr("*", step, extent)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TileAccess:
    """Where a tile lies in a buffer.

    Tile element (e0, e1, ...) is buffer element `index`, moved by `e_a * step[a]` along buffer dim `axes[a]` for every tile axis
    a; `axes[a] = -1` repeats the same elements along a. `valid[a]` is how many elements along a exist (None: all of them).
    """

    buffer: str
    index: tuple[Dim, ...]
    axes: tuple[int, ...] = ()
    step: tuple[Dim, ...] = ()
    """Empty means 1 along every axis."""
    valid: tuple[Dim | None, ...] = ()
    """Empty means that all elements exist."""


Operand = Tile | TileAccess | Dim | float
"""A tile, a place in memory, an integer expression, or a literal."""

Attr = int | float | str | tuple[int, ...]
"""What an attribute may hold."""


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction; `op` names its row in `tile.isa`."""

    op: str
    args: tuple[Operand, ...]
    outs: tuple[Tile, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    loc: Loc = Loc()


class LoopKind(StrEnum):
    """How iterations may run."""

    SERIAL = "serial"
    PARALLEL = "parallel"
    """In any order, at once; carries nothing."""
    UNROLL = "unroll"
    """Written out: the trip count is a number."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Counts `var` from `lo` (inclusive) to `hi` (exclusive) by `step`; `carried` tiles go from one iteration to the next."""

    var: str
    lo: Dim
    hi: Dim
    step: int
    kind: LoopKind
    body: tuple[Stmt, ...]
    carried: tuple[tuple[Tile, Tile], ...] = ()
    """(tile inside the body, its first value); inside it holds the previous iteration's yield."""
    yields: tuple[Tile, ...] = ()
    """What the body hands on, in the order of `carried`."""
    outs: tuple[Tile, ...] = ()
    """The last yields, or the first values if the loop did not run."""
    given: TileAccess | None = None
    """Where an i64 lies that `var` is for one round, instead of counting; it lies from `lo` to `hi`, as its writer promises.
    So data may say how far other loops run, and where they read."""


@dataclass(frozen=True, slots=True)
class When:
    """Runs the body if a predicate over loop variables and sizes holds; defines nothing for the outside."""

    pred: Dim
    body: tuple[Stmt, ...]


Stmt = Instr | Loop | When


@dataclass(frozen=True, slots=True)
class Kernel:
    """A tile program: `sizes` are the symbols that a call gives as integers, in order."""

    name: str
    sizes: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    loc: Loc = Loc()
    left_out: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Of a kernel without its body (`tile.compressed.header`): the instructions that it had."""

    @property
    def ops(self) -> frozenset[str]:
        """The instructions that it has."""
        return self.left_out or frozenset(i.op for i in instructions(self.body))

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        return next(b for b in self.buffers if b.name == name)


def instructions(stmts: Sequence[Stmt]) -> Iterator[Instr]:
    """All instructions of a program's piece, in order, those inside loops and conditions too."""
    found: list[Instr] = []
    _collect(stmts, found)
    return iter(found)


def _collect(stmts: Sequence[Stmt], found: list[Instr]) -> None:
    """Into one list: generators inside generators hand every instruction through all levels of loops."""
    for s in stmts:
        if isinstance(s, Instr):
            found.append(s)
        else:
            _collect(s.body, found)
