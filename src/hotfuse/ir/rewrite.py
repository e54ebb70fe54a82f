"""A driver for named rewrite rules that must end.

A rule looks at one node and may give a `Replacement`: the nodes that stand in its place, and for each of its outputs
the value (or number) that its readers read from then on. The driver applies rules until none fires, also in nested
graphs.

Why it ends: all rules of one run share a `Measure`, a tuple of natural numbers per node that depends only on the node
itself (never on the names or types of what it reads). A replacement's measures must sum to less than the replaced
node's, in lexicographic order; the driver checks that each time, so the sum over the graph falls with every
step and cannot fall forever. A rule that breaks this is named in an InternalError.

A rule's author also promises: the replacement computes the same values (NaN, -0.0, dtype and memory shared with other
values the user can see included), and every value it names is defined before the node.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar, cast

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Node, Value, map_node, map_values, output_values, values_in
from hotfuse.ir.text import show, show_arg, show_node, show_type
from hotfuse.ir.types import ScalarType, Type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measure:
    """A named size of a node; the size of a nested graph counts with the node that holds it."""

    name: str
    of: Callable[[Node], tuple[int, ...]]

    def total(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        """The sum over nodes and the graphs nested in them."""
        total: list[int] = []
        for node in nodes:
            inner = [self.total(g.nodes) for g in node.graphs]
            for one in (self.of(node), *inner):
                total += [0] * (len(one) - len(total))
                for i, n in enumerate(one):
                    total[i] += n
        return tuple(total)


def _leaves(arg: Arg) -> int:
    return sum(map(_leaves, arg)) if isinstance(arg, tuple) else 1


READS = Measure("values read", lambda n: (len(n.ins),))
"""For rules that put a number, or nothing, in the place of a value."""
SIZE = Measure("nodes, then arguments", lambda n: (1, sum(map(_leaves, (*n.args, *(a for _, a in n.attrs))))))


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes instead of one, and what its outputs' readers read instead, by output name."""

    nodes: tuple[Node, ...] = ()
    values: Mapping[str, Arg] = field(default_factory=dict[str, Arg])


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rewrite of one node; `note` says how it shrinks the measure."""

    name: str
    rewrite: Callable[[Node, Context], Replacement | None]
    note: str
    measure: Measure = SIZE
    ops: frozenset[str] | None = None
    """The ops (`aten.add`, without overload) the rule looks at; None for all."""


@dataclass(frozen=True, slots=True)
class RewriteTrace:
    """One step that was taken."""

    rule: str
    graph: str
    before: Node
    after: tuple[Node, ...]
    values: tuple[tuple[str, Arg], ...]

    def __str__(self) -> str:
        after = "; ".join(next(show_node(n)) for n in self.after)
        renames = ", ".join(f"%{name} -> {show_arg(arg)}" for name, arg in self.values)
        text = f"{self.rule}: {next(show_node(self.before))}  =>  {after or 'nothing'}"
        return f"{text} ({renames})" if renames else text


class Context:
    """What a rule may ask about the graph around a node, as it stands at that moment."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        """The graph as it was given; its inputs, params and guards still hold."""
        self._nodes: dict[int, Node] = {}
        self._place: dict[int, tuple[int, ...]] = {}
        self._producer: dict[str, int] = {}
        self._readers: dict[str, set[int]] = {}
        self._keys: dict[int, str] = {}
        self._twins: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        self._reaching: dict[Callable[[Node], bool], dict[str, bool]] = {}
        self._sizes: dict[Type, list[tuple[tuple[int, ...], int]]] = {}
        self._facts: dict[Callable[[Graph], object], object] = {}
        self._outputs = list(graph.outputs)
        self._output_names = {v.name for v in output_values(graph)}
        self._params = {p.value.name for p in graph.params}
        for i, node in enumerate(graph.nodes):
            self._insert(i, node, (i,))
        self._next = len(graph.nodes)

    def fact(self, of: Callable[[Graph], T]) -> T:
        """What an analysis says of the graph as it was given, worked out once."""
        if of not in self._facts:
            self._facts[of] = of(self.graph)
        return cast(T, self._facts[of])

    def producer(self, value: Value) -> Node | None:
        """The node that makes a value; None for an input or a param."""
        at = self._producer.get(value.name)
        return None if at is None else self._nodes[at]

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read a value, in order."""
        return [self._nodes[i] for i in sorted(self._readers.get(value.name, ()), key=self._place.__getitem__)]

    def is_used(self, value: Value) -> bool:
        """Whether a node or an output reads the value."""
        return bool(self._readers.get(value.name)) or value.name in self._output_names

    def is_param(self, value: Value) -> bool:
        """Whether the value is a param."""
        return value.name in self._params

    def reaches_output(self, value: Value, through: Callable[[Node], bool]) -> bool:
        """Whether an output is the value, or is made from it by a chain of nodes for which `through` holds."""
        known = self._reaching.setdefault(through, {})
        came_from: dict[str, str] = {value.name: ""}
        todo, found = [value.name], False
        while todo and not found:
            name = todo.pop()
            if known.get(name, name in self._output_names):
                found = True
                while name:  # all the way here leads to an output
                    known[name] = True
                    name = came_from[name]
            elif name not in known:
                for i in self._readers.get(name, ()):
                    if through(self._nodes[i]):
                        for out in self._nodes[i].outs:
                            if out.name not in came_from:
                                came_from[out.name] = name
                                todo.append(out.name)
        if not found:
            known.update(dict.fromkeys(came_from, False))
        return found

    def earlier_twin(self, node: Node) -> Node | None:
        """The first node with the same op, arguments, nested graphs and output types, if it stands before this one."""
        at = self._producer[node.outs[0].name]
        twins = self._twins[self._keys[at]]
        while self._keys.get(twins[0][1]) != self._keys[at]:
            heapq.heappop(twins)
        first = twins[0][1]
        return None if first == at else self._nodes[first]

    def earlier_size(self, node: Node) -> Value | None:
        """An input, or the first result of an earlier node, that is the same expression as the node's first result."""
        wanted = node.outs[0].type
        for v in self.graph.inputs:
            if v.type == wanted:
                return v
        sizes = self._sizes[wanted]
        while sizes[0][1] not in self._nodes:
            heapq.heappop(sizes)
        first = self._nodes[sizes[0][1]].outs[0]
        return None if first.name == node.outs[0].name else first

    # -- the driver's side

    def _insert(self, at: int, node: Node, place: tuple[int, ...]) -> None:
        self._nodes[at] = node
        self._place[at] = place
        for v in node.outs:
            self._producer[v.name] = at
        for v in node.ins:
            self._readers.setdefault(v.name, set()).add(at)
        if node.outs:
            key = self._keys[at] = _key(node)
            heapq.heappush(self._twins.setdefault(key, []), (place, at))
            first = node.outs[0].type
            if isinstance(first, ScalarType) and first.expr is not None:
                heapq.heappush(self._sizes.setdefault(first, []), (place, at))

    def _remove(self, at: int) -> Node:
        node = self._nodes.pop(at)
        self._keys.pop(at, None)
        for v in node.ins:
            self._readers[v.name].discard(at)
        for v in node.outs:
            if self._producer.get(v.name) == at:
                del self._producer[v.name]
        return node

    def _swap(self, at: int, by: Replacement) -> set[int]:
        """Put a replacement in a node's place; gives the nodes to look at again."""
        place = self._place[at]
        node = self._remove(at)
        self._reaching.clear()
        again = {self._producer[v.name] for v in node.ins if v.name in self._producer}
        readers = {i for v in node.outs for i in self._readers.get(v.name, ()) if v.name in by.values}
        for k, new in enumerate(by.nodes):
            self._insert(self._next, new, (*place, k))
            again.add(self._next)
            self._next += 1
        values = dict(by.values)
        for i in readers:
            old = self._remove(i)
            self._insert(i, map_node(old, values), self._place[i])
        if any(name in self._output_names for name in values):
            self._outputs = [map_values(a, values) for a in self._outputs]
            self._output_names = {v.name for a in self._outputs for v in values_in(a)}
        for arg in values.values():
            again.update(self._producer[v.name] for v in values_in(arg) if v.name in self._producer)
        return again | readers

    def _finish(self) -> Graph:
        nodes = tuple(self._nodes[i] for i in sorted(self._nodes, key=self._place.__getitem__))
        return replace(self.graph, nodes=nodes, outputs=tuple(self._outputs))


