"""Rows of comparisons, truth values, bits and choices."""

from __future__ import annotations

import math

from hotfuse.ir.types import DType
from hotfuse.lower.ops.expand import FLOATS, HALVES, Computes, Expansion, Function, expands
from hotfuse.tile.program import Tile

_COMMON, _OWN = Computes.COMMON, Computes.OWN


def _binary(function: str) -> Function:
    return lambda e, a, b: e.map(function, a, b)


for _names, _function in {
    "eq": "eq", "ne not_equal": "ne", "lt less": "lt", "le less_equal": "le", "gt greater": "gt",
    "ge greater_equal": "ge",
}.items():  # fmt: skip
    expands(_names, "self other", _COMMON)(_binary(_function))
for _names, _function in {
    "bitwise_and __and__": "and", "bitwise_or __or__": "or", "bitwise_xor __xor__": "xor",
    "bitwise_left_shift __lshift__": "shl", "bitwise_right_shift __rshift__": "shr",
}.items():  # fmt: skip
    expands(_names, "self other", _COMMON)(_binary(_function))


@expands("bitwise_not", computes=_OWN)
def _bitwise_not(e: Expansion, x: Tile) -> Tile:
    return e.map("not", x)


def _truth(e: Expansion, x: Tile) -> Tile:
    """Non-zero; NaN is true."""
    return x if x.type.dtype is DType.BOOL else e.map("ne", x, 0)


def _logical(function: str) -> Function:
    return lambda e, a, b: e.map(function, _truth(e, a), _truth(e, b))


for _function in ("and", "or", "xor"):
    expands(f"logical_{_function}", "self other", _OWN)(_logical(_function))


@expands("logical_not", computes=_OWN)
def _logical_not(e: Expansion, x: Tile) -> Tile:
    return e.map("not", _truth(e, x))


def _test(e: Expansion, x: Tile, function: str, *, otherwise: bool) -> Tile:
    if x.type.dtype not in FLOATS:
        return e.b.fill(int(otherwise), DType.BOOL)
    return e.map(function, x)


expands("isnan", computes=_OWN)(lambda e, x: _test(e, x, "isnan", otherwise=False))
expands("isinf", computes=_OWN)(lambda e, x: _test(e, x, "isinf", otherwise=False))


@expands("isfinite", computes=_OWN)
def _isfinite(e: Expansion, x: Tile) -> Tile:
    return e.map("not", e.map("or", _test(e, x, "isnan", otherwise=False), _test(e, x, "isinf", otherwise=False)))


@expands("isposinf isneginf", computes=_OWN)
def _isposinf(e: Expansion, x: Tile) -> Tile:
    if x.type.dtype not in FLOATS:
        return e.b.fill(0, DType.BOOL)
    return e.map("eq", x, math.inf if "isposinf" in e.node.op else -math.inf)


@expands("signbit", computes=_OWN)
def _signbit(e: Expansion, x: Tile) -> Tile:
    if x.type.dtype in HALVES:
        x = e.b.cast(x, DType.F32)
    if x.type.dtype in FLOATS:
        x = e.b.bitcast(x, DType.I64 if x.type.dtype is DType.F64 else DType.I32)
    return e.b.fill(0, DType.BOOL) if x.type.dtype is DType.BOOL else e.map("lt", x, 0)


@expands("where", "condition self other", _OWN)
def _where(e: Expansion, condition: Tile, a: Tile, b: Tile) -> Tile:
    a, b = (t for t in (e.operand("self", e.out), e.operand("other", e.out)) if t is not None)
    return e.map("select", _truth(e, condition), a, b)


@expands("masked_fill", "self mask value", _OWN)
def _masked_fill(e: Expansion, x: Tile, mask: Tile, value: Tile) -> Tile:
    value = e.operand("value", e.out) or value
    return e.map("select", mask, value, e.cast(x, e.out))


@expands("heaviside", "self values")
def _heaviside(e: Expansion, x: Tile, values: Tile) -> Tile:
    step = e.map("select", e.map("gt", x, 0), e.fill(1), e.fill(0))
    return e.map("select", e.map("eq", x, 0), values, step)


@expands("hotfuse.assume", "x holds", _OWN)
def _assume(e: Expansion, x: Tile, holds: Tile) -> Tile:
    """The tensor itself; a call for which that does not hold is a fault, answered by the model's own code."""
    e.b.effect("require", holds)
    return x
