"""Halves that change places, as rotary positions have them: a turned view times signs, instead of two pieces put together.

    cat((-x[..., h:], x[..., :h]), -1)   ->   (flip(x.view(..., 2, h), -2) * [-1, 1]).view(..., 2h)

A kernel for a GPU makes no values of pieces, since each thread would have to decide between them; a turned view is another address.
So the whole rotation of queries and keys becomes one kernel instead of five.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, makers, output_values, readers, unused_name
from hotfuse.ir.types import ROW_MAJOR, DType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def turned(graph: Graph) -> Graph:
    """The graph with such halves as turned views."""
    maker, taken = makers(graph), {v.name for v in graph.inputs} | {v.name for n in graph.nodes for v in n.outs}
    taken |= {p.value.name for p in graph.params}
    nodes: list[Node] = []
    signs: dict[tuple[DType, str], Value] = {}
    changed = False
    for node in graph.nodes:
        source = _swapped_halves(graph, node, maker)
        if source is None:
            nodes.append(node)
            continue
        changed = True
        nodes += _as_turned(node, source, signs, taken)
    return _without_unread(replace(graph, nodes=tuple(nodes))) if changed else graph


def _swapped_halves(graph: Graph, node: Node, maker: dict[str, int]) -> Value | None:
    """What a node's two pieces are the halves of, the second one negated and in front; None where it is anything else."""
    if packet(node.op) != "aten.cat" or not isinstance(node.args[0], tuple) or len(node.args[0]) != 2:
        return None
    front, back = node.args[0]
    if not isinstance(front, Value) or not isinstance(back, Value):
        return None
    negated = graph.nodes[maker[front.name]] if front.name in maker else None
    if negated is None or packet(negated.op) != "aten.neg":
        return None
    second, first = _half(graph, negated.ins[0], maker), _half(graph, back, maker)
    if second is None or first is None or first[0].name != second[0].name:
        return None
    (x, begin, end), (_, middle, stop) = first, second
    if not isinstance(x.type, TensorType) or x.type.dtype not in _FLOATS or not x.type.shape:
        return None
    width, rank, dim = x.type.shape[-1], len(x.type.shape), argument(node, "dim", 0)
    halves = isinstance(width, int) and begin == 0 and end == middle == width // 2 and stop >= width and width % 2 == 0
    numbers = all(isinstance(n, int) for n in x.type.shape)
    return x if halves and numbers and isinstance(dim, int) and dim % rank == rank - 1 else None


def _half(graph: Graph, v: Value, maker: dict[str, int]) -> tuple[Value, int, int] | None:
    """The value that another one is a slice of along its last dim, from where, and to where."""
    node = graph.nodes[maker[v.name]] if v.name in maker else None
    if node is None or packet(node.op) != "aten.slice":
        return None
    source, dim = node.ins[0], argument(node, "dim", 0)
    begin, end, step = argument(node, "start", 0) or 0, argument(node, "end"), argument(node, "step", 1)
    rank = len(source.type.shape) if isinstance(source.type, TensorType) else 0
    last = (1 << 63) - 1 if end is None else end
    if not isinstance(dim, int) or not isinstance(begin, int) or not isinstance(last, int) or step not in (None, 1):
        return None
    return (source, begin, last) if rank and dim % rank == rank - 1 and begin >= 0 and last >= 0 else None


def _as_turned(node: Node, x: Value, signs: dict[tuple[DType, str], Value], taken: set[str]) -> list[Node]:
    made: list[Node] = []
    assert isinstance(x.type, TensorType)
    dtype, device, shape = x.type.dtype, x.type.device, x.type.shape
    width = shape[-1]
    assert isinstance(width, int)

    def new(stem: str, op: str, args: tuple[Arg, ...], dims: tuple[int, ...], of: DType, **attrs: Arg) -> Value:
        name = unused_name(stem, taken)
        taken.add(name)
        out = Value(name, TensorType(of, dims, ROW_MAJOR, device))
        made.append(Node(Kind.OPERATOR, op, args, (out,), tuple(attrs.items()), loc=node.loc))
        return out

    if (dtype, device) not in signs:
        each = new("each", "aten.arange.default", (2,), (2,), DType.I64, device=Token("device", device))
        double = new("double", "aten.mul.Tensor", (each, 2), (2,), DType.I64)
        odd = new("odd", "aten.sub.Tensor", (double, 1), (2,), DType.I64)
        wide = new("sign", "aten.to.dtype", (odd, dtype), (2,), dtype)
        signs[dtype, device] = new("signs", "aten.unsqueeze.default", (wide, 1), (2, 1), dtype)
    sizes = tuple(n for n in shape if isinstance(n, int))
    parted = (*sizes[:-1], 2, width // 2)
    halves = new("halves", "aten.reshape.default", (x, parted), parted, dtype)
    flipped = new("turned", "aten.flip.default", (halves, (-2,)), parted, dtype)
    signed = new("signed", "aten.mul.Tensor", (flipped, signs[dtype, device]), parted, dtype)
    made.append(Node(Kind.OPERATOR, "aten.reshape.default", (signed, sizes), node.outs, loc=node.loc))
    return made


def _without_unread(graph: Graph) -> Graph:
    """Without the slices and negations that nobody reads any more."""
    while True:
        read, returned = readers(graph), {v.name for v in output_values(graph)}
        kept = tuple(n for n in graph.nodes if packet(n.op) not in ("aten.slice", "aten.neg") or any(
            read.get(v.name) or v.name in returned for v in n.outs))  # fmt: skip
        if len(kept) == len(graph.nodes):
            return graph
        graph = replace(graph, nodes=kept)
