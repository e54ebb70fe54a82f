"""Quotients by a number that are rounded and saturated: two products that give the same integers to the last one.

    %d = div(%x, 0.0137)   %r = round(%d)   %a = add(%r, 98.0)   %y = clamp(%a, 0, 255)
    ->     d = fma(x, high, x * low)        high + low = 1 / 0.0137 in twice the digits, neither below zero

A division of vectors takes as long as ten products, and quantizing divides each element once. One product by the reciprocal is off
in the last digit of every fourth quotient, which rounding to integers shows at ties. With the reciprocal in two parts, quotients
that differ from the divided ones are rare. Where saturation leaves few integers, all numbers at which the quotient passes from one
integer to the next are tried here. If one of them gives another integer than the division does, the division stays. Away from
those numbers both quotients are on the same side of the tie: neither is off by more than one unit in the last place.

Infinities and what is not a number come out as from a division: both parts are positive, or there is one.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hotfuse.ir.graph import Graph, Node, Value, output_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

MAX_INTEGERS = 1 << 17
"""Integers that are tried: those of 16 bits, and as many on either side."""
_NEIGHBOURS = 6
"""Floats on either side of a place where a quotient may pass to the next integer."""
_EXPONENT = 100
"""Divisors are within 2 to this power, so that no part of a reciprocal leaves the normal numbers."""


def parts_of_reciprocal(node: Node, graph: Graph) -> tuple[float, float] | None:
    """What to multiply by instead of dividing; None where the division has to stay. The second part may be zero."""
    if packet(node.op) not in ("aten.div", "aten.divide", "aten.true_divide") or argument(node, "rounding_mode") is not None:
        return None
    by = argument(node, "other")
    if isinstance(by, bool) or not isinstance(by, int | float) or not all(_f32(v) for v in (*node.ins, *node.outs)):
        return None
    span = _integers(node.outs[0], graph)
    return None if span is None else _parts(float(np.float32(by)), *span)


def _f32(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype is DType.F32


def _integers(quotient: Value, graph: Graph) -> tuple[int, int] | None:
    """Which integers a quotient may be rounded to before saturation makes no more difference of them."""
    outs = {v.name for v in output_values(graph)}
    rounded = _only_reader(quotient, graph, outs)
    if rounded is None or packet(rounded.op) != "aten.round" or len(rounded.args) + len(rounded.attrs) != 1:
        return None
    clamped, shift = _only_reader(rounded.outs[0], graph, outs), 0.0
    if clamped is not None and packet(clamped.op) == "aten.add" and len(clamped.args) == 2 and not clamped.attrs:
        number = clamped.args[1]
        if isinstance(number, Value | bool) or not isinstance(number, int | float):
            return None
        clamped, shift = _only_reader(clamped.outs[0], graph, outs), float(number)
    if clamped is None or packet(clamped.op) not in ("aten.clamp", "aten.clip"):
        return None
    low, high = argument(clamped, "min"), argument(clamped, "max")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not shift.is_integer() or abs(shift) > MAX_INTEGERS:
        return None
    if not 0 <= high - low <= MAX_INTEGERS:
        return None
    return math.floor(low - shift) - 1, math.ceil(high - shift) + 1


def _only_reader(value: Value, graph: Graph, outs: set[str]) -> Node | None:
    """Who alone reads a value that nobody outside does."""
    found = [n for n in graph.nodes if any(v.name == value.name for v in n.ins)]
    return found[0] if len(found) == 1 and value.name not in outs else None


@lru_cache(4096)
def _parts(by: float, low: int, high: int) -> tuple[float, float] | None:
    if not 2.0**-_EXPONENT < by < 2.0**_EXPONENT:
        return None
    exact = 1.0 / by
    first = np.float32(exact)
    if float(first) == exact and math.frexp(by)[0] == 0.5:
        return float(first), 0.0
    if float(first) >= exact:
        first = np.nextafter(first, np.float32(0))
    second = np.float32(exact - float(first))
    return (float(first), float(second)) if _same_integers(np.float32(by), first, second, low, high) else None


def _same_integers(by: np.float32, first: np.float32, second: np.float32, low: int, high: int) -> bool:
    """Whether both ways round to the same integers around every place where a quotient passes from one to the next."""
    x = ((np.arange(low, high + 1) + 0.5) * np.float64(by)).astype(np.float32)
    near = [x]
    for direction in (np.float32(-np.inf), np.float32(np.inf)):
        at = x
        for _ in range(_NEIGHBOURS):
            at = np.nextafter(at, direction)
            near.append(at)
    x = np.concatenate(near)
    total = x.astype(np.float64) * np.float64(first) + (x * second).astype(np.float64)
    made = total.astype(np.float32)
    off = np.abs(total - made)
    tie = (off != 0) & ((off * 2 == np.spacing(np.abs(made))) | (off * 4 == np.spacing(np.abs(made))))
    return not tie.any() and np.array_equal(np.rint(made), np.rint(x / by))
