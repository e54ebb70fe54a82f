"""A sum of times with learned rates: what a kernel takes is, nearly, so many of each thing times what each takes.

    seconds = sum of rate[family, term] * amount[term]        rates are never negative, fitted to relative errors

Few samples teach it much, and it goes on where trees would stay at their last leaf. Trees learn what it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm import reduction_passes
from hotfuse.hpm.cuts import WIDE, Loops, Steps, usual
from hotfuse.hpm.roofline import Column, Vector
from hotfuse.hpm.work import FAMILIES, Matrix

STEPS = {"exp": 16.0, "sigmoid": 24.0, "tanh": 24.0, "erf": 30.0, "root": 10.0, "special": 40.0}
"""Instructions that an element of a function takes, roughly: trees correct what is wrong with it, class by class."""
MIN_SAMPLES = 20
"""Samples that rates are fitted to; with fewer, the roofline stands in."""
APART, EACH = 500, 100
"""Samples from which on full and narrower vectors have rates of their own, and how many of each kind there must be: what fewer say
about the difference is chance, and a machine without full vectors would say that they take nothing."""
CALM = 0.01
"""What a rate's square costs beside squared errors: rates that few samples tell of stay near nothing instead of anywhere."""
TOGETHER = {"broadcast": "pointwise", "reduction": "pointwise"}
"""Families made of the same things share their rates."""
LOWEST, HIGHEST = 0.3, 200.0
"""How far from the roofline a sum is believed."""
_OWN = np.array([FAMILIES.index(TOGETHER.get(n, n)) for n in FAMILIES])
_LEVELS = (0.0, 1.0, 2.0, 3.0)


def shared(family: int) -> int:
    """Whose rates a family has."""
    return int(_OWN[family])


@dataclass(frozen=True, slots=True)
class Counted:
    """What is counted in: rows by column (or a row's symbols), and what follows from them."""

    c: Mapping[str, Column]
    at: Any
    needed: Column
    """Operations of products that cannot be done without."""
    cut: Steps
    loop: Loops
    rows: reduction_passes.Passes
    weights: Column
    """Seconds for the weights to arrive, once for every group of rows."""
    by_moved: Column
    """Bytes a second of the largest thing that operators move one by one."""


def amounts(k: Counted) -> list[Column]:
    """How much there is of each thing, as seconds of about the right size: one for each of `TERMS`."""
    c, at, cut, loop = k.c, k.at, k.cut, k.loop
    library, has_product, reduces = c["library"] > 0, c["mma"] > 0, c["reduction"] > 0
    tick = 32.0 / at.flops
    # of one element, where the last vector of a row is not full
    each = loop.vectors * loop.lanes / loop.length * (tick / WIDE)
    starts = loop.count * tick
    weight = sum(s * (c[n] > 0) for n, s in STEPS.items())
    of_functions = sum(s * c[n] for n, s in STEPS.items())
    softmax, norm = c["softmax"] > 0, (c["norm"] > 0) & (c["folds"] > 1) & usual(c)
    extremum = (c["extremum"] > 0) & ~(softmax | norm)
    kinds = (softmax, norm, extremum, reduces & ~(softmax | norm | extremum))
    narrow = tick * np.maximum(1 / loop.lanes - 1 / WIDE, 0.0)
    read, written = c["bytes_in"] + c["bytes_const"], c["bytes_out"]
    place = at.between(read + written, _LEVELS)
    near = [np.maximum(1 - np.maximum(place - i, i - place), 0.0) / at.speeds[int(i)] for i in _LEVELS]
    own = has_product & ~library
    tiles = own * cut.blocks * cut.panels * tick
    inputs = c["depth"] / np.maximum(c["window"], 1.0)
    transformed = c["rows"] * (k.needed < c["mma"]) * (2 * tick / 16)
    turned = loop.turned * tick
    products = np.where(own, k.needed * cut.cycles / cut.ideal * (1 + c["tile_padding"]), k.needed)
    grouped = c["mma"] * ((c["groups"] > 1) & (c["convolution"] > 0))
    none, wide = c["library"] * 0.0, loop.lanes >= WIDE
    by_width = (
        c["light"] * each, c["divide"] * each, *(c[n] * each * s for n, s in STEPS.items()),
        *(kind * (c["reduced"] * each) for kind in kinds), *(kind * (starts * 10) for kind in kinds),
        ~(reduces | has_product) * 10.0 * starts, weight * starts, loop.turns * ~has_product * starts,
        loop.turns * weight * starts, loop.left * weight * starts,
    )  # fmt: skip
    return [
        *(v * wide for v in by_width), *(v * ~wide for v in by_width),
        (c["light"] + c["divide"]) * narrow, of_functions * narrow, c["reduced"] * narrow,
        *(read * n for n in near), *(written * n for n in near),
        none + 1e-7, c["pooled"] * tick, c["picked"] * tick, turned * ~reduces, turned * reduces * k.rows.reads,
        products / at.flops, k.needed / at.flops, transformed * inputs, transformed * c["columns"], own * k.weights,
        tiles * 10, tiles * c["depth"], tiles * cut.high * c["tile_vectors"], grouped / at.flops,
        c["moved"] / k.by_moved * library, c["steps"] * 1e-7, none + at.fork_s,
        *(v * tick for v in k.rows.amounts),
        *(c[n] * library * 1e-6 for n in ("calls", "convolution", "attention", "recurrent", "product", "reduction")),
    ]  # fmt: skip


