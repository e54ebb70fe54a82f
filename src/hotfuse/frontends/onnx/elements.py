"""How operators compute with the element types that torch half-supports.

torch has the unsigned 16/32/64-bit and float8 types but few kernels for them, and has no strings, int4 or float4
at all. Three facts make every operator work on all of them without a kernel of its own:

- moving elements around does not look at them: any type can travel as the signed integer of its size, and a NumPy
  array can travel as positions into a pool (`moves`);
- sums and products modulo 2^n are the same for signed and unsigned (`wraps`);
- flipping the top bit turns unsigned order into signed order (`orders`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.values import BY_CODE

Array = npt.NDArray[Any]
Value = torch.Tensor | Array
OpFn = Callable[..., Any]

FLOAT8 = frozenset(
    {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
UNSIGNED = frozenset(_SIGNED)
"""The unsigned types that torch has few kernels for (uint8 is a full citizen)."""
_CARRIER = {**_SIGNED, **dict.fromkeys(FLOAT8, torch.uint8)}


def torch_dtype(code: int) -> torch.dtype:
    """The torch dtype of an ONNX element type that must have one."""
    elem = BY_CODE.get(code)
    if elem is None or elem.torch is None:
        raise ModelError(
            f"element type {elem.name if elem else code} is not allowed here",
            because="it is not one of torch's number types",
            hint="cast to a number type of at least 8 bits first",
        )
    return elem.torch


def moved_as_it_is(x: torch.Tensor) -> bool:
    """Whether torch's own operators move elements of such a tensor."""
    return x.dtype not in _CARRIER


def carry(x: torch.Tensor) -> torch.Tensor:
    """The same bits in a type that torch has kernels for."""
    return x.view(_CARRIER[x.dtype]) if x.dtype in _CARRIER else x


def to_ordered(x: torch.Tensor) -> torch.Tensor:
    """An integer tensor whose signed order is the order of `x` (unsigned types; others as they are)."""
    signed = _SIGNED.get(x.dtype)
    return x if signed is None else x.view(signed) ^ torch.iinfo(signed).min


def from_ordered(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_ordered`."""
    signed = _SIGNED.get(dtype)
    return y if signed is None else (y ^ torch.iinfo(signed).min).view(dtype)


def _decoded(result: Any, decode: Callable[[Any], Any]) -> Any:
    return tuple(decode(y) for y in result) if isinstance(result, (tuple, list)) else decode(result)


def _through_pool(fn: OpFn, ctx: Any, args: list[Any], at: list[int], attrs: dict[str, Any]) -> Any:
    """Run `fn` on positions into the arrays laid end to end, and pick the elements its result names."""
    arrays = [np.asarray(args[i]) for i in at]
    dtype = arrays[0].dtype
    pool: Array = np.concatenate([a.astype(dtype).reshape(-1) for a in arrays])
    base = 0
    for i, a in zip(at, arrays, strict=True):
        args[i] = torch.arange(base, base + a.size).reshape(a.shape)
        base += a.size

    def pick(y: torch.Tensor) -> Array:
        positions: Array = y.numpy()
        return pool[positions.reshape(-1)].reshape(positions.shape)

    return _decoded(fn(ctx, *args, **attrs), pick)


def moves(*positions: int) -> Callable[[OpFn], OpFn]:
    """Let a function that only moves elements take any type; `positions` are its data inputs (none: all)."""

    first = positions[0] if positions else 0

    def wrap(fn: OpFn) -> OpFn:
        @functools.wraps(fn)
        def run(ctx: Any, *inputs: Any, **attrs: Any) -> Any:
            if len(inputs) > first and isinstance(x := inputs[first], torch.Tensor) and x.dtype not in _CARRIER:
                return fn(ctx, *inputs, **attrs)  # as nearly always: data inputs have one type
            args = list(inputs)
            at = _present(args, positions)
            if any(isinstance(args[i], np.ndarray) for i in at):
                return _through_pool(fn, ctx, args, at, attrs)
            dtype = args[at[0]].dtype
            if dtype not in _CARRIER:
                return fn(ctx, *args, **attrs)
            for i in at:
                args[i] = carry(args[i])
            return _decoded(fn(ctx, *args, **attrs), lambda y: y.view(dtype))

        return run

    return wrap


def wraps(*positions: int) -> Callable[[OpFn], OpFn]:
    """Let a function of sums, products or bits take unsigned types."""
    return _for_unsigned(positions, carry, lambda y, dtype: y.view(dtype))


def orders(*positions: int) -> Callable[[OpFn], OpFn]:
    """Let a function of comparisons take unsigned types; bool results pass as they are."""
    return _for_unsigned(positions, to_ordered, from_ordered)


def _for_unsigned(
    positions: tuple[int, ...],
    encode: Callable[[torch.Tensor], torch.Tensor],
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
) -> Callable[[OpFn], OpFn]:
    first = positions[0] if positions else 0

    def wrap(fn: OpFn) -> OpFn:
        @functools.wraps(fn)
        def run(ctx: Any, *inputs: Any, **attrs: Any) -> Any:
            if len(inputs) > first and isinstance(x := inputs[first], torch.Tensor) and x.dtype not in _SIGNED:
                return fn(ctx, *inputs, **attrs)
            args = list(inputs)
            at = _present(args, positions)
            dtype = args[at[0]].dtype if at else None
            if dtype not in _SIGNED:
                return fn(ctx, *args, **attrs)
            for i in at:
                args[i] = encode(args[i])
            return _decoded(fn(ctx, *args, **attrs), lambda y: decode(y, dtype) if y.dtype != torch.bool else y)

        return run

    return wrap


def _present(args: list[Any], positions: Iterable[int]) -> list[int]:
    at = list(positions) or list(range(len(args)))
    return [i for i in at if i < len(args) and args[i] is not None]


def norm_axis(axis: int, rank: int) -> int:
    """A non-negative axis; a model error where it is out of range."""
    if not -rank <= axis < rank and not (rank == 0 and axis in (0, -1)):
        raise ModelError(f"axis {axis} is out of range for a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def is_known(n: Any, value: int) -> bool:
    """Whether a size is known to be `value`; asking a symbolic one would tie the graph to the answer."""
    return isinstance(n, int) and n == value


def zero_of(x: Array) -> Array:
    """The zero of a NumPy value: an empty string for strings."""
    return np.array("", dtype=object) if x.dtype.kind == "O" else np.zeros((), x.dtype)
