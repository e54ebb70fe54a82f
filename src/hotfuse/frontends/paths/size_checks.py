"""What a traced path assumes of sizes that data decide is checked before anything runs on what has such a size.

    y = index(x, mask)          y = index(x, mask)
    z = max_pool1d(y)           n = size_of(y, 0)
    n = size_of(y, 0)     ->    c = n == 96
    c = n == 96                 y1 = hotfuse.sized(y, c)          raises where the call takes another path
                                z = max_pool1d(y1)

A graph says of `y` that it has the 96 rows of the traced call, and kernels read as many. In a call in which the mask picks fewer,
they would read behind the end of its memory before the check at the graph's end (`frontends.paths.path_checks`) is come to.

A number that code reads may be a size, too (`x.split([n.item(), 4])`). What is assumed of it is checked before it is read:

    c = n == 96,  n1 = hotfuse.sized(n, c),  k = item(n1)

What no later node would read is no check, and is left to the one at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import symbols
from hotfuse.ir.graph import Arg, Kind, Node, Value, map_node, unused_name
from hotfuse.ir.types import ScalarType, TensorType
from hotfuse.ops.own.assume import SIZE_OF, SIZED

_ITEMS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
_SAME_NUMBER = frozenset(f"aten.{op}.default" for op in ("clone", "reshape", "view", "squeeze", "detach"))
"""What gives the one number of its argument in another form."""


@dataclass(slots=True)
class _SizeCondition:
    """A truth value that rests on sizes which data decide."""

    value: Value
    nodes: set[int] = field(default_factory=set[int])
    """By number: nodes that compute it from single numbers."""
    sources: set[str] = field(default_factory=set[str])
    """What those read besides."""
    sized: set[str] = field(default_factory=set[str])
    """The values among them whose sizes are asked, and numbers that are read to be sizes."""


def sizes_checked(
    nodes: Sequence[Node], conditions: Sequence[Value], taken: set[str], inputs: Sequence[Value] = (),
    outputs: Sequence[Arg] = (), captures: Sequence[Value] = (),
) -> tuple[list[Node], dict[str, Arg], list[Value]]:
    """Nodes with such checks as early as they can be, what stands for checked values from there on, and the other conditions.

    `captures`: what a branch has from the graph around it, whose sizes nobody has checked; those of `inputs` guards have.
    """  # fmt: skip
    maker = {v.name: i for i, n in enumerate(nodes) for v in n.outs}
    values = {v.name: v for v in (*captures, *(v for n in nodes for v in n.outs))}
    numbers = _numbers_that_are_sizes(nodes)
    values |= {v.name: v for v in inputs if v.name in numbers}
    found = [_condition(c, nodes, maker, numbers) for c in conditions]
    waiting = [c for c in found if c.sized & values.keys()]
    while True:
        order = _in_order(nodes, maker, values, taken, waiting, {v.name for v in (*captures, *inputs)})
        unread = order.unread(outputs)
        if not unread:
            break
        waiting = [c for c in waiting if c.value.name not in unread]  # fewer with every turn
    return order.nodes, order.instead, [c.value for c in found if c not in waiting]


def _in_order(
    nodes: Sequence[Node], maker: Mapping[str, int], values: Mapping[str, Value], taken: set[str], waiting: list[_SizeCondition],
    given: set[str],
) -> _Ordered:  # fmt: skip
    moved = {i for c in waiting for i in c.nodes}
    order = _Ordered(nodes, maker, values, taken, list(waiting))
    order.check(given)
    for i, node in enumerate(nodes):
        if i not in moved:
            order.nodes.append(map_node(node, order.instead))
            order.check({v.name for v in node.outs})
    return order


class _Ordered:
    """Nodes in their new order."""

    def __init__(
        self, old: Sequence[Node], maker: Mapping[str, int], values: Mapping[str, Value], taken: set[str],
        waiting: list[_SizeCondition],
    ) -> None:  # fmt: skip
        self._old, self._maker, self._values, self._taken, self._waiting = old, maker, values, taken, waiting
        self._known = set[str]()
        self._written = set[int]()
        self.nodes: list[Node] = []
        self.instead: dict[str, Arg] = {}
        self._checks: dict[str, list[Value]] = {}
        """By what stands for a checked value, what was checked of it."""

    def unread(self, outputs: Sequence[Arg]) -> set[str]:
        """Names of conditions whose checks nothing reads: they would be left out with them."""
        read = {v.name for n in self.nodes for v in n.ins}
        read |= {a.name for o in outputs if isinstance(o, Value) and isinstance(a := self.instead.get(o.name), Value)}
        waiting = {c.value.name for c in self._waiting}  # a source of theirs is never made here
        return waiting | {c.name for name, checked in self._checks.items() if name not in read for c in checked}

    def check(self, made: set[str]) -> None:
        """These are there now: write down what can be checked with them."""
        self._known |= made
        ready = [c for c in self._waiting if c.sources & self._values.keys() <= self._known]
        self._waiting = [c for c in self._waiting if c not in ready]
        checks: dict[str, list[Value]] = {}
        for c in ready:
            for k in sorted(c.nodes - self._written):
                self.nodes.append(self._old[k])
                self._written.add(k)
            # the last of them: what reads several reads it, too
            name = max(c.sized & self._values.keys(), key=lambda n: self._maker.get(n, -1))
            checks.setdefault(name, []).append(c.value)
        for name, (holds, *more) in checks.items():
            value, asked = self._values[name], [holds, *more]
            for other in more:
                both = Value(unused_name("read.", self._taken), holds.type)
                self.nodes.append(Node(Kind.OPERATOR, "aten.logical_and.default", (holds, other), (both,)))
                holds = both
            checked = Value(unused_name("sized.", self._taken), value.type)
            self.nodes.append(Node(Kind.OPERATOR, SIZED, (self.instead.get(name, value), holds), (checked,)))
            self.instead[name] = checked
            self._checks[checked.name] = asked


def _numbers_that_are_sizes(nodes: Sequence[Node]) -> set[str]:
    """Names of values of one number that code reads, where some value has that number in its sizes."""
    sizes = {s for n in nodes for v in n.outs if isinstance(v.type, TensorType) for d in v.type.shape for s in symbols(d)}
    read = set[str]()
    for n in nodes:
        t = n.outs[0].type if n.op in _ITEMS and n.outs else None
        if isinstance(t, ScalarType) and t.expr is not None and symbols(t.expr) & sizes:
            read |= {v.name for v in n.ins}
    return read


def _condition(value: Value, nodes: Sequence[Node], maker: Mapping[str, int], numbers: set[str]) -> _SizeCondition:
    condition = _SizeCondition(value)
    left, seen = [value], set[str]()
    while left:
        v = left.pop()
        if v.name in seen:
            continue
        seen.add(v.name)
        if v.name in numbers:
            condition.sized.add(v.name)
            condition.sources.add(v.name)
            continue
        at = maker.get(v.name)
        node = nodes[at] if at is not None else None
        if at is None or node is None or not (node.op == SIZE_OF or _single_numbers(node)):
            condition.sources.add(v.name)
            continue
        condition.nodes.add(at)
        if node.op == SIZE_OF:
            condition.sized |= {x.name for x in node.ins}
            condition.sources |= {x.name for x in node.ins}
        else:
            left += node.ins
    return condition


def _single_numbers(node: Node) -> bool:
    """Whether a node computes one number from others."""
    values = [v.type for v in (*node.ins, *node.outs)]
    if node.op in _SAME_NUMBER:
        return all(isinstance(t, TensorType) and all(d == 1 for d in t.shape) for t in values)
    return node.kind is Kind.OPERATOR and all(isinstance(t, TensorType) and not t.shape for t in values)