def apply(graph: Graph, rules: Sequence[Rule]) -> tuple[Graph, tuple[RewriteTrace, ...]]:
    """Apply rules, also in nested graphs, until none fires; the graph itself comes back when none ever did."""
    for rule in rules:
        if rule.measure is not rules[0].measure:
            raise InternalError(
                f"rules {rules[0].name} and {rule.name} do not share a measure",
                because=f"one shrinks {rules[0].measure.name}, the other {rule.measure.name}: both may not end",
            )
    trace: list[RewriteTrace] = []
    return _apply(graph, rules, trace) if rules else graph, tuple(trace)


def _apply(graph: Graph, rules: Sequence[Rule], trace: list[RewriteTrace]) -> Graph:
    if any(n.graphs for n in graph.nodes):
        nodes = tuple(
            replace(n, graphs=tuple(_apply(g, rules, trace) for g in n.graphs)) if n.graphs else n for n in graph.nodes
        )
        if any(a is not b for old, new in zip(graph.nodes, nodes, strict=True)
               for a, b in zip(old.graphs, new.graphs, strict=True)):
            graph = replace(graph, nodes=nodes)
    table: dict[str, list[Rule]] = {}
    context = Context(graph)
    work = deque(range(len(graph.nodes)))
    waiting = set(work)
    before = len(trace)
    while work:
        at = work.popleft()
        waiting.discard(at)
        node = context._nodes.get(at)  # pyright: ignore[reportPrivateUsage]
        if node is None:
            continue
        packet = ".".join(node.op.split(".")[:2])
        if packet not in table:
            table[packet] = [r for r in rules if r.ops is None or packet in r.ops]
        for rule in table[packet]:
            by = rule.rewrite(node, context)
            if by is None:
                continue
            _check(rule, node, by, context)
            trace.append(RewriteTrace(rule.name, graph.name, node, by.nodes, tuple(by.values.items())))
            again = context._swap(at, by)  # pyright: ignore[reportPrivateUsage]
            for i in sorted(again - waiting):
                work.append(i)
                waiting.add(i)
            break
    return context._finish() if len(trace) > before else graph  # pyright: ignore[reportPrivateUsage]


