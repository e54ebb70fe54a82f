"""Bounds on what a model may ask for: a damaged or hostile file must end in an error, not in a starved machine.

Most operators make results about as large as what they are given. A few take the size of their result from a number, in
the file or in the data, and one wrong bit in it asks for terabytes. For those the size is reckoned before they run. The
bound is half of the memory this process may use, for one result; loops are bounded in `ops.control`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.model_file import OnnxNode
from hotfuse.machine.topology import topology

_SHARE = 2
_UNKNOWN_MEMORY = 16 << 30
_ELEMENT_BYTES = 8
"""Assumed where a result's element type is not the first input's: no type that is computed with is larger."""
_TYPED_OTHERWISE = frozenset({"AffineGrid", "ConstantOfShape", "MelWeightMatrix", "OneHot"})

Attrs = Mapping[str, Any]
Predict = Callable[[Sequence[Any], Attrs], float]


@functools.cache
def max_result_bytes() -> int:
    """The largest single result allowed on this machine."""
    found = topology()
    return (found.memory_limit_bytes or found.memory_bytes or _UNKNOWN_MEMORY) // _SHARE


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return list(value.reshape(-1).tolist())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _size(x: Any) -> float:
    return math.prod(x.shape)


def _shape_given(args: Sequence[Any], attrs: Attrs, at: int, name: str = "shape") -> float:
    given = args[at] if len(args) > at and args[at] is not None else attrs.get(name, [0])
    return math.prod(_numbers(given))


def _expand(args: Sequence[Any], attrs: Attrs) -> float:
    want, have = _numbers(args[1]), list(args[0].shape)
    n = max(len(want), len(have))
    pairs = zip([1] * (n - len(want)) + want, [1] * (n - len(have)) + have, strict=True)
    return math.prod(b if a == 1 else a for a, b in pairs)


def _tile(args: Sequence[Any], attrs: Attrs) -> float:
    return _size(args[0]) * math.prod(_numbers(args[1]))


def _range(args: Sequence[Any], attrs: Attrs) -> float:
    start, limit, delta = (_numbers(a)[0] for a in args[:3])
    return (limit - start) / delta


def _pad(args: Sequence[Any], attrs: Attrs) -> float:
    shape: list[float] = list(args[0].shape)
    pads = _numbers(args[1] if len(args) > 1 and args[1] is not None else attrs.get("pads") or attrs["paddings"])
    axes = [int(a) for a in _numbers(args[3])] if len(args) > 3 and args[3] is not None else list(range(len(shape)))
    for i, axis in enumerate(axes):
        shape[axis] += pads[i] + pads[i + len(axes)]
    return math.prod(max(0, d) for d in shape)


def _resize(args: Sequence[Any], attrs: Attrs) -> float:
    axes = attrs.get("axes") or list(range(len(args[0].shape)))
    shape: list[float] = list(args[0].shape)
    scales = args[1] if len(args) == 2 else args[2] if len(args) > 2 else attrs["scales"]
    if len(args) > 3 and args[3] is not None:
        for axis, size in zip(axes, _numbers(args[3]), strict=True):
            shape[axis] = size
    else:
        for axis, scale in zip(axes, _numbers(scales), strict=True):
            shape[axis] *= scale
    return math.prod(shape)


def _crop(args: Sequence[Any], attrs: Attrs) -> float:
    shape: list[float] = list(args[0].shape)
    for axis, size in zip(attrs.get("axes") or range(len(shape)), _numbers(args[1]), strict=True):
        shape[axis] = size
    return math.prod(shape)


def _one_hot(args: Sequence[Any], attrs: Attrs) -> float:
    return _size(args[0]) * _numbers(args[1])[0]


def _windows(op: str, channels: Callable[[Sequence[Any]], int]) -> Predict:
    """Convolutions and poolings: the output, and the padded input, which a convolution of floats has where ends differ alone."""

    def predict(args: Sequence[Any], attrs: Attrs) -> float:
        batch, deep, *spatial = args[0].shape
        rank = len(spatial)
        pads = attrs.get("pads") or [0] * (2 * rank)
        strides, dilations = attrs.get("strides") or [1] * rank, attrs.get("dilations") or [1] * rank
        padded = [n + pads[i] + pads[i + rank] for i, n in enumerate(spatial)]
        window = list(args[_WEIGHT[op]].shape[2:]) if op in _WEIGHT else [1] * rank
        out = [
            -(-max(0, n - (k - 1) * d) // max(1, s)) for n, k, d, s in zip(padded, window, dilations, strides, strict=True)
        ]
        held = spatial if op == "Conv" and pads[:rank] == pads[rank:] else padded
        return max(batch * deep * math.prod(held), batch * channels(args) * math.prod(out))

    return predict


def _conv_transpose(args: Sequence[Any], attrs: Attrs) -> float:
    batch, _, *spatial = args[0].shape
    rank = len(spatial)
    strides = attrs.get("strides") or [1] * rank
    dilations = attrs.get("dilations") or [1] * rank
    extra = attrs.get("output_padding") or [0] * rank
    kernel = list(args[1].shape[2:])
    full = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(spatial, strides, kernel, dilations, extra, strict=True)
    ]
    asked = attrs.get("output_shape") or full
    return batch * args[1].shape[1] * int(attrs.get("group", 1)) * max(math.prod(full), math.prod(asked[-rank:]))


_WEIGHT = {"Conv": 1, "QLinearConv": 3}
"""Which input of a convolution says how large its window is."""
_CHANNELS: dict[str, Callable[[Sequence[Any]], int]] = {
    "AveragePool": lambda a: a[0].shape[1],
    "Conv": lambda a: a[1].shape[0],
    "LpPool": lambda a: a[0].shape[1],
    "MaxPool": lambda a: a[0].shape[1],
    "QLinearConv": lambda a: a[3].shape[0],
}
"""Of the result, for operators with windows: their prediction follows from this and the first input's shape."""

