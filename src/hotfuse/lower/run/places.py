"""Where values lie in memory between kernels: an offset and strides in somebody's buffer, as expressions over sizes.

    %y = transpose(%x, 0, 1)      %x at base + 0, strides (s1, 1)   ->   %y at base + 0, strides (1, s1)
    %z = select(%y, 0, 3)         ->   base + 3, strides (s1,)

The rows of `lower.ops.views` say which element of an operand stands at a position of the result; where that is a sum over the
result's own counters, the result is a view, whatever the op is called, and costs nothing but this arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Kind, Node, Value
from hotfuse.ir.types import Layout, ScalarType, TensorType
from hotfuse.lower.common.algebra import add, mul, product, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import dense_strides
from hotfuse.lower.common.positions import Position, Refine, Space, Split, counters_in
from hotfuse.lower.ops.views import Alias, is_move, move, shape_of
from hotfuse.ops.table import packet

_SAME = frozenset({"aten.alias", "aten.detach", "aten.contiguous", "aten.clone", "aten.to", "aten._to_copy"})
"""Ops that give the same elements where the element type stays; whether they lie elsewhere nobody sees."""
_NOTHING = frozenset({"aten._assert_tensor_metadata"})
"""Checks of what the graph's types say already."""
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Lies:
    """A value's place: the number of a buffer, and offset and strides in elements."""

    root: int
    offset: Dim
    strides: tuple[Dim, ...]


def does_nothing(node: Node) -> bool:
    """Whether a node needs no code: it only checks, or gives sizes that are known as expressions."""
    if node.kind is not Kind.OPERATOR:
        return False
    if packet(node.op) in _NOTHING:
        return True
    return bool(node.outs) and all(isinstance(v.type, ScalarType) and v.type.expr is not None for v in node.outs)


def is_view(node: Node) -> bool:
    """Whether a node's results are views, wherever its operand lies densely."""
    if node.kind is not Kind.OPERATOR or not node.outs or not all(isinstance(v.type, TensorType) for v in node.outs):
        return False
    if packet(node.op) in _SAME:
        return _same_elements(node)
    if not is_move(node.op):
        return False
    try:
        return all(_alias(node, i) is not None for i in range(len(node.outs)))
    except CannotLower:
        return False


def operand(node: Node, out: int) -> Value | None:
    """What a result is a view of."""
    if packet(node.op) in _SAME:
        given = node.args[0]
        return given if isinstance(given, Value) else None
    found = _alias(node, out)
    return None if found is None else found[0]


def _same_elements(node: Node) -> bool:
    given = node.args[0] if node.args else None
    made = node.outs[0].type
    if not isinstance(given, Value) or not isinstance(given.type, TensorType) or not isinstance(made, TensorType):
        return False
    return len(node.outs) == 1 and given.type.dtype is made.dtype and given.type.device == made.device == "cpu"


def view(node: Node, out: int, where: Callable[[str], Lies]) -> Lies | None:
    """Where a result lies as a view of an operand; None where it has to be computed."""
    if packet(node.op) in _SAME:
        given = node.args[0]
        return where(given.name) if isinstance(given, Value) and _same_elements(node) else None
    try:
        found = _alias(node, out)
    except CannotLower:
        return None
    if found is None:
        return None
    value, position, space = found
    if isinstance(value.type, TensorType) and value.type.dtype is not _tensor(node.outs[out]).dtype:
        return None
    lies = where(value.name)
    offset, steps = lies.offset, dict[int, Dim]()
    for c, stride in zip(position, lies.strides, strict=True):
        offset = add(offset, mul(c.offset, stride))
        for k, f in c.terms:
            steps[k] = add(steps.get(k, 0), mul(f, stride))
    strides: list[Dim] = []
    for counters in space.roots:
        stride = _joined([k for k in counters if space.extents[k] != 1], steps, space)
        if stride is None:
            return None
        strides.append(stride)
    return Lies(lies.root, offset, tuple(strides))


def _alias(node: Node, out: int) -> tuple[Value, Position, Space] | None:
    """The operand, the place in it, and the loops over the result that are fine enough to say so."""
    space = Space.of(shape_of(node.outs[out]))
    for _ in range(_MAX_SPLITS):
        try:
            moved = move(node, out, tuple(space.root(i) for i in range(len(space.roots))), space)
        except Refine as finer:
            if not isinstance(finer, Split):
                return None
            space = space.refined(finer)
            continue
        if not isinstance(moved, Alias) or any(counters_in(c.offset) for c in moved.position):
            return None
        return moved.value, moved.position, space
    return None


def _joined(counters: list[int], steps: dict[int, Dim], space: Space) -> Dim | None:
    """The one stride that walks several counters, outermost first; None where there is none."""
    if not counters:
        return 0
    step = steps.get(counters[-1], 0)
    extent = space.extents[counters[-1]]
    for k in reversed(counters[:-1]):
        if not same(steps.get(k, 0), mul(step, extent)):
            return None
        extent = mul(extent, space.extents[k])
    return step


def _tensor(v: Value) -> TensorType:
    assert isinstance(v.type, TensorType)
    return v.type


def fits(strides: tuple[Dim, ...], shape: tuple[Dim, ...], wanted: tuple[Dim, ...]) -> bool:
    """Whether strides are the wanted ones for sure; those of dims of extent 1 do not matter."""
    return all(n == 1 or same(a, b) for n, a, b in zip(shape, strides, wanted, strict=True))


def whole(lies: Lies, t: TensorType, elements: Dim) -> tuple[Dim, ...] | None:
    """The strides of a tensor of its own that is laid out like a value that covers its buffer; None where it does not."""
    if lies.offset != 0 or not same(product(t.shape), elements):
        return None
    for layout in (Layout(), t.layout):
        dense = dense_strides(t.shape, layout)
        if not layout.strided and fits(lies.strides, t.shape, dense):
            return dense
    return None
