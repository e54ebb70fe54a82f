"""How a pointwise op becomes tile instructions: the mechanism; the rows are in `expand_math`, `expand_logic` and `expand_make`.

    @expands("aten.add", "self other")
    def _add(e: Expansion, a: Tile, b: Tile) -> Tile: ...

A row names the arguments that are read element by element. They arrive as tiles of the type torch computes in: the operands'
common type by torch's promotion, integers as floats where the op says so, half precision as f32. What the row gives back
is converted to the element type that the graph says the result has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from importlib import import_module
from typing import Protocol

import numpy as np
import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Node, Value, values_in
from hotfuse.ir.types import DType, ScalarKind, ScalarType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import Coord, Position
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.ops.torch_dtypes import dtype_of, torch_dtype
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Tile

FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
HALVES = (DType.F16, DType.BF16)


class Computes(StrEnum):
    """The element type a row computes in."""

    PROMOTED = "promoted"
    """The operands' common type; bool as u8, since arithmetic on truth values is arithmetic on 0 and 1."""
    COMMON = "common"
    """The operands' common type, bool too."""
    FLOAT = "float"
    """The common type, integers as the default float."""
    OWN = "own"
    """Each operand as it is."""


class ElementContext(Protocol):
    """Where a row's elements are computed: the evaluator of values (`lower.common.tile_values`) is one."""

    @property
    def builder(self) -> KernelBuilder:
        """The kernel being written."""
        ...

    @property
    def graph(self) -> Graph:
        """The group that a row's node is of."""
        ...

    def number(self, d: Dim) -> Dim:
        """An expression over counters as one over loop variables."""
        ...

    def index_tile(self, c: Coord) -> Tile:
        """A place along a dim as 64-bit integers."""
        ...

    def checked(self, at: Tile, extent: Dim) -> Tile:
        """Indexes limited to what exists; one outside is a fault of the call."""
        ...

    def require(self, holds: Tile) -> None:
        """What must be true of every element that exists; anything else is a fault of the call."""
        ...


Function = Callable[..., Tile]


@dataclass(frozen=True, slots=True)
class ExpansionRow:
    """One op."""

    operands: tuple[str, ...]
    function: Function
    computes: Computes


_ROWS: dict[str, ExpansionRow] = {}


def expands(names: str, operands: str = "self", computes: Computes = Computes.PROMOTED) -> Callable[[Function], Function]:
    """Add a row for each of these ops (`aten.` is understood)."""

    def note(function: Function) -> Function:
        for name in names.split():
            _ROWS[name if "." in name else f"aten.{name}"] = ExpansionRow(tuple(operands.split()), function, computes)
        return function

    return note


def known(op: str) -> bool:
    """Whether there is a row."""
    _load()
    return packet(op) in _ROWS


def rows() -> Mapping[str, ExpansionRow]:
    """Every row by the op's name."""
    _load()
    return _ROWS


@cache
def _load() -> None:
    """The rows register themselves when their modules are imported, which import this one."""
    for name in ("expand_logic", "expand_make", "expand_math"):
        import_module(f"hotfuse.lower.ops.{name}")


def reads(node: Node, value: Value) -> bool:
    """Whether an op reads a value's elements, and not only its shape or type."""
    row = rows()[packet(node.op)]
    return any(v.name == value.name for name in row.operands for v in values_in(argument(node, name)))


def common_type(args: list[Arg], types: Mapping[str, TensorType]) -> DType:
    """torch's promotion: tensors with dims decide, then tensors without, then numbers, unless these are of a higher kind."""
    ranked: list[list[torch.dtype]] = [[], [], []]
    for a in args:
        if isinstance(a, Value) and a.name in types:
            ranked[0 if types[a.name].shape else 1].append(torch_dtype(types[a.name].dtype))
        elif isinstance(a, Value) and isinstance(a.type, ScalarType):
            kinds = {ScalarKind.INT: torch.int64, ScalarKind.FLOAT: torch.float32, ScalarKind.BOOL: torch.bool}
            ranked[2].append(kinds[a.type.kind])
        elif isinstance(a, bool | int | float):
            ranked[2].append(torch.bool if isinstance(a, bool) else torch.int64 if isinstance(a, int) else torch.float32)
        elif a is not None:
            raise CannotLower(f"an operand is {a}")
    result: torch.dtype | None = None
    for group in reversed(ranked):
        for i, t in enumerate(group):
            group[0] = t if i == 0 else torch.promote_types(group[0], t)
        if group:
            result = group[0] if result is None else _combined(group[0], result)
    if result is None:
        raise CannotLower("an op has no operand")
    return dtype_of(result)


