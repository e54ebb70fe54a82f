"""Where the rows of one value come from in another: how each op carries an index of a batch or a sequence through.

    %a: f32[B, S, 64]     = linear(%x: f32[B, S, 64], ..)    position s is axis 1 of both
    %b: f32[B, S, 4, 16]  = view(%a)                         still axis 1
    %c: f32[B, 4, S, 16]  = transpose(%b, 1, 2)              axis 2
    %d: f32[S, (B * 4), 16] = view(%e: f32[S, B, 64])        batch b is axis 1, in steps of 4

An index of a row (which sequence, which position in it) has an `AxisIndex` in every shape that has it: an axis, and the elements of
that axis one step takes. A `Relation` carries a place from an operand to the result or back. A value that does not vary with the
index (a bias, a weight) has no place for it: None. `NotByRows` is raised where rows are mixed or nobody knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, dims_in, expr
from hotfuse.ir.graph import Kind, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument, draws_random
from hotfuse.ops.table import Access, is_mutating, lookup, packet

Shape = tuple[Dim, ...]
Rule = Callable[[Node], "dict[str, Relation]"]


class NotByRows(Exception):
    """An op that does not treat every row alike, or that nobody knows to."""


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """An index of a row in a shape."""

    axis: int
    span: Dim = 1
    """Elements of the axis that one step of the index takes; more than 1 where the axis has other indices inside."""


def shape_of(v: Value) -> Shape:
    """The shape of a tensor; raises NotByRows for anything else."""
    if not isinstance(v.type, TensorType):
        raise NotByRows(f"%{v.name} is no tensor")
    return v.type.shape


def _factors(d: Dim) -> tuple[int, Counter[Dim]]:
    if isinstance(d, int):
        return d, Counter()
    number, found = 1, Counter[Dim]()
    for a in dims_in(d) if d.op == "*" else (d,):
        if isinstance(a, int):
            number *= a
        else:
            found[a] += 1
    return number, found


def quotient(a: Dim, b: Dim) -> Dim | None:
    """a / b where that is certain to be whole; None elsewhere."""
    (n, top), (m, bottom) = _factors(a), _factors(b)
    if m == 0 or n % m or bottom - top:
        return None
    rest: list[Dim] = list((top - bottom).elements())
    return expr("*", n // m, *rest) if rest else n // m


def product(dims: Sequence[Dim]) -> Dim:
    """The product of sizes."""
    return expr("*", 1, *dims)


def whole(place: AxisIndex, size: Dim, shape: Shape) -> bool:
    """Whether an axis is the index and nothing else."""
    return place.span == 1 and shape[place.axis] == size


class Relation(ABC):
    """How places in an operand (`x`) and in the result (`y`) belong together."""

    @abstractmethod
    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """The place in the result."""

    @abstractmethod
    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """The place in the operand; None where the operand does not vary with the index."""


@dataclass(frozen=True, slots=True)
class AlignedAxes(Relation):
    """Axes correspond from the right, as in broadcasting; rows may not lie along `mixed` ones (negative numbers)."""

    mixed: frozenset[int] = frozenset()

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """The same axis from the right."""
        at = place.axis - len(x)
        if at in self.mixed or -at > len(y) or y[at] != x[at]:
            raise NotByRows("rows are mixed")
        return AxisIndex(len(y) + at, place.span)

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """The same, unless the operand is broadcast there."""
        at = place.axis - len(y)
        if at in self.mixed:
            raise NotByRows("rows are mixed")
        if -at > len(x) or (x[at] == 1 and y[at] != 1):
            return None
        if x[at] != y[at]:
            raise NotByRows("sizes differ")
        return AxisIndex(len(x) + at, place.span)


@dataclass(frozen=True, slots=True)
class Factor(Relation):
    """An operand of a product over one of the last two axes: the result has the operand's other one."""

    gone: int
    """The axis of the result (-1 or -2) that the operand does not have."""

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """Axes of the batch and the operand's own one."""
        at = place.axis - len(x)
        if at == (-1 if self.gone == -1 else -2) or -at > len(y) or y[at] != x[at]:
            raise NotByRows("rows are summed up")
        return AxisIndex(len(y) + at, place.span)

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """None for the axis that comes from the other operand."""
        at = place.axis - len(y)
        return None if at == self.gone else AlignedAxes().backward(place, size, x, y)


@dataclass(frozen=True, slots=True)
class Reshaped(Relation):
    """The same elements in the same order."""

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """Where steps of as many elements lie."""
        return _found(expr("*", place.span, product(x[place.axis + 1 :])), size, y)

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """Where steps of as many elements lie, as in `forward`."""
        return self.forward(place, size, y, x)


def _found(step: Dim, size: Dim, shape: Shape) -> AxisIndex:
    """The place of an index whose steps take so many elements of a row-major shape."""
    found: list[AxisIndex] = []
    for axis, n in enumerate(shape):
        span = quotient(step, product(shape[axis + 1 :]))
        if span is not None and quotient(n, expr("*", span, size)) is not None:
            found.append(AxisIndex(axis, span))
    best = [p for p in found if whole(p, size, shape)] or found
    if not best:
        raise NotByRows("a reshape takes rows apart")
    return best[0]


