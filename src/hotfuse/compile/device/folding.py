"""Layer norms between products, on a device: taken in by the products around them, so that no kernel is launched for them alone.

    before   [x = linear, add]   [y = layer_norm(x)]   [linear(y), ...]   [linear, add y]
    after    [x = linear, add, moments of x's blocks]   [y = normalized(x), linear(y), ...]   [y' = normalized(x), linear, add y']

For few rows a kernel of its own costs more to wait for than the norm costs to compute; with many it is the other way round, since
every program that reads rows computes them anew. Plans of both forms are made and measured (`compile.device.device_plan`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from hotfuse.compile.unit.grouping import GroupedGraph
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, map_node, output_values, readers
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.folded_norm import BLOCK, MEAN, NORMALIZED, SPREAD
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

FOLDED = frozenset({MEAN, SPREAD, NORMALIZED})
"""Ops that stand for parts of a norm."""
MAX_ROWS = 1024
MAX_BLOCKS = 128


def _norm(graph: Graph, group: Group) -> Node | None:
    """The layer norm of rows that is all there is in a group; None where it is something else."""
    if len(group.nodes) != 1 or packet((node := graph.nodes[group.nodes[0]]).op) != "aten.layer_norm":
        return None
    x, weight, bias = (argument(node, n) for n in ("input", "weight", "bias"))
    shape, eps = argument(node, "normalized_shape"), argument(node, "eps", 1e-5)
    if not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(bias, Value) or not isinstance(eps, float):
        return None
    if not isinstance(t := x.type, TensorType) or t.dtype not in (DType.F16, DType.BF16) or not isinstance(shape, tuple):
        return None
    sizes = [n for n in t.shape if isinstance(n, int)]
    if len(sizes) != len(t.shape) or len(shape) != 1 or len(sizes) < 2 or math.prod(sizes[:-1]) > MAX_ROWS:
        return None
    return node if sizes[-1] % BLOCK == 0 and 2 <= sizes[-1] // BLOCK <= MAX_BLOCKS and math.prod(sizes[:-1]) > 1 else None


def folded(found: GroupedGraph) -> GroupedGraph:
    """With every norm taken in that stands between products with weights; the same where none does."""
    graph = found.graph
    home = {i: k for k, g in enumerate(found.groups) for i in g.nodes}
    maker, reading = makers(graph), readers(graph)
    returned = {v.name for v in output_values(graph)}
    groups: list[list[Node]] = [[graph.nodes[i] for i in g.nodes] for g in found.groups]
    for k, g in enumerate(found.groups):
        norm = _norm(graph, g)
        if norm is None or norm.outs[0].name in returned:
            continue
        x, y = norm.ins[0], norm.outs[0]
        made_in, into = home.get(maker.get(x.name, -1), -1), sorted({home[r] for r in reading.get(y.name, [])})
        if made_in < 0 or not into or any(found.groups[i].kind != GroupKind.GEMM_WEIGHT for i in (made_in, *into)):
            continue
        means, spreads = (_of_blocks(x, f"{y.name}.{what}") for what in ("means", "spreads"))
        groups[made_in] += [Node(Kind.OPERATOR, op, (x,), (v,), loc=norm.loc) for op, v in ((MEAN, means), (SPREAD, spreads))]
        args = (x, means, spreads, argument(norm, "weight"), argument(norm, "bias"), argument(norm, "eps", 1e-5))
        for i in into:
            own = Value(f"{y.name}.in{i}", y.type)
            readers_here = [map_node(n, {y.name: own}) for n in groups[i]]
            groups[i] = [Node(Kind.OPERATOR, NORMALIZED, args, (own,), loc=norm.loc), *readers_here]
        groups[k] = []
    at, made = 0, list[Group]()
    for g, nodes in zip(found.groups, groups, strict=True):
        if nodes:
            made.append(replace(g, nodes=tuple(range(at, at + len(nodes)))))
            at += len(nodes)
    return replace(found, graph=replace(graph, nodes=tuple(n for nodes in groups for n in nodes)), groups=tuple(made))


def _of_blocks(x: Value, name: str) -> Value:
    assert isinstance(x.type, TensorType)
    *rows, width = x.type.shape
    assert isinstance(width, int)
    return Value(name, replace(x.type, dtype=DType.F32, shape=(*rows, width // BLOCK)))
