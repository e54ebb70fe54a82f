"""Types of nodes that were written anew: torch's own kernels say how results lie, and whether their sizes are as said.

Operators of the CPU run on zeros of small sizes. Meta kernels would say the same, but the first of them imports Dynamo into a
process that serves: one and a half seconds with the interpreter lock held. They answer where zeros are no input (a division of
integers), for devices, for what draws numbers (the program's generator stays where it is) and for operators of our own. Layers
repeat, so each operator is asked once for operands of one kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hotfuse.analysis.shapes import holds
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import evaluate, symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, map_values, output_values, sources
from hotfuse.ir.types import ScalarType, TensorType, Type, dims_of
from hotfuse.ops.dense_order import layout_by
from hotfuse.ops.table import is_random, resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_dtypes import torch_dtype

_TRIES = ((5, 2), (8, 8), (64, 64), (16, 0), (2, 1), (1, 0))
"""Sizes to try for a graph's symbols: the first, and what each further one is larger by."""


def possible_sizes(graph: Graph) -> Mapping[str, int] | None:
    """Sizes that a graph could be called with, and such that data decide inside it; None where none of a few come to mind."""
    names = _symbols_of(sources(graph))
    inside = _symbols_of([v for n in graph.nodes for v in n.outs]) - names
    for first, step in _TRIES:
        sizes = {name: first + i * step for i, name in enumerate(sorted(names))}
        if all(symbols(g) <= sizes.keys() and holds(g, sizes) for g in graph.guards):
            return sizes | {name: first + i * step for i, name in enumerate(sorted(inside), len(sizes))}
    return None


def _symbols_of(values: Sequence[Value]) -> frozenset[str]:
    return frozenset[str]().union(*(symbols(d) for v in values for d in dims_of(v.type)))


def relaid(graph: Graph, changed: Collection[str], sizes: Mapping[str, int]) -> Graph:
    """The graph with layouts as its ops give them, behind the values named; raises InternalError where sizes are not as said."""
    asked, made = _Kernels(), _OperandStandIns(sizes)
    new: dict[str, Arg] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if not any(v.name in new or v.name in changed for v in (*node.ins, *node.outs)):
            nodes.append(node)
            continue
        if node.kind is Kind.CONTROL:  # what it gives lies as it did where what it is given does
            if any(v.name in new for v in node.ins):
                raise InternalError("a graph cannot be laid out anew", because="a branch or a loop is given what lies otherwise")
            nodes.append(node)
            continue
        now = map_node(node, new)
        results = _run(now, made, asked)
        outs: list[Value] = []
        for v, t in zip(node.outs, results, strict=True):
            made.put(v, t)
            outs.append(Value(v.name, _typed(v, t, sizes)))
            if outs[-1].type != v.type:
                new[v.name] = outs[-1]
        nodes.append(replace(now, outs=tuple(outs)))
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, new) for o in graph.outputs))


def lies_as_before(made: Graph, graph: Graph, written: Collection[str]) -> bool:
    """Whether what is returned has the type that it had, and so have these values: views of them show the caller their strides."""

    def types(of: Graph) -> list[Type]:
        nodes = [v.type for n in of.nodes for v in n.outs if v.name in written]
        return [*nodes, *(v.type for v in output_values(of))]

    return types(made) == types(graph)


