"""Groups to measure on a device, drawn as models have them there: products with what is around them, rows, chains, attention.

The draw is a function of a seed. Sizes are numbers: kernels for devices are compiled for them. Types are mostly of 16 bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.graph import Arg, Graph, Value
from hotfuse.ir.types import DType, TensorType

MAX_ELEMENTS = 1 << 25
"""Of one tensor."""


def device_problems(seed: int = 0) -> Iterator[Graph]:
    """Without end; products come most often, as they take most of a model's time."""
    r = random.Random(seed)
    kinds: list[Callable[[random.Random], Graph]] = [_product] * 6 + [_products, _gated, _rows, _rows, _chain, _attention]
    while True:
        yield r.choice(kinds)(r)


def _log(r: random.Random, low: float, high: float, step: int) -> int:
    """Spread evenly over orders of magnitude, most of them a multiple of what hardware likes."""
    n = round(math.exp(r.uniform(math.log(low), math.log(high))))
    return max(1, n) if r.random() < 0.1 else max(step, round(n / step) * step)


def _dtype(r: random.Random) -> DType:
    return r.choice((DType.F16, DType.F16, DType.F16, DType.BF16, DType.F32))


class _Draft:
    """A group while it is drawn: all of one type."""

    def __init__(self, r: random.Random) -> None:
        self.r, self.b, self.dtype = r, GraphBuilder("group"), _dtype(r)

    def type(self, *shape: int) -> TensorType:
        return TensorType(self.dtype, shape)

    def input(self, *shape: int) -> Value:
        return self.b.input("x", self.type(*shape))

    def param(self, *shape: int) -> Value:
        return self.b.param("w", self.type(*shape), f"w{len(self.b.params)}")

    def add(self, op: str, args: tuple[Arg, ...], *shape: int) -> Value:
        return self.b.add(op, args, self.type(*shape))

    def linear(self, x: Value, m: int, n: int, k: int, *, bias: bool) -> Value:
        given = (x, self.param(n, k), self.param(n)) if bias else (x, self.param(n, k))
        return self.add("aten.linear.default", given, m, n)


def _sizes(r: random.Random) -> tuple[int, int, int]:
    """Rows, columns and steps of a product; now and then one row, as decoding has it."""
    while True:
        m = 1 if r.random() < 0.12 else _log(r, 16, 16384, 16)
        n, k = _log(r, 128, 8192, 64), _log(r, 64, 8192, 64)
        if m * n <= MAX_ELEMENTS and m * k <= MAX_ELEMENTS and m * n * k <= 1 << 37:
            return m, n, k


def _product(r: random.Random) -> Graph:
    d = _Draft(r)
    m, n, k = _sizes(r)
    y = d.linear(d.input(m, k), m, n, k, bias=r.random() < 0.7)
    match r.choice(("", "gelu", "relu", "add", "add", "silu")):
        case "add":
            y = d.add("aten.add.Tensor", (y, d.input(m, n)), m, n)
        case "":
            pass
        case name:
            y = d.add(f"aten.{name}.default", (y,), m, n)
    return d.b.finish(y)


def _products(r: random.Random) -> Graph:
    """Several products of one input, as queries, keys and values are."""
    d = _Draft(r)
    m, n, k = _sizes(r)
    x, bias = d.input(m, k), r.random() < 0.5
    return d.b.finish(*(d.linear(x, m, n, k, bias=bias) for _ in range(3)))


def _gated(r: random.Random) -> Graph:
    d = _Draft(r)
    m, n, k = _sizes(r)
    x = d.input(m, k)
    gate = d.add("aten.silu.default", (d.linear(x, m, n, k, bias=False),), m, n)
    return d.b.finish(d.add("aten.mul.Tensor", (gate, d.linear(x, m, n, k, bias=False)), m, n))


def _rows(r: random.Random) -> Graph:
    d = _Draft(r)
    n = _log(r, 64, 8192, 64)
    m = _log(r, 8, max(16, min(32768, MAX_ELEMENTS // n)), 8)
    x = d.input(m, n)
    if r.random() < 0.5:
        x = d.add("aten.add.Tensor", (x, d.input(m, n)), m, n)
    if r.random() < 0.3:
        return d.b.finish(d.add("aten.softmax.int", (x, -1), m, n))
    y = d.add("aten.layer_norm.default", (x, (n,), d.param(n), d.param(n)), m, n)
    return d.b.finish(y)


def _chain(r: random.Random) -> Graph:
    d = _Draft(r)
    n = _log(r, 64, 8192, 64)
    m = _log(r, 8, max(16, min(65536, MAX_ELEMENTS // n)), 8)
    x = d.input(m, n)
    for name in r.choices(("gelu", "add", "mul", "silu", "tanh", "relu"), k=r.choice((1, 2, 2, 3, 4))):
        if name in ("add", "mul"):
            x = d.add(f"aten.{name}.Tensor", (x, d.input(m, n)), m, n)
        else:
            x = d.add(f"aten.{name}.default", (x,), m, n)
    return d.b.finish(x)


def _attention(r: random.Random) -> Graph:
    d = _Draft(r)
    heads, width, s = r.choice((4, 8, 12, 16, 32)), r.choice((32, 64, 64, 64, 128)), _log(r, 16, 2048, 16)
    b = min(r.choice((1, 1, 2, 4, 8, 32)), max(1, MAX_ELEMENTS // (heads * width * s)))
    q, k, v = (d.input(b, heads, s, width) for _ in range(3))
    return d.b.finish(d.add("aten.scaled_dot_product_attention.default", (q, k, v), b, heads, s, width))
