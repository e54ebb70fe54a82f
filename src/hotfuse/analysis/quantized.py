"""Products of 8-bit integers, found by how a graph makes numbers of them.

    real  = (cast(x) - zero) * scale              each step may be missing: DequantizeLinear, or MatMulInteger's zero points
    y     = matmul(real x, real w)                w made from a param; or a convolution, with zeros put around real x

The sum over x and w is one of integers: Σ(x - zx)(w - zw)·sx·sw = sx·sw·(Σxw - zx·Σw - zw·Σx + K·zx·zw). Nothing is rewritten
here. A kernel of these nodes may compute the sum of integers, which is exact but for one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.analysis.convolution import STRAIGHT, is_convolution, is_transposed, padding_in_front
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

PRODUCTS = {"aten.matmul": ("self", "other"), "aten.mm": ("self", "mat2"), "aten.linear": ("input", "weight"),
            "aten.addmm": ("mat1", "mat2"), **dict.fromkeys(sorted(STRAIGHT), ("input", "weight"))}  # fmt: skip
_CASTS = frozenset({"aten.to", "aten._to_copy"})
_BYTES = frozenset({DType.I8, DType.U8})
_REALS = frozenset({DType.F32, DType.F64})

Factor = float | Value


@dataclass(frozen=True, slots=True)
class Bytes:
    """A tensor of real numbers made from 8-bit integers."""

    raw: Value
    zero: Factor
    scale: Factor
    nodes: tuple[int, ...]
    """The nodes that make the real numbers, in no order."""


@dataclass(frozen=True, slots=True)
class ByteProduct:
    """A product whose operands are both made from 8-bit integers, the right one constant."""

    node: int
    x: Bytes
    weight: Bytes
    pad: int | None = None
    """The node that puts zeros around the real numbers for a convolution."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes that belong to it."""
        return (self.node, *self.x.nodes, *self.weight.nodes, *(() if self.pad is None else (self.pad,)))


def byte_products(graph: Graph) -> Mapping[int, ByteProduct]:
    """The products of bytes by the index of their node."""
    params = {p.value.name for p in graph.params}
    if not any(_dtype(v) in _BYTES for v in (*graph.inputs, *(p.value for p in graph.params))):
        made = (v for n in graph.nodes for v in n.outs)
        if not any(_dtype(v) in _BYTES for v in made):
            return {}
    maker = makers(graph)
    found: dict[int, ByteProduct] = {}
    for i, node in enumerate(graph.nodes):
        if not _multiplies(node):
            continue
        left, right = (argument(node, n) for n in PRODUCTS[packet(node.op)])
        left, pad = _unpadded(graph, node, left, maker)
        x, w = (made_from_bytes(graph, v, maker) for v in (left, right))
        if x is not None and w is not None and w.raw.name in params and x.raw.name not in params:
            found[i] = ByteProduct(i, x, w, pad)
    return found


def _multiplies(node: Node) -> bool:
    """Whether every result of a node is a sum over all of an input's channels or columns."""
    if packet(node.op) not in PRODUCTS:
        return False
    if not is_convolution(node):
        return True
    out = node.outs[0].type
    several = isinstance(out, TensorType) and out.shape[1] != 1  # a single output channel leaves most of a vector empty
    return several and argument(node, "groups", 1) == 1 and not is_transposed(node)


def _unpadded(graph: Graph, node: Node, left: object, maker: Mapping[str, int]) -> tuple[object, int | None]:
    """What lies behind the zeros around a convolution's input, and the node that puts them there."""
    if not is_convolution(node) or (found := padding_in_front(graph, node)) is None:
        return left, None
    return found[0].args[0], maker[found[0].outs[0].name]


def weight_nodes(graph: Graph) -> frozenset[int]:
    """The nodes that make real matrices of byte weights which meet an input made from bytes, whatever scales and shifts them.

    Computing these once, as is right for other constants, would hide the bytes.
    """
    maker = makers(graph)
    params = {p.value.name for p in graph.params}
    found: set[int] = set()
    for node in graph.nodes:
        if _multiplies(node):
            left, right = (argument(node, n) for n in PRODUCTS[packet(node.op)])
            (x, _), (weight, chain) = (
                _traced(graph, v, maker) for v in (_unpadded(graph, node, left, maker)[0], right)
            )
            if x is not None and weight is not None and weight.name in params and x.name not in params:
                found |= chain
    return frozenset(found)


def _traced(graph: Graph, value: object, maker: Mapping[str, int]) -> tuple[Value | None, set[int]]:
    """The bytes at the beginning of a chain of scaling, shifting and casting; None where there are none."""
    chain: set[int] = set()
    while isinstance(value, Value) and _dtype(value) not in _BYTES:
        i = maker.get(value.name, -1)
        if i < 0 or packet(graph.nodes[i].op) not in (*_CASTS, "aten.mul", "aten.sub"):
            return None, chain
        chain.add(i)
        value = graph.nodes[i].args[0]
    return (value, chain) if isinstance(value, Value) else (None, chain)


def made_from_bytes(graph: Graph, value: object, maker: Mapping[str, int]) -> Bytes | None:
    """How a tensor of real numbers is made from bytes; None where it is not."""
    if not isinstance(value, Value) or _dtype(value) not in _REALS:
        return None
    nodes: list[int] = []
    scale: Factor = 1.0
    zero: Factor = 0.0
    at: Node | None

    def step(v: object) -> tuple[int, Node | None]:
        i = maker.get(v.name, -1) if isinstance(v, Value) else -1
        return i, graph.nodes[i] if i >= 0 and graph.nodes[i].kind is Kind.OPERATOR else None

    i, at = step(value)
    if at is not None and packet(at.op) == "aten.mul" and (factor := _number(at.args[1])) is not None:
        scale, value = factor, at.args[0]
        nodes.append(i)
        i, at = step(value)
    if at is not None and packet(at.op) == "aten.sub" and not at.attrs and (factor := _number(at.args[1])) is not None:
        zero, value = factor, at.args[0]
        nodes.append(i)
        i, at = step(value)
    while at is not None and packet(at.op) in _CASTS:
        nodes.append(i)
        value = at.args[0]
        if _dtype(value) in _BYTES:
            assert isinstance(value, Value)
            raw = _uncast(graph, zero, maker, nodes) if isinstance(zero, Value) else zero
            return None if raw is None else Bytes(value, raw, scale, tuple(nodes))
        if _dtype(value) not in _REALS:
            return None
        i, at = step(value)
    return None


def _uncast(graph: Graph, zero: Value, maker: Mapping[str, int], nodes: list[int]) -> Value | None:
    """The bytes that a zero point known only at run time is; they need no conversion to be subtracted."""
    value: object = zero
    while isinstance(value, Value):
        if _dtype(value) in _BYTES:
            return value
        i = maker.get(value.name, -1)
        if i < 0 or packet(graph.nodes[i].op) not in _CASTS:
            return None
        nodes.append(i)
        value = graph.nodes[i].args[0]
    return None


def _number(arg: object) -> Factor | None:
    return arg if isinstance(arg, int | float | Value) else None


def _dtype(v: object) -> DType | None:
    return v.type.dtype if isinstance(v, Value) and isinstance(v.type, TensorType) else None
