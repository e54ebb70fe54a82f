"""What a model reads of a candidate: ratios against the machine, all computed from rows of `hpm.work` at once.

Times are held against the roofline; extents are logarithms; a core-time model says how long the arithmetic takes when issued as
the tile is cut, a cache model how long its operands take to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotfuse.hpm.fitted import STEPS, TERMS, amounts, product_step
from hotfuse.hpm.roofline import Least, Roof, least
from hotfuse.hpm.work import COLUMN, FAMILIES, Matrix, families


@dataclass(frozen=True, slots=True)
class Features:
    """A matrix for the model, and what predictions are relative to."""

    x: Matrix
    roof: Least
    family: np.ndarray[tuple[int], np.dtype[np.int64]]
    amounts: Matrix
    """What fitted rates are multiplied with, a column a term."""

    def pick(self, where: np.ndarray[Any, Any]) -> Features:
        """Some rows."""
        return Features(self.x[where], self.roof.pick(where), self.family[where], self.amounts[where])


def derive(table: Matrix, at: Roof) -> Features:
    """Features of rows on a machine."""
    if not len(table):
        return Features(np.zeros((0, len(NAMES))), least(table, at), families(table), np.zeros((0, len(TERMS))))
    c = {n: table[:, i] for n, i in COLUMN.items()}
    floor = least(table, at)
    t = floor.seconds
    kind = families(table)
    rows, columns, depth = (np.maximum(c[n], 1.0) for n in ("rows", "columns", "depth"))
    lanes = np.maximum(c["lanes"], 1.0)
    nv = c["tile_vectors"]
    cut = step, ideal, blocks, panels = product_step(c)
    high = rows / blocks  # rows of a block, on average
    needed = floor.products
    product = needed * step / ideal * (1 + c["tile_padding"])
    rest = 2 * (c["light"] + sum(steps * c[n] for n, steps in STEPS.items()))
    elements = np.maximum(c["elements"], 1.0)
    wide = np.maximum(c["width"], 1.0)
    lane16 = np.where(lanes > 1, lanes, 16.0)
    vectors = np.ceil(wide / lane16)
    useful = wide / (vectors * lane16)
    starts = c["elements"] / wide  # rows begun: each has a loop of its own
    core = (product + rest / useful) / at.flops
    again = np.ceil(rows / np.maximum(c["group_rows"], 1.0))
    weights = c["bytes_const"] * again / at.bandwidth(np.maximum(c["bytes_const"] + c["bytes_in"], 1.0))
    left = rows * depth * 4 * panels / at.bandwidth(np.minimum(rows * depth * 4 + depth * nv * lanes * 4, 1e12))
    traffic = c["bytes_in"] + c["bytes_const"] + c["bytes_out"]
    arrive = np.maximum(weights, traffic / at.bandwidth(np.maximum(traffic, 1.0)))
    writes = c["bytes_out"] / at.bandwidth(np.maximum(traffic, 1.0))
    tasks = np.where(c["mma"] > 0, blocks * panels, starts)
    over_roof = (floor.compute, floor.memory, core, arrive, left, writes, np.maximum(core, arrive), core + arrive)
    each = (c["light"], c["function"], c["divide"], c["reduced"], rest)
    extents = (
        t, rows, columns, depth, wide, vectors, blocks, panels, again, depth * nv * lanes * 4, high * depth * 4,
        np.maximum(tasks, 1) / np.maximum(c["threads"], 1), (c["mma"] + 1) / (c["mma"] + rest + 1),
        (c["moved"] + 1) / (traffic + 1), (needed + 1) / (c["mma"] + 1),
    )  # fmt: skip
    counts = (traffic, starts, c["mma"] + c["light"] + c["divide"] + c["function"], *(c[n] for n in _COUNTS))
    logs = np.vstack([np.array(over_roof) / t, np.array(each) / elements + 1, np.array(extents), np.array(counts) + 1])
    plain = (
        kind * 1.0, useful, np.mod(wide, lane16) / lane16, high, step / ideal, lanes, floor.level * 1.0,
        np.where(np.mod(depth, 1024) == 0, 2.0, (np.mod(depth, 512) == 0) * 1.0), *(c[n] for n in _PLAIN),
    )  # fmt: skip
    x = np.vstack([np.log(np.maximum(logs, 1e-30)), np.array([c[n] for n in _PER_ELEMENT]) / elements, np.array(plain)])
    return Features(
        x.T.astype(np.float64, copy=False), floor, kind, np.array(list(amounts(c, at, needed, cut).values())).T
    )


_OVER_ROOF = ("compute", "memory", "core", "arrive", "left", "writes", "core_or_arrive", "both")
_EACH = ("light", "function", "divide", "reduced", "each")
_EXTENTS = ("log_roof", "rows", "columns", "depth", "width", "vectors", "blocks", "panels", "again", "panel_bytes", "block_bytes",
            "shares", "mma", "moved", "needed")  # fmt: skip
_COUNTS = (
    "bytes_in",
    "bytes_const",
    "bytes_out",
    "picked",
    "pooled",
    "steps",
    "window",
    "groups",
    "elements",
    "group_rows",
)
_PER_ELEMENT = (*STEPS, "turned")
_MADE = ("family", "useful", "tail", "high", "step", "lanes", "level", "same_set")
_PLAIN = ("softmax", "norm", "extremum", "nodes", "calls", "indexing", "reduction", "streams", "small_inputs", "strided",
          "element_bytes", "narrow", "stride", "tile_rows", "tile_vectors", "tile_sets", "tile_padding", "registers",
          "threads")  # fmt: skip
NAMES = (*_OVER_ROOF, *_EACH, *_EXTENTS, "traffic", "starts", "flops", *_COUNTS, *_PER_ELEMENT, *_MADE, *_PLAIN)
"""Columns of a feature matrix, in order: logarithms, shares of elements, plain figures."""


def family_name(number: int) -> str:
    """The family of a number."""
    return FAMILIES[number]