def without_unused_params(graph: Graph) -> Graph:
    """The graph without params that nothing reads any more."""
    used = {v.name for n in graph.nodes for v in n.ins} | {v.name for v in output_values(graph)}
    kept = tuple(p for p in graph.params if p.value.name in used)
    return graph if len(kept) == len(graph.params) else replace(graph, params=kept)


def _check(rule: Rule, node: Node, by: Replacement, context: Context) -> None:
    """Hold a rule to its promises, as far as they show here."""

    def fail(because: str) -> None:
        raise InternalError(f"rule {rule.name} is wrong", where="\n    ".join(show_node(node)), because=because)

    old, new = rule.measure.total((node,)), rule.measure.total(by.nodes)
    width = max(len(old), len(new))
    if new + (0,) * (width - len(new)) >= old + (0,) * (width - len(old)):
        fail(f"it does not shrink the measure ({rule.measure.name}): {old} became {new}")
    made = {v.name: v for n in by.nodes for v in n.outs}
    for v in node.outs:
        instead = by.values.get(v.name)
        if v.name in by.values:
            if isinstance(instead, Value) and instead.type != v.type:
                fail(f"%{v.name} of type {show_type(v.type)} became {show_type(instead.type)}")
        elif v.name not in made and context.is_used(v):
            fail(f"%{v.name} is still used but no longer made")


def _key(node: Node) -> str:
    """Equal for nodes that compute the same: by text, since 1, 1.0 and True are equal in Python but not to an op."""
    args = [*map(show_arg, node.args), *(f"{n}={show_arg(a)}" for n, a in node.attrs)]
    types = [show_type(v.type) for v in node.outs]
    return "\0".join([node.kind.value, node.op, *args, "", *types, *map(show, node.graphs)])
