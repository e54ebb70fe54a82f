"""Rule for depthwise convolutions of images that lie plane by plane: shifted planes times a number each, added up.

    conv1d(x, w, padding=1, groups=C)   ->   p = x with zeros around, stored;  p[:, :, 0:] * w[:, 0] + p[:, :, 1:] * w[:, 1] + ...

Vectors run along pixels, side by side here; with channels innermost they run along channels (`cpu.conv.depthwise`). The borders
are stored with the image, so that no place has to be checked. A window of many places runs in a loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hotfuse.analysis.convolution import STRAIGHT, is_convolution
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import Layout, TensorType
from hotfuse.lower.common.algebra import add, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import dense_strides
from hotfuse.lower.ops.expand import FLOATS
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.pool import each
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_WRITTEN_OUT = 64
"""Most places of a window that are computed one after the other in one loop body."""


def by_planes(graph: Graph) -> bool:
    """Whether a group's convolution is depthwise and reads planes."""
    convs = [n for n in graph.nodes if is_convolution(n)]
    return len(convs) == 1 and packet(convs[0].op) in STRAIGHT and _depthwise(convs[0]) and not _channels_inside(convs[0].args[0])


def _depthwise(node: Node) -> bool:
    x, weight = node.args[0], node.args[1]
    if not isinstance(x, Value) or not isinstance(weight, Value) or packet(node.op) == "aten.convolution":
        return False
    groups = argument(node, "groups", 1)
    return groups != 1 and same(shape_of(x)[1], groups) if isinstance(groups, int) and len(shape_of(x)) > 2 else False


def _channels_inside(x: object) -> bool:
    """Whether an image is dense, with its channels innermost."""
    if not isinstance(x, Value) or not isinstance(x.type, TensorType) or x.type.layout.strided:
        return False
    shape = x.type.shape
    strides = dense_strides(shape, x.type.layout)
    return strides[1] == 1 and any(n != 1 for n in shape[2:]) and x.type.layout != Layout()


@decomposes("conv1d conv2d conv3d")
def _convolution(d: Draft, node: Node) -> Sequence[Value]:
    x, weight, bias = d.value("input"), d.value("weight"), d.maybe("bias")
    shape, window = shape_of(x), shape_of(weight)
    rank = len(shape) - 2
    if not _depthwise(node) or len(window) != rank + 2 or window[1] != 1 or dtype(x) not in FLOATS:
        raise CannotLower(f"{node.op} is no depthwise convolution of real numbers")
    numbers = [n for n in (window[0], *window[2:]) if isinstance(n, int)]
    if len(numbers) != rank + 1 or not isinstance(shape[1], int) or isinstance(d.arg("padding", 0), str):
        raise CannotLower("a depthwise convolution whose sizes are not numbers")
    times = numbers[0] // shape[1]
    strides, pads, steps = each(d, "stride", rank, 1), each(d, "padding", rank, 0), each(d, "dilation", rank, 1)
    out = shape_of(node.outs[0])[2:]
    x, weight = d.wide(x), d.wide(weight)
    for i, pad in enumerate(pads):
        if pad:
            around = tuple(add(n, 2 * pad) if j == 2 + i else n for j, n in enumerate(shape_of(x)))
            x = d.add("lower.pad", (x, 2 + i, pad, 0.0), dtype(x), around)
    if any(pads) or x.name not in {v.name for v in node.ins}:
        x = d.add("lower.stored", (x,), dtype(x), shape_of(x))
    if times != 1:  # several results of each channel
        x = d.reshape(x, (*shape[:2], 1, *shape_of(x)[2:]))
        weight = d.reshape(weight, (shape[1], times, *numbers[1:]))
    else:
        weight = d.reshape(weight, (shape[1], *numbers[1:]))
    first, front = len(shape_of(x)) - rank, len(shape_of(weight)) - rank
    summed = _looped if math.prod(numbers[1:]) > _WRITTEN_OUT else _written
    sums = summed(d, x, weight, first, front, numbers[1:], strides, steps, out)
    sums = d.reshape(sums, (shape[0], numbers[0], *out))
    return (sums if bias is None else d.pointwise("add.Tensor", sums, d.reshape(d.wide(bias), (numbers[0], *(1,) * rank))),)


def _written(
    d: Draft, x: Value, weight: Value, first: int, front: int, sizes: Sequence[int], strides: Sequence[int], steps: Sequence[int],
    out: Sequence[Dim],
) -> Value:  # fmt: skip
    """Every place of the window by itself."""
    sums: Value | None = None
    for at in itertools.product(*map(range, sizes)):
        seen, factor = x, weight
        for i, k in enumerate(at):
            dim = first + i
            target = (*shape_of(seen)[:dim], out[i], *shape_of(seen)[dim + 1:])
            seen = d.add("lower.window", (seen, dim, k * steps[i], strides[i], 0.0, False), dtype(x), target, {"whole": True})
            one = (*shape_of(factor)[:front + i], 1, *shape_of(factor)[front + i + 1:])
            factor = d.add("lower.window", (factor, front + i, k, 1, 0.0, False), dtype(x), one, {"whole": True})
        sums = d.pointwise("mul.Tensor", seen, factor) if sums is None else d.pointwise("addcmul.default", sums, seen, factor)
    assert sums is not None
    return sums


def _looped(
    d: Draft, x: Value, weight: Value, first: int, front: int, sizes: Sequence[int], strides: Sequence[int], steps: Sequence[int],
    out: Sequence[Dim],
) -> Value:  # fmt: skip
    """All places of the window as a sum over more dims."""
    for i, size in enumerate(sizes):
        dim, shape = first + 2 * i, shape_of(x)
        target = (*shape[:dim], out[i], size, *shape[dim + 1:])
        x = d.add("lower.unfold", (x, dim, 0, strides[i], steps[i], 0.0), dtype(x), target, {"whole": True})
    spread = tuple(n for s in sizes for n in (1, s))
    weight = d.reshape(weight, (*shape_of(weight)[:front], *spread))
    inside = [first + 2 * i + 1 for i in range(len(sizes))]
    folded = d.reduce("sum", d.pointwise("mul.Tensor", x, weight), inside)
    return d.reshape(folded, (*shape_of(folded)[:first], *out))
