"""The hypergraph's data; behaviour lives in functions elsewhere.

    graph ::= inputs, params, nodes in a topological order, outputs, guards
    node  ::= outs = op(args, attrs) {nested graphs} @loc
    arg   ::= value | number | string | None | dtype | token | (arg, ...)

A `Value` is a hyperedge: one producer (an input, a param or a node), any number of consumers. A `Node` is an
operator, a transfer or a control node. `args` follow the operator's own signature, so
`torch_op(*args, **attrs)` is the node's meaning; values may stand inside tuples (`[s0, 12, 64]`).
A nested graph is closed: what it uses from outside comes in through the control node's args.
Params are named tensors that live outside the graph, so a graph stays small plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from enum import StrEnum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Sym
from hotfuse.ir.types import DType, Type


class Kind(StrEnum):
    """The three kinds of nodes."""

    OPERATOR = "operator"
    TRANSFER = "transfer"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Loc:
    """Where a node came from: the user's line, and the module path or ONNX node name."""

    file: str = ""
    line: int = 0
    name: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return " ".join(part for part in (place, self.name and f"({self.name})") if part)


@dataclass(frozen=True, slots=True)
class Token:
    """A named constant of torch that is neither number nor string: a device, memory format or layout."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """A hyperedge. Its name is unique in its graph."""

    name: str
    type: Type

    def __hash__(self) -> int:
        return hash(self.name)


Arg = Value | int | float | complex | bool | str | None | DType | Token | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One operator, transfer or control node."""

    kind: Kind
    op: str
    args: tuple[Arg, ...]
    outs: tuple[Value, ...]
    attrs: tuple[tuple[str, Arg], ...] = ()
    graphs: tuple[Graph, ...] = ()
    loc: Loc = Loc()
    ins: tuple[Value, ...] = field(init=False, compare=False, repr=False)
    """The values read, in order of first use: derived from args and attrs."""

    def __post_init__(self) -> None:
        seen: dict[str, Value] = {}
        for arg in (*self.args, *(a for _, a in self.attrs)):
            for v in values_in(arg):
                seen.setdefault(v.name, v)
        object.__setattr__(self, "ins", tuple(seen.values()))

    def attr(self, name: str, default: Arg = None) -> Arg:
        """The attribute of that name, or the default."""
        return next((a for n, a in self.attrs if n == name), default)


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor that lives outside the graph, under `key` in the model's weights."""

    value: Value
    key: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A closed graph; `guards` are predicates over shape symbols under which it was captured."""

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]
    guards: tuple[Sym, ...] = ()


def values_in(arg: Arg) -> Iterator[Value]:
    """Every value inside an argument, in order."""
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, tuple):
        for a in arg:
            yield from values_in(a)


def map_values(arg: Arg, fn: dict[str, Arg]) -> Arg:
    """The argument with values replaced by name; values not named stay."""
    if isinstance(arg, Value):
        return fn.get(arg.name, arg)
    if isinstance(arg, tuple):
        return tuple(map_values(a, fn) for a in arg)
    return arg


def map_node(node: Node, values: dict[str, Arg], outs: tuple[Value, ...] | None = None) -> Node:
    """The node on other values, replaced by name; with other results, if they are given. Nested graphs stay."""
    args = tuple(map_values(a, values) for a in node.args)
    attrs = tuple((name, map_values(a, values)) for name, a in node.attrs)
    return replace(node, args=args, attrs=attrs, outs=node.outs if outs is None else outs)


def makers(graph: Graph) -> dict[str, int]:
    """By value, the number of the node that makes it."""
    return {v.name: i for i, n in enumerate(graph.nodes) for v in n.outs}


def readers(graph: Graph) -> dict[str, list[int]]:
    """By value, the numbers of the nodes that read it, in order; outputs are not among them."""
    found: dict[str, list[int]] = {}
    for i, n in enumerate(graph.nodes):
        for v in n.ins:
            found.setdefault(v.name, []).append(i)
    return found


def unused_name(stem: str, taken: set[str]) -> str:
    """The stem with the first number that makes it a name which is not taken; it is from now on."""
    number = 1
    while f"{stem}{number}" in taken:
        number += 1
    taken.add(f"{stem}{number}")
    return f"{stem}{number}"


def sources(graph: Graph) -> tuple[Value, ...]:
    """The values a graph starts from: inputs, then params."""
    return (*graph.inputs, *(p.value for p in graph.params))


def output_values(graph: Graph) -> tuple[Value, ...]:
    """The values among the outputs, in order, with repeats."""
    return tuple(v for out in graph.outputs for v in values_in(out))
