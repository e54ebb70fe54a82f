"""Arithmetic on sizes while tracing: small tensors whose elements are known as numbers or symbolic expressions.

Models compute shapes with ordinary operators (Shape, Gather, Mul, Concat, ...). A row here says what such an operator does to
NumPy object arrays of `int | float | bool | SymInt | SymFloat | SymBool`. Only symbolic operands come here: operands that are all
plain numbers are folded by the operator's own function. An operator without a row makes its result unknown, no more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hotfuse.frontends.onnx.registry import DataDependent
from hotfuse.frontends.onnx.values import BY_CODE

Numbers = np.ndarray[Any, Any]
Row = Callable[..., Any]
"""(operands as arrays or None, attributes by name) -> array, or (array, dtype) when the element type changes."""

LIMIT = 64
"""Most elements carried as numbers: shapes are short, and symbolic arithmetic is slow."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def array(numbers: Any, shape: tuple[int, ...] | None = None) -> Numbers:
    """An object array of the numbers."""
    flat = list(numbers)
    out = np.empty(len(flat), dtype=object)
    for i, n in enumerate(flat):
        out[i] = n
    return out if shape is None else out.reshape(shape)


def is_static(numbers: Numbers) -> bool:
    """Whether no element is symbolic."""
    return not any(isinstance(n, SYMBOLIC) for n in numbers.flat)


def _each(fn: Callable[..., Any]) -> Row:
    def row(*operands: Numbers) -> Numbers:
        arrays = np.broadcast_arrays(*operands)
        return array((fn(*items) for items in zip(*(a.flat for a in arrays), strict=True)), arrays[0].shape)

    return row


def _compare(fn: Callable[..., Any]) -> Row:
    each = _each(fn)
    return lambda *operands: (each(*operands), torch.bool)


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, (float, torch.SymFloat)) or isinstance(b, (float, torch.SymFloat)):
        return a / b
    if not (a >= 0 and b > 0):
        raise DataDependent("division of a negative size")
    return a // b


def _max(*items: Any) -> Any:
    out = items[0]
    for n in items[1:]:
        out = torch.sym_max(out, n)
    return out


def _min(*items: Any) -> Any:
    out = items[0]
    for n in items[1:]:
        out = torch.sym_min(out, n)
    return out


def _where(c: Any, a: Any, b: Any) -> Any:
    return torch.sym_ite(c, a, b) if isinstance(c, torch.SymBool) and not _known(c) else (a if c else b)


def _known(c: torch.SymBool) -> bool:
    return c.node.expr.is_Boolean and not c.node.expr.free_symbols


def _plain(*operands: Numbers | None) -> list[list[Any]]:
    """Operands that must be plain integers."""
    out: list[list[Any]] = []
    for a in operands:
        if a is None or not is_static(a):
            raise DataDependent("an index that is a symbolic size")
        out.append([int(n) for n in a.flat])
    return out


def _gather(x: Numbers, indices: Numbers, *, axis: int = 0) -> Numbers:
    flat = _plain(indices)[0]
    found: Any = np.take(x, np.array(flat, dtype=np.int64).reshape(indices.shape), axis)
    return found if isinstance(found, np.ndarray) else array([found], ())  # NumPy unwraps a single element


def _concat(*parts: Numbers, axis: int = 0) -> Numbers:
    return np.concatenate(parts, axis)


def _slice(x: Numbers, *given: Numbers | None, starts: Any = None, ends: Any = None, axes: Any = None) -> Numbers:
    if given:
        starts, ends = _plain(given[0], given[1])
        axes = _plain(given[2])[0] if len(given) > 2 and given[2] is not None else None
    steps = _plain(given[3])[0] if len(given) > 3 and given[3] is not None else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, range(len(starts)) if axes is None else axes, steps, strict=True):
        lowest = -x.shape[axis] - 1
        stop = None if step < 0 and end <= lowest else end
        index = [slice(None)] * x.ndim
        index[axis] = slice(start, stop, step)
        x = x[tuple(index)]
    return x


def _unsqueeze(x: Numbers, given: Numbers | None = None, *, axes: Any = None) -> Numbers:
    at = _plain(given)[0] if given is not None else list(axes)
    rank = x.ndim + len(at)
    for axis in sorted(a % rank for a in at):
        x = np.expand_dims(x, axis)
    return x


def _squeeze(x: Numbers, given: Numbers | None = None, *, axes: Any = None) -> Numbers:
    at = _plain(given)[0] if given is not None else axes
    return np.squeeze(x, None if at is None else tuple(at))


