"""Types of nodes that were written anew: torch's own meta kernels say how results lie, and whether their sizes are as said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.shapes import holds
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Arg, Graph, Node, Value, map_node, map_values, sources
from hotfuse.ir.types import ScalarType, TensorType, Type, dims_of
from hotfuse.ops.dense_order import layout_by
from hotfuse.ops.table import resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_dtypes import torch_dtype

_TRIES = ((5, 2), (8, 8), (64, 64), (16, 0), (2, 1), (1, 0))
"""Sizes to try for a graph's symbols: the first, and what each further one is larger by."""


def possible_sizes(graph: Graph) -> Mapping[str, int] | None:
    """Sizes that a graph could be called with; None where none of a few come to mind."""
    names = sorted(frozenset[str]().union(*(symbols(d) for v in sources(graph) for d in dims_of(v.type))))
    for first, step in _TRIES:
        sizes = {name: first + i * step for i, name in enumerate(names)}
        if all(symbols(g) <= sizes.keys() and holds(g, sizes) for g in graph.guards):
            return sizes
    return None


def relaid(graph: Graph, changed: Collection[str], sizes: Mapping[str, int]) -> Graph:
    """The graph with layouts as its ops give them, behind the values named; raises InternalError where sizes are not as said."""
    made: dict[str, Any] = {v.name: _stand_in(v.type, sizes) for v in sources(graph)}
    new: dict[str, Arg] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if not any(v.name in new or v.name in changed for v in (*node.ins, *node.outs)):
            made |= {v.name: _stand_in(v.type, sizes) for v in node.outs}
            nodes.append(node)
            continue
        now = map_node(node, new)
        results = _run(now, made)
        outs: list[Value] = []
        for v, t in zip(node.outs, results, strict=True):
            made[v.name] = t
            outs.append(Value(v.name, _typed(v, t, sizes)))
            if outs[-1].type != v.type:
                new[v.name] = outs[-1]
        nodes.append(replace(now, outs=tuple(outs)))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, new) for o in graph.outputs))


def _stand_in(t: Type, sizes: Mapping[str, int]) -> Any:
    match t:
        case TensorType(dtype, shape, layout):
            dims = [evaluate(d, sizes) for d in shape]
            order = layout.order or tuple(range(len(dims)))
            strides, step = [0] * len(dims), 1
            for axis in reversed(order):
                strides[axis] = step
                step *= max(dims[axis], 1)
            return torch.empty_strided(dims, strides, dtype=torch_dtype(dtype), device="meta")
        case ScalarType(expr=e) if e is not None:
            return evaluate(e, sizes)
        case _:
            return None


def _run(node: Node, made: Mapping[str, Any]) -> tuple[Any, ...]:
    def given(a: Arg) -> Any:
        if isinstance(a, Value):
            return made[a.name]
        if isinstance(a, tuple):
            return [given(x) for x in a]
        found = to_torch(a)
        return torch.device("meta") if isinstance(found, torch.device) else found

    attrs = {k: given(a) for k, a in node.attrs if k != "pin_memory"}
    try:
        with torch.no_grad():
            found = resolve(node.op)(*[given(a) for a in node.args], **attrs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
        raise InternalError(f"{node.op} does not take what a rewrite gives it", where=str(node.loc), because=str(e)) from e
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _typed(v: Value, t: Any, sizes: Mapping[str, int]) -> Type:
    if not isinstance(v.type, TensorType):
        return v.type
    want = tuple(evaluate(d, sizes) for d in v.type.shape)
    if not isinstance(t, torch.Tensor) or tuple(t.shape) != want or t.dtype is not torch_dtype(v.type.dtype):
        got = f"{t.dtype} of {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise InternalError(f"a rewrite says that %{v.name} is {v.type.dtype.value} of {want}", because=f"it is {got}")
    return replace(v.type, layout=layout_by(tuple(t.shape), tuple(t.stride())))
