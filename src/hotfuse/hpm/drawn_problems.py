"""Problems to measure: groups as the fusion engine makes them, drawn to spread over sizes, widths and lengths of chains.

Single operators and partially fused pairs come out of the same draw: a chain's prefixes are problems too. Rows are a symbol, so
that one kernel is compiled once and measured at several sizes. The draw is a function of a seed: calibration can be taken up
again where it stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.build import GraphBuilder
from hotfuse.ir.dims import Dim, sym
from hotfuse.ir.graph import Arg, Graph, Value
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import ROW_MAJOR, DType, Layout, TensorType

MAX_ELEMENTS = 3_000_000
ROWS = "n"
MAX_DRAWS_IN_VAIN = 1000
"""Draws without a new problem, after which there are no more."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A group and the sizes of several calls."""

    family: str
    graph: Graph
    sizes: tuple[Mapping[str, int], ...]

    @property
    def key(self) -> str:
        """Its name: the same for the same group."""
        return hashlib.sha256(show(self.graph).encode()).hexdigest()[:16]


def _log(r: random.Random, low: float, high: float) -> int:
    return max(1, round(math.exp(r.uniform(math.log(low), math.log(high)))))


def _extent(r: random.Random, low: int, high: int) -> int:
    """Mostly multiples of a vector, as models have them."""
    n = _log(r, low, high)
    return n if r.random() < 0.15 or n < 16 else max(16, round(n / 16) * 16)


