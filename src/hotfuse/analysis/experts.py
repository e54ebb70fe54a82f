"""Products with the weights of each row's expert, and what else their kernels can do on the way.

    y = grouped_mm(x, W, ends); a, b = chunk(y, 2, -1); z = silu(a) * b          one kernel: y is never written
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, output_values, readers
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.experts import ORDER, PRODUCT
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

_REALS = frozenset({DType.F32, DType.F64, DType.F16, DType.BF16})
_SPLITS = frozenset({"aten.chunk", "aten.split", "aten.slice"})
MAX_EPILOGUE = 16
"""Pointwise nodes behind a product, at most: a gate has about three, the one of gpt-oss nine."""


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """Columns of a product's result that are a value of their own: from `first` on, one of every `step`."""

    out: Value
    first: int
    step: int
    n: int


def shape(v: object) -> tuple[Dim, ...]:
    """A tensor's shape; empty for anything else."""
    return v.type.shape if isinstance(v, Value) and isinstance(v.type, TensorType) else ()


def has_kernel(node: Node, params: Container[str]) -> bool:
    """Whether a node is one that kernels know: ids in a row, or rows that meet constant weights of known sizes."""
    if packet(node.op) == ORDER:
        return isinstance(argument(node, "experts"), int)
    x, weight = argument(node, "x"), argument(node, "weight")
    if not isinstance(weight, Value) or weight.name not in params or not isinstance(x, Value):
        return False
    sizes = shape(weight)
    known = len(sizes) == 3 and all(isinstance(n, int) and n > 0 for n in sizes)
    return known and all(isinstance(v.type, TensorType) and v.type.dtype in _REALS for v in (x, weight))


def column_parts(nodes: Sequence[Node], product: Value, returned: Container[str]) -> tuple[ColumnPart, ...]:
    """What a product's result is cut into, where nobody among these nodes and outputs reads it otherwise; else itself, whole."""
    (_, n) = shape(product)
    assert isinstance(n, int)
    whole = (ColumnPart(product, 0, 1, n),)
    found: list[ColumnPart] = []
    for node in (r for r in nodes if product in r.ins):
        cut = _cut(node, n)
        if not cut:
            return whole
        found += cut
    return whole if product.name in returned or not found or len({p.n for p in found}) > 1 else tuple(found)


def _cut(node: Node, n: int) -> list[ColumnPart]:
    """The columns that each result of a node has; nothing for one that does not cut columns, or cuts them unevenly."""
    if packet(node.op) not in _SPLITS or argument(node, "dim", 0) not in (1, -1):
        return []
    widths = [shape(v)[-1] for v in node.outs]
    if packet(node.op) == "aten.slice":
        first, step = argument(node, "start", 0), argument(node, "step", 1)
        first = 0 if first is None else first
        if not isinstance(first, int) or not isinstance(step, int) or not isinstance(widths[0], int) or not 0 <= first < n:
            return []
        return [ColumnPart(node.outs[0], first, step, widths[0])]
    if len(widths) != 2 or widths[0] != widths[1] or not isinstance(widths[0], int):
        return []
    return [ColumnPart(v, i * widths[0], 1, widths[0]) for i, v in enumerate(node.outs)]


def expert_products(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Each product's number with those of its group, itself first: what cuts its columns, and pointwise consumers of its rows."""
    params = {p.value.name for p in graph.params}
    found: dict[int, tuple[int, ...]] = {}
    for i, node in enumerate(graph.nodes):
        if packet(node.op) == PRODUCT and has_kernel(node, params):
            found[i] = _around(graph, i)
    return found


def _around(graph: Graph, centre: int) -> tuple[int, ...]:
    """The group of one product, closed under what its kernel computes behind it."""
    product, reading, maker = graph.nodes[centre].outs[0], readers(graph), makers(graph)
    returned = {v.name for v in output_values(graph)}
    behind = [graph.nodes[r] for r in reading.get(product.name, [])]
    parts = column_parts(behind, product, returned)
    rows, width = shape(product)[0], parts[0].n
    taken = [centre]
    if parts[0].out != product:
        taken += sorted({maker[p.out.name] for p in parts})
    inside = {p.out.name for p in parts}
    later = _descendants(graph, reading, centre)
    for r in range(centre + 1, len(graph.nodes)):
        node = graph.nodes[r]
        if r in taken or len(taken) > MAX_EPILOGUE or node.kind is not Kind.OPERATOR or len(node.outs) != 1:
            continue
        pointwise = lookup(node.op).access is Access.POINTWISE and shape(node.outs[0]) == (rows, width)
        ready = all(v.name in inside or v.name not in later for v in node.ins)
        if pointwise and ready and any(v.name in inside for v in node.ins):
            taken.append(r)
            inside.add(node.outs[0].name)
    return tuple(sorted(taken))


def _descendants(graph: Graph, reading: dict[str, list[int]], centre: int) -> set[str]:
    """Values that are made from a product, through whatever."""
    found: set[str] = set()
    waiting = [v.name for v in graph.nodes[centre].outs]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [v.name for r in reading.get(name, []) for v in graph.nodes[r].outs]
    return found
