"""The branch that is always taken becomes straight-line code.

    prefix:  what the condition depends on            run first, its values go to whichever side follows
    hot:     the rest of the graph, branch written out  -> one run of code across the boundary the `if` was
    cold:    the rest of the graph, `if` and all        -> any other outcome; nothing is computed twice

    %c = lt(%x, 0)                       prefix(%x) -> %c
    %y = control.if(%c, [%x]) {...}      hot(%x):      %y = neg(%x)  %z = exp(%y)  return %z
    %z = exp(%y)                         cold(%x, %c): %y = control.if(%c, [%x]) {...}  %z = exp(%y)  return %z
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import IF
from hotfuse.ir.dims import Dim, Sym, substitute, symbols
from hotfuse.ir.graph import Arg, Graph, Node, Param, Value, makers, map_node, map_values, output_values
from hotfuse.ir.retype import retyped
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import Type, dims_of, with_dims
from hotfuse.ir.verify import verify


@dataclass(frozen=True, slots=True)
class Speculation:
    """A graph cut behind a condition. `cold` takes the graph's inputs and then the prefix's outputs; `hot` those only where it
    reads any of them."""

    prefix: Graph
    condition: int
    """Which output of the prefix is the condition."""
    outcome: bool
    hot: Graph
    cold: Graph


def conditions(graph: Graph) -> tuple[int, ...]:
    """The `if` nodes of a graph whose condition is computed in it or comes in: what can be speculated on."""
    return tuple(i for i, n in enumerate(graph.nodes) if n.op == IF and isinstance(n.args[0], Value))


def speculate(graph: Graph, at: int, *, outcome: bool) -> Speculation:
    """Bet that the `if` at node `at` goes one way."""
    node = graph.nodes[at]
    condition = node.args[0]
    if node.op != IF or not isinstance(condition, Value):
        raise InternalError(f"node {at} of {graph.name!r} is not a condition to bet on", where=str(node.loc))
    needed = _needed(graph, condition)
    prefix = extract(graph, needed, f"{graph.name}.until")
    known = output_values(prefix)
    if not needed:  # the condition is an input: there is nothing to compute first
        prefix = Graph(f"{graph.name}.until", (condition,), (), (), (condition,))
        known = ()
    rest = tuple(n for i, n in enumerate(graph.nodes) if i not in set(needed))
    cold = _closed(replace(graph, name=f"{graph.name}.otherwise", inputs=(*graph.inputs, *known), nodes=rest))
    hot = _closed(_inlined(replace(cold, name=f"{graph.name}.{'then' if outcome else 'else'}"), rest.index(node), outcome=outcome))
    if known and not any(v in _read(hot) for v in known):
        hot = replace(hot, inputs=graph.inputs)
    position = next(i for i, v in enumerate(output_values(prefix)) if v.name == condition.name)
    return Speculation(prefix, position, outcome, verify(hot), verify(cold))


def _needed(graph: Graph, value: Value) -> list[int]:
    """The nodes a value depends on."""
    maker = makers(graph)
    found: set[int] = set()
    waiting = [value.name]
    while waiting:
        if (i := maker.get(waiting.pop())) is not None and i not in found:
            found.add(i)
            waiting += [v.name for v in graph.nodes[i].ins]
    return sorted(found)


def _read(graph: Graph) -> set[Value]:
    """What nodes and callers read."""
    return {v for n in graph.nodes for v in n.ins} | set(output_values(graph))


def _closed(graph: Graph) -> Graph:
    """Only the params that are still read."""
    used = {v.name for v in _read(graph)}
    return replace(graph, params=tuple(p for p in graph.params if p.value.name in used))


def _inlined(graph: Graph, at: int, *, outcome: bool) -> Graph:
    """The graph with a branch in place of its `if`."""
    node = graph.nodes[at]
    branch = node.graphs[0 if outcome else 1]
    captures = node.args[1]
    if not isinstance(captures, tuple):
        raise InternalError(f"{node.op} has no captures", where=str(node.loc))
    taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs}
    taken |= {p.value.name for p in graph.params}
    new: dict[str, Arg] = {v.name: c for v, c in zip(branch.inputs, captures, strict=True)}
    params = list(graph.params)
    for p in branch.params:
        value = Value(_fresh(p.value.name, taken), p.value.type)
        new[p.value.name] = value
        params.append(Param(value, p.key))
    nodes: list[Node] = []
    for n in branch.nodes:
        outs = tuple(Value(_fresh(v.name, taken), v.type) for v in n.outs)
        nodes.append(map_node(n, new, outs))
        new |= {old.name: v for old, v in zip(n.outs, outs, strict=True)}
    given = {out.name: map_values(made, new) for out, made in zip(node.outs, branch.outputs, strict=True)}
    after = tuple(map_node(n, given) for n in graph.nodes[at + 1 :])
    joined = replace(
        graph, params=tuple(params), nodes=(*graph.nodes[:at], *nodes, *after),
        outputs=tuple(map_values(o, given) for o in graph.outputs),
    )
    return _with_sizes(joined, _learned(node, given, graph))


def _fresh(name: str, taken: set[str]) -> str:
    made = name
    k = 0
    while made in taken:
        k += 1
        made = f"{name}.{k}"
    taken.add(made)
    return made


def _learned(node: Node, given: dict[str, Arg], graph: Graph) -> dict[str, Dim]:
    """What sizes that only the run could tell are in this branch."""
    bound = frozenset[str]().union(*(symbols(d) for v in graph.inputs for d in dims_of(v.type)))
    found: dict[str, Dim] = {}
    for out in node.outs:
        made = given[out.name]
        if not isinstance(made, Value):
            continue
        inner = dims_of(made.type)
        for d, here in zip(dims_of(out.type), inner, strict=False):
            if isinstance(d, Sym) and d.op == "sym" and (name := str(d.args[0])) not in bound and d != here:
                found.setdefault(name, here)
    return found


def _with_sizes(graph: Graph, sizes: dict[str, Dim]) -> Graph:
    if not sizes:
        return graph

    def known(t: Type) -> Type:
        return with_dims(t, tuple(substitute(d, sizes) for d in dims_of(t)))

    return replace(retyped(graph, known, nested=True), guards=graph.guards)
