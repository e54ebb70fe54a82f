"""Movement rows of ops that read at places which other data say.

The tensor that is read must lie in memory: a gather from values that are computed on the fly would compute them again and
again, so grouping lets such a node begin a group. An index outside raises in torch: here it is a fault of the call
(`require`), which is then answered by torch's own operators, and nothing outside is ever read.

    lower.pick(x, index, ...) {dims}    element p is x[p] with the place along each of dims replaced by index[p], broadcast
"""

from __future__ import annotations

from hotfuse.ir.graph import Arg, Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.positions import ORIGIN, Coord
from hotfuse.lower.ops.views import Alias, Move, Moved, Pick, Picked, broadcast, moves, shape_of, tensor

_INDEXES = (DType.I64, DType.I32)


def _index(arg: Arg, node: Node) -> Value:
    value = tensor(arg, node)
    assert isinstance(value.type, TensorType)
    if value.type.dtype not in _INDEXES:
        raise CannotLower(f"{node.op} by {value.type.dtype.value}")
    return value


def _picked(
    value: Value, position: list[Coord], picks: list[tuple[int, Alias]], *, wraps: bool = False, trusted: bool = False
) -> Picked:
    shape = shape_of(value)
    for dim, _ in picks:
        position[dim] = ORIGIN
    return Picked(value, tuple(position), tuple(Pick(d, shape[d], at, wraps, trusted) for d, at in picks))


@moves("aten.embedding")
def _embedding(m: Move) -> Moved:
    weight, indices = m.value("weight"), _index(m.arg("indices"), m.node)
    return _picked(weight, [ORIGIN, m.position[-1]], [(0, Alias(indices, m.position[:-1]))])


@moves("aten.index_select")
def _index_select(m: Move) -> Moved:
    value, index = m.value(), _index(m.arg("index"), m.node)
    rank = len(shape_of(value))
    if not rank or not shape_of(index):
        raise CannotLower("index_select without dims")
    d = m.dim("dim", rank)
    return _picked(value, list(m.position), [(d, Alias(index, (m.position[d],)))])


@moves("aten.gather")
def _gather(m: Move) -> Moved:
    value, index = m.value(), _index(m.arg("index"), m.node)
    if len(shape_of(value)) != len(shape_of(index)) or not m.position:
        raise CannotLower("gather without dims")
    d = m.dim("dim", len(m.position))
    return _picked(value, list(m.position), [(d, Alias(index, m.position))])


@moves("aten.index")
def _index_tensors(m: Move) -> Moved:
    """Index tensors broadcast against each other; their dims stand where the first of them stood, or, if a dim that is
    kept lies between two of them, in front."""
    value, given = m.value(), m.arg("indices")
    shape = shape_of(value)
    if not isinstance(given, tuple):
        raise CannotLower(f"{m.node.op} by {given}")
    chosen = {d: _index(a, m.node) for d, a in enumerate(given) if a is not None}
    if not chosen:
        raise CannotLower("index by nothing")
    rank = max(len(shape_of(i)) for i in chosen.values())
    together = max(chosen) - min(chosen) + 1 == len(chosen)
    front = min(chosen) if together else 0
    among, kept = m.position[front : front + rank], iter((*m.position[:front], *m.position[front + rank:]))
    target = m.shape[front : front + rank]
    position = [ORIGIN if d in chosen else next(kept) for d in range(len(shape))]
    picks = [(d, Alias(i, broadcast(among, target, shape_of(i)))) for d, i in chosen.items()]
    return _picked(value, position, picks, wraps=True)


@moves("lower.pick")
def _pick(m: Move) -> Moved:
    value, *indexes = (tensor(a, m.node) for a in m.node.args)
    dims = m.node.attr("dims")
    assert isinstance(dims, tuple)
    at: list[tuple[int, Alias]] = []
    for d, i in zip(dims, indexes, strict=True):
        assert isinstance(d, int)
        at.append((d, Alias(i, broadcast(m.position, m.shape, shape_of(i)))))
    return _picked(value, list(m.position), at, trusted=True)