def _several(r: random.Random, low: int, high: int, width: int, count: int = 3) -> tuple[Mapping[str, int], ...]:
    """Rows of several calls, spread over their range."""
    top = max(low + 1, min(high, MAX_ELEMENTS // max(width, 1)))
    edges = [low * (top / low) ** (i / count) for i in range(count + 1)]
    return tuple({ROWS: max(2, _log(r, edges[i], edges[i + 1]))} for i in range(count))


def _f32(*shape: Dim, layout: Layout = ROW_MAJOR) -> TensorType:
    return TensorType(DType.F32, tuple(shape), layout)


class _Chain:
    """Pointwise operators appended to a value, with operands of its shape or of its last dimension."""

    def __init__(self, b: GraphBuilder, r: random.Random, x: Value, channel: int | None = None) -> None:
        self.b, self.r, self.x, self.channel = b, r, x, channel
        assert isinstance(x.type, TensorType)
        self.type = x.type

    def step(self, kinds: str) -> None:
        kind = self.r.choice(kinds.split())
        if kind in ("add", "mul", "sub"):
            self._put(f"aten.{kind}.Tensor", (self.x, self.b.input("y", self.type)))
        elif kind in ("addv", "mulv"):
            shape = self.type.shape
            wide = shape[-1] if self.channel is None else (shape[self.channel], *(1 for _ in shape[self.channel + 1 :]))
            own = _f32(*wide) if isinstance(wide, tuple) else _f32(wide)
            self._put(f"aten.{kind[:3]}.Tensor", (self.x, self.b.param("v", own, f"v{len(self.b.params)}")))
        elif kind == "div":
            self._put("aten.div.Tensor", (self.x, 3.0))
        elif kind == "scale":
            self._put("aten.mul.Tensor", (self.x, 0.5))
        elif kind == "gelu":
            self._put("aten.gelu.default", (self.x,))
        else:
            self._put(f"aten.{kind}.default", (self.x,))

    def _put(self, op: str, args: tuple[Arg, ...]) -> None:
        self.x = self.b.add(op, args, self.type)


_CHEAP = "add mul sub scale relu"
_ANY = f"{_CHEAP} div sigmoid tanh gelu exp silu"


def _begin(b: GraphBuilder, r: random.Random, width: int, usual: float = 0.94) -> Value:
    """An input of rows; now and then it lies the other way round."""
    if r.random() < usual:
        return b.input("x", _f32(sym(ROWS), width))
    turned = b.input("x", _f32(width, sym(ROWS)))
    return b.add("aten.transpose.int", (turned, 0, 1), _f32(sym(ROWS), width))


def _pointwise(r: random.Random) -> Problem:
    b, width = GraphBuilder("group"), _extent(r, 16, 4096)
    chain = _Chain(b, r, _begin(b, r, width))
    for _ in range(r.choice((1, 1, 2, 2, 3, 4, 6))):
        chain.step(_ANY)
    return Problem("pointwise", b.finish(chain.x), _several(r, 2, 8192, width))


def _broadcast(r: random.Random) -> Problem:
    b, width = GraphBuilder("group"), _extent(r, 16, 4096)
    if r.random() < 0.15:
        return _one_row(b, r, width)
    chain = _Chain(b, r, b.input("x", _f32(sym(ROWS), width)))
    for i in range(r.choice((1, 2, 2, 3, 4))):
        chain.step("addv mulv" if i == 0 else f"{_ANY} addv")
    return Problem("broadcast", b.finish(chain.x), _several(r, 2, 8192, width))


def _one_row(b: GraphBuilder, r: random.Random, width: int) -> Problem:
    """Something computed of one row and used by all: fused, it is computed again for each."""
    own = _Chain(b, r, b.input("r", _f32(1, width)))
    for _ in range(r.choice((1, 1, 2))):
        own.step("gelu tanh sigmoid exp scale relu")
    x = b.input("x", _f32(sym(ROWS), width))
    op = r.choice(("aten.mul.Tensor", "aten.add.Tensor"))
    chain = _Chain(b, r, b.add(op, (x, own.x), _f32(sym(ROWS), width)))
    for _ in range(r.choice((0, 0, 1, 2))):
        chain.step(_CHEAP)
    return Problem("broadcast", b.finish(chain.x), _several(r, 2, 4096, width))


def _reduction(r: random.Random) -> Problem:
    if r.random() < 0.1:
        return _pool(r)
    b, width = GraphBuilder("group"), _extent(r, 32, 4096)
    chain = _Chain(b, r, _begin(b, r, width))
    for _ in range(r.choice((0, 0, 1, 1, 2, 3))):
        chain.step("add mul scale addv gelu")
    kind = r.choice(("softmax", "layer_norm", "layer_norm", "sum", "amax", "mean"))
    if kind == "softmax":
        out = b.add("aten.softmax.int", (chain.x, -1), chain.type)
    elif kind == "layer_norm":
        w, v = (b.param(n, _f32(width), n) for n in ("gamma", "beta"))
        out = b.add("aten.layer_norm.default", (chain.x, (width,), w, v, 1e-5), chain.type)
    else:
        op = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim", "amax": "aten.amax.default"}[kind]
        out = b.add(op, (chain.x, (-1,), True), _f32(sym(ROWS), 1))
    return Problem("reduction", b.finish(out), _several(r, 4, 4096, width))


_NORMS = {"layer_norm": ("gamma", "beta"), "rms_norm": ("gamma",)}
_FOLDED = {"sum": "sum.dim_IntList", "mean": "mean.dim", "amax": "amax.default"}


def _rows(r: random.Random) -> Problem:
    """Rows in more ways than models have most: short ones, odd ones, such as lie across, whose dim is not the innermost."""
    if r.random() < 0.25:
        return _picked(r) if r.random() < 0.2 else _pool(r)
    b, width = GraphBuilder("group"), _extent(r, 24, 3072)
    width += r.randint(1, 15) if r.random() < 0.15 else 0
    chain = _Chain(b, r, _begin(b, r, width, 0.9))
    for _ in range(r.choice((0, 0, 1, 1, 2, 3))):
        chain.step("add mul scale addv gelu")
    kind = r.choice(("softmax", "softmax", "softmax", "layer_norm", "layer_norm", "layer_norm", "rms_norm", *_FOLDED))
    if kind in _NORMS:
        weights = tuple(b.param(n, _f32(width), n) for n in _NORMS[kind])
        out = b.add(f"aten.{kind}.default", (chain.x, (width,), *weights, 1e-5), chain.type)
    elif kind in _FOLDED:
        dim = 0 if r.random() < 0.1 else -1
        made = _f32(1, width) if dim == 0 else _f32(sym(ROWS), 1)
        out = b.add(f"aten.{_FOLDED[kind]}", (chain.x, (dim,), True), made)
    else:
        out = b.add("aten.softmax.int", (chain.x, -1), chain.type)
    return Problem("reduction", b.finish(out), _several(r, 16, 4096, width))


def _pool(r: random.Random) -> Problem:
    b, last, channels, side = (
        GraphBuilder("group"),
        Layout((0, 2, 3, 1)),
        _extent(r, 16, 1024),
        r.choice((7, 14, 28, 56, 112)),
    )
    channels = max(16, min(channels, MAX_ELEMENTS // (side * side) // 16 * 16))
    x = b.input("x", _f32(1, channels, side, side, layout=last))
    if r.random() < 0.4:
        out = b.add("aten.adaptive_avg_pool2d.default", (x, (1, 1)), _f32(1, channels, 1, 1, layout=last))
        return Problem("reduction", b.finish(out), ({},))
    window, kind = r.choice((2, 3, 3, 5)), r.choice(("max", "avg"))
    pad = window // 2
    made = (side + 2 * pad - window) // 2 + 1
    args = (x, (window, window), (2, 2), (pad, pad))
    out = b.add(f"aten.{kind}_pool2d.default", args, _f32(1, channels, made, made, layout=last))
    return Problem("reduction", b.finish(out), ({},))


def _picked(r: random.Random) -> Problem:
    b, width, rows = GraphBuilder("group"), _extent(r, 32, 2048), _log(r, 100, 30_000)
    table = b.param("t", _f32(min(rows, 8 * MAX_ELEMENTS // width), width), "t")
    at = b.input("i", TensorType(DType.I64, (sym(ROWS),)))
    chain = _Chain(b, r, b.add("aten.embedding.default", (table, at), _f32(sym(ROWS), width)))
    for _ in range(r.choice((0, 1, 2))):
        chain.step("add addv scale")
    return Problem("broadcast", b.finish(chain.x), _several(r, 4, 2048, width))


def _contraction(r: random.Random) -> Problem:
    b, k, n = GraphBuilder("group"), _extent(r, 32, 3072), _extent(r, 16, 3072)
    x, w = b.input("x", _f32(sym(ROWS), k)), b.param("w", _f32(n, k), "w")
    bias = b.param("b", _f32(n), "b") if r.random() < 0.8 else None
    front = _Chain(b, r, x)
    if r.random() < 0.12:
        front.step("relu gelu silu add scale")  # computed again for every panel of columns
    chain = _Chain(b, r, b.add("aten.linear.default", (front.x, w, bias), _f32(sym(ROWS), n)))
    for _ in range(r.choice((0, 0, 1, 1, 2, 3))):
        chain.step("relu gelu add silu tanh")
    most = max(4, min(512, 700_000_000 // (2 * n * k)))
    return Problem("contraction", b.finish(chain.x), _several(r, 1, most, max(n, k), 4))


def _stem(r: random.Random) -> Problem:
    """The first convolution of a model: few channels, one plane after another, long strides."""
    b, last, side = GraphBuilder("group"), Layout((0, 2, 3, 1)), r.choice((64, 96, 128, 160, 224))
    window, stride = r.choice(((3, 1), (3, 2), (7, 2), (4, 4), (16, 16), (16, 16)))
    c_out = _extent(r, 16, 768 if stride > 2 else 96)
    pad = window // 2 if stride < 3 else 0
    out = (side + 2 * pad - window) // stride + 1
    x = b.input("x", _f32(1, 3, side, side))
    w, v = b.param("w", _f32(c_out, 3, window, window), "w"), b.param("b", _f32(c_out), "b")
    args = (x, w, v, (stride, stride), (pad, pad), (1, 1), 1)
    chain = _Chain(b, r, b.add("aten.conv2d.default", args, _f32(1, c_out, out, out, layout=last)), 1)
    if r.random() < 0.5:
        chain.step("relu silu")
    return Problem("convolution", b.finish(chain.x), ({},))


def _convolution(r: random.Random) -> Problem:
    if r.random() < 0.12:
        return _stem(r)
    b, last = GraphBuilder("group"), Layout((0, 2, 3, 1))
    side, window, stride = r.choice((7, 14, 20, 28, 40, 56)), r.choice((1, 1, 3, 3, 5)), r.choice((1, 1, 1, 2))
    own = r.random() < 0.3 and window > 1
    c_in = _extent(r, 16, 512)
    c_out = c_in if own else _extent(r, 16, 512)
    groups = c_in if own else 1
    if 2 * side * side * c_out * c_in // groups * window * window > 500_000_000:
        side = 14
    pad, out = window // 2, (side + 2 * (window // 2) - window) // stride + 1
    x = b.input("x", _f32(1, c_in, side, side, layout=last))
    w, v = b.param("w", _f32(c_out, c_in // groups, window, window), "w"), b.param("b", _f32(c_out), "b")
    args = (x, w, v, (stride, stride), (pad, pad), (1, 1), groups)
    made = b.add("aten.conv2d.default", args, _f32(1, c_out, out, out, layout=last))
    chain = _Chain(b, r, made, 1)
    for _ in range(r.choice((0, 1, 1, 2))):
        chain.step("relu silu add")
    return Problem("convolution", b.finish(chain.x), ({},))


def _attention(r: random.Random) -> Problem:
    b, heads, deep = GraphBuilder("group"), r.randint(1, 16), r.choice((32, 48, 64, 64, 80, 128))
    t = _f32(1, heads, sym(ROWS), deep)
    q, k, v = (b.input(n, t) for n in "qkv")
    out = b.add("aten.scaled_dot_product_attention.default", (q, k, v), t)
    return Problem("attention", b.finish(out), _several(r, 8, 384, heads * deep, 5))


_DRAW: dict[str, tuple[Callable[[random.Random], Problem], float]] = {
    "pointwise": (_pointwise, 0.19), "broadcast": (_broadcast, 0.14), "reduction": (_reduction, 0.25),
    "contraction": (_contraction, 0.2), "convolution": (_convolution, 0.17), "attention": (_attention, 0.03),
    "picked": (_picked, 0.02), "rows": (_rows, 0.0),
}  # fmt: skip
"""How problems are drawn, and how often; rows only where they are asked for."""
EACH_ROWS = 4
"""Problems of calibration after which there is one of rows."""


def remembered(groups: Iterable[tuple[str, Mapping[str, int]]]) -> Iterator[Problem]:
    """Groups of models that were served here; what cannot be read is left out."""
    for text, sizes in groups:
        try:
            graph = parse(text)
        except HotfuseError:
            continue
        yield Problem("served", graph, (dict(sizes),))


def calibrated(seed: int = 0) -> Iterator[Problem]:
    """What calibration measures: problems as models have them, and more of rows, which differ in most ways."""
    more = draws(seed, "rows")
    for n, problem in enumerate(draws(seed), 1):
        yield problem
        if n % EACH_ROWS == 0:
            yield from itertools.islice(more, 1)


def draws(seed: int = 0, only: str | None = None) -> Iterator[Problem]:
    """Problems, every one once, without end as long as new ones come up."""
    seen: set[str] = set()
    names = [only] if only is not None else list(_DRAW)
    shares = [1.0 if only is not None else _DRAW[n][1] for n in names]
    number = last = 0
    while number - last < MAX_DRAWS_IN_VAIN:
        r = random.Random(f"{seed} {number}")
        number += 1
        problem = _DRAW[r.choices(names, shares)[0]][0](r)
        if problem.key not in seen:
            seen.add(problem.key)
            last = number
            yield problem
