"""An einsum of two tensors is a product of matrices between views, which kernels take; an einsum is nothing they know.

    einsum("bqd,kd->bqk", x, w)          ->    matmul(x, permute(w, (1, 0)))
    einsum("bhqd,bhkd->bhqk", q, k)      ->    matmul(q, permute(k, (0, 1, 3, 2)))
    einsum("bsd,dhk->bshk", x, w)        ->    unflatten(matmul(x, flatten(w, 1, 2)), 2, (h, k))

Letters are of four kinds: those of both operands and the result (batches), of one operand and the result (rows, columns), of both
operands alone (summed). What has others (diagonals, sums of one operand, dots) stays an einsum; so does a product without
sums, rows or columns. Of three tensors, one that has only letters of another (a mask, a gate) is multiplied into that one first:

    einsum("tef,efd,te->td", h, w, g)    ->    einsum("tef,efd->td", h * unsqueeze(g, 2), w)

Where `opt_einsum` is installed, torch says in which order such three are to be contracted (`path`); the numbers are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hotfuse.analysis.inferred_types import possible_sizes, relaid
from hotfuse.analysis.row_axes import product
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values, unused_name
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


@dataclass(frozen=True, slots=True)
class _Letters:
    """An equation of two operands by what its letters do; the first operand has the rows."""

    left: str
    right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str


def einsums_as_products(graph: Graph) -> tuple[Graph, int]:
    """The graph with such einsums as products, and how many; as it is where there is none, or an output would lie otherwise."""
    if any(n.kind is Kind.CONTROL for n in graph.nodes) or not any(packet(n.op) == "aten.einsum" for n in graph.nodes):
        return graph, 0
    sizes = possible_sizes(graph)
    if sizes is None:
        return graph, 0
    writer = _EinsumWriter(graph)
    count = writer.run()
    if not count:
        return graph, 0
    try:
        made = verify(relaid(replace(graph, nodes=tuple(writer.nodes)), writer.new, sizes))
    except InternalError:  # an operand whose sizes are not what the letters say: torch has its own word for that
        return graph, 0
    same = [v.type for v in output_values(made)] == [v.type for v in output_values(graph)]
    return (made, count) if same else (graph, 0)


def _letters(equation: Arg, a: Value, b: Value, weights: frozenset[str]) -> tuple[_Letters, Value, Value] | None:
    """What an equation says, with the operand on the right that is a weight, or whose letters come last."""
    if not isinstance(equation, str) or "." in equation:
        return None
    text, arrow, result = equation.replace(" ", "").partition("->")
    one, comma, two = text.partition(",")
    if not comma or "," in two:
        return None
    if not arrow:
        result = "".join(sorted(c for c in set(one + two) if (one + two).count(c) == 1))
    if any(len(set(t)) != len(t) for t in (one, two, result)) or not set(result) <= set(one + two):
        return None
    if len(one) != len(_shape(a)) or len(two) != len(_shape(b)):
        return None
    both = set(one) & set(two)
    first = next((c for c in result if c not in both), "")
    if (a.name in weights, first in two) > (b.name in weights, first in one):  # as it lies, the result has rows before columns
        one, two, a, b = two, one, b, a
    sizes = dict(zip(two, _shape(b), strict=True))
    if any(sizes[c] != n for c, n in zip(one, _shape(a), strict=True) if c in both):  # one that is stretched
        return None
    batch = "".join(c for c in result if c in both)
    rows, columns = ("".join(c for c in result if c in t and c not in both) for t in (one, two))
    summed = "".join(c for c in one if c in both and c not in result)
    if len(batch) + len(rows) + len(summed) != len(one) or len(batch) + len(columns) + len(summed) != len(two):
        return None
    return (_Letters(one, two, result, batch, rows, columns, summed), a, b) if rows and columns and summed else None


def _shape(v: Value) -> tuple[Dim, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()


class _EinsumWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.new: set[str] = set()
        self.weights = frozenset(p.value.name for p in graph.params)
        self.taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | set(self.weights)

    def run(self) -> int:
        """How many einsums were written as products."""
        count = 0
        for node in self.graph.nodes:
            operands = argument(node, "tensors") if packet(node.op) == "aten.einsum" else None
            if not isinstance(operands, tuple):
                self.nodes.append(node)
                continue
            before = len(self.nodes)
            pair = self._pair(node, argument(node, "equation"), operands)
            known = None if pair is None else _letters(*pair, self.weights)
            if not known or not self._product(node, *known):
                self.new -= {v.name for n in self.nodes[before:] for v in n.outs}
                del self.nodes[before:]
                self.nodes.append(node)
                continue
            count += 1
        return count

    def _pair(self, node: Node, equation: Arg, operands: tuple[Arg, ...]) -> tuple[Arg, Value, Value] | None:
        """The einsum as one of two tensors; None where it is not."""
        values = [v for v in operands if isinstance(v, Value)]
        if len(values) != len(operands) or len(values) not in (2, 3) or not isinstance(equation, str):
            return None
        if len(values) == 2:
            return equation, values[0], values[1]
        text, arrow, result = equation.replace(" ", "").partition("->")
        parts = text.split(",")
        if not arrow or "." in text or [len(set(t)) for t in parts] != [len(_shape(v)) for v in values]:
            return None
        sizes = [dict(zip(t, _shape(v), strict=True)) for t, v in zip(parts, values, strict=True)]
        dtypes = {v.type.dtype for v in values if isinstance(v.type, TensorType)}
        for small, large in itertools.permutations(range(3), 2):
            inside = all(c in sizes[large] and sizes[large][c] == n for c, n in sizes[small].items())
            if inside and len(dtypes) == 1 and values[large].name not in self.weights:
                values[large] = self._scaled(node, values[large], values[small], parts[large], parts[small])
                first, second = sorted({0, 1, 2} - {small})
                return f"{parts[first]},{parts[second]}->{result}", values[first], values[second]
        return None

    def _scaled(self, node: Node, x: Value, by: Value, letters: str, of: str) -> Value:
        """A tensor times one of some of its letters."""
        by = self._ordered(node, by, of, "".join(c for c in letters if c in of))
        for at, letter in enumerate(letters):
            if letter not in of:
                by = self._add(node, "aten.unsqueeze.default", (by, at), [*_shape(by)[:at], 1, *_shape(by)[at:]])
        return self._add(node, "aten.mul.Tensor", (x, by), _shape(x))

    def _product(self, node: Node, of: _Letters, a: Value, b: Value) -> bool:
        size = dict(zip(of.left + of.right, (*_shape(a), *_shape(b)), strict=True))
        rows = of.rows if of.batch else ""  # beside a single matrix rows may be several dims
        unfolded = [part for part in (rows, of.columns) if len(part) > 1]
        if any(not isinstance(size[c], int) for part in unfolded for c in part):  # their sizes would have to be named
            return False
        front = of.batch if rows else of.rows
        x = self._folded(node, self._ordered(node, a, of.left, of.batch + of.rows + of.summed), front, (rows, of.summed))
        y = self._ordered(node, b, of.right, of.batch + of.summed + of.columns)
        y = self._folded(node, y, of.batch, (of.summed, of.columns))
        shape = [size[c] for c in front] + [product([size[c] for c in part]) for part in (rows, of.columns) if part]
        found = self._add(node, "aten.matmul.default", (x, y), shape)
        for part, at in ((of.columns, len(shape) - 1), (rows, len(shape) - 2)):
            if len(part) > 1:
                numbers = tuple(n for c in part if isinstance(n := size[c], int))
                shape[at:at + 1] = numbers
                found = self._add(node, "aten.unflatten.int", (found, at, numbers), shape)
        found = self._ordered(node, found, of.batch + of.rows + of.columns, of.result)
        made = self.nodes[-1]
        self.nodes[-1] = replace(made, outs=(node.outs[0],))
        self.new.discard(found.name)
        self.new.add(node.outs[0].name)
        return True

    def _ordered(self, node: Node, x: Value, letters: str, wanted: str) -> Value:
        if letters == wanted:
            return x
        order = tuple(letters.index(c) for c in wanted)
        return self._add(node, "aten.permute.default", (x, order), [_shape(x)[d] for d in order])

    def _folded(self, node: Node, x: Value, front: str, parts: tuple[str, str]) -> Value:
        """A tensor whose last dims are those of two parts, each as one dim."""
        shape, at = list(_shape(x)), len(front)
        for part in parts:
            if len(part) > 1:
                shape[at:at + len(part)] = [product(shape[at:at + len(part)])]
                x = self._add(node, "aten.flatten.using_ints", (x, at, at + len(part) - 1), shape)
            at += bool(part)
        return x

    def _add(self, node: Node, op: str, args: tuple[Arg, ...], shape: Sequence[Dim]) -> Value:
        like = node.outs[0].type
        assert isinstance(like, TensorType)
        out = Value(unused_name(f"{node.outs[0].name}_", self.taken), TensorType(like.dtype, tuple(shape), device=like.device))
        self.new.add(out.name)
        self.nodes.append(Node(Kind.OPERATOR, op, args, (out,), loc=node.loc))
        return out
