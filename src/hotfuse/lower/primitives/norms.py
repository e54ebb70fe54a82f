"""Rules for normalizations: statistics over some dims, then pointwise work with them."""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import divide
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.rules import Draft, decomposes


def _number(d: Draft, name: str, default: float) -> float:
    value = d.arg(name, default)
    if not isinstance(value, int | float):
        raise CannotLower(f"{name} of {d.node.op} is {value}")
    return value


def _inverse_std(d: Draft, variance: Value, eps: float) -> Value:
    return d.pointwise("rsqrt.default", d.pointwise("add.Tensor", variance, eps))


def _affine(d: Draft, x: Value, weight: Value | None, bias: Value | None) -> Value:
    if weight is not None:
        x = d.pointwise("mul.Tensor", x, d.wide(weight))
    return x if bias is None else d.pointwise("add.Tensor", x, d.wide(bias))


def _last(d: Draft, x: Value) -> tuple[int, ...]:
    normalized = d.arg("normalized_shape")
    rank = len(shape_of(x))
    count = len(normalized) if isinstance(normalized, tuple) else 1
    return tuple(range(rank - count, rank))


@decomposes("layer_norm native_layer_norm")
def _layer_norm(d: Draft, node: Node) -> Sequence[Value]:
    x = d.wide(d.value("input"))
    mean, centered, variance = d.centered_mean(x, _last(d, x))
    rstd = _inverse_std(d, variance, _number(d, "eps", 1e-5))
    y = _affine(d, d.pointwise("mul.Tensor", centered, rstd), d.maybe("weight"), d.maybe("bias"))
    return y, mean, rstd


_EPSILON = {DType.F64: 2.220446049250313e-16, DType.F32: 1.1920928955078125e-07, DType.F16: 0.0009765625, DType.BF16: 0.0078125}


@decomposes("rms_norm _fused_rms_norm")
def _rms_norm(d: Draft, node: Node) -> Sequence[Value]:
    given = d.value("input")
    x = d.wide(given)
    dims = _last(d, x)
    eps = d.arg("eps")
    if eps is None:  # torch takes the epsilon of the type it computes in
        eps = _EPSILON[x.type.dtype]  # type: ignore[union-attr]
    if not isinstance(eps, int | float):
        raise CannotLower(f"eps is {eps}")
    square = d.reduce("mean", d.pointwise("square.default", x), dims)
    rstd = _inverse_std(d, square, eps)
    return _affine(d, d.pointwise("mul.Tensor", x, rstd), d.maybe("weight"), None), rstd


def _per_channel(d: Draft, v: Value | None, rank: int) -> Value | None:
    """[C] as [C, 1, 1, ...], which broadcasts against [N, C, ...]."""
    return None if v is None else d.reshape(v, (*shape_of(v), *(1,) * (rank - 2)))


@decomposes("group_norm native_group_norm")
def _group_norm(d: Draft, node: Node) -> Sequence[Value]:
    x = d.wide(d.value("input"))
    shape = shape_of(x)
    groups = d.arg("num_groups", d.arg("group"))
    if not isinstance(groups, int):
        raise CannotLower(f"groups are {groups}")
    each: Dim | None = divide(shape[1], groups)
    if each is None:
        raise CannotLower(f"{shape[1]} channels in {groups} groups")
    split = d.reshape(x, (shape[0], groups, each, *shape[2:]))
    mean, centered, variance = d.centered_mean(split, tuple(range(2, len(shape) + 1)))
    rstd = _inverse_std(d, variance, _number(d, "eps", 1e-5))
    y = d.reshape(d.pointwise("mul.Tensor", centered, rstd), shape)
    weight, bias = (_per_channel(d, d.maybe(n), len(shape)) for n in ("weight", "bias"))
    return _affine(d, y, weight, bias), d.reshape(mean, (shape[0], groups)), d.reshape(rstd, (shape[0], groups))


def _with_running(d: Draft, x: Value) -> Sequence[Value]:
    rank = len(shape_of(x))
    mean, variance = (d.maybe(n) for n in ("running_mean", "running_var"))
    if mean is None or variance is None:
        raise CannotLower("there are no running statistics")
    rstd = _inverse_std(d, d.wide(variance), _number(d, "eps", 1e-5))
    weight, bias = d.maybe("weight"), d.maybe("bias")
    scale = rstd if weight is None else d.pointwise("mul.Tensor", rstd, d.wide(weight))
    shift = d.pointwise("neg.default", d.pointwise("mul.Tensor", d.wide(mean), scale))
    shift = shift if bias is None else d.pointwise("add.Tensor", shift, d.wide(bias))
    scale, shift = (d.reshape(v, (*shape_of(v), *(1,) * (rank - 2))) for v in (scale, shift))
    return (d.pointwise("add.Tensor", d.pointwise("mul.Tensor", x, scale), shift),)


@decomposes("batch_norm")
def _batch_norm(d: Draft, node: Node) -> Sequence[Value]:
    if d.arg("training", default=False):
        raise CannotLower("batch norm's statistics of the batch")
    return _with_running(d, d.wide(d.value("input")))


@decomposes("instance_norm")
def _instance_norm(d: Draft, node: Node) -> Sequence[Value]:
    x = d.wide(d.value("input"))
    if not d.arg("use_input_stats", default=True):
        return _with_running(d, x)
    if d.arg("running_mean") is not None:
        raise CannotLower("instance norm that updates running statistics")
    rank = len(shape_of(x))
    _, centered, variance = d.centered_mean(x, tuple(range(2, rank)))
    y = d.pointwise("mul.Tensor", centered, _inverse_std(d, variance, _number(d, "eps", 1e-5)))
    weight, bias = (_per_channel(d, d.maybe(n), rank) for n in ("weight", "bias"))
    return (_affine(d, y, weight, bias),)
