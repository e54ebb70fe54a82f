"""Rules for reductions and softmax, and for the few movements that are written as simpler ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import add
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import FLOATS, HALVES
from hotfuse.lower.ops.views import shape_of, size
from hotfuse.lower.primitives.resize import bordered
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype


def _dims(d: Draft, x: Value, name: str = "dim") -> tuple[int, ...]:
    """The reduced dims; none given means all of them."""
    given, rank = d.arg(name), len(shape_of(x))
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if given is None or given == ():
        return tuple(range(rank))
    if not isinstance(given, tuple) or not all(isinstance(g, int) for g in given):
        raise CannotLower(f"reduced dims are {given}")
    return tuple(sorted({int(g) % max(rank, 1) for g in given})) if rank else ()  # type: ignore[arg-type]


def _accumulated(d: Draft, x: Value, out: DType) -> Value:
    """The operand in the type that a sum is kept in."""
    return d.cast(x, DType.F32 if out in HALVES else out)


@decomposes("sum mean prod")
def _sum(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    return (d.reduce(node.op.split(".")[1], _accumulated(d, x, dtype(node.outs[0])), _dims(d, x)),)


@decomposes("amax amin")
def _amax(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    return (_extreme(d, node.op.split(".")[1][1:], x, _dims(d, x)),)


def _extreme(d: Draft, function: str, x: Value, dims: Sequence[int]) -> Value:
    if dtype(x) is DType.BOOL:
        return d.reduce("any" if function == "max" else "all", x, dims)
    return d.reduce(function, x, dims)


@decomposes("max min")
def _max(d: Draft, node: Node) -> Sequence[Value]:
    function = node.op.split(".")[1]
    if node.op.endswith(".other"):
        other = d.value("other")
        both = [d.cast(v, dtype(node.outs[0])) for v in (d.value(), other)]
        return (d.pointwise("maximum.default" if function == "max" else "minimum.default", *both),)
    x = d.value()
    if node.op.endswith(".default"):
        return (_extreme(d, function, x, tuple(range(len(shape_of(x))))),)
    dims = _dims(d, x)
    plain = d.cast(x, DType.U8) if dtype(x) is DType.BOOL else x
    return _extreme(d, function, x, dims), d.reduce(f"arg{function}", plain, dims, out=DType.I64)


@decomposes("argmax argmin")
def _argmax(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    return (d.reduce(node.op.split(".")[1], x, _dims(d, x), out=DType.I64),)


@decomposes("any all")
def _any(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    return (d.reduce(node.op.split(".")[1], d.cast(x, DType.BOOL), _dims(d, x)),)


@decomposes("count_nonzero")
def _count_nonzero(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    return (d.reduce("sum", d.cast(d.cast(x, DType.BOOL), DType.I64), _dims(d, x)),)


def _spread(d: Draft) -> tuple[Value, Value]:
    """(mean, variance) as var's arguments ask for it."""
    x = d.wide(d.value())
    correction, unbiased = d.arg("correction"), d.arg("unbiased")
    less = 1 if correction is None and unbiased is not False else 0 if correction is None else correction
    if not isinstance(less, int | float):
        raise CannotLower(f"correction is {less}")
    mean, _, variance = d.centered_mean(x, _dims(d, x), less)
    return mean, variance


@decomposes("var std")
def _var(d: Draft, node: Node) -> Sequence[Value]:
    _, variance = _spread(d)
    return (variance if node.op.startswith("aten.var") else d.pointwise("sqrt.default", variance),)


@decomposes("var_mean std_mean")
def _var_mean(d: Draft, node: Node) -> Sequence[Value]:
    mean, variance = _spread(d)
    return variance if node.op.startswith("aten.var") else d.pointwise("sqrt.default", variance), mean


@decomposes("linalg_vector_norm norm frobenius_norm")
def _norm(d: Draft, node: Node) -> Sequence[Value]:
    x = _accumulated(d, d.value(), dtype(node.outs[0]))
    order = d.arg("ord", d.arg("p", 2))
    dims = _dims(d, x)
    size_of = d.pointwise("abs.default", x)
    if order is None or order == 2 or order == "fro":
        return (d.pointwise("sqrt.default", d.reduce("sum", d.pointwise("square.default", x), dims)),)
    if order == 1:
        return (d.reduce("sum", size_of, dims),)
    if order in (math.inf, -math.inf):
        return (d.reduce("max" if order == math.inf else "min", size_of, dims),)
    raise CannotLower(f"the norm of order {order}")


# --- softmax ----------------------------------------------------------------------------------------------------------


