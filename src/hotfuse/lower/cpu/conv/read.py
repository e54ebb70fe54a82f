"""A convolution node read as what it computes: channels by group, one axis per spatial dim, padding in front folded in.

A transposed convolution with stride s makes s kinds of outputs along a dim, and each kind is an ordinary convolution of stride 1
over the same image, with every so manieth element of the window, turned round:

    y[s t + r] = sum over j:  x[t + b + j] w[c - s j]           b and c depend on r and the padding
"""

from __future__ import annotations

import math
from dataclasses import replace

from hotfuse.analysis.convolution import Pads, is_convolution, is_transposed, padding_in_front
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value, map_values, sources
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.algebra import add
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument

_MAX_PHASES = 16
"""Kinds of outputs of a transposed convolution for which code is written."""


@dataclass(frozen=True, slots=True)
class ConvPhase:
    """Every `step`-th output along a dim, as an ordinary convolution."""

    axis: Axis
    step: int = 1
    first: int = 0
    taps: tuple[int, ...] = ()
    """The elements of a turned window that it uses, in the order it uses them."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution of a group."""

    node: Node
    x: Value
    weight: Value
    bias: Value | None
    groups: int
    inputs: int
    """Input channels that one output channel reads."""
    outputs: int
    """Output channels of one group."""
    spatial_phases: tuple[tuple[ConvPhase, ...], ...]
    """Per spatial dim its phases: one, unless it is transposed."""
    windows: tuple[int, ...]
    turned: bool

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]

    @property
    def own(self) -> bool:
        """Depthwise: every channel for itself."""
        return self.groups > 1 and self.inputs == self.outputs == 1 and not self.turned

    @property
    def matrix(self) -> bool:
        """Whether it is a plain matrix product over pixels."""
        return self.groups == 1 and not self.turned and all(dim[0].axis.still for dim in self.spatial_phases)

    @property
    def channels(self) -> int:
        """Output channels of all groups."""
        return self.groups * self.outputs


def the_convolution(graph: Graph, *, scaled: bool = False) -> tuple[Graph, Convolution]:
    """The one convolution of a group, and the group without the padding in front of it; of bytes, if it is to be `scaled`."""
    found = [n for n in graph.nodes if is_convolution(n)]
    if len(found) != 1:
        raise CannotLower(f"{len(found)} convolutions in one group")
    graph, pads = _without_padding(graph, found[0])
    node = next(n for n in graph.nodes if is_convolution(n))
    if node.args[0] not in sources(graph):
        raise CannotLower("the input of the convolution is computed in the same group", where=str(node.loc))
    return graph, read(node, {p.value.name for p in graph.params}, pads, scaled=scaled)


def _without_padding(graph: Graph, conv: Node) -> tuple[Graph, Pads | None]:
    """The group with the convolution reading what is padded for it alone."""
    if (found := padding_in_front(graph, conv)) is None:
        return graph, None
    maker, pads = found
    plain = replace(conv, args=tuple(map_values(a, {maker.outs[0].name: maker.args[0]}) for a in conv.args))
    return replace(graph, nodes=tuple(plain if n is conv else n for n in graph.nodes if n is not maker)), pads


def read(node: Node, params: set[str], pads: Pads | None = None, *, scaled: bool = False) -> Convolution:
    """A node's operands by role; `pads` are zeros that are to lie around its input."""
    where = str(node.loc)
    x, weight, bias = (argument(node, n) for n in ("input", "weight", "bias"))
    if not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(bias, Value | None):
        raise CannotLower(f"{node.op} of {x} and {weight}", where=where)
    if weight.name not in params:
        raise CannotLower(f"the weight %{weight.name} is not constant", where=where)
    _check_dtypes(x, weight, node.outs[0], bias, where, scaled=scaled)
    xs, ws, outs = shape_of(x), shape_of(weight), shape_of(node.outs[0])
    if not len(xs) == len(ws) == len(outs) or len(xs) not in (3, 4, 5):
        raise CannotLower(f"an input of {len(xs)} dims and a weight of {len(ws)}", where=where)
    numbers = [n for n in (*ws, xs[1]) if isinstance(n, int) and n > 0]
    if len(numbers) != len(ws) + 1 or any(n == 0 for n in (*xs, *outs)):
        raise CannotLower(f"a weight of {list(ws)} on an input of {list(xs)}", where=where)
    turned = is_transposed(node)
    groups = argument(node, "groups", 1)
    assert isinstance(groups, int)
    windows = tuple(numbers[2:-1])
    if turned:
        spatial_phases = _turned_phases(node, xs[2:], outs[2:], windows)
        inputs, outputs = numbers[0] // groups, numbers[1]
    else:
        spatial_phases = _spatial_phases(node, xs[2:], outs[2:], windows, pads or ((0, 0),) * len(windows))
        inputs, outputs = numbers[1], numbers[0] // groups
    if math.prod(len(dim) for dim in spatial_phases) > _MAX_PHASES:
        raise CannotLower("a transposed convolution with a large stride", where=where)
    return Convolution(node, x, weight, bias, groups, inputs, outputs, spatial_phases, windows, turned)


