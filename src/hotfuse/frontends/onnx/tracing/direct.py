# pyright: reportPrivateUsage=false
# torch keeps private how its tracer knows a tensor.
"""Operators whose result types follow from rules of our own, added to the graph without asking torch's fake tensors.

Torch answers any operator on tensors of symbolic sizes, at about ten milliseconds each: an OCR model of 440 operators took five
seconds of a processor, most of what a busy server waited for. It also decides everything that running the operator would decide.
Which library's convolution it would take depends on the number of elements, so convolutions left bounds on sizes in the graph's
guards, and traffic of three sizes had to be captured three times.

A row says for one function of torch which operator it is and how large the result is. Where arguments are not of the usual kind
(another type, another layout, sizes that only a guard could compare) it says nothing, and torch answers as ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    set_proxy_slot,
    track_tensor,
)
from torch.overrides import TorchFunctionMode

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.types import ROW_MAJOR
from hotfuse.ops.torch_types import layout_of

aten = torch.ops.aten
_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_CONVERTIBLE = _FLOATS | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_MIN_SIZE = 2
"""Of a computed size that depends on inputs: torch takes 0 and 1 for cases of their own, and so do readers of the graph."""
Size = Any
"""An int or a SymInt."""


@dataclass(frozen=True, slots=True)
class DirectNode:
    """A node to be added: its result has the first operand's device, and its dtype where no other is given."""

    op: Any
    args: tuple[Any, ...]
    shape: tuple[Size, ...]
    stride: tuple[Size, ...] | None = None
    """None is row-major."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dtype: torch.dtype | None = None


Row = Callable[..., DirectNode | torch.Tensor | None]
"""Called with a function's arguments: the node, the operand that is the result already, or None where torch has to be asked."""


class Descriptions:
    """Fake tensors of one trace, made without asking torch how each is described: those that look alike share that."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._found: dict[tuple[Any, ...], torch.Tensor] = {}

    def named(
        self, tracer: Any, proxy: fx.Proxy, shape: Sequence[Size], stride: Sequence[Size] | None, dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:  # fmt: skip
        """A fake tensor as the value of a node."""
        with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
            key = (dtype, device, *map(_expression, shape), None, *map(_expression, stride or ()))
            described = self._found.get(key)
            new = described is None
            if described is None:
                described = (
                    torch.empty(shape, dtype=dtype, device="meta") if stride is None
                    else torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                )  # fmt: skip
                self._found[key] = described
            out, proxy.node.meta["val"] = (FakeTensor(self._mode, described, device) for _ in range(2))
            if new:  # its sizes can be named from here on
                track_tensor(out, proxy, constant=None, tracer=tracer)
            else:
                set_proxy_slot(out, tracer, _ProxyTensor(proxy, None))
        return out


class GraphInTrace(Protocol):
    """The graph that nodes are added to, as far as adding needs it."""

    tracer: Any
    descriptions: Descriptions

    def proxy(self, v: Any) -> Any:
        """A value as an argument of a node."""
        ...


class DirectOperators(TorchFunctionMode):
    """Answers calls of the functions that have a row, while one graph is traced."""

    def __init__(self, level: GraphInTrace) -> None:
        super().__init__()
        self._level = level
        self._row_major: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result of a node that was added, or torch's own answer."""
        row = _ROWS.get(func)
        if row is not None:
            with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                made = self._asked(row, func, args, kwargs or {})
            if made is not None:
                return self._added(made) if isinstance(made, DirectNode) else made
        return func(*args, **(kwargs or {}))

    def _asked(self, row: Row, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectNode | torch.Tensor | None:
        operands = _tensors(args)
        first = operands[0] if operands else None
        if first is None or (first.dtype not in _FLOATS and func not in _ANY_TYPE) or not all(_alike(t, first) for t in operands):
            return None
        if func not in _ANY_LAYOUT and not all(map(self._is_row_major, operands)):
            row = _OTHER_ORDER.get(func, _unknown)
        try:
            return row(*args, **kwargs)
        except TypeError:  # arguments that no row expects
            return None

    def _is_row_major(self, t: torch.Tensor) -> bool:
        known = self._row_major.get(id(t))
        if known is None:
            dense = layout_of(tuple(t.shape), tuple(t.stride())) == ROW_MAJOR
            known = self._row_major[id(t)] = (t, dense)
        return known[1]

    def _added(self, made: DirectNode) -> torch.Tensor:
        level, first = self._level, _tensors(made.args)[0]
        args = tuple(level.proxy(a) for a in _without_defaults(made))
        name = made.op.overloadpacket.__name__
        proxy = level.tracer.create_proxy("call_function", made.op, args, dict(made.kwargs), name=name)
        with torch._C.DisableTorchFunction():
            dtype = first.dtype if made.dtype is None else made.dtype
            out = level.descriptions.named(level.tracer, proxy, made.shape, made.stride, dtype, first.device)
        if made.stride is None:
            self._row_major[id(out)] = (out, True)
        return out


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(a, torch.Tensor)]