def _exponentials(d: Draft, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """(x - max, its exponential): what keeps softmax from overflowing. A NaN need not show in the maximum: it will in the sum."""
    shifted = d.pointwise("sub.Tensor", x, d.reduce("top" if dtype(x) in FLOATS else "max", x, dims))
    return shifted, _decay(d, shifted)


def _decay(d: Draft, x: Value) -> Value:
    """e^x of what is at most 0."""
    return d.add("lower.decay", (), dtype(x), shape_of(x), {"self": x})


def _softmax_input(d: Draft, node: Node) -> tuple[Value, tuple[int, ...]]:
    x = _accumulated(d, d.value(), dtype(node.outs[0]))
    return x, _dims(d, x)


@decomposes("softmax _softmax special_softmax")
def _softmax(d: Draft, node: Node) -> Sequence[Value]:
    x, dims = _softmax_input(d, node)
    _, e = _exponentials(d, x, dims)
    return (_share(d, e, dims),)


def _share(d: Draft, e: Value, dims: Sequence[int]) -> Value:
    """Parts of their sum, which is at least 1: one quotient per row, the rest are products."""
    return d.pointwise("mul.Tensor", e, d.pointwise("reciprocal.default", d.reduce("sum", e, dims)))


@decomposes("_safe_softmax")
def _safe_softmax(d: Draft, node: Node) -> Sequence[Value]:
    """A row of nothing but -inf gives zeros."""
    x, dims = _softmax_input(d, node)
    high = d.reduce("max", x, dims)
    e = _decay(d, d.pointwise("sub.Tensor", x, high))
    y = _share(d, e, dims)
    masked = d.add("aten.eq.Scalar", (high, -math.inf), DType.BOOL, shape_of(high))
    return (d.add("aten.masked_fill.Scalar", (y, masked, 0.0), dtype(y), shape_of(y)),)


@decomposes("log_softmax _log_softmax special_log_softmax")
def _log_softmax(d: Draft, node: Node) -> Sequence[Value]:
    x, dims = _softmax_input(d, node)
    shifted, e = _exponentials(d, x, dims)
    return (d.pointwise("sub.Tensor", shifted, d.pointwise("log.default", d.reduce("sum", e, dims))),)


@decomposes("logsumexp special_logsumexp")
def _logsumexp(d: Draft, node: Node) -> Sequence[Value]:
    """An infinite maximum is not subtracted: inf - inf would be NaN."""
    x = _accumulated(d, d.value(), dtype(node.outs[0]))
    dims = _dims(d, x)
    high = d.reduce("max", x, dims)
    infinite = d.add("aten.isinf.default", (high,), DType.BOOL, shape_of(high))
    level = d.add("aten.masked_fill.Scalar", (high, infinite, 0.0), dtype(x), shape_of(high))
    e = d.pointwise("exp.default", d.pointwise("sub.Tensor", x, level))
    return (d.pointwise("add.Tensor", d.pointwise("log.default", d.reduce("sum", e, dims)), level),)


# --- movement ---------------------------------------------------------------------------------------------------------


@decomposes("glu")
def _glu(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    shape = shape_of(node.outs[0])
    dim = d.arg("dim", -1)
    if not isinstance(dim, int):
        raise CannotLower(f"glu along {dim}")
    dim %= len(shape)
    half = shape[dim]
    if not isinstance(half, int):
        raise CannotLower(f"glu over {half}")
    a, b = (d.add("aten.slice.Tensor", (x, dim, at, at + half), dtype(x), shape) for at in (0, half))
    return (d.pointwise("mul.Tensor", d.wide(a), d.pointwise("sigmoid.default", d.wide(b))),)


@decomposes("prelu")
def _prelu(d: Draft, node: Node) -> Sequence[Value]:
    x, weight = d.value(), d.value("weight")
    rank = len(shape_of(x))
    if shape_of(weight) not in ((), (1,)):
        weight = d.reshape(weight, (*shape_of(weight), *(1,) * max(rank - 2, 0)))
    else:
        weight = d.reshape(weight, ())
    return (d.pointwise("_prelu_kernel.default", x, weight),)


@decomposes("constant_pad_nd pad")
def _pad(d: Draft, node: Node) -> Sequence[Value]:
    """One dim after the other; `pad` lists them from the last one on."""
    x, amounts = d.value(), d.arg("pad")
    mode = d.arg("mode", "constant")
    if mode != "constant":
        return (bordered(d, x, amounts, str(mode)),)
    if not isinstance(amounts, tuple):
        raise CannotLower(f"padding by {amounts}")
    number = d.arg("value", 0)
    number = 0 if number is None else number
    if not isinstance(number, int | float) or (dtype(x) not in FLOATS and not math.isfinite(number)):
        raise CannotLower(f"padding with {number}")
    shape = list[Dim](shape_of(x))
    for i in range(0, len(amounts), 2):
        dim = len(shape) - 1 - i // 2
        before, after = amounts[i], amounts[i + 1]
        if (before, after) == (0, 0):
            continue
        shape[dim] = add(shape[dim], size(before), size(after))
        x = d.add("lower.pad", (x, dim, before, number), dtype(x), tuple(shape))
    return (x,)