_REDUCED = ("softmax", "norm", "extremum", "sum")
_BY_WIDTH = (
    "light", "divide", *STEPS, *(f"{n}_elements" for n in _REDUCED), *(f"{n}_rows" for n in _REDUCED),
    "rows", "row_functions", "turns", "turn_functions", "left_functions",
)  # fmt: skip
"""What full and narrower vectors have rates of their own for: functions are other code for them."""
TERMS = (
    *_BY_WIDTH, *(f"{n}_narrower" for n in _BY_WIDTH), "narrow", "narrow_functions", "narrow_reduced",
    *(f"read_{i}" for i in range(4)), *(f"written_{i}" for i in range(4)),
    "once", "pooled", "picked", "turned", "turned_rows", "product", "multiply_adds", "tiles_in", "tiles_out", "weights", "tiles",
    "tile_steps", "tile_sums", "windows", "moved", "steps", "forked", *reduction_passes.TERMS,
    "calls", *(f"call_{n}" for n in ("convolution", "attention", "recurrent", "product", "reduction")),
)  # fmt: skip
"""Columns of a table of rates, and of amounts."""
_WIDE, _NARROWER = slice(len(_BY_WIDTH)), slice(len(_BY_WIDTH), 2 * len(_BY_WIDTH))
Rates = npt.NDArray[np.float64]
NONE: Rates = np.zeros((len(FAMILIES), len(TERMS)))


def fit(terms: Matrix, family: npt.NDArray[np.int64], seconds: Vector, weight: Vector) -> Rates:
    """Rates that make relative errors small; zero for families with too few samples."""
    from scipy.optimize import nnls

    found, of = np.zeros_like(NONE), _OWN[family]
    calm, aim = np.sqrt(CALM) * np.eye(len(TERMS)), np.zeros(len(TERMS))
    for one in np.unique(of):
        own = of == one
        if own.sum() >= MIN_SAMPLES:
            root = np.sqrt(weight[own] / weight[own].mean())
            part = terms[own] / seconds[own, None] * root[:, None]
            together = not _tells_widths_apart(terms[own])
            if together:
                part[:, _WIDE] += part[:, _NARROWER]
                part[:, _NARROWER] = 0.0
            found[one] = nnls(np.vstack([part, calm]), np.concatenate([root, aim]), maxiter=60 * len(TERMS))[0]
            if together:
                found[one, _NARROWER] = found[one, _WIDE]
    return found


def _tells_widths_apart(terms: Matrix) -> bool:
    """Whether samples of a family are enough for rates of full and of narrower vectors."""
    return len(terms) >= APART and all((terms[:, part].sum(1) > 0).sum() >= EACH for part in (_WIDE, _NARROWER))


def base(terms: Matrix, family: npt.NDArray[np.int64], rates: Rates, roofline: Vector) -> Vector:
    """Seconds by rates, near enough to the roofline; the roofline itself where there are none."""
    total = np.einsum("ij,ij->i", rates[_OWN[family]], terms)
    return np.clip(np.where(total > 0, total, roofline), LOWEST * roofline, HIGHEST * roofline)