def _alike(t: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether a tensor is one of this trace, of the first one's kind."""
    return isinstance(t, FakeTensor) and t.dtype == first.dtype and t.device == first.device and t.layout is torch.strided


def _without_defaults(made: DirectNode) -> list[Any]:
    """The arguments as torch's tracer writes them: without those at the end that are what they would be anyway."""
    args = list(made.args)
    for argument in reversed(made.op._schema.arguments[: len(args)]):
        if not argument.has_default_value() or isinstance(args[-1], torch.Tensor) or args[-1] != argument.default_value:
            break
        args.pop()
    return args


# --- sizes -------------------------------------------------------------------------------------------------------------


def _expression(size: Size) -> Any:
    """What tells sizes apart, without asking torch to compare them."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def _equal(a: Size, b: Size) -> bool:
    return _expression(a) == _expression(b)


def _broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...] | None:
    """The shape of a pointwise result; None where only a guard could say."""
    rank = max(map(len, shapes))
    out: list[Size] = []
    for sizes in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        wide = [s for s in sizes if _expression(s) != 1]
        if any(not _equal(s, wide[0]) for s in wide[1:]):
            return None
        out.append(wide[0] if wide else 1)
    return tuple(out)


def _window(size: Size, kernel: int, stride: int, padding: int, dilation: int) -> Size | None:
    """How often a window fits; None where that may be never, or once, for other sizes than these."""
    shrink = dilation * (kernel - 1) - 2 * padding
    return size if stride == 1 and shrink == 0 else _at_least((size - shrink - 1) // stride + 1)


def _at_least(size: Size) -> Size | None:
    """A computed size with the guard that torch's own answers bring; None where it does not hold here."""
    if isinstance(size, int):
        return size if size > 0 else None
    return size if size.node.hint is not None and size.node.hint >= _MIN_SIZE and bool(size >= _MIN_SIZE) else None


def _numbers(value: Any, count: int) -> list[int] | None:
    """One number for each spatial axis."""
    found = [value] * count if isinstance(value, int) else list(value) if isinstance(value, (list, tuple)) else []
    found = found * count if len(found) == 1 else found
    return found if len(found) == count and all(type(n) is int for n in found) else None


# --- rows --------------------------------------------------------------------------------------------------------------


def _unary(op: Any) -> Row:
    def row(x: torch.Tensor, inplace: bool = False) -> DirectNode | None:
        return None if inplace else DirectNode(op, (x,), tuple(x.shape))

    return row


def _binary(tensors: Any, number: Any | None = None) -> Row:
    """The row of an operator on two tensors, or on a tensor and a number; the number leaves the tensor's type as it is."""

    def row(a: Any, b: Any) -> DirectNode | None:
        if not isinstance(a, torch.Tensor):
            return None
        if isinstance(b, torch.Tensor):
            shape = _broadcast(a.shape, b.shape)
            return None if shape is None else DirectNode(tensors, (a, b), shape)
        return DirectNode(number, (a, b), tuple(a.shape)) if number is not None and type(b) in (int, float) else None

    return row


def _clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> DirectNode | None:
    if any(bound is not None and type(bound) not in (int, float) for bound in (min, max)) or (min is None and max is None):
        return None
    return DirectNode(aten.clamp.default, (x, min, max), tuple(x.shape))


def _conv(op: Any, count: int) -> Row:
    def row(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> DirectNode | None:
        steps, around, spread = (_numbers(v, count) for v in (stride, padding, dilation))
        weights = tuple(w.shape)
        if steps is None or around is None or spread is None or x.dim() != count + 2 or w.dim() != count + 2:
            return None
        if not all(type(n) is int for n in weights) or not _equal(x.shape[1], weights[1] * groups) or weights[0] % groups:
            return None
        if b is not None and tuple(b.shape) != (weights[0],):
            return None
        places = [_window(*each) for each in zip(x.shape[2:], weights[2:], steps, around, spread, strict=True)]
        if any(p is None for p in places):
            return None
        return DirectNode(op, (x, w, b, steps, around, spread, groups), (x.shape[0], weights[0], *places))

    return row


def _transposed_conv(op: Any, count: int) -> Row:
    def row(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, stride: Any = 1, padding: Any = 0, extra: Any = 0,
        groups: int = 1, dilation: Any = 1,
    ) -> DirectNode | None:
        given = [_numbers(v, count) for v in (stride, padding, extra, dilation)]
        weights = tuple(w.shape)
        if any(g is None for g in given) or x.dim() != count + 2 or w.dim() != count + 2:
            return None
        steps, around, more, spread = (g or [] for g in given)
        if not all(type(n) is int for n in weights) or not _equal(x.shape[1], weights[0]) or weights[0] % groups:
            return None
        if b is not None and tuple(b.shape) != (weights[1] * groups,):
            return None
        each = zip(x.shape[2:], weights[2:], steps, around, more, spread, strict=True)
        places = [_at_least((n - 1) * s - 2 * p + d * (k - 1) + e + 1) for n, k, s, p, e, d in each]
        if any(p is None for p in places):
            return None
        return DirectNode(op, (x, w, b, steps, around, more, groups, spread), (x.shape[0], weights[1] * groups, *places))

    return row


def _batch_norm(
    x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> DirectNode | None:
    if training or x.dim() < 2 or any(not isinstance(t, torch.Tensor) for t in (w, b, mean, var)):
        return None
    if any(t.dim() != 1 or not _equal(t.shape[0], x.shape[1]) for t in (w, b, mean, var)):
        return None
    return DirectNode(aten.batch_norm.default, (x, w, b, mean, var, training, momentum, eps, cudnn), tuple(x.shape))


def _matmul(a: torch.Tensor, b: torch.Tensor) -> DirectNode | None:
    """The product of many rows with one matrix, or of equally many matrices on both sides."""
    if a.dim() < 2 or b.dim() < 2 or not _equal(a.shape[-1], b.shape[-2]) or (b.dim() != 2 and a.dim() != b.dim()):
        return None
    if not all(_equal(m, n) for m, n in zip(a.shape[:-2], b.shape[:-2], strict=False)):
        return None
    return DirectNode(aten.matmul.default, (a, b), (*a.shape[:-1], b.shape[-1]))


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> DirectNode | None:
    if x.dim() < 2 or w.dim() != 2 or not _equal(x.shape[-1], w.shape[1]):
        return None
    if b is not None and (b.dim() != 1 or not _equal(b.shape[0], w.shape[0])):
        return None
    return DirectNode(aten.linear.default, (x, w, b), (*x.shape[:-1], w.shape[0]))


def _softmax(op: Any) -> Row:
    def row(x: torch.Tensor, dim: int) -> DirectNode | None:
        return DirectNode(op, (x, dim), tuple(x.shape)) if type(dim) is int and -x.dim() <= dim < x.dim() else None

    return row


def _reduction(op: Any, *, typed: bool = False) -> Row:
    """Over some axes; `typed` where the function is told the result's type."""

    def row(x: torch.Tensor, dims: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> DirectNode | None:
        if not isinstance(dims, (list, tuple)) or not dims or (dtype is not None) != typed or dtype not in (None, x.dtype):
            return None
        axes = {d % x.dim() for d in dims if -x.dim() <= d < x.dim()}
        if len(axes) != len(dims) or any(_expression(x.shape[d]) == 0 for d in axes):
            return None
        shape = tuple(1 if d in axes else s for d, s in enumerate(x.shape) if keepdim or d not in axes)
        return DirectNode(op, (x, list(dims), keepdim), shape, kwargs={"dtype": dtype} if typed else {})

    return row


def _permute(x: torch.Tensor, dims: Sequence[int]) -> DirectNode | None:
    if sorted(dims) != list(range(x.dim())):
        return None
    shape, stride = (tuple(of[d] for d in dims) for of in (x.shape, x.stride()))
    return DirectNode(aten.permute.default, (x, list(dims)), shape, stride)


def _squeeze(x: torch.Tensor, dims: Sequence[int]) -> DirectNode | None:
    if not isinstance(dims, (list, tuple)) or any(not 0 <= d < x.dim() or _expression(x.shape[d]) != 1 for d in dims):
        return None
    shape, stride = (tuple(s for d, s in enumerate(of) if d not in dims) for of in (x.shape, x.stride()))
    return DirectNode(aten.squeeze.dims, (x, list(dims)), shape, stride)


def _reshape_method(x: torch.Tensor, *sizes: Any) -> DirectNode | torch.Tensor | None:
    """As a method, which takes its sizes one by one as well; of a single number it leaves that as it is."""
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    return x if not len(given) and x.dim() == 0 else _reshape(x, given)


def _converted(x: torch.Tensor, dtype: Any) -> DirectNode | torch.Tensor | None:
    """To another type; what has that type already is the result itself, as torch's answer is. Quantized files are full of these."""
    if not isinstance(dtype, torch.dtype):
        return None
    if x.dtype == dtype:
        return x
    return DirectNode(aten.to.dtype, (x, dtype), tuple(x.shape), dtype=dtype) if _CONVERTIBLE.issuperset((x.dtype, dtype)) else None


def _as_float(x: torch.Tensor) -> DirectNode | torch.Tensor | None:
    return _converted(x, torch.float32)


def _reshape(x: torch.Tensor, sizes: Sequence[Size]) -> DirectNode | None:
    """Reshape row-major elements, where symbols only change places; a size of -1 is inferred if the others leave one size."""
    left, count = Counter(_expression(s) for s in x.shape if isinstance(s, torch.SymInt)), 1
    for n in (s for s in x.shape if not isinstance(s, torch.SymInt)):
        count *= n
    wanted = Counter(_expression(s) for s in sizes if isinstance(s, torch.SymInt))
    numbers = [s for s in sizes if not isinstance(s, torch.SymInt)]
    fixed = math.prod(n for n in numbers if n != -1)
    if wanted - left or fixed <= 0 or count % fixed or numbers.count(-1) > 1 or any(n < -1 for n in numbers):
        return None
    symbols, rest = list((left - wanted).elements()), count // fixed
    if -1 not in numbers:
        return DirectNode(aten.reshape.default, (x, list(sizes)), tuple(sizes)) if not symbols and rest == 1 else None
    if len(symbols) > 1 or (symbols and rest != 1):
        return None
    last = next((s for s in x.shape if isinstance(s, torch.SymInt) and _expression(s) == symbols[0]), None) if symbols else rest
    return DirectNode(aten.reshape.default, (x, list(sizes)), tuple(last if type(s) is int and s == -1 else s for s in sizes))


def _unknown(*_args: Any, **_kwargs: Any) -> None:
    """No row: torch has to be asked."""


def _reshape_turned(x: torch.Tensor, *sizes: Any) -> DirectNode | None:
    """Reshape elements in another order, where all sizes are numbers. Torch says whether that is a view, of a tensor without
    data: its answer for fake tensors is put together in Python, and the first of those loads its distributed tensors.
    """
    made = _reshape(x, sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes)
    if made is None or any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride(), *made.shape)):
        return None
    with unset_fake_temporarily():
        found = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta").reshape(made.shape)
    return replace(made, stride=found.stride())


def _rows() -> dict[Any, Row]:
    rows: dict[Any, Row] = {F.hardswish: _unary(aten.hardswish.default), F.silu: _unary(aten.silu.default)}
    names = (
        "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "erf", "reciprocal", "neg", "abs", "floor", "ceil", "round",
        "sin", "cos", "square",
    )  # fmt: skip
    for name in names:
        rows[getattr(torch, name)] = _unary(getattr(aten, name).default)
    for name in ("add", "sub", "mul", "div"):
        op = getattr(aten, name).Tensor
        rows[getattr(torch, name)] = rows[getattr(torch.Tensor, name)] = _binary(op, op)
    for symbol, name in (("__add__", "add"), ("__sub__", "sub"), ("__mul__", "mul"), ("__truediv__", "div")):
        rows[getattr(torch.Tensor, symbol)] = rows[getattr(torch, name)]
    for name in ("maximum", "minimum"):
        rows[getattr(torch, name)] = _binary(getattr(aten, name).default)
    rows[torch.pow] = _binary(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar)
    for count, function in enumerate((F.conv1d, F.conv2d, F.conv3d), 1):
        rows[function] = _conv(getattr(aten, f"conv{count}d").default, count)
    for count, function in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
        packet = getattr(aten, f"conv_transpose{count}d")
        rows[function] = _transposed_conv(packet.default if count == 1 else packet.input, count)
    rows |= {torch.clamp: _clamp, torch.batch_norm: _batch_norm, torch.matmul: _matmul, F.linear: _linear}
    rows |= {torch.softmax: _softmax(aten.softmax.int), torch.log_softmax: _softmax(aten.log_softmax.int)}
    rows |= {torch.mean: _reduction(aten.mean.dim), torch.sum: _reduction(aten.sum.dim_IntList, typed=True)}
    rows |= {torch.amax: _reduction(aten.amax.default), torch.amin: _reduction(aten.amin.default)}
    rows |= {torch.Tensor.to: _converted, torch.Tensor.float: _as_float, torch.Tensor.reshape: _reshape_method}
    return rows | {torch.permute: _permute, torch.squeeze: _squeeze, torch.reshape: _reshape}


_ROWS = _rows()
_ANY_LAYOUT = frozenset[Any]({torch.matmul, F.linear, torch.permute, torch.squeeze})
"""What looks through the order of its operands, or gives a row-major result whatever it is."""
_OTHER_ORDER: Mapping[Any, Row] = {torch.reshape: _reshape_turned, torch.Tensor.reshape: _reshape_turned}
"""Rows for operands that are not row-major."""
_ANY_TYPE = frozenset[Any]({torch.Tensor.to, torch.Tensor.float, torch.reshape, torch.Tensor.reshape})
