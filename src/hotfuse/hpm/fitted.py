"""A sum of times with learned rates: what a kernel takes is, nearly, so many of each thing times what each takes.

    seconds = sum of rate[family, term] * amount[term]        rates are never negative, fitted to relative errors

Few samples teach it much, and it goes on where trees would stay at their last leaf. Trees learn what it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hotfuse.hpm.roofline import Roof, Vector
from hotfuse.hpm.work import COLUMN, FAMILIES, Matrix

STEPS = {"exp": 16.0, "sigmoid": 24.0, "tanh": 24.0, "erf": 30.0, "root": 10.0, "special": 40.0}
"""Instructions that an element of a function takes, roughly: trees correct what is wrong with it, class by class."""
LATENCY = 4.0
"""Cycles of a multiply-add."""
LEAST = 20
"""Samples that rates are fitted to; with fewer, the roofline stands in."""
TOGETHER = {"broadcast": "pointwise", "reduction": "pointwise"}
"""Families made of the same things share their rates."""
LOWEST, HIGHEST = 0.3, 200.0
"""How far from the roofline a sum is believed."""
_OWN = np.array([FAMILIES.index(TOGETHER.get(n, n)) for n in FAMILIES])
_LEVELS = 4
WIDE = 16.0
"""Numbers of a vector; narrower ones need not cost more, so what they do is fitted apart."""


def shared(family: int) -> int:
    """Whose rates a family has."""
    return int(_OWN[family])


Cut = tuple[Vector, Vector, Vector, Vector]


def product_step(c: Mapping[str, Vector]) -> Cut:
    """A product as it is cut: (cycles of one step of K, those of its multiply-adds alone, blocks of rows, panels of columns)."""
    rows, columns, lanes = (np.maximum(c[n], 1.0) for n in ("rows", "columns", "lanes"))
    nv = c["tile_vectors"]
    blocks = np.ceil(rows / c["tile_rows"])
    high = rows / blocks
    panels = np.ceil(columns / (nv * lanes))
    ideal = np.maximum(high * nv / 2, 1e-9)
    # multiply-adds on two pipes, loads on two ports, the wait for the sums before, six instructions a cycle
    waits = LATENCY / np.maximum(c["tile_sets"], 1.0)
    step = np.maximum.reduce([high * nv / 2, (high + nv) / 2, waits, (high * nv + high + nv + 1) / 6])
    return step, ideal, blocks, panels


def amounts(c: Mapping[str, Vector], at: Roof, needed: Vector, cut: Cut) -> dict[str, Vector]:
    """How much there is of each thing, as seconds of about the right size: of columns of rows, products needed, and their cut."""
    library, has_product = c["library"] > 0, c["mma"] > 0
    tick = 32.0 / at.flops
    each_way = 2 * tick / 16
    lanes = np.where(c["lanes"] > 1, c["lanes"], WIDE)
    wide = np.maximum(c["width"], 1.0)
    vectors = np.ceil(wide / WIDE)
    each = tick / (wide / vectors)  # of one element, where the last vector of a row is not full
    starts = c["elements"] / wide * tick
    reduces = c["reduction"] > 0
    kinds = {
        "softmax": c["softmax"] > 0,
        "norm": c["norm"] > 0,
        "extremum": (c["extremum"] > 0) & (c["softmax"] + c["norm"] == 0),
    }
    kinds["sum"] = reduces & ~(kinds["softmax"] | kinds["norm"] | kinds["extremum"])
    weight = sum(s * (c[n] > 0) for n, s in STEPS.items())
    found: dict[str, Vector] = {
        "once": np.full(len(wide), 1e-7),
        "light": c["light"] * each,
        "divide": c["divide"] * each,
    }
    for n, s in STEPS.items():
        found[n] = c[n] * each * s
    for n, of in kinds.items():
        found[f"{n}_elements"] = c["reduced"] * each * of
        found[f"{n}_rows"] = starts * of * 10
    of_functions = sum(s * c[n] for n, s in STEPS.items())
    found["narrow"] = (c["light"] + c["divide"] + of_functions) * tick * np.maximum(1 / lanes - 1 / WIDE, 0.0)
    found["rows"] = np.where(reduces | has_product, 0.0, starts * 10)
    found["row_functions"] = starts * weight
    found["short_rows"] = starts * weight / vectors
    found["pooled"], found["picked"] = c["pooled"] * tick, c["picked"] * tick
    found["turned"], found["turned_rows"] = c["turned"] * ~reduces * tick, c["turned"] * reduces * tick
    read, written = c["bytes_in"] + c["bytes_const"], c["bytes_out"]
    held = np.log(np.maximum(read + written, 1.0))
    for level in range(_LEVELS):
        near = np.interp(held, at.log_knots, np.eye(_LEVELS)[level]) / at.speeds[level]
        found[f"read_{level}"], found[f"written_{level}"] = read * near, written * near
    step, ideal, blocks, panels = cut
    own = has_product & ~library
    fewer = needed < c["mma"]
    found["product"] = np.where(own, needed * step / ideal * (1 + c["tile_padding"]), needed) / at.flops
    found["multiply_adds"] = needed / at.flops
    inputs = c["depth"] / np.maximum(c["window"], 1.0)
    found["tiles_in"], found["tiles_out"] = (c["rows"] * n * fewer * each_way for n in (inputs, c["columns"]))
    again = np.ceil(np.maximum(c["rows"], 1.0) / np.maximum(c["group_rows"], 1.0))
    found["weights"] = own * c["bytes_const"] * again / at.bandwidth(np.maximum(c["bytes_const"] + c["bytes_in"], 1.0))
    found["tiles"] = own * blocks * panels * tick * 10
    found["windows"] = c["mma"] * (c["groups"] > 1) * (c["convolution"] > 0) / at.flops
    moved = c["moved"] / at.bandwidth(np.maximum(c["most_moved"], 1.0))
    found["moved"], found["calls"] = moved * library, c["calls"] * library * 1e-6
    for n in ("convolution", "attention", "recurrent", "product", "reduction"):
        found[f"call_{n}"] = c[n] * library * 1e-6
    found["steps"] = c["steps"] * 1e-7
    found["forked"] = np.full(len(wide), at.fork_s)
    return found


def _terms() -> tuple[str, ...]:
    ones = {n: np.ones(1) for n in COLUMN}
    at = Roof(1, 1.0, (1.0, 2.0, 3.0, 4.0), (1.0,) * _LEVELS, 1.0, 0.0, False)
    return tuple(amounts(ones, at, np.ones(1), product_step(ones)))


TERMS = _terms()
"""Columns of a table of rates."""
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
