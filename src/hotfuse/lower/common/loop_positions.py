"""Where values lie in the loops of another one: the loops run over a root value's shape, and other values are placed in them.

    root   %c: [B, S, D] at (b, s, d)
    lands  %m = mean(%c, -1): [B, S, 1] at (b, s, 0);  %y = permute(%c, 0, 2, 1): [B, D, S] at (b, d, s)

Going forward, pointwise ops keep the place, reshapes and permutations move it, reductions drop dims. Going backward from the
root, what it was made from by the same kinds of ops lands too. A value that does not land has loops of its own.
"""

from __future__ import annotations

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import ORIGIN, Position, Space
from hotfuse.lower.common.steps import Apply, Definitions
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import Alias, shape_of
from hotfuse.ops.table import packet

_RESHAPES = {
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze", "aten.unsqueeze",
    "aten.view_as", "aten.reshape_as", "aten.ravel", "lower.alias",
}  # fmt: skip
_TURNS = {
    "aten.permute", "aten.transpose", "aten.t", "aten.mT", "aten.numpy_T", "aten.swapaxes", "aten.swapdims", "aten.movedim",
}  # fmt: skip


def land(definitions: Definitions, graph: Graph, space: Space, root: Value, base: Position) -> dict[str, Position]:
    """The position of every value that has one in the root's loops."""
    found: dict[str, Position] = {}
    _backward(definitions, space, root, base, found)
    for node in graph.nodes:
        for i, out in enumerate(node.outs):
            if out.name not in found and isinstance(out.type, TensorType):
                position = _forward(definitions, space, node, i, found)
                if position is not None:
                    found[out.name] = position
    return found


def _backward(definitions: Definitions, space: Space, value: Value, at: Position, found: dict[str, Position]) -> None:
    if value.name in found:
        return
    found[value.name] = at
    if value.name in definitions.sources:
        return
    node, _ = definitions.nodes[value.name]
    if packet(node.op) not in _RESHAPES | _TURNS and not expand.known(node.op):
        return
    step = definitions.step(value, at, space)
    for o in (step,) if isinstance(step, Alias) else step.operands if isinstance(step, Apply) else ():
        if packet(node.op) in _RESHAPES | _TURNS or _equal(shape_of(o.value), shape_of(value)):
            _backward(definitions, space, o.value, o.position, found)


def _equal(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    return len(a) == len(b) and all(same(m, n) for m, n in zip(a, b, strict=True))


def _forward(
    definitions: Definitions, space: Space, node: Node, out: int, found: dict[str, Position]
) -> Position | None:
    shape, name = shape_of(node.outs[out]), packet(node.op)
    tensors = [v for v in node.ins if v.name in found]
    if not tensors:
        return None
    first = tensors[0]
    at, given = found[first.name], shape_of(first)
    if name in _RESHAPES:
        return space.reshaped(at, given, shape)
    if name in _TURNS:
        return _turned(definitions, space, node, at)
    if node.op.startswith("lower.reduce."):
        dims = node.attr("dims")
        return tuple(ORIGIN if isinstance(dims, tuple) and d in dims else c for d, c in enumerate(at))
    if expand.known(node.op):
        for v in tensors:
            if expand.reads(node, v) and _equal(shape_of(v), shape):
                return found[v.name]
    return None


def _turned(definitions: Definitions, space: Space, node: Node, at: Position) -> Position:
    """The inverse of what the move does to marked coords."""
    marks = Space.of(tuple(range(2, len(at) + 2)))
    base = tuple(marks.root(i) for i in range(len(at)))
    step = definitions.step(node.outs[0], base, space)
    if not isinstance(step, Alias):
        raise CannotLower(f"{node.op} does not only turn dims")
    return tuple(at[step.position.index(c)] for c in base)
