"""The instruction set: one row per instruction, with its type rule and its meaning on NumPy arrays.

    movement     load store gather scatter prefetch fill iota index bcast reshape transpose extract concat
    arithmetic   map.<function>, element by element; operands broadcast over extents of 1 and missing leading axes
    contraction  mma; mma.memory, a block of a product from memory to memory, for matrix units with registers of their own
    reductions   reduce.<function>, over one axis that stays with extent 1; scan.<function>, inclusive
    structure    count peak require barrier_spill forget; loops and conditions are statements, see `tile.program`

Back ends key their emission by the same names, so what one of them lacks can be listed. Operands of arithmetic are tiles: a
literal becomes a tile by `fill`, an integer expression by `index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.types import DType
from hotfuse.tile import meaning as m
from hotfuse.tile import type_rules as r
from hotfuse.tile.memory import NUMPY, Array
from hotfuse.tile.program import Attr, Buffer, Instr, Operand, Tile, TileType


class Category(StrEnum):
    """What kind of thing an instruction does."""

    MEMORY = "memory"
    """Touches a buffer."""
    MOVE = "move"
    """Makes or rearranges tiles."""
    MAP = "map"
    CONTRACT = "contract"
    REDUCE = "reduce"
    SCAN = "scan"
    HINT = "hint"
    """Means nothing; only speed depends on it."""


@dataclass(frozen=True, slots=True)
class InstructionRow:
    """One instruction."""

    name: str
    types: r.Rule
    meaning: m.Meaning
    category: Category
    dtypes: tuple[DType, ...]
    """Element types of the tile it works on: what a contract test has to go through."""
    arity: int
    """Number of operands; -1 when there may be any."""
    attrs: Mapping[str, Attr | None]
    """The attributes it has, with their defaults; None where one must be given."""


_ROWS: dict[str, InstructionRow] = {}
MAX_KINDS = 20_000
"""Well-typed uses that are remembered."""
_WELL_TYPED: dict[tuple[str, tuple[TileType, ...], tuple[TileType, ...] | None], tuple[TileType, ...]] = {}


def definstr(
    name: str,
    *,
    types: r.Rule,
    meaning: m.Meaning,
    category: Category,
    dtypes: tuple[DType, ...] = r.ALL,
    arity: int = 1,
    attrs: Mapping[str, Attr | None] = MappingProxyType({}),
) -> None:
    """Add an instruction."""
    if name in _ROWS:
        raise InternalError(f"instruction {name} is defined twice")
    _ROWS[name] = InstructionRow(name, types, meaning, category, dtypes, arity, MappingProxyType(dict(attrs)))


def row(name: str) -> InstructionRow:
    """The row of an instruction."""
    try:
        return _ROWS[name]
    except KeyError as e:
        raise InternalError(f"there is no instruction {name!r}") from e


def rows() -> Mapping[str, InstructionRow]:
    """Every instruction by name."""
    return MappingProxyType(_ROWS)


def attributes(op: str, attrs: Sequence[tuple[str, Attr]]) -> dict[str, Attr]:
    """All attributes of an instruction, defaults included."""
    known = row(op).attrs
    given = dict(attrs)
    if len(given) != len(attrs) or not given.keys() <= known.keys():
        wrong = ", ".join(n for n, _ in attrs) or "none"
        raise InternalError(f"{op} has attributes {', '.join(known) or 'none'}; given are {wrong}")
    for name, default in known.items():
        if name not in given:
            if default is None:
                raise InternalError(f"{op} needs the attribute {name}")
            given[name] = default
    return given


def out_types(
    op: str,
    args: tuple[Operand, ...],
    attrs: Sequence[tuple[str, Attr]] = (),
    outs: tuple[TileType, ...] | None = None,
    buffers: Mapping[str, Buffer] = MappingProxyType({}),
) -> tuple[TileType, ...]:
    """What comes out; raises InternalError when the operands, attributes or declared outs do not fit.

    Of tiles without attributes only the types count. A kernel has hundreds of instructions of a dozen kinds, and each is asked
    for twice, when it is written and when the kernel is verified: what was well typed once is.
    """
    kind = None
    if not attrs and all([isinstance(a, Tile) for a in args]):
        kind = (op, tuple([a.type for a in args if isinstance(a, Tile)]), outs)
        if (known := _WELL_TYPED.get(kind)) is not None:
            return known
    found = _out_types(op, args, attrs, outs, buffers)
    if kind is not None and len(_WELL_TYPED) < MAX_KINDS:
        _WELL_TYPED[kind] = found
    return found


def _out_types(
    op: str,
    args: tuple[Operand, ...],
    attrs: Sequence[tuple[str, Attr]],
    outs: tuple[TileType, ...] | None,
    buffers: Mapping[str, Buffer],
) -> tuple[TileType, ...]:
    use = r.InstructionUse(op, args, attributes(op, attrs), outs, buffers)
    found = row(op).types(use)
    if outs is not None and found != outs:
        given = ", ".join(map(r.show_type, outs)) or "nothing"
        use.fail(f"it gives {', '.join(map(r.show_type, found)) or 'nothing'}, and {given} is declared")
    return found


def check(instr: Instr, buffers: Mapping[str, Buffer]) -> None:
    """Whether an instruction is well typed; raises InternalError when it is not."""
    out_types(instr.op, instr.args, instr.attrs, tuple(t.type for t in instr.outs), buffers)


def compute(op: str, args: Sequence[Any], out: TileType | None, attrs: Sequence[tuple[str, Attr]] = ()) -> Array | None:
    """Run one instruction: tiles are arrays, accesses are `Place`s, everything else a number."""
    with np.errstate(all="ignore"):
        result = row(op).meaning(out, *args, **attributes(op, attrs))
    if out is None:
        return None
    result = np.asarray(result)
    if result.dtype != NUMPY[out.dtype] or result.shape != out.shape:
        raise InternalError(f"the meaning of {op} gave {result.dtype}{list(result.shape)}, not {r.show_type(out)}")
    return result


# --- memory and movement ----------------------------------------------------------------------------------------------

_FILL: dict[str, Attr | None] = {"fill": 0}
_DIM: dict[str, Attr | None] = {"dim": None}
_AXIS: dict[str, Attr | None] = {"axis": None}

definstr("load", types=r.load, meaning=m.load, category=Category.MEMORY, attrs=_FILL)
definstr("store", types=r.store, meaning=m.store, category=Category.MEMORY, arity=2)
definstr("gather", types=r.gather, meaning=m.gather, category=Category.MEMORY, arity=2, attrs=_DIM | _FILL)
definstr("scatter", types=r.scatter, meaning=m.scatter, category=Category.MEMORY, arity=3,
         attrs=_DIM | {"reduce": "none"})  # fmt: skip
definstr("prefetch", types=r.prefetch, meaning=m.nothing, category=Category.HINT, attrs={"level": 1, "write": 0})
definstr("count", types=r.count, meaning=m.count, category=Category.MEMORY, arity=2)
definstr("peak", types=r.peak, meaning=m.peak, category=Category.MEMORY, dtypes=(DType.I64,), arity=2)
definstr("require", types=r.require, meaning=m.require, category=Category.MEMORY, dtypes=(DType.BOOL,))
definstr("barrier_spill", types=r.hint, meaning=m.nothing, category=Category.HINT, arity=0)
definstr("forget", types=r.hint, meaning=m.nothing, category=Category.HINT, arity=0)

definstr("fill", types=r.fill, meaning=m.fill, category=Category.MOVE)
definstr("iota", types=r.iota, meaning=m.iota, category=Category.MOVE, dtypes=r.INTS, attrs=_AXIS)
definstr("index", types=r.index, meaning=m.index, category=Category.MOVE, dtypes=(DType.I64,))
definstr("bcast", types=r.bcast, meaning=m.shaped, category=Category.MOVE)
definstr("reshape", types=r.reshape, meaning=m.reshape, category=Category.MOVE)
definstr("transpose", types=r.transpose, meaning=m.transpose, category=Category.MOVE, attrs={"perm": None})
definstr("extract", types=r.extract, meaning=m.extract, category=Category.MOVE, attrs={"start": None, "extent": None})
definstr("concat", types=r.concat, meaning=m.concat, category=Category.MOVE, arity=-1, attrs=_AXIS)

# --- arithmetic -------------------------------------------------------------------------------------------------------


def _map(name: str, arity: int, dtypes: tuple[DType, ...], meaning: m.Meaning, out: DType | None = None) -> None:
    types = r.elementwise(arity, dtypes, out)
    definstr(f"map.{name}", types=types, meaning=meaning, category=Category.MAP, dtypes=dtypes, arity=arity)


_map("add", 2, r.NUMBERS, m.elementwise(np.add))
_map("sub", 2, r.NUMBERS, m.elementwise(np.subtract))
_map("mul", 2, r.NUMBERS, m.elementwise(np.multiply))
_map("div", 2, r.FLOATS, m.elementwise(np.divide))
_map("truncdiv", 2, r.INTS, m.elementwise(m.truncdiv))
_map("floordiv", 2, r.INTS, m.elementwise(np.floor_divide))
_map("rem", 2, r.NUMBERS, m.elementwise(np.fmod))
_map("mod", 2, r.NUMBERS, m.elementwise(m.mod))
_map("pow", 2, r.NUMBERS, m.power)
_map("fma", 3, r.FLOATS, m.fma)
_map("max", 2, r.NUMBERS, m.elementwise(np.maximum))
_map("min", 2, r.NUMBERS, m.elementwise(np.minimum))

_map("neg", 1, r.NUMBERS, m.elementwise(np.negative))
_map("abs", 1, r.NUMBERS, m.elementwise(np.absolute))
_map("sign", 1, r.NUMBERS, m.elementwise(m.sign))
_map("sqrt", 1, r.FLOATS, m.precise(np.sqrt))
_map("rsqrt", 1, r.FLOATS, m.precise(lambda a: 1 / np.sqrt(a)))
_map("recip", 1, r.FLOATS, m.precise(np.reciprocal))
_map("exp", 1, r.FLOATS, m.precise(np.exp))
_map("decay", 1, r.FLOATS, m.precise(np.exp))  # of what is at most 0
_map("exp2", 1, r.FLOATS, m.precise(np.exp2))
_map("expm1", 1, r.FLOATS, m.precise(np.expm1))
_map("log", 1, r.FLOATS, m.precise(np.log))
_map("log2", 1, r.FLOATS, m.precise(np.log2))
_map("log1p", 1, r.FLOATS, m.precise(np.log1p))
_map("sin", 1, r.FLOATS, m.precise(np.sin))
_map("cos", 1, r.FLOATS, m.precise(np.cos))
_map("tanh", 1, r.FLOATS, m.precise(np.tanh))
_map("erf", 1, r.FLOATS, m.precise(m.erf))
_map("normal", 1, r.FLOATS, m.precise(m.normal))  # the share of a standard normal distribution below x
_map("floor", 1, r.FLOATS, m.precise(np.floor))
_map("ceil", 1, r.FLOATS, m.precise(np.ceil))
_map("round", 1, r.FLOATS, m.precise(np.rint))
_map("trunc", 1, r.FLOATS, m.precise(np.trunc))

_map("eq", 2, r.ALL, m.elementwise(np.equal), DType.BOOL)
_map("ne", 2, r.ALL, m.elementwise(np.not_equal), DType.BOOL)
_map("lt", 2, r.ALL, m.elementwise(np.less), DType.BOOL)
_map("le", 2, r.ALL, m.elementwise(np.less_equal), DType.BOOL)
_map("gt", 2, r.ALL, m.elementwise(np.greater), DType.BOOL)
_map("ge", 2, r.ALL, m.elementwise(np.greater_equal), DType.BOOL)
_map("isnan", 1, r.FLOATS, m.elementwise(np.isnan), DType.BOOL)
_map("isinf", 1, r.FLOATS, m.elementwise(np.isinf), DType.BOOL)

_map("and", 2, r.BITS, m.elementwise(np.bitwise_and))
_map("or", 2, r.BITS, m.elementwise(np.bitwise_or))
_map("xor", 2, r.BITS, m.elementwise(np.bitwise_xor))
_map("not", 1, r.BITS, m.elementwise(np.invert))
_map("shl", 2, r.INTS, m.elementwise(m.shift_left))
_map("shr", 2, r.INTS, m.elementwise(m.shift_right))

definstr("map.select", types=r.select, meaning=lambda out, c, a, b: m.shaped(out, np.where(c, a, b)),
         category=Category.MAP, arity=3)  # fmt: skip
definstr("map.cast", types=r.cast, meaning=m.cast, category=Category.MAP)
definstr("map.bitcast", types=r.bitcast, meaning=m.bitcast, category=Category.MAP, dtypes=r.NUMBERS)

# --- contraction, reduction, scan -------------------------------------------------------------------------------------

definstr("mma", types=r.mma, meaning=m.mma, category=Category.CONTRACT, arity=3,
         dtypes=(DType.F64, DType.F32, *r.HALVES, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8))  # fmt: skip
definstr("mma.memory", types=r.mma_memory, meaning=m.mma_memory, category=Category.MEMORY, arity=3, dtypes=(DType.BF16,),
         attrs={"rows": None, "columns": None, "blocks": None})  # fmt: skip


def _reduce(name: str, dtypes: tuple[DType, ...], meaning: m.Meaning, out: DType | None = None) -> None:
    types = r.reduction(dtypes, out)
    definstr(f"reduce.{name}", types=types, meaning=meaning, category=Category.REDUCE, dtypes=dtypes, attrs=_AXIS)


_reduce("sum", r.NUMBERS, m.reduction(m.wrapping(np.sum)))
_reduce("prod", r.NUMBERS, m.reduction(m.wrapping(np.prod)))
_reduce("max", r.NUMBERS, m.reduction(np.max))
_reduce("min", r.NUMBERS, m.reduction(np.min))
_reduce("any", (DType.BOOL,), m.reduction(np.any))
_reduce("all", (DType.BOOL,), m.reduction(np.all))
_reduce("argmax", r.NUMBERS, m.reduction(np.argmax), DType.I64)
_reduce("argmin", r.NUMBERS, m.reduction(np.argmin), DType.I64)

for _name, _ufunc in {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}.items():
    definstr(f"scan.{_name}", types=r.scan, meaning=m.scan(_ufunc), category=Category.SCAN, dtypes=r.NUMBERS, attrs=_AXIS)
