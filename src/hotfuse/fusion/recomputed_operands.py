"""Operands of their own: cheap nodes that several kernels would want to have inside are written once for each.

    %r = (cast(%q) - 3) * 0.1        read by three products and a sum       ->   each product casts for itself, from %q
    %m = expand(%mask)               read by the attention of every layer   ->   each attention walks %mask by strides

Both cost nothing inside a kernel, and a tensor that nobody stores. A node is still in one group only, so what is shared has to be
copied before groups are formed; what nobody reads afterwards is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hotfuse.analysis.attention import FUSED, written
from hotfuse.analysis.quantized import byte_products
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, makers, map_node, output_values, readers, unused_name
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet


def with_own_operands(graph: Graph) -> Graph:
    """The graph in which products of bytes and masks of attention share no node that prepares them."""
    wanted: list[tuple[int, frozenset[int]]] = [
        (p.node if p.pad is None or chain is p.weight.nodes else p.pad, frozenset(chain))
        for p in byte_products(graph).values()
        for chain in (p.x.nodes, p.weight.nodes)
    ]
    maker = makers(graph)
    for reader, mask in _masks(graph):
        views = _views(graph, mask, maker)
        if views:
            wanted.append((reader, frozenset(views)))
    copied: dict[int, list[Node]] = {}
    nodes = list(graph.nodes)
    names = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs}
    names |= {p.value.name for p in graph.params}
    shared = _shared(graph, wanted)
    for at, (reader, chain) in enumerate(wanted):
        if at not in shared:
            continue
        new: dict[str, Arg] = {}
        made: list[Node] = []
        for i in sorted(chain):
            node = graph.nodes[i]
            outs = tuple(Value(unused_name(f"{v.name}.own", names), v.type) for v in node.outs)
            made.append(map_node(node, new, outs))
            new.update({old.name: out for old, out in zip(node.outs, outs, strict=True)})
        copied.setdefault(reader, []).extend(made)
        nodes[reader] = map_node(nodes[reader], new, nodes[reader].outs)
    if not copied:
        return graph
    ordered = [n for i, node in enumerate(nodes) for n in (*copied.get(i, ()), node)]
    return _without_dead(replace(graph, nodes=tuple(ordered)), {i for _, chain in wanted for i in chain}, graph)


def _masks(graph: Graph) -> Iterable[tuple[int, Value]]:
    """The masks of attentions, with the node that reads each."""
    for i, node in enumerate(graph.nodes):
        if packet(node.op) == FUSED and isinstance(mask := argument(node, "attn_mask"), Value):
            yield i, mask
    for w in written(graph):
        if w.mask is not None:
            yield next(i for i in w.nodes if w.mask in graph.nodes[i].ins), w.mask


def _views(graph: Graph, value: Value, maker: dict[str, int]) -> list[int]:
    """The chain of views that ends at a value."""
    found: list[int] = []
    while (i := maker.get(value.name, -1)) >= 0:
        node = graph.nodes[i]
        tensors = [v for v in node.ins if isinstance(v.type, TensorType)]
        if node.kind is not Kind.OPERATOR or lookup(node.op).access is not Access.MOVEMENT or len(tensors) != 1:
            break
        found.append(i)
        value = tensors[0]
    return found


def _shared(graph: Graph, wanted: list[tuple[int, frozenset[int]]]) -> set[int]:
    """Which chains have a node that someone else reads; the last reader of a chain that all others copied keeps it."""
    returned = {v.name for v in output_values(graph)}
    reading = readers(graph)
    shared: set[int] = set()
    for at, (reader, chain) in enumerate(wanted):
        made = [v.name for i in chain for v in graph.nodes[i].outs]
        outside = any(n in returned or set(reading.get(n, ())) - chain - {reader} for n in made)
        if outside:
            shared.add(at)
    return shared


def _without_dead(graph: Graph, originals: set[int], before: Graph) -> Graph:
    """Without the copied nodes that nobody reads any more."""
    candidates = {v.name for i in originals for v in before.nodes[i].outs}
    used = {v.name for v in output_values(graph)}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.outs and all(v.name in candidates and v.name not in used for v in node.outs):
            continue
        used |= {v.name for v in node.ins}
        kept.append(node)
    return replace(graph, nodes=tuple(reversed(kept)))
