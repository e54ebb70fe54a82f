"""What instructions mean, as functions on NumPy arrays: `meaning(out, *operands, **attrs)`, `out` being the result's type.

These are the oracle for every back end, so they are exact where that is possible and otherwise better than what a back end may
be: transcendental functions, sums and products of floats are computed in float64 and rounded once. Half precision computes in
float32. Integers wrap. Where C leaves something open, torch decides; where torch raises, the result is some number and never a
trap: an integer divided by zero gives zero (lowering asks of divisors that they are none: `Expansion.divisor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hotfuse.base.errors import CallFault
from hotfuse.ir.types import DType
from hotfuse.tile.memory import NUMPY, Array, TileRegion
from hotfuse.tile.program import TileType

Meaning = Callable[..., Any]
_HALF = {NUMPY[DType.F16], NUMPY[DType.BF16]}
_FLOAT = {*_HALF, NUMPY[DType.F32], NUMPY[DType.F64]}


def elementwise(function: Callable[..., Array]) -> Meaning:
    """Computed in the operands' own type (half precision in float32), rounded to the result's."""

    def meaning(out: TileType, *args: Array) -> Array:
        return shaped(out, function(*(a.astype(np.float32) if a.dtype in _HALF else a for a in args)))

    return meaning


def precise(function: Callable[..., Array]) -> Meaning:
    """Computed in float64, rounded once."""

    def meaning(out: TileType, *args: Array) -> Array:
        return shaped(out, function(*(a.astype(np.float64) for a in args)))

    return meaning


def shaped(out: TileType, value: Any) -> Array:
    """The value with the result's extents and element type."""
    return np.broadcast_to(np.asarray(value), out.shape).astype(NUMPY[out.dtype])


# --- arithmetic -------------------------------------------------------------------------------------------------------


def truncdiv(a: Array, b: Array) -> Array:
    """Integer division towards zero."""
    q = np.floor_divide(a, b)
    inexact = (q * b != a) & ((a < 0) != (b < 0)) & (b != 0)
    return q + inexact.astype(q.dtype)


def mod(a: Array, b: Array) -> Array:
    """The remainder with the divisor's sign, as torch.remainder."""
    r = np.fmod(a, b)
    return np.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


def power(out: TileType, a: Array, b: Array) -> Array:
    """Floats in float64; integers wrap, and a negative exponent leaves only the powers of 1 and -1."""
    if a.dtype in _FLOAT:
        return shaped(out, np.power(a.astype(np.float64), b.astype(np.float64)))
    plain = np.power(a, np.maximum(b, 0))
    odd = (b & 1).astype(bool)
    units = np.where(a == 1, 1, np.where(a + 1 == 0, np.where(odd, -1, 1), 0)).astype(a.dtype)
    return shaped(out, np.where(b < 0, units, plain))


def fma(out: TileType, a: Array, b: Array, c: Array) -> Array:
    """One rounding where the wider type holds the product: exact up to the last double rounding."""
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    return shaped(out, a.astype(wide) * b.astype(wide) + c.astype(wide))


def sign(a: Array) -> Array:
    """-1, 0 or 1; NaN has no sign and gives 0, as in torch."""
    return (a > 0).astype(a.dtype) - (a < 0).astype(a.dtype)


def erf(a: Array) -> Array:
    """The error function, number by number: correctness is all that counts here."""
    return np.array([math.erf(v) for v in a.ravel().tolist()], np.float64).reshape(a.shape)


def normal(a: Array) -> Array:
    """The share of a standard normal distribution below a number: by the complement, which keeps its digits far below 0."""
    return np.array([0.5 * math.erfc(-v * math.sqrt(0.5)) for v in a.ravel().tolist()], np.float64).reshape(a.shape)


def shift_left(a: Array, b: Array) -> Array:
    """An amount outside 0..bits-1 shifts everything out."""
    return np.where(_within(a, b), np.left_shift(a, np.where(_within(a, b), b, 0)), 0).astype(a.dtype)


def shift_right(a: Array, b: Array) -> Array:
    """An amount outside 0..bits-1 leaves only the sign."""
    bits = a.dtype.itemsize * 8
    return np.right_shift(a, np.where(_within(a, b), b, bits - 1)) * (_within(a, b) | (a < 0)).astype(a.dtype)


def _within(a: Array, b: Array) -> Array:
    return (b >= 0) & (b < a.dtype.itemsize * 8)


def cast(out: TileType, a: Array) -> Array:
    """Floats become integers by truncation, numbers become bool by being non-zero."""
    if out.dtype is DType.BOOL:
        return a != 0
    return a.astype(NUMPY[out.dtype])


def bitcast(out: TileType, a: Array) -> Array:
    """The same bits."""
    return np.ascontiguousarray(a).view(NUMPY[out.dtype]).reshape(out.shape)


# --- movement ---------------------------------------------------------------------------------------------------------


def load(out: TileType, place: TileRegion, fill: float) -> Array:
    """The elements there; `fill` where none exist."""
    return place.read(fill)


