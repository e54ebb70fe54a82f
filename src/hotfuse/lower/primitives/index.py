"""Rules for ops that write at places which other data say, turned round: every place of the result asks who writes to it.

    one_hot(i, n)             ->   i' = lower.checked(i) {extent = n};  i' == [0 .. n)
    scatter(x, d, i, y)       ->   hit = i' == place along d;  j = max(where(hit, j, -1));  y[j] where j >= 0, else x
    scatter_add(x, d, i, y)   ->   x + sum(where(hit, y, 0))
    index_put(x, [i], y)      ->   the same, whole slices at a time; so index_add(x, d, i, y)

    lower.checked() {self, extent}    an index; one outside is a fault of the call, which torch's own operators then answer

That costs a look at every index for every place, so it is for a few indexes only; where the library is faster, the trial says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import HALVES
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.rules import Draft, broadcast, decomposes, dtype

MAX_INDEXES, MAX_LOOKS = 64, 1 << 14
"""Indexes along the dim that is written, at most; more where that dim is short, so that all its places together look so often."""
_I64, _BOOL = DType.I64, DType.BOOL


def _few(many: int, extent: int) -> bool:
    return 1 <= many <= MAX_INDEXES or 1 <= many <= MAX_LOOKS // max(extent, 1)


def _checked(d: Draft, index: Value, extent: int) -> Value:
    if dtype(index) not in (DType.I64, DType.I32):
        raise CannotLower(f"an index of {dtype(index).value}")
    return d.add("lower.checked", (), _I64, shape_of(index), {"self": index, "extent": extent})


def places(d: Draft, count: int, rank: int, at: int) -> Value:
    """0, 1, ... along one of so many dims."""
    plain = d.add("aten.arange.default", (count,), _I64, (count,))
    return d.reshape(plain, tuple(count if i == at else 1 for i in range(rank)))


def equal(d: Draft, a: Value, b: Value) -> Value:
    """Where two are the same, broadcast."""
    return d.add("aten.eq.Tensor", (a, b), _BOOL, broadcast(shape_of(a), shape_of(b)))


@decomposes("one_hot")
def _one_hot(d: Draft, node: Node) -> Sequence[Value]:
    x, classes = d.value(), d.arg("num_classes", -1)
    if not isinstance(classes, int) or classes < 1:
        raise CannotLower("the number of classes is known only at run time")
    index = _checked(d, x, classes)
    shape = shape_of(x)
    column = d.reshape(index, (*shape, 1))
    return (d.cast(equal(d, column, places(d, classes, len(shape) + 1, len(shape))), _I64),)


@decomposes("scatter scatter_add")
def _scatter(d: Draft, node: Node) -> Sequence[Value]:
    x, index, dim = d.value(), d.value("index"), d.arg("dim")
    shape, given = shape_of(x), shape_of(index)
    if d.arg("reduce") is not None or not isinstance(dim, int) or not shape or len(shape) != len(given):
        raise CannotLower("a scatter of an unusual form")
    at = dim % len(shape)
    extent, many = shape[at], given[at]
    if not isinstance(extent, int) or not isinstance(many, int) or not _few(many, extent):
        raise CannotLower(f"{many} indexes into a dim of {extent}")
    if not all(same(m, n) for i, (m, n) in enumerate(zip(shape, given, strict=True)) if i != at):
        raise CannotLower("a scatter into a part of the other dims")
    at_place = places(d, extent, len(shape) + 1, at)
    hit = equal(d, _turned(d, _checked(d, index, extent), at), at_place)
    source = d.arg("src")
    if not isinstance(source, Value):
        return (either(d, once(d, "any", hit, len(shape)), d.arg("value"), x),)
    if not all(same(m, n) for m, n in zip(shape_of(source), given, strict=True)) or len(shape_of(source)) != len(given):
        raise CannotLower("a scatter of a part of its source")
    return (_written(d, x, hit, _turned(d, source, at), many, adds=node.op.startswith("aten.scatter_add")),)


@decomposes("index_put")
def _index_put(d: Draft, node: Node) -> Sequence[Value]:
    """One index tensor of one dim: whole slices are written."""
    x, values, given = d.value(), d.value("values"), d.arg("indices")
    shape = shape_of(x)
    chosen = [(at, i) for at, i in enumerate(given) if i is not None] if isinstance(given, tuple) else []
    if len(chosen) != 1 or not isinstance(chosen[0][1], Value) or len(shape_of(chosen[0][1])) != 1:
        raise CannotLower("index_put by other than one index of one dim")
    at, index = chosen[0][0], chosen[0][1]
    assert isinstance(index, Value)
    extent, (many,) = shape[at], shape_of(index)
    if not isinstance(extent, int) or not isinstance(many, int) or not _few(many, extent):
        raise CannotLower(f"{many} indexes into a dim of {extent}")
    whole = (*shape[:at], many, *shape[at + 1 :])
    wanted = shape_of(values)
    if wanted and (len(wanted) != len(whole) or not all(same(m, n) for m, n in zip(wanted, whole, strict=True))):
        raise CannotLower("index_put of values that are repeated")
    wide = d.cast(index, _I64)
    below = d.add("aten.lt.Scalar", (wide, 0), _BOOL, (many,))
    wrapped = either(d, below, d.pointwise("add.Tensor", wide, extent), wide)
    turned = _turned(d, values, at) if wanted else d.reshape(values, (1,) * (len(shape) + 1))
    return (_written(d, x, _hit(d, x, at, wrapped, extent), turned, many, adds=d.arg("accumulate", default=False) is True),)


@decomposes("index_add")
def _index_add(d: Draft, node: Node) -> Sequence[Value]:
    """Slices of the source, times a number, added where one index tensor says; no index counts from the end."""
    x, index, source, dim, alpha = d.value(), d.value("index"), d.value("source"), d.arg("dim"), d.arg("alpha", 1)
    shape, given = shape_of(x), shape_of(source)
    if not isinstance(dim, int) or not shape or len(shape_of(index)) != 1 or not isinstance(alpha, int | float):
        raise CannotLower("an index_add of an unusual form")
    at = dim % len(shape)
    extent, (many,) = shape[at], shape_of(index)
    if not isinstance(extent, int) or not isinstance(many, int) or not _few(many, extent):
        raise CannotLower(f"{many} indexes into a dim of {extent}")
    if dtype(x) is _BOOL or dtype(source) is not dtype(x) or len(given) != len(shape):
        raise CannotLower("an index_add of truth values, or of another type or rank")
    values = _turned(d, source, at)
    scaled = values if alpha == 1 else d.pointwise("mul.Tensor", d.wide(values), alpha)
    return (_written(d, x, _hit(d, x, at, index, extent), scaled, many, adds=True),)


def _hit(d: Draft, x: Value, at: int, index: Value, extent: int) -> Value:
    """Who writes whole slices to which place of a dim."""
    rank = len(shape_of(x))
    row = d.reshape(_checked(d, index, extent), (*(1,) * rank, shape_of(index)[0]))
    return equal(d, row, places(d, extent, rank + 1, at))


def _written(d: Draft, x: Value, hit: Value, values: Value, many: int, *, adds: bool) -> Value:
    """x with what is written to each place, the last of several; `hit` and `values` have a last dim of those who may write."""
    last = len(shape_of(x))
    if adds:
        return d.pointwise("add.Tensor", d.wide(x), once(d, "sum", either(d, hit, d.wide(values), 0), last))
    number = places(d, many, last + 1, last)
    chosen = equal(d, number, d.reduce("max", either(d, hit, number, -1), (last,)))
    if dtype(x) is _BOOL:
        picked = once(d, "any", either(d, chosen, values, no=False), last)
    else:
        kept = d.cast(values, DType.F32) if dtype(x) in HALVES else values
        picked = d.cast(once(d, "sum", either(d, chosen, kept, 0), last), dtype(x))
    return either(d, once(d, "any", hit, last), picked, x)


def _turned(d: Draft, v: Value, at: int) -> Value:
    """The dim that is written last, and one of extent 1 in its place: what one place of the result looks through."""
    shape = shape_of(v)
    rest = [i for i in range(len(shape)) if i != at]
    moved = tuple(shape[i] for i in (*rest, at))
    turned = d.add("aten.permute.default", (v, (*rest, at)), dtype(v), moved)
    return d.add("aten.unsqueeze.default", (turned, at), dtype(v), (*moved[:at], 1, *moved[at:]))


def either(d: Draft, condition: Value, yes: object, no: object) -> Value:
    """One or the other; one of them may be a number."""
    tensors = [v for v in (yes, no) if isinstance(v, Value)]
    kind = dtype(tensors[0])
    sides: list[Value] = []
    for side in (yes, no):
        if isinstance(side, Value):
            sides.append(side)
        elif isinstance(side, bool | int | float):
            sides.append(d.add("aten.full.default", ((), side), kind, (), {"dtype": kind}))
        else:
            raise CannotLower(f"a choice of {side}")
    shape = broadcast(shape_of(condition), broadcast(shape_of(sides[0]), shape_of(sides[1])))
    return d.add("aten.where.self", (condition, *sides), kind, shape)


def once(d: Draft, function: str, v: Value, dim: int) -> Value:
    """A reduction over the last dim, which goes."""
    made = d.reduce(function, v, (dim,))
    return d.reshape(made, shape_of(made)[:-1])