@dataclass(frozen=True, slots=True)
class Permuted(Relation):
    """Axis i of the result is axis order[i] of the operand."""

    order: tuple[int, ...]

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """Where the axis went."""
        return AxisIndex(self.order.index(place.axis), place.span)

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """Where it came from."""
        return AxisIndex(self.order[place.axis], place.span)


@dataclass(frozen=True, slots=True)
class Dropped(Relation):
    """The result lacks some axes of the operand."""

    axes: frozenset[int]

    def _left(self, x: Shape) -> list[int]:
        return [i for i in range(len(x)) if i not in self.axes]

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """One of those that are left."""
        if place.axis in self.axes:
            raise NotByRows("rows are summed up or picked")
        return AxisIndex(self._left(x).index(place.axis), place.span)

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """The operand's axis that is left at this place."""
        return AxisIndex(self._left(x)[place.axis], place.span)


@dataclass(frozen=True, slots=True)
class Leading(Relation):
    """The result has the operand's axes, and further ones behind them."""

    def forward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex:
        """The same axis from the left."""
        return place

    def backward(self, place: AxisIndex, size: Dim, x: Shape, y: Shape) -> AxisIndex | None:
        """The same, unless it is one of the further ones."""
        if place.axis >= len(x):
            raise NotByRows("rows along a dim that is looked up")
        return place


@dataclass(frozen=True, slots=True)
class Carries:
    """What a node does with rows."""

    operands: dict[str, Relation] = field(default_factory=dict[str, Relation])
    """By value; whatever else the node reads, it reads whole."""


_POSITIONAL = frozenset(f"aten.{n}" for n in (
    "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_full", "new_zeros", "new_ones", "empty", "empty_like",
    "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "scalar_tensor", "arange", "range", "linspace", "logspace",
    "eye", "tril_indices", "triu_indices", "tril", "triu", "complex", "real", "imag", "frexp", "quantize_per_channel",
    "fake_quantize_per_channel_affine", "prelu", "_prelu_kernel", "rrelu", "native_dropout", "feature_dropout",
    "feature_alpha_dropout",
))  # fmt: skip
"""Pointwise ops in which the position itself matters, or axes have another meaning than in broadcasting."""
_REDUCES = frozenset(f"aten.{n}" for n in ("sum", "mean", "amax", "amin", "var", "std", "linalg_vector_norm"))
_KEEPS = frozenset({"aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax"})
_SPLITS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow"})
SDPA = "aten.scaled_dot_product_attention"


def carries(node: Node) -> Carries:
    """How a node carries rows; raises NotByRows where it does not."""
    op = packet(node.op)
    if node.kind is not Kind.OPERATOR or not node.outs or is_mutating(node.op):
        raise NotByRows(f"{op} is not pure")
    if draws_random(node.op, node.args, dict(node.attrs)):
        raise NotByRows(f"{op} draws random numbers")
    if op in RESHAPES:
        return Carries({_first(node).name: Reshaped()})
    if lookup(node.op).access is Access.POINTWISE and op not in _POSITIONAL:
        return Carries({v.name: AlignedAxes() for v in node.ins if isinstance(v.type, TensorType)})
    found = _ROWS.get(op)
    if found is None:
        raise NotByRows(f"{op} may mix rows")
    return Carries(found(node))


def _first(node: Node) -> Value:
    x = node.args[0] if node.args else None
    if not isinstance(x, Value):
        raise NotByRows(f"{packet(node.op)} of no tensor")
    return x


def _named(node: Node, name: str) -> Value:
    x = argument(node, name)
    if not isinstance(x, Value):
        raise NotByRows(f"{packet(node.op)} without {name}")
    return x


def _axis(node: Node, name: str, rank: int, default: int | None = None) -> int:
    found = argument(node, name, default)
    if not isinstance(found, int) or not -rank <= found < max(rank, 1):
        raise NotByRows(f"{packet(node.op)} along an axis that only a run tells")
    return found % rank


def _from_right(axis: int, rank: int) -> frozenset[int]:
    return frozenset({axis - rank})


def _linear(node: Node) -> dict[str, Relation]:
    return {_named(node, "input").name: AlignedAxes(frozenset({-1}))}


def _product(left: str, right: str) -> Rule:
    def rows(node: Node) -> dict[str, Relation]:
        x, w = _named(node, left), _named(node, right)
        if len(shape_of(x)) < 2 or len(shape_of(w)) < 2 or x == w:
            raise NotByRows("a product of vectors")
        return {x.name: Factor(-1), w.name: Factor(-2)}

    return rows


def _biased(node: Node) -> dict[str, Relation]:
    found = _product("mat1", "mat2")(node)
    bias = _named(node, "self")
    if bias.name in found:
        raise NotByRows("a product that is added to itself")
    return {**found, bias.name: AlignedAxes()}