class _OperandStandIns:
    """What operators are given for values: what others gave, or tensors of the types that values have."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._made: dict[str, Any] = {}

    def put(self, v: Value, given: Any) -> None:
        """What stands for a value."""
        self._made[v.name] = given

    def get(self, v: Value) -> Any:
        """What stands for a value; of its type where nothing was put, which seldom is asked for."""
        if v.name not in self._made:
            self._made[v.name] = _stand_in(v.type, self._sizes)
        return self._made[v.name]


def _stand_in(t: Type, sizes: Mapping[str, int]) -> Any:
    match t:
        case TensorType(dtype, shape, layout):
            dims = [evaluate(d, sizes) for d in shape]
            if any(d < 0 for d in dims):  # the sizes that were thought of are none that data could decide
                raise InternalError("a graph cannot be laid out anew", because=f"no tensor has the sizes {dims}")
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


class _Kernels:
    """What operators gave so far, by their operands; and memory of zeros that all operands share."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._zeros = torch.zeros(0, dtype=torch.uint8)

    def results(self, node: Node, args: list[Any], attrs: dict[str, Any]) -> tuple[Any, ...]:
        """Stand-ins for the results of a node."""
        key = (node.op, *map(_described, args), *((k, _described(a)) for k, a in attrs.items()))
        if key not in self._known:
            found = self._on_zeros(node, args, attrs)
            self._known[key] = found if found is not None else _called(node, args, attrs, torch.device("meta"))
        return self._known[key]

    def _on_zeros(self, node: Node, args: list[Any], attrs: dict[str, Any]) -> tuple[Any, ...] | None:
        devices = {v.type.device for v in (*node.ins, *node.outs) if isinstance(v.type, TensorType)}
        if not node.op.startswith("aten.") or is_random(node.op) or not devices <= {"cpu"}:
            return None
        try:
            given = [self._zeroed(a) for a in args]
            found = _called(node, given, {k: self._zeroed(a) for k, a in attrs.items()}, torch.device("cpu"))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError):
            return None
        return tuple(_lying_as(t) if isinstance(t, torch.Tensor) else t for t in found)

    def _zeroed(self, a: Any) -> Any:
        """A stand-in with memory, as operators of the CPU take it."""
        if isinstance(a, list):
            return [self._zeroed(x) for x in a]  # pyright: ignore[reportUnknownVariableType] - arguments of any operator
        if not isinstance(a, torch.Tensor):
            return a
        span = max(1, 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)))
        if span * a.element_size() > self._zeros.numel():  # of NumPy's, which come with their first use
            self._zeros = torch.from_numpy(np.zeros(-(-span * a.element_size() // 16) * 16, np.uint8))
        return self._zeros.view(a.dtype).as_strided(a.shape, a.stride())


def _described(a: Any) -> Any:
    """An argument as a key: whatever its memory holds, operators of stand-ins see how it lies."""
    if isinstance(a, torch.Tensor):
        return (a.dtype, tuple(a.shape), a.stride())
    return tuple(_described(x) for x in a) if isinstance(a, list) else (type(a), a)  # pyright: ignore[reportUnknownVariableType]


def _lying_as(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _called(node: Node, args: list[Any], attrs: dict[str, Any], device: torch.device) -> tuple[Any, ...]:
    def here(a: Any) -> Any:
        return device if isinstance(a, torch.device) else a

    with torch.no_grad():
        found = resolve(node.op)(*map(here, args), **{k: here(a) for k, a in attrs.items()})
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _run(node: Node, made: _OperandStandIns, asked: _Kernels) -> tuple[Any, ...]:
    def given(a: Arg) -> Any:
        if isinstance(a, Value):
            return made.get(a)
        return [given(x) for x in a] if isinstance(a, tuple) else to_torch(a)

    attrs = {k: given(a) for k, a in node.attrs if k != "pin_memory"}
    try:
        return asked.results(node, [given(a) for a in node.args], attrs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as e:
        what = f"{node.op} does not accept the operands that a rewrite gives it"
        raise InternalError(what, where=str(node.loc), because=str(e)) from e


def _typed(v: Value, t: Any, sizes: Mapping[str, int]) -> Type:
    if not isinstance(v.type, TensorType):
        return v.type
    want = tuple(evaluate(d, sizes) for d in v.type.shape)
    if not isinstance(t, torch.Tensor) or tuple(t.shape) != want or t.dtype is not torch_dtype(v.type.dtype):
        got = f"{t.dtype} of {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise InternalError(f"a rewrite says that %{v.name} is {v.type.dtype.value} of {want}", because=f"it is {got}")
    return replace(v.type, layout=layout_by(tuple(t.shape), tuple(t.stride())))
