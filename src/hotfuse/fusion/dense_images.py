"""Images that convolutions read lie in memory without gaps.

    %b = split(%x, ...)         half of the channels: of several images, each with a gap behind it
    %d = contiguous(%b)         what the kernel that makes %x writes, or one that only copies
    %y = conv2d(%d, ...)

A convolution's kernel finds pixels by strides that the types give, and a view with gaps has none there: the library took the
convolution, and the native run around it was interrupted. The copy is one pass over an image that the convolution reads many
times, and mostly part of the kernel that computes it, since views cost that nothing.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.convolution import is_convolution
from hotfuse.analysis.quantized import byte_products
from hotfuse.fusion.layout import CONVERTS
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, unused_name
from hotfuse.ir.types import Layout, TensorType


def dense_images(graph: Graph) -> Graph:
    """The graph in which convolutions with constant weights read copies of views with gaps; the same graph where there are none."""
    wanted = _read_with_gaps(graph)
    if not wanted:
        return graph
    names = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | {p.value.name for p in graph.params}
    copies: dict[str, Arg] = {}
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        x = wanted.get(i)
        if x is not None:
            if x.name not in copies:
                assert isinstance(x.type, TensorType)
                made = Value(unused_name(f"{x.name}_dense", names), replace(x.type, layout=Layout()))
                copies[x.name] = made
                nodes.append(Node(Kind.OPERATOR, CONVERTS, (x,), (made,)))
            node = map_node(node, {x.name: copies[x.name]})
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _read_with_gaps(graph: Graph) -> dict[int, Value]:
    """Images with gaps that convolutions read, by the number of the node that reads them: of bytes, the first that widens them."""
    convolutions = [(i, n) for i, n in enumerate(graph.nodes) if is_convolution(n)]
    if not convolutions:
        return {}
    params = {p.value.name for p in graph.params}
    bytewise = byte_products(graph)
    found: dict[int, Value] = {}
    for i, node in convolutions:
        product = bytewise.get(i)
        if product is not None:
            raw = product.x.raw
            found.update({j: raw for j in product.x.nodes if _with_gaps(raw) and raw in graph.nodes[j].ins})
        elif isinstance(x := node.args[0], Value) and _with_gaps(x) and isinstance(w := node.args[1], Value) and w.name in params:
            found[i] = x
    return found


def _with_gaps(x: Value) -> bool:
    return isinstance(x.type, TensorType) and x.type.layout.strided
