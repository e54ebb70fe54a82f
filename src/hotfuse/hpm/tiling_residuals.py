"""Tilings of one problem, told apart: what a forest of times misses, because problems differ by more than their tilings do.

cell    rows that are the same problem at the same sizes, in several tilings
target  what the model missed of each, less the cell's mean, to which quiet rows count more: problems cancel, tilings remain
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from hotfuse.hpm import forest
from hotfuse.hpm.forest import Forest, Table, Vector
from hotfuse.hpm.work import COLUMN, TILING, Matrix

MIN_CELL_ROWS = 60
"""Rows in cells of several that a forest of tilings is grown from."""
BETTER = 0.97
"""It is kept where it leaves at most this part of the error within cells, on problems it had not seen."""
TREES = {"n_estimators": 40, "max_depth": 14, "min_samples_leaf": 3, "max_features": 0.8}
"""Deep, for tilings differ in details; leaves of single rows would learn what a label happened to be."""
Cells = npt.NDArray[np.int64]


def cells(table: Matrix) -> Cells:
    """The cell of each row; -1 where it is alone, or the library's."""
    own = table[:, [i for n, i in COLUMN.items() if n not in TILING]]
    keys = [row.tobytes() for row in np.ascontiguousarray(own)]
    library = table[:, COLUMN["library"]] > 0
    count = Counter(k for k, skip in zip(keys, library, strict=True) if not skip)
    number = {k: i for i, k in enumerate(count)}
    return np.array(
        [-1 if skip or count[k] < 2 else number[k] for k, skip in zip(keys, library, strict=True)], np.int64
    )


def centered(values: Vector, cell: Cells, weight: Vector) -> Vector:
    """Values less their cell's mean."""
    _, at = np.unique(cell, return_inverse=True)
    return values - (np.bincount(at, values * weight) / np.bincount(at, weight))[at]


def grow(x: Table, missed: Vector, weight: Vector, cell: Cells, seed: int = 0) -> Forest | None:
    """A forest of what was missed within cells; None where there are too few."""
    several = cell >= 0
    if several.sum() < MIN_CELL_ROWS:
        return None
    own = weight[several]
    return forest.extra(x[several], centered(missed[several], cell[several], own), own, TREES, seed)


def error(measured: Vector, predicted: Vector, cell: Cells, weight: Vector) -> float:
    """The mean error of ratios within cells; NaN without any."""
    several = cell >= 0
    if not several.any():
        return float("nan")
    off, own = np.log(measured[several] / predicted[several]), weight[several]
    return float(np.average(np.abs(centered(off, cell[several], own)), weights=own))