def _reshape(x: Numbers, shape: Numbers, *, allowzero: int = 0) -> Numbers:
    sizes = _plain(shape)[0]
    return x.reshape([x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(sizes)])


def _expand(x: Numbers, shape: Numbers) -> Numbers:
    sizes = tuple(_plain(shape)[0])
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, sizes))


def _reduce(fn: Callable[[list[Any]], Any]) -> Row:
    def row(
        x: Numbers, given: Numbers | None = None, *, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Numbers:
        at = _plain(given)[0] if given is not None else axes
        if x.ndim > 1 or (not at and noop_with_empty_axes):
            raise DataDependent("a reduction of sizes in several dimensions")
        return array([fn(list(x.flat))], (1,) * x.ndim if keepdims else ())

    return row


def _cast(x: Numbers, *, to: int, saturate: int = 1, round_mode: str = "up") -> tuple[Numbers, torch.dtype]:
    elem = BY_CODE.get(to)
    if elem is None or elem.torch is None:
        raise DataDependent("sizes in a type torch lacks")
    if elem.torch == torch.bool:
        return _each(lambda n: n if isinstance(n, (bool, torch.SymBool)) else n != 0)(x), elem.torch
    if elem.torch.is_floating_point:
        return _each(torch.sym_float)(x), elem.torch
    if elem.torch not in (torch.int64, torch.int32):
        raise DataDependent("sizes in a narrow type")
    return _each(_to_int)(x), elem.torch


def _to_int(n: Any) -> Any:
    if isinstance(n, torch.SymBool):
        return torch.sym_ite(n, 1, 0)
    return torch.sym_int(n) if isinstance(n, (float, torch.SymFloat)) else int(n) if isinstance(n, bool) else n


def _split(
    x: Numbers, sizes: Numbers | None = None, *, axis: int = 0, split: Any = None, num_outputs: int | None = None
) -> Any:
    at = _plain(sizes)[0] if sizes is not None else split
    if at is None:
        raise DataDependent("an even split of sizes")
    return tuple(np.split(x, list(np.cumsum(at)[:-1]), axis))


def _range(start: Numbers, limit: Numbers, delta: Numbers) -> Numbers:
    raise DataDependent("as many numbers as a symbolic size")


def _same(x: Numbers, **_attrs: Any) -> Numbers:
    return x


def _rounded(fn: Callable[[Any], Any]) -> Row:
    return _each(lambda n: torch.sym_float(fn(n)) if isinstance(n, (float, torch.SymFloat)) else n)


ROWS: dict[str, Row] = {
    "Add": _each(operator.add),
    "Sub": _each(operator.sub),
    "Mul": _each(operator.mul),
    "Div": _each(_divide),
    "Neg": _each(operator.neg),
    "Abs": _each(abs),
    "Max": _each(_max),
    "Min": _each(_min),
    "Floor": _rounded(math.floor),
    "Ceil": _rounded(math.ceil),
    "Equal": _compare(operator.eq),
    "Less": _compare(operator.lt),
    "LessOrEqual": _compare(operator.le),
    "Greater": _compare(operator.gt),
    "GreaterOrEqual": _compare(operator.ge),
    "Not": _each(lambda n: torch.sym_not(n)),
    "And": _each(operator.and_),
    "Or": _each(operator.or_),
    "Where": _each(_where),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[:axis])), -1),
    "Expand": _expand,
    "ReduceProd": _reduce(math.prod),
    "ReduceSum": _reduce(sum),
    "ReduceMax": _reduce(lambda items: _max(*items)),
    "ReduceMin": _reduce(lambda items: _min(*items)),
    "Cast": _cast,
    "Identity": _same,
    "Split": _split,
    "Range": _range,
}


def evaluate(
    op: str, operands: list[Numbers | None], attrs: dict[str, Any], dtype: torch.dtype
) -> list[tuple[Numbers, torch.dtype]] | None:
    """The results of an operator on known numbers, with their element types; None when no row says."""
    row = ROWS.get(op)
    if row is None:
        return None
    try:
        found = row(*operands, **attrs)
    except (DataDependent, GuardOnDataDependentSymNode, TypeError, ValueError, IndexError):
        return None  # the tensors themselves are still traced; only their contents stay unknown
    results = (
        found if isinstance(found, tuple) and not (len(found) == 2 and isinstance(found[1], torch.dtype)) else (found,)
    )
    out: list[tuple[Numbers, torch.dtype]] = []
    for r in results:
        numbers, kind = r if isinstance(r, tuple) else (r, dtype)
        if numbers.size > LIMIT:
            return None
        out.append((numbers, kind))
    return out
