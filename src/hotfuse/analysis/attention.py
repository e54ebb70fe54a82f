"""Attention that a graph spells out, found by its shape.

    scores = matmul(q * s, transpose(k) * s)          or baddbmm; scales may stand on either side, or on the scores
    scores = scores + mask                            or where(mask, scores, -inf), masked_fill(scores, hidden, -inf)
    weights = softmax(scores, -1)                     or that with NaN replaced by 0
    out = matmul(weights, v)

Exporters write attention like this. Nothing is rewritten: lowering makes one kernel of these nodes, and knows from here what they
compute, and the nodes stay what they are for everyone else. What lies between the first and the last node is read by nobody
else, or it could not stay inside a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, output_values, readers
from hotfuse.ir.types import TensorType
from hotfuse.ops import packed
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

FUSED = "aten.scaled_dot_product_attention"
PACKED = packed.NAME
"""Over sequences that lie one behind the other."""
BOUNDED = "hotfuse.bounded_packed_attention"
"""The same with a bound on their lengths, on a device (`ops.bounded_attention`)."""
WHOLE = frozenset({FUSED, PACKED, BOUNDED})
"""Attentions that are one node."""
_PRODUCTS = frozenset({"aten.matmul", "aten.bmm"})
_SOFTMAX = frozenset({"aten.softmax", "aten._softmax"})
_ATTENDING = _SOFTMAX | {FUSED}
_HIDING = frozenset({"aten.mul", "aten.masked_fill", "aten.where"})
_OF_MASKS = frozenset({
    *RESHAPES, "aten.expand", "aten.slice", "aten.to", "aten._to_copy",
    "aten.eq", "aten.ne", "aten.lt", "aten.le", "aten.gt", "aten.ge", "aten.logical_not", "aten.bitwise_not", "aten.logical_and",
    "aten.bitwise_and", "aten.__and__", "aten.rsub", "aten.sub",
})  # fmt: skip
_FILLED = {"aten.full": "fill_value", "aten.full_like": "fill_value", "aten.scalar_tensor": "s"}
_MAX_RANK = 4
HIDES = 1e4
"""How much lower the score of a hidden key has to be: its weight is exp(-1e4) of any other's, which no float can tell from 0."""


@dataclass(frozen=True, slots=True)
class Written:
    """One attention that is spelled out."""

    nodes: tuple[int, ...]
    """In the graph's order; the last one gives the result."""
    q: Value
    k: Value
    """[..., element, key]: as the product takes it."""
    v: Value
    scale: float
    mask: Value | None
    """Added to the scores, or (bool) true where a key counts."""
    hides: bool
    """Whether a bool mask is true where a key does not count."""
    empty_is_nan: bool
    """Whether a query without any key left gives NaN, as a plain softmax does, or 0."""
    bias: Value | None = None
    """Added to the scores before the mask is, or behind it."""
    fill: float = -math.inf
    """What scores of hidden keys are, where a bool mask hides them."""


def attends(graph: Graph) -> bool:
    """Whether a graph has anything that may be attention, told by the names of its operators alone."""
    return any(packet(n.op) in _ATTENDING for n in graph.nodes)


def pools(graph: Graph) -> bool:
    """Whether a graph may hide rows that products made, by what it makes of a small input alone: told by the names of operators.

        %h: f32[B, S, 64] = linear(..)      %p = %h * unsqueeze(%mask, -1)      %y = sum(%p, 1)
    """
    told = {v.name for v in graph.inputs if isinstance(v.type, TensorType) and 1 <= sum(d != 1 for d in v.type.shape) <= 2}
    worked = set[str]()
    for node in graph.nodes if told else ():
        names, op, outs = {v.name for v in node.ins}, packet(node.op), (v.name for v in node.outs)
        if names & worked or lookup(node.op).access is Access.CONTRACTION:
            if op in _HIDING and names & told:
                return True
            worked.update(outs)
        elif names & told and op in _OF_MASKS:
            told.update(outs)
    return False


def written(graph: Graph, *, loosely: bool = False) -> tuple[Written, ...]:
    """Every attention that a graph spells out, in the order of their last nodes; with `loosely`, those too of which no one kernel
    is made: that add two values to their scores, a bias and a mask, or give hidden keys a low score instead of -inf."""
    if not any(packet(n.op) in _SOFTMAX for n in graph.nodes):
        return ()
    view = _View(graph, loosely=loosely)
    found = [_match(view, i) for i, n in enumerate(graph.nodes) if packet(n.op) in _PRODUCTS]
    return tuple(w for w in found if w is not None)


