"""A sum of times with learned rates: what a kernel takes is, nearly, so many of each thing times what each takes.

    seconds = sum of rate[family, term] * amount[term]        rates are never negative, fitted to relative errors

Few samples teach it much, and it goes on where trees would stay at their last leaf. Trees learn what it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotfuse.hpm.cuts import WIDE, Loops, Steps
from hotfuse.hpm.roofline import Roof, Vector
from hotfuse.hpm.work import COLUMN, FAMILIES, Matrix

STEPS = {"exp": 16.0, "sigmoid": 24.0, "tanh": 24.0, "erf": 30.0, "root": 10.0, "special": 40.0}
"""Instructions that an element of a function takes, roughly: trees correct what is wrong with it, class by class."""
LEAST = 20
"""Samples that rates are fitted to; with fewer, the roofline stands in."""
TOGETHER = {"broadcast": "pointwise", "reduction": "pointwise"}
"""Families made of the same things share their rates."""
LOWEST, HIGHEST = 0.3, 200.0
"""How far from the roofline a sum is believed."""
_OWN = np.array([FAMILIES.index(TOGETHER.get(n, n)) for n in FAMILIES])
_LEVELS = np.arange(4.0)[:, None]


def shared(family: int) -> int:
    """Whose rates a family has."""
    return int(_OWN[family])


@dataclass(frozen=True, slots=True)
class Counted:
    """What is counted in: rows by column and as one block, a column a line, and what follows from them."""

    c: Mapping[str, Vector]
    block: Matrix
    at: Roof
    needed: Vector
    """Operations of products that cannot be done without."""
    cut: Steps
    loop: Loops
    weights: Vector
    """Seconds for the weights to arrive, once for every group of rows."""
    by_moved: Vector
    """Bytes a second of the largest thing that operators move one by one."""


def amounts(k: Counted) -> Matrix:
    """How much there is of each thing, as seconds of about the right size: a line a term."""
    c, at, cut, loop = k.c, k.at, k.cut, k.loop
    library, has_product, reduces = c["library"] > 0, c["mma"] > 0, c["reduction"] > 0
    tick = 32.0 / at.flops
    each = (
        loop.vectors * loop.lanes / loop.length * (tick / WIDE)
    )  # of one element, where the last vector of a row is not full
    starts = loop.count * tick
    functions = k.block[_FUNCTIONS]
    weight, of_functions = _STEPS @ (functions > 0), _STEPS @ functions
    kinds = k.block[_KINDS] > 0
    told = kinds[0] | kinds[1]
    kinds[2] &= ~told
    kinds[3] &= ~(told | kinds[2])
    narrow = tick * np.maximum(1 / loop.lanes - 1 / WIDE, 0.0)
    read, written = c["bytes_in"] + c["bytes_const"], c["bytes_out"]
    place = np.interp(np.log(np.maximum(read + written, 1.0)), at.log_knots, _LEVELS[:, 0])
    near = np.maximum(1 - np.abs(place - _LEVELS), 0.0) / np.array(at.speeds)[:, None]
    own = has_product & ~library
    tiles = own * cut.blocks * cut.panels * tick
    inputs = c["depth"] / np.maximum(c["window"], 1.0)
    transformed = c["rows"] * (k.needed < c["mma"]) * (2 * tick / 16)
    turned = loop.turned * tick
    products = np.where(own, k.needed * cut.cycles / cut.ideal * (1 + c["tile_padding"]), k.needed)
    grouped = c["mma"] * ((c["groups"] > 1) & (c["convolution"] > 0))
    made = np.empty((len(TERMS), len(each)))
    np.multiply(k.block[_PLAIN], each, out=made[:2])
    np.multiply(functions, each, out=made[_OF_FUNCTIONS])
    made[_OF_FUNCTIONS] *= _STEPS[:, None]
    np.multiply(kinds, c["reduced"] * each, out=made[_OF_ELEMENTS])
    np.multiply(kinds, starts * 10, out=made[_OF_ROWS])
    np.multiply(read, near, out=made[_READ])
    np.multiply(written, near, out=made[_WRITTEN])
    np.multiply(k.block[_CALLS], library * 1e-6, out=made[_CALLED])
    np.multiply((c["light"] + c["divide"], of_functions, c["reduced"]), narrow, out=made[_NARROW])
    begun = (~(reduces | has_product) * 10.0, weight, loop.turns * ~has_product, loop.turns * weight,
             loop.left * weight)  # fmt: skip
    np.multiply(begun, starts, out=made[_STARTS])
    made[_OTHERS] = (
        np.full(len(each), 1e-7), c["pooled"] * tick, c["picked"] * tick, turned * ~reduces, turned * reduces,
        products / at.flops, k.needed / at.flops, transformed * inputs, transformed * c["columns"], own * k.weights,
        tiles * 10, tiles * c["depth"], tiles * cut.high * c["tile_vectors"], grouped / at.flops,
        c["moved"] / k.by_moved * library, c["steps"] * 1e-7, np.full(len(each), at.fork_s),
    )  # fmt: skip
    return made


_STEPS = np.array(list(STEPS.values()))
_FUNCTIONS, _PLAIN, _KINDS, _CALLS = (
    np.array([COLUMN[n] for n in names])
    for names in (
        STEPS, ("light", "divide"), ("softmax", "norm", "extremum", "reduction"),
        ("calls", "convolution", "attention", "recurrent", "product", "reduction"),
    )
)  # fmt: skip
_REDUCED = ("softmax", "norm", "extremum", "sum")
TERMS = (
    "light", "divide", *STEPS, *(f"{n}_elements" for n in _REDUCED), *(f"{n}_rows" for n in _REDUCED),
    "narrow", "narrow_functions", "narrow_reduced", "rows", "row_functions", "turns", "turn_functions", "left_functions",
    *(f"read_{i}" for i in range(4)), *(f"written_{i}" for i in range(4)),
    "once", "pooled", "picked", "turned", "turned_rows", "product", "multiply_adds", "tiles_in", "tiles_out", "weights", "tiles",
    "tile_steps", "tile_sums", "windows", "moved", "steps", "forked",
    "calls", *(f"call_{n}" for n in ("convolution", "attention", "recurrent", "product", "reduction")),
)  # fmt: skip
"""Columns of a table of rates, lines of amounts."""


def _lines(first: str, after: str | None) -> slice:
    return slice(TERMS.index(first), TERMS.index(after) if after is not None else None)


_OF_FUNCTIONS, _OF_ELEMENTS, _OF_ROWS = (
    _lines("exp", "softmax_elements"), _lines("softmax_elements", "softmax_rows"), _lines("softmax_rows", "narrow")
)  # fmt: skip
_NARROW, _STARTS, _READ = _lines("narrow", "rows"), _lines("rows", "read_0"), _lines("read_0", "written_0")
_WRITTEN, _OTHERS, _CALLED = _lines("written_0", "once"), _lines("once", "calls"), _lines("calls", None)
Rates = npt.NDArray[np.float64]
NONE: Rates = np.zeros((len(FAMILIES), len(TERMS)))


def fit(terms: Matrix, family: npt.NDArray[np.int64], seconds: Vector, weight: Vector) -> Rates:
    """Rates that make relative errors small; zero for families with too few samples."""
    from scipy.optimize import nnls

    found, of = np.zeros_like(NONE), _OWN[family]
    for one in np.unique(of):
        own = of == one
        if own.sum() >= LEAST:
            root = np.sqrt(weight[own] / weight[own].mean())
            found[one] = nnls(terms[own] / seconds[own, None] * root[:, None], root, maxiter=60 * len(TERMS))[0]
    return found


def base(terms: Matrix, family: npt.NDArray[np.int64], rates: Rates, roof: Vector) -> Vector:
    """Seconds by rates, near enough to the roofline; the roofline itself where there are none."""
    total = np.einsum("ij,ij->i", rates[_OWN[family]], terms)
    return np.clip(np.where(total > 0, total, roof), LOWEST * roof, HIGHEST * roof)