def _combined(higher: torch.dtype, lower: torch.dtype) -> torch.dtype:
    if higher.is_complex or higher.is_floating_point:
        return higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def literal(b: KernelBuilder, number: float, dtype: DType) -> Tile:
    """A number as a tile of an element type that can hold it."""
    if dtype is DType.BOOL:
        return b.fill(int(bool(number)), dtype)
    if dtype not in FLOATS:
        low, high = np.iinfo(NUMPY[dtype]).min, np.iinfo(NUMPY[dtype]).max
        if number != number or number in (float("inf"), float("-inf")) or not low <= int(number) <= high:
            raise CannotLower(f"{number} does not fit {dtype.value}")
        return b.fill(int(number), dtype)
    return b.fill(float(number), dtype)


@dataclass(slots=True)
class Expansion:
    """What a row works with."""

    node: Node
    tiles: Mapping[str, Tile]
    evaluator: ElementContext
    position: Position
    out: DType
    """The result's element type."""
    dtype: DType = DType.F32
    """The element type to compute in."""

    @property
    def b(self) -> KernelBuilder:
        """The kernel being written."""
        return self.evaluator.builder

    def arg(self, name: str, default: Arg = None) -> Arg:
        """An argument by its name in torch's schema."""
        return argument(self.node, name, default)

    def number(self, name: str, default: float) -> float:
        """An argument that must be a literal number."""
        value = self.arg(name, default)
        if value is None:
            value = default
        if not isinstance(value, bool | int | float):
            raise CannotLower(f"{name} of {self.node.op} is not a literal number")
        return value

    def operand(self, name: str, dtype: DType | None = None) -> Tile | None:
        """An argument as a tile of an element type; None where it is None."""
        return self.converted(self.arg(name), dtype)

    def converted(self, arg: Arg, dtype: DType | None) -> Tile | None:
        """A tensor's tile, or a number as one."""
        if arg is None:
            return None
        if isinstance(arg, Value) and arg.name in self.tiles:
            tile = self.tiles[arg.name]
            return tile if dtype is None else self.cast(tile, dtype)
        if isinstance(arg, Value) and isinstance(arg.type, ScalarType) and arg.type.expr is not None:
            return self.cast(self.b.index(self.evaluator.number(arg.type.expr)), dtype or DType.I64)
        if isinstance(arg, bool | int | float):
            return literal(self.b, arg, dtype or self.dtype)
        raise CannotLower(f"an operand of {self.node.op} is {arg.name if isinstance(arg, Value) else arg}")

    def cast(self, tile: Tile, dtype: DType) -> Tile:
        """To another element type; through i64 where torch goes from a float to a small integer."""
        small = dtype not in (*FLOATS, DType.I64, DType.U64, DType.BOOL)
        if tile.type.dtype in FLOATS and small:
            tile = self.b.cast(tile, DType.I64 if dtype is DType.U32 else DType.I32)
        return self.b.cast(tile, dtype)

    def map(self, function: str, *args: Tile | float) -> Tile:
        """`map.<function>`; numbers take the element type of the last tile."""
        return self.b.map(function, *args)

    def fill(self, number: float) -> Tile:
        """A number in the type that is computed in."""
        return literal(self.b, number, self.dtype)

    @property
    def floating(self) -> bool:
        """Whether the computation is on floats."""
        return self.dtype in FLOATS

    def divisor(self, b: Tile, name: str = "other") -> Tile:
        """What is divided by: an integer that is zero is a fault of the call, as torch raises of it."""
        given = self.arg(name)
        if not self.floating and not (isinstance(given, int | float) and int(given) != 0):
            self.evaluator.require(self.map("ne", b, 0))
        return b

    def chain(self, x: Tile, *steps: tuple[str, float]) -> Tile:
        """Function after function with a literal second operand."""
        for function, number in steps:
            x = self.map(function, x, number)
        return x


def computed_in(row: ExpansionRow, args: list[Arg], types: Mapping[str, TensorType]) -> DType:
    """The element type of a row's computation."""
    dtype = common_type(args, types)
    if row.computes is Computes.FLOAT and dtype not in FLOATS:
        dtype = DType.F32
    if row.computes is Computes.PROMOTED and dtype is DType.BOOL:
        dtype = DType.U8
    dtype = DType.F32 if dtype in HALVES else dtype
    if dtype not in NUMPY:
        raise CannotLower(f"tiles do not hold {dtype.value}")
    return dtype


def expand(node: Node, out: int, tiles: Mapping[str, Tile], evaluator: ElementContext, position: Position) -> Tile:
    """The instructions of a pointwise node at a position, its operands being given."""
    row = rows()[packet(node.op)]
    result = node.outs[out].type
    if out != 0 or not isinstance(result, TensorType) or result.dtype not in NUMPY:
        raise CannotLower(f"{node.op} has a result that is no tensor of numbers")
    e = Expansion(node, tiles, evaluator, position, result.dtype)
    args = [argument(node, name) for name in row.operands]
    if row.computes is Computes.OWN:
        operands = [e.converted(a, None) for a in args]
    else:
        types = {v.name: v.type for v in node.ins if isinstance(v.type, TensorType)}
        e.dtype = computed_in(row, args, types)
        operands = [e.converted(a, e.dtype) for a in args]
    return e.cast(row.function(e, *operands), result.dtype)
