"""Products of bytes inside a group: what the sums of raw bytes have to become to be the product of real numbers.

    Σ(x - zx)(w - zw)·sx·sw  =  sx·sw · (Σxw' - zx·Σw' - zw'·Σx + K·zx·zw')

w' is the weight as it is packed: one without a sign less 128, and its zero point zw' likewise, which makes the usual one 0. Σw'
is packed beside the weight, Σx is computed only where zw' is not 0. Sums stay exact in 32 bits as long as K is below 2^15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hotfuse.analysis.quantized import PRODUCTS, ByteProduct, Factor, byte_products
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Value, map_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.pack import WeightOrder
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument_names
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile

MAX_K = 1 << 15
"""The longest sum of products of bytes that 32 bits hold."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What turns sums of bytes into real numbers."""

    zero_x: Factor
    scale_x: Factor
    zero_w: int
    """As the weight is packed."""
    scale_w: Factor


def bytes_taken(graph: Graph) -> tuple[Graph, Mapping[str, Scaling]]:
    """The group with products that take raw bytes, and the scaling of each by the name of its result.

    The graph that comes back is for lowering alone: its products mean sums of bytes.
    """
    found = byte_products(graph)
    if not found:
        return graph, {}
    scalings: dict[str, Scaling] = {}
    gone = {i for p in found.values() for i in (*p.x.nodes, *p.weight.nodes)}
    nodes = list(graph.nodes)
    for i, p in found.items():
        node = nodes[i]
        scalings[node.outs[0].name] = _scaling(p)
        names = argument_names(node.op)
        new: dict[str, Arg] = {}
        for name, raw in zip(PRODUCTS[packet(node.op)], (p.x.raw, p.weight.raw), strict=True):
            old = node.args[names.index(name)]
            if p.pad is not None and raw is p.x.raw:  # zeros around the image: these are what stands around the bytes
                nodes[p.pad] = replace(nodes[p.pad], args=(raw, *nodes[p.pad].args[1:]))
            elif isinstance(old, Value):
                new[old.name] = raw
        nodes[i] = replace(node, args=tuple(map_values(a, new) for a in node.args))
    kept = tuple(n for i, n in enumerate(nodes) if i not in gone)
    return replace(graph, nodes=kept), scalings


def _scaling(p: ByteProduct) -> Scaling:
    zero = p.weight.zero
    if not isinstance(zero, int | float) or zero != int(zero):
        raise CannotLower("a weight whose zero points are not one whole number")
    assert isinstance(p.weight.raw.type, TensorType)
    shift = 128 if p.weight.raw.type.dtype is DType.U8 else 0
    if isinstance(p.x.zero, int | float) and p.x.zero != int(p.x.zero):
        raise CannotLower("a zero point that is not a whole number")
    for what in (p.x.zero, p.x.scale):
        if isinstance(what, Value) and any(n != 1 for n in shape_of(what)):
            raise CannotLower("an input with several scales or zero points")
    return Scaling(p.x.zero, p.x.scale, int(zero) - shift, p.weight.scale)


def column_of(scale: Value, order: WeightOrder, n: int) -> int:
    """Which dim of a weight's scale counts columns of the product; -1 for one scale for all."""
    shape: tuple[Dim, ...] = shape_of(scale)
    if all(d == 1 for d in shape):
        return -1
    at = len(shape) - 1 if order is WeightOrder.KN else len(shape) - 2
    if at < 0 or shape[at] != n or any(d != 1 for i, d in enumerate(shape) if i != at):
        raise CannotLower(f"a weight whose scales are {list(shape)}")
    return at


def corrected(
    b: KernelBuilder, sums: Tile, s: Scaling, k: int, number: Callable[[Value], Tile], of_columns: Callable[[], Tile],
    of_row: Callable[[], Tile],
) -> Tile:  # fmt: skip
    """Sums of raw bytes without what zero points added to them."""
    known = isinstance(s.zero_x, int | float)
    zero: Tile | None = None
    if isinstance(s.zero_x, Value):
        zero = b.cast(number(s.zero_x), DType.I32)
    elif s.zero_x != 0:
        zero = b.fill(int(s.zero_x), DType.I32)
    if zero is not None:
        sums = b.map("sub", sums, b.map("mul", of_columns(), zero))
    if s.zero_w != 0:
        rest = of_row()
        if known and s.zero_x != 0:
            rest = b.map("sub", rest, b.fill(k * int(s.zero_x), DType.I32))  # type: ignore[arg-type]
        elif zero is not None:
            rest = b.map("sub", rest, b.map("mul", zero, k))
        sums = b.map("sub", sums, b.map("mul", rest, s.zero_w))
    return sums


def scaled(
    b: KernelBuilder, sums: Tile, s: Scaling, of_input: Callable[[Value], Tile], of_weight: Callable[[Value], Tile]
) -> Tile:
    """Corrected sums, already in the result's type, times both scales: those that are numbers as one."""
    factor = 1.0
    for scale in (s.scale_x, s.scale_w):
        if isinstance(scale, int | float):
            factor *= scale
    result = sums if factor == 1 else b.map("mul", sums, factor)
    for scale, tile in ((s.scale_x, of_input), (s.scale_w, of_weight)):
        if isinstance(scale, Value):
            result = b.map("mul", result, b.cast(tile(scale), result.type.dtype))
    return result