class _View:
    """Who makes and who reads a value."""

    def __init__(self, graph: Graph, *, loosely: bool = False) -> None:
        self.nodes, self.loosely = graph.nodes, loosely
        self.maker, self.readers = makers(graph), readers(graph)
        self.returned = {v.name for v in output_values(graph)}

    def inner(self, v: object, by: Sequence[int]) -> int:
        """The node that makes a value which only these nodes read; -1 for any other."""
        if not isinstance(v, Value) or v.name in self.returned or set(self.readers.get(v.name, ())) != set(by):
            return -1
        at = self.maker.get(v.name, -1)
        return at if at >= 0 and self.nodes[at].kind is Kind.OPERATOR and len(self.nodes[at].outs) == 1 else -1


@dataclass(slots=True)
class _AttentionParts:
    """What has been gathered on the way from the result back to the operands."""

    nodes: list[int]
    scale: float = 1.0
    mask: Value | None = None
    hides: bool = False
    bias: Value | None = None
    fill: float = -math.inf


def _match(view: _View, last: int) -> Written | None:
    p, v = view.nodes[last].args[:2]
    found = _AttentionParts([last])
    at, empty_is_nan = _softmax(view, p, found)
    if at < 0 or not isinstance(v, Value):
        return None
    scores = _scores(view, view.nodes[at].args[0], at, found)
    if scores < 0:
        return None
    product = view.nodes[scores]
    q, k = (product.args[1:3] if packet(product.op) == "aten.baddbmm" else product.args[:2])
    q, k = _unscaled(view, q, scores, found), _unscaled(view, k, scores, found)
    if q is None or k is None or not _fits(_shape(q), _shape(k), _shape(v), _shape(found.mask) if found.mask else ()):
        return None
    nodes = tuple(sorted(set(found.nodes)))
    return Written(nodes, q, k, v, found.scale, found.mask, found.hides,
                   empty_is_nan and found.fill == -math.inf, found.bias, found.fill)


def _softmax(view: _View, p: object, found: _AttentionParts) -> tuple[int, bool]:
    """The softmax that gives the weights, and whether NaN stays NaN; (-1, ..) for none."""
    at = view.inner(p, found.nodes)
    if at >= 0 and packet(view.nodes[at].op) == "aten.where":  # where(isnan(p), 0, p)
        cond, zero, plain = view.nodes[at].args[:3]
        test = view.inner(cond, [at])
        if test < 0 or packet(view.nodes[test].op) != "aten.isnan" or zero != 0 or view.nodes[test].args[0] != plain:
            return -1, False
        found.nodes += [at, test]
        inner = view.inner(plain, [at, test])
        return (_over_last(view, inner, found), False)
    return (_over_last(view, at, found), True)


def _over_last(view: _View, at: int, found: _AttentionParts) -> int:
    if at < 0 or packet(view.nodes[at].op) not in _SOFTMAX:
        return -1
    node = view.nodes[at]
    rank = len(_shape(node.outs[0]))
    x, dtype = node.args[0], argument(node, "dtype")
    same = dtype is None or (isinstance(x, Value) and isinstance(x.type, TensorType) and dtype is x.type.dtype)
    if argument(node, "dim") not in (-1, rank - 1) or not same or argument(node, "half_to_float"):
        return -1
    found.nodes.append(at)
    return at


def _scores(view: _View, value: object, reader: int, found: _AttentionParts) -> int:
    """The product that the scores come from; what is done to them in between is gathered."""
    at = view.inner(value, [reader])
    if at < 0:
        return -1
    node = view.nodes[at]
    op = packet(node.op)
    if op in _PRODUCTS or op == "aten.baddbmm":
        if op == "aten.baddbmm" and not _biased(view, node, at, found):
            return -1
        found.nodes.append(at)
        return at
    before = (found.scale, found.mask, found.hides, found.bias, found.fill, list(found.nodes))
    for inner in _undone(view, node, at, found):
        found.nodes.append(at)
        product = _scores(view, inner, at, found)
        if product >= 0:
            return product
        found.scale, found.mask, found.hides, found.bias, found.fill, found.nodes = (*before[:5], list(before[5]))
    return -1


def _undone(view: _View, node: Node, at: int, found: _AttentionParts) -> list[object]:
    """The scores before a step, and what the step did; several candidates where both operands could be them."""
    op, args = packet(node.op), node.args
    if op in ("aten.mul", "aten.div") and _is_factor(args[1]) and not node.attrs:
        found.scale *= args[1] if op == "aten.mul" else 1 / args[1]
        return [args[0]]
    second = view.loosely and op == "aten.add" and found.bias is None
    if (found.mask is not None and not second) or found.scale != 1:
        return []  # what is added before a scale is scaled as well
    full = _shape(node.outs[0])
    if op == "aten.add" and not node.attrs and all(isinstance(a, Value) for a in args):
        for score, mask in ((args[0], args[1]), (args[1], args[0])):
            if isinstance(score, Value) and isinstance(mask, Value) and _shape(score) == full and _leads(view, score, at):
                if found.mask is None:
                    _set_mask(view, mask, at, found)
                else:
                    found.bias = mask
                return [score]
        return []
    if op == "aten.masked_fill" and (low := _low(view, args[2])) is not None and isinstance(args[1], Value):
        found.mask, found.hides, found.fill = args[1], True, low
        return [args[0]]
    if op == "aten.where" and len(args) == 3 and isinstance(args[0], Value):
        for hidden, other in ((1, 2), (2, 1)):
            if (low := _low(view, args[hidden])) is not None:
                found.mask, found.hides, found.fill = args[0], hidden == 1, low
                return [args[other]]
    return []