def _norm(node: Node) -> dict[str, Relation]:
    over = argument(node, "normalized_shape")
    if not isinstance(over, tuple):
        raise NotByRows("a norm over sizes that only a run tells")
    return {_named(node, "input").name: AlignedAxes(frozenset(range(-len(over), 0)))}


def _along(node: Node) -> dict[str, Relation]:
    x = _first(node)
    rank = len(shape_of(x))
    return {x.name: AlignedAxes(_from_right(_axis(node, "dim", rank, 0), rank))}


def _reduced(node: Node) -> dict[str, Relation]:
    x = _first(node)
    rank = len(shape_of(x))
    dims = argument(node, "dim")
    dims = dims if isinstance(dims, tuple) else (dims,)
    if len(node.outs) != 1 or not dims or not all(isinstance(d, int) for d in dims):
        raise NotByRows(f"{packet(node.op)} over everything")
    axes = frozenset(d % rank for d in dims if isinstance(d, int))
    if argument(node, "keepdim", default=False) is True:
        return {x.name: AlignedAxes(frozenset(a - rank for a in axes))}
    return {x.name: Dropped(axes)}


def _selected(node: Node) -> dict[str, Relation]:
    x = _first(node)
    return {x.name: Dropped(frozenset({_axis(node, "dim", len(shape_of(x)), 0)}))}


def _permuted(node: Node) -> dict[str, Relation]:
    x = _first(node)
    rank = len(shape_of(x))
    order = list(range(rank))
    match packet(node.op), node.args[1:]:
        case "aten.t", ():
            order.reverse()
        case ("aten.mT" | "aten.mH" | "aten.adjoint"), () if rank >= 2:
            order[-1], order[-2] = order[-2], order[-1]
        case ("aten.transpose" | "aten.swapaxes" | "aten.swapdims"), (int(a), int(b)):
            order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
        case "aten.permute", (tuple(by),) if all(isinstance(d, int) for d in by):
            order = [d % rank for d in by if isinstance(d, int)]
        case _:
            raise NotByRows("a transpose whose axes only a run tells")
    return {x.name: Permuted(tuple(order))}


def _expanded(node: Node) -> dict[str, Relation]:
    return {_first(node).name: AlignedAxes()}


def _joined(node: Node) -> dict[str, Relation]:
    parts = node.args[0]
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, Value) for p in parts):
        raise NotByRows("cat of no tensors")
    rank = len(shape_of(node.outs[0]))
    along = AlignedAxes(_from_right(_axis(node, "dim", rank, 0), rank))
    return {p.name: along for p in parts if isinstance(p, Value)}


def _looked_up(node: Node) -> dict[str, Relation]:
    return {_named(node, "indices").name: Leading()}


def _indexed(node: Node) -> dict[str, Relation]:
    """One index along the first axis, as ONNX's Gather of an embedding is written."""
    table, places = node.args[0], node.args[1]
    if not isinstance(places, tuple) or len(places) != 1 or not isinstance(table, Value) or not isinstance(places[0], Value):
        raise NotByRows("indexing along several axes")
    if not isinstance(places[0].type, TensorType) or places[0].type.dtype.value not in ("i64", "i32"):
        raise NotByRows("indexing by a mask")
    return {places[0].name: Leading()}


def _attention(node: Node) -> dict[str, Relation]:
    """The rows of queries are the result's; keys and values have only the batch in common with it."""
    q, k, v = (_named(node, n) for n in ("query", "key", "value"))
    if argument(node, "is_causal", default=False) is not False or argument(node, "enable_gqa", default=False) is not False:
        raise NotByRows("attention in which places matter")
    if len({q.name, k.name, v.name}) < 3:
        raise NotByRows("attention of one value to itself")
    found: dict[str, Relation] = {q.name: AlignedAxes(frozenset({-1})), k.name: Factor(-2), v.name: Factor(-2)}
    if isinstance(mask := argument(node, "attn_mask"), Value):
        found[mask.name] = Factor(-1)
    return found


_ROWS: dict[str, Rule] = {
    "aten.linear": _linear,
    "aten.matmul": _product("self", "other"), "aten.mm": _product("self", "mat2"), "aten.bmm": _product("self", "mat2"),
    "aten.addmm": _biased, "aten.layer_norm": _norm, "aten.rms_norm": _norm,
    "aten.select": _selected, "aten.unbind": _selected,
    "aten.expand": _expanded, "aten.expand_as": _expanded, "aten.broadcast_to": _expanded,
    "aten.cat": _joined, "aten.embedding": _looked_up, "aten.index": _indexed, SDPA: _attention,
    **{name: _along for name in (*_SPLITS, *_KEEPS)},
    **{name: _reduced for name in _REDUCES},
    **{f"aten.{name}": _permuted for name in ("t", "transpose", "permute", "mT", "mH", "adjoint", "swapaxes", "swapdims")},
}  # fmt: skip
