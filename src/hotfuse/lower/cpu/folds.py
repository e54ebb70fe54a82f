"""How a reduction is accumulated lane by lane and finished across lanes.

Every accumulator is a list of tiles carried through the loops. Vectors of different widths (the wide main loop, its rest) have
accumulators of their own, which are put together at the end, so no loop waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hotfuse.ir.dims import Dim
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import product
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import tensor_type
from hotfuse.lower.common.positions import ORIGIN, Coord, scaled, summed
from hotfuse.lower.common.tile_values import Evaluator
from hotfuse.lower.cpu.loop_nest import FoldPlan, ScanPlan
from hotfuse.lower.ops.expand import FLOATS
from hotfuse.lower.ops.views import shape_of
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Tile

_MAPS = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}
_ACROSS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "max", "min": "min", "any": "any", "all": "all"}
_NO_INDEX = np.iinfo(np.int64).max


def _limit(dtype: DType, *, low: bool) -> float:
    if dtype in FLOATS:
        return -math.inf if low else math.inf
    return int(np.iinfo(NUMPY[dtype]).min if low else np.iinfo(NUMPY[dtype]).max)


def identity(fold: FoldPlan) -> float:
    """What changes nothing."""
    return _neutral(fold.function, tensor_type(fold.input).dtype)


def _neutral(function: str, dtype: DType) -> float:
    match function:
        case "sum" | "mean" | "any":
            return 0
        case "prod" | "all":
            return 1
        case "max" | "argmax" | "min" | "argmin" | "top":
            return _limit(dtype, low=not function.endswith("min"))
        case _:
            raise CannotLower(f"there is no reduction {function}")


def start(b: KernelBuilder, fold: FoldPlan, shape: Sequence[int]) -> list[Tile]:
    """Accumulators before the first element."""
    tiles = [b.fill(identity(fold), tensor_type(fold.input).dtype, shape)]
    return [*tiles, b.fill(0, DType.I64, shape)] if fold.function.startswith("arg") else tiles


def step(at: Evaluator, fold: FoldPlan, held: Sequence[Tile], present: Tile | None) -> list[Tile]:
    """Accumulators after the elements at hand; where `present` is false there are none."""
    b = at.builder
    x = at.tile(fold.input, fold.at)
    if present is not None:
        x = b.map("select", present, x, b.fill(identity(fold), x.type.dtype))
    if not fold.function.startswith("arg"):
        return [_joined(b, fold, x, held[0])]
    index = at.index_tile(_flat(fold))
    better = _better(b, fold, x, held[0])
    return [b.map("select", better, x, held[0]), b.map("select", better, index, held[1])]


def _joined(b: KernelBuilder, fold: FoldPlan, new: Tile, held: Tile) -> Tile:
    """Whether a new element is NaN can be asked ahead, of what is held only when it is there: maxima ask of their first."""
    if fold.function == "top":
        return b.map("select", b.map("gt", new, held), new, held)
    return b.map(_MAPS[fold.function], new, held)


def _flat(fold: FoldPlan) -> Coord:
    """The index that argmax gives: along the one reduced dim, or through all of them."""
    shape = shape_of(fold.input)
    flat = ORIGIN
    for d in fold.dims:
        flat = summed(scaled(flat, shape[d]), fold.at[d])
    return flat


def _better(b: KernelBuilder, fold: FoldPlan, x: Tile, held: Tile) -> Tile:
    """Strictly better, so that the first one stays; NaN beats everything, as in torch."""
    better = b.map("gt" if fold.function == "argmax" else "lt", x, held)
    if x.type.dtype not in FLOATS:
        return better
    return b.map("or", better, b.map("and", b.map("isnan", x), b.map("not", b.map("isnan", held))))


def across(b: KernelBuilder, fold: FoldPlan, held: Sequence[Tile]) -> list[Tile]:
    """One number per accumulator from a tile of lanes."""
    if not held[0].type.shape:
        return list(held)
    if fold.function == "top":
        return [highest(b, held[0])]
    if not fold.function.startswith("arg"):
        return [b.reshape(b.reduce(_ACROSS[fold.function], held[0], 0), ())]
    value = b.reduce(fold.function[3:], held[0], 0)
    hit = b.map("eq", held[0], value)
    if value.type.dtype in FLOATS:
        hit = b.map("or", hit, b.map("isnan", held[0]))
    index = b.reduce("min", b.map("select", hit, held[1], b.fill(_NO_INDEX, DType.I64)), 0)
    return [b.reshape(value, ()), b.reshape(index, ())]


def highest(b: KernelBuilder, tile: Tile) -> Tile:
    """The largest of a tile's numbers, none of which is NaN: halves against halves, without asking for NaN at each step."""
    while (extent := tile.type.shape[0]) > 1:
        if extent % 2:
            return b.reshape(b.reduce("max", tile, 0), ())
        one, other = (b.extract(tile, (at,), (extent // 2,)) for at in (0, extent // 2))
        tile = b.map("select", b.map("gt", one, other), one, other)
    return b.reshape(tile, ())


def together(b: KernelBuilder, fold: FoldPlan, one: Sequence[Tile], other: Sequence[Tile]) -> list[Tile]:
    """Two accumulators of the same reduction as one."""
    if not fold.function.startswith("arg"):
        return [_joined(b, fold, one[0], other[0])]
    better = _better(b, fold, other[0], one[0])
    equal = b.map("eq", other[0], one[0])
    if one[0].type.dtype in FLOATS:
        equal = b.map("or", equal, b.map("and", b.map("isnan", one[0]), b.map("isnan", other[0])))
    better = b.map("or", better, b.map("and", equal, b.map("lt", other[1], one[1])))
    return [b.map("select", better, o, i) for i, o in zip(one, other, strict=True)]


def running(b: KernelBuilder, scans: Sequence[ScanPlan], shape: Sequence[int]) -> list[Tile]:
    """Running results before the first element."""
    return [b.fill(_neutral(s.function, dtype), dtype, shape) for s in scans for dtype in [tensor_type(s.node.outs[0]).dtype]]


def scan(at: Evaluator, plan: ScanPlan, before: Tile, present: Tile | None, *, across: bool) -> Tile:
    """Give the running results at the elements at hand; what comes out is that up to and with the last one."""
    b, out = at.builder, plan.node.outs[0]
    x = at.tile(plan.node.ins[0], plan.position)
    if present is not None:
        x = b.map("select", present, x, b.fill(_neutral(plan.function, x.type.dtype), x.type.dtype))
    extents = [a.extent for a in at.axes]
    if not across or not extents:
        total = b.map(_MAPS[plan.function], before, x)
        at.give(out, plan.position, total)
        return total
    sums = b.map(_MAPS[plan.function], b.scan(plan.function, b.bcast(x, extents), 0), before)
    at.give(out, plan.position, sums)
    return b.reshape(b.extract(sums, (extents[0] - 1,), (1,)), ())


def result(at: Evaluator, fold: FoldPlan, held: Sequence[Tile]) -> Tile:
    """The reduction's result from one accumulator."""
    b = at.builder
    if fold.function.startswith("arg"):
        return held[1]
    if fold.function != "mean":
        return held[0]
    dtype = held[0].type.dtype
    shape = shape_of(fold.input)
    count: Dim = product(tuple(shape[d] for d in fold.dims))
    less = fold.node.attr("less", 0)
    less = less if isinstance(less, int | float) else 0
    if isinstance(count, int):
        return b.map("div", held[0], float(max(count - less, 0)))
    number = b.cast(b.index(count), dtype)
    return b.map("div", held[0], b.map("max", b.map("sub", number, float(less)), 0.0) if less else number)