PREDICT: dict[str, Predict] = {
    **{op: _windows(op, channels) for op, channels in _CHANNELS.items()},
    "AffineGrid": lambda a, at: 3 * _shape_given(a, at, 1),
    "BlackmanWindow": lambda a, at: _numbers(a[0])[0],
    "CenterCropPad": _crop,
    "Col2Im": lambda a, at: a[0].shape[0] * a[0].shape[1] * _shape_given(a, at, 1),
    "ConstantOfShape": lambda a, at: _shape_given(a, at, 0),
    "ConvTranspose": _conv_transpose,
    "Expand": _expand,
    "HammingWindow": lambda a, at: _numbers(a[0])[0],
    "HannWindow": lambda a, at: _numbers(a[0])[0],
    "MaxUnpool": lambda a, at: _shape_given(a, at, 2),
    "MelWeightMatrix": lambda a, at: _numbers(a[0])[0] * _numbers(a[1])[0],
    "Multinomial": lambda a, at: a[0].shape[0] * at.get("sample_size", 1),
    "OneHot": _one_hot,
    "Pad": _pad,
    "RandomNormal": lambda a, at: _shape_given((), at, 0),
    "RandomUniform": lambda a, at: _shape_given((), at, 0),
    "Range": _range,
    "Resize": _resize,
    "RoiAlign": lambda a, at: a[1].shape[0] * a[0].shape[1] * at.get("output_height", 1) * at.get("output_width", 1),
    "Tile": _tile,
    "Upsample": _resize,
}
"""Elements of the result, per operator whose result's size is a number it reads."""


def guard(node: OnnxNode, attrs: Attrs, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, refused when its result would be absurdly large."""
    predict = PREDICT.get(node.op) if node.domain == "" else None
    if predict is None:
        return call
    chosen, channels = predict, _CHANNELS.get(node.op)
    if channels is not None:
        return _guarded_by_shape(node, attrs, call, chosen, channels)

    def guarded(*args: Any) -> Any:
        check(node, args, attrs, chosen)
        return call(*args)

    return guarded


def _guarded_by_shape(
    node: OnnxNode, attrs: Attrs, call: Callable[..., Any], predict: Predict, channels: Callable[[Sequence[Any]], int]
) -> Callable[..., Any]:  # fmt: skip
    """The same, reckoned anew when sizes change: in small layers the reckoning took longer than the layer."""
    fits: tuple[Any, ...] | None = None
    weight = _WEIGHT.get(node.op)

    def guarded(*args: Any) -> Any:
        nonlocal fits
        first = args[0]
        try:
            sizes = (first.shape, first.dtype, channels(args) if weight is None else args[weight].shape)
        except (LookupError, AttributeError):
            return call(*args)  # malformed arguments: the operator itself says what is wrong with them
        if sizes != fits:
            check(node, args, attrs, predict)
            fits = sizes
        return call(*args)

    return guarded


def check(node: OnnxNode, args: Sequence[Any], attrs: Attrs, predict: Predict) -> None:
    """Refuse a result that is larger than this machine could sensibly hold."""
    try:
        typed = args and isinstance(args[0], torch.Tensor) and node.op not in _TYPED_OTHERWISE
        need = predict(args, attrs) * (args[0].element_size() if typed else _ELEMENT_BYTES)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError):
        return  # malformed arguments: the operator itself says what is wrong with them
    if need > max_result_bytes():
        raise ModelError(
            f"operator {node.op} of node {node.title!r} would make a result of {need:.3g} bytes",
            where=f"node {node.index}",
            because=f"one result may take {max_result_bytes():.3g} bytes, half of this machine's memory",
            hint="the model or its input is damaged, or the machine is too small for it",
        )