def _low(view: _View, arg: object) -> float | None:
    """A number that hides a key: -inf, or, loosely, one that is lower than scores are; a tensor of it as well."""
    at = view.maker.get(arg.name, -1) if view.loosely and isinstance(arg, Value) else -1
    if at >= 0 and packet(view.nodes[at].op) in _FILLED:
        arg = argument(view.nodes[at], _FILLED[packet(view.nodes[at].op)])
    if not isinstance(arg, int | float) or isinstance(arg, bool):
        return None
    return float(arg) if arg == -math.inf or (view.loosely and arg <= -HIDES) else None


def _is_factor(arg: object) -> TypeGuard[float]:
    """Whether an argument is a number that something may be scaled by, or divided by."""
    return isinstance(arg, int | float) and math.isfinite(arg) and arg != 0


def _leads(view: _View, value: Value, reader: int) -> bool:
    """Whether a value looks like scores: a product, perhaps scaled; where biases are looked for, perhaps with something added."""
    at = view.inner(value, [reader])
    if view.loosely and at >= 0 and packet(view.nodes[at].op) == "aten.add" and not view.nodes[at].attrs:
        return any(isinstance(x, Value) and _scaled_product(view, x, at) for x in view.nodes[at].args[:2])
    return _scaled_product(view, value, reader)


def _scaled_product(view: _View, value: Value, reader: int) -> bool:
    at = view.inner(value, [reader])
    while at >= 0 and packet(view.nodes[at].op) in ("aten.mul", "aten.div"):
        at = view.inner(view.nodes[at].args[0], [at])
    return at >= 0 and packet(view.nodes[at].op) in (*_PRODUCTS, "aten.baddbmm")


def _set_mask(view: _View, mask: Value, reader: int, found: _AttentionParts) -> None:
    """A mask, as it is or, where it is made of -inf and 0, as the bools that it is made from."""
    found.mask, found.hides = mask, False
    at = view.inner(mask, [reader])
    if at >= 0 and packet(view.nodes[at].op) == "aten.where":
        cond, a, b = view.nodes[at].args[:3]
        if isinstance(cond, Value) and sorted((str(a), str(b))) == ["-inf", "0.0"]:
            found.mask, found.hides = cond, a == -math.inf
            found.nodes.append(at)


def _biased(view: _View, node: Node, at: int, found: _AttentionParts) -> bool:
    """What a product with a bias adds and scales."""
    alpha, beta = argument(node, "alpha", 1), argument(node, "beta", 1)
    if not isinstance(alpha, int | float) or beta not in (0, 1):
        return False
    if beta == 1:
        bias = node.args[0]
        if found.mask is not None or found.scale != 1 or not isinstance(bias, Value):
            return False
        _set_mask(view, bias, at, found)
    found.scale *= float(alpha)
    return True


def _unscaled(view: _View, value: object, reader: int, found: _AttentionParts) -> Value | None:
    """An operand before it was scaled."""
    while isinstance(value, Value):
        at = view.inner(value, [reader])
        if at < 0:
            return value
        node = view.nodes[at]
        op, args = packet(node.op), node.args
        if len(args) != 2 or node.attrs or not isinstance(args[0], Value) or _shape(args[0]) != _shape(value):
            return value
        if op in ("aten.mul", "aten.div") and _is_factor(args[1]):
            found.scale *= args[1] if op == "aten.mul" else 1 / args[1]
        elif op not in ("aten.add", "aten.sub") or args[1] != 0:
            return value
        found.nodes.append(at)
        value, reader = args[0], at
    return None


def _shape(v: Value) -> tuple[Dim, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()


def _fits(q: tuple[Dim, ...], k: tuple[Dim, ...], v: tuple[Dim, ...], mask: tuple[Dim, ...]) -> bool:
    """Whether these are operands of one attention, without repetition along batch dims."""
    one_rank = len(q) == len(k) == len(v) and 2 <= len(q) <= _MAX_RANK and len(mask) <= len(q)
    return one_rank and q[:-2] == k[:-2] == v[:-2] and q[-1] == k[-2] and k[-1] == v[-2]