def _check_dtypes(x: Value, weight: Value, out: Value, bias: Value | None, where: str, *, scaled: bool) -> None:
    """fp32 everywhere; or bytes, whose sums become real numbers."""
    reals = (DType.F32, DType.F64) if scaled else (DType.F32,)
    wanted = [(v, (DType.I8, DType.U8) if scaled else reals) for v in (x, weight)] + [(out, reals)]
    for v, dtypes in wanted:
        if not isinstance(v.type, TensorType) or v.type.dtype not in dtypes:
            raise CannotLower(f"%{v.name} is not {' or '.join('fp32' if d is DType.F32 else d.value for d in dtypes)}", where=where)
    if bias is not None and (not isinstance(bias.type, TensorType) or bias.type.dtype is not out.type.dtype):  # type: ignore[union-attr]
        raise CannotLower(f"the bias %{bias.name} is of another type than the result", where=where)


SpatialPhases = tuple[tuple[ConvPhase, ...], ...]


def _spatial_phases(
    node: Node, sizes: tuple[Dim, ...], outs: tuple[Dim, ...], windows: tuple[int, ...], pads: Pads
) -> SpatialPhases:
    rank = len(windows)
    strides, dilations = (_numbers(node, n, 1, rank) for n in ("stride", "dilation"))
    own = _padding(node, windows, dilations)
    found: list[tuple[ConvPhase, ...]] = []
    for i, (a, b) in enumerate(own):
        before, after = a + pads[i][0], b + pads[i][1]
        axis = Axis(sizes[i], windows[i], strides[i], before, dilations[i], after)
        if not axis.static:
            axis = replace(axis, count=outs[i])
        found.append((ConvPhase(axis),))
    return tuple(found)


def _turned_phases(node: Node, sizes: tuple[Dim, ...], outs: tuple[Dim, ...], windows: tuple[int, ...]) -> SpatialPhases:
    rank = len(windows)
    strides, dilations = (_numbers(node, n, 1, rank) for n in ("stride", "dilation"))
    padding, extra = (_numbers(node, n, 0, rank) for n in ("padding", "output_padding"))
    return tuple(
        turned_phases(sizes[i], outs[i], windows[i], strides[i], padding[i], extra[i], dilations[i]) for i in range(rank)
    )


def turned_phases(
    size: Dim, out: Dim, window: int, stride: int, padding: int, extra: int = 0, dilation: int = 1
) -> tuple[ConvPhase, ...]:
    """The phases of a transposed convolution along one dim."""
    common = math.gcd(stride, dilation)
    apart = dilation // common
    found: list[ConvPhase] = []
    for r in range(stride):
        count = expr("max", 0, expr("ceildiv", add(out, -r), stride)) if r else expr("ceildiv", out, stride)
        if count == 0:
            continue
        taps = [c for c in range(window) if (c * dilation - r - padding) % stride == 0][::-1]
        if not taps:
            found.append(ConvPhase(Axis(size, 0, after=0, count=count), stride, r))
            continue
        begin = (r + padding - taps[0] * dilation) // stride
        beyond = (dilation * (window - 1 - taps[-1]) + extra - padding) // stride
        axis = Axis(size, len(taps), 1, -begin, apart, beyond, count)
        found.append(ConvPhase(axis, stride, r, tuple(taps)))
    return tuple(found)


def _padding(node: Node, windows: tuple[int, ...], dilation: tuple[int, ...]) -> Pads:
    """How far the window reaches beyond the image, before and after."""
    given = argument(node, "padding", 0)
    if not isinstance(given, str):
        return tuple((n, n) for n in _numbers(node, "padding", 0, len(windows)))
    beyond = [0 if given == "valid" else d * (k - 1) for k, d in zip(windows, dilation, strict=True)]
    return tuple((n // 2, n - n // 2) for n in beyond)


def _numbers(node: Node, name: str, default: int, rank: int) -> tuple[int, ...]:
    given = argument(node, name, default)
    many = given if isinstance(given, tuple) else (given,)
    numbers = tuple(n for n in many if isinstance(n, int))
    if len(numbers) != len(many) or len(numbers) not in (1, rank):
        raise CannotLower(f"{node.op} with {name} {given}", where=str(node.loc))
    return numbers * rank if len(numbers) == 1 else numbers
