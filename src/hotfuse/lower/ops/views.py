"""Ops that only move elements: which element of an operand stands at a position of the result.

One row per op, `@moves("aten.permute")`, in `lower.ops.moves`, `lower.ops.windows` and `lower.ops.gather_reads`. A row answers with
another value and the position in it, or, where the result is put together from pieces, with the pieces along one dim. Nothing
is copied: positions compose until a load is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Node, Value
from hotfuse.ir.types import ScalarKind, ScalarType, TensorType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import ORIGIN, Coord, Position, Space
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


@dataclass(frozen=True, slots=True)
class Alias:
    """The same element of another value."""

    value: Value
    position: Position


@dataclass(frozen=True, slots=True)
class ConcatPart:
    """From `start` on along the dim: an element of a value, or a number where there is none."""

    start: Dim
    content: Alias | float


@dataclass(frozen=True, slots=True)
class Pieces:
    """A dim put together: the last part that starts at or before `along` holds the element."""

    along: Coord
    parts: tuple[ConcatPart, ...]


@dataclass(frozen=True, slots=True)
class MaskedElement:
    """An element where its place along a dim exists, a number elsewhere; `content` may be read in either case."""

    along: Coord
    extent: Dim
    content: Alias
    number: float


@dataclass(frozen=True, slots=True)
class Pick:
    """Along a dim of this extent, the place that an index tensor's element says."""

    dim: int
    extent: Dim
    index: Alias
    wraps: bool
    """Whether negative numbers count from the end."""
    trusted: bool
    """Whether the index lies inside by construction."""


@dataclass(frozen=True, slots=True)
class Picked:
    """An element of a value in memory, whose place along some dims is data; the position says 0 there."""

    value: Value
    position: Position
    picks: tuple[Pick, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A node to be looked through."""

    node: Node
    out: int
    position: Position
    space: Space

    def arg(self, name: str, default: Arg = None) -> Arg:
        """An argument by its name in torch's schema."""
        return argument(self.node, name, default)

    def value(self, name: str = "self") -> Value:
        """A tensor operand."""
        return tensor(self.arg(name), self.node)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The result's."""
        return shape_of(self.node.outs[self.out])

    def dim(self, name: str, rank: int, default: int | None = None) -> int:
        """An argument that names a dim."""
        d = self.arg(name, default)
        if not isinstance(d, int):
            raise CannotLower(f"{self.node.op} names its dim as {d}")
        return d % max(rank, 1)

    def moved(self, value: Value, dim: int, c: Coord) -> Alias:
        """The same position with one coord replaced."""
        return Alias(value, (*self.position[:dim], c, *self.position[dim + 1:]))


Moved = Alias | Pieces | MaskedElement | Picked
Row = Callable[[Move], Moved]
_ROWS: dict[str, Row] = {}


def moves(*names: str) -> Callable[[Row], Row]:
    """Add a row for each of these ops."""

    def note(row: Row) -> Row:
        for name in names:
            _ROWS[name] = row
        return row

    return note


@cache
def _load() -> None:
    """Rows of other modules register themselves when these are imported, which import this one."""
    for name in ("moves", "windows", "gather_reads"):
        import_module(f"hotfuse.lower.ops.{name}")


def is_move(op: str) -> bool:
    """Whether there is a row."""
    _load()
    return packet(op) in _ROWS


def rows() -> tuple[str, ...]:
    """Every op that has one."""
    _load()
    return tuple(_ROWS)


def move(node: Node, out: int, position: Position, space: Space) -> Moved:
    """Where the element at a position of a node's result comes from."""
    _load()
    return _ROWS[packet(node.op)](Move(node, out, position, space))


def tensor(arg: Arg, node: Node) -> Value:
    """An argument that must be a tensor."""
    if not isinstance(arg, Value) or not isinstance(arg.type, TensorType):
        raise CannotLower(f"{node.op} takes {arg} where a tensor was expected")
    return arg


def shape_of(v: Value) -> tuple[Dim, ...]:
    """A tensor's shape."""
    if not isinstance(v.type, TensorType):
        raise CannotLower(f"%{v.name} is not a tensor")
    return v.type.shape


def size(arg: Arg) -> Dim:
    """A number of the host as a size."""
    if isinstance(arg, Value) and isinstance(arg.type, ScalarType) and arg.type.kind is ScalarKind.INT:
        if arg.type.expr is None:
            raise CannotLower(f"%{arg.name} is not a size that is known")
        return arg.type.expr
    if isinstance(arg, int):
        return int(arg)
    raise CannotLower(f"{arg.name if isinstance(arg, Value) else arg} is not a size that is known")


def broadcast(position: Position, shape: tuple[Dim, ...], operand: tuple[Dim, ...]) -> Position:
    """The place in an operand that is repeated to a shape."""
    skip = len(shape) - len(operand)
    at: list[Coord] = []
    for i, n in enumerate(operand):
        if n == 1 and shape[skip + i] != 1:
            at.append(ORIGIN)
        elif same(n, shape[skip + i]):
            at.append(position[skip + i])
        else:
            raise CannotLower(f"whether a dim of {n} is repeated to {shape[skip + i]} is not known")
    return tuple(at)