def store(out: None, place: TileRegion, tile: Array) -> None:
    """Write the elements that exist."""
    place.write(tile)


def gather(out: TileType, place: TileRegion, index: Array, dim: int, fill: float) -> Array:
    """A load whose every element is moved by its own index along one buffer dimension."""
    tile = np.full(out.shape, fill, NUMPY[out.dtype])
    if not place.empty:
        tile[place.region] = place.view[place.scattered(dim, index)]
    return tile


def scatter(out: None, place: TileRegion, index: Array, tile: Array, dim: int, reduce: str) -> None:
    """The store that mirrors `gather`; where indices meet, the last element in row-major order stays, or all are added."""
    if place.empty:
        return
    where, values = place.scattered(dim, index), tile[place.region]
    if reduce == "add":
        wide = values.astype(np.float32) if values.dtype in _HALF else values
        for spot, value in zip(zip(*(w.ravel() for w in where), strict=True), wide.ravel(), strict=True):
            place.view[spot] = place.view[spot] + value
    else:
        for spot, value in zip(zip(*(w.ravel() for w in where), strict=True), values.ravel(), strict=True):
            place.view[spot] = value


def count(out: None, place: TileRegion, tile: Array) -> None:
    """Add the number of non-zero elements to a counter; other threads may do the same at the same time."""
    place.write(place.read(0) + np.count_nonzero(tile))


def peak(out: None, place: TileRegion, number: Array) -> None:
    """Raise a counter to a number, if that is greater; other threads may do the same at the same time."""
    place.write(np.maximum(place.read(0), number))


def require(out: None, tile: Array) -> None:
    """Every element must be true; native code counts where it is not, and goes on."""
    if not tile.all():
        raise CallFault("an index points outside its tensor, a number is not finite, or an integer is divided by zero")


def fill(out: TileType, number: float) -> Array:
    """One number everywhere."""
    return np.full(out.shape, number, NUMPY[out.dtype])


def iota(out: TileType, start: int, axis: int) -> Array:
    """start, start + 1, ... along an axis."""
    along = [-1 if a == axis else 1 for a in range(len(out.shape))]
    return shaped(out, (np.arange(out.shape[axis], dtype=np.int64) + start).reshape(along))


def index(out: TileType, value: int) -> Array:
    """An integer expression as a number."""
    return np.full((), value, np.int64)


def reshape(out: TileType, a: Array) -> Array:
    """The same elements in row-major order."""
    return a.reshape(out.shape)


def transpose(out: TileType, a: Array, perm: tuple[int, ...]) -> Array:
    """Axis i of the result is axis perm[i] of the operand."""
    return a.transpose(perm)


def extract(out: TileType, a: Array, start: tuple[int, ...], extent: tuple[int, ...]) -> Array:
    """A part of a tile."""
    return a[tuple(slice(s, s + e) for s, e in zip(start, extent, strict=True))]


def concat(out: TileType, *tiles: Array, axis: int) -> Array:
    """Tiles one behind the other."""
    return np.concatenate(tiles, axis)


def nothing(out: None, *args: object, **attrs: object) -> None:
    """A hint: only speed depends on it."""


# --- contraction, reduction, scan -------------------------------------------------------------------------------------


def mma(out: TileType, acc: Array, a: Array, b: Array) -> Array:
    """acc + a @ b: floats in float64, integers wrap in the accumulator's type."""
    wide = np.float64 if acc.dtype in _FLOAT else acc.dtype
    return shaped(out, acc.astype(wide) + a.astype(wide) @ b.astype(wide))


def mma_memory(out: None, c: TileRegion, a: TileRegion, b: TileRegion, rows: int, columns: int, blocks: int) -> None:
    """c = a @ b, in float64: a comes by blocks of steps, b by pairs of them."""
    left = a.read(0).astype(np.float64).transpose(1, 0, 2).reshape(rows, -1)
    right = b.read(0).astype(np.float64).transpose(0, 2, 1).reshape(-1, columns)
    c.write((left @ right).astype(np.float32))


def reduction(function: Callable[..., Array]) -> Meaning:
    """Over one axis, whose extent becomes 1; floats in float64, integers in their own type."""

    def meaning(out: TileType, a: Array, axis: int) -> Array:
        return shaped(out, function(a.astype(np.float64) if a.dtype in _FLOAT else a, axis=axis, keepdims=True))

    return meaning


def wrapping(function: Callable[..., Array]) -> Callable[..., Array]:
    """A sum or product that stays in its operand's type, where NumPy would widen integers."""

    def reduce(a: Array, axis: int, *, keepdims: bool) -> Array:
        return function(a, axis=axis, keepdims=keepdims, dtype=a.dtype)

    return reduce


def scan(ufunc: np.ufunc) -> Meaning:
    """Inclusive prefixes along one axis; floats in float64, integers in their own type."""

    def meaning(out: TileType, a: Array, axis: int) -> Array:
        wide = a.astype(np.float64) if a.dtype in _FLOAT else a
        return shaped(out, ufunc.accumulate(wide, axis=axis, dtype=wide.dtype))

    return meaning
