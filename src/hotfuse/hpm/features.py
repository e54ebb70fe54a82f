"""What a model reads of a candidate: ratios against the machine, all computed from rows of `hpm.work` at once.

Times are held against the roofline; extents are logarithms; a core-time model says how long the arithmetic takes when issued as
the tile is cut, a cache model how long its operands take to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.hpm import cuts
from hotfuse.hpm.fitted import STEPS, Counted, amounts
from hotfuse.hpm.roofline import Least, Roof, least_of
from hotfuse.hpm.work import COLUMN, FAMILIES, Matrix, families_of


@dataclass(frozen=True, slots=True)
class Features:
    """A matrix for the model, and what predictions are relative to."""

    x: npt.NDArray[np.float32]
    roof: Least
    family: npt.NDArray[np.int64]
    amounts: Matrix
    """What fitted rates are multiplied with, a column a term."""

    def pick(self, where: npt.NDArray[Any]) -> Features:
        """Some rows."""
        return Features(self.x[where], self.roof.pick(where), self.family[where], self.amounts[where])


def derive(table: Matrix, at: Roof) -> Features:
    """Features of rows on a machine."""
    block = np.ascontiguousarray(table.T)
    c = dict(zip(COLUMN, block, strict=True))
    floor, kind = least_of(c, at), families_of(c)
    t = floor.seconds
    rows, columns, depth, elements, wide = np.maximum(block[_EXTENT], 1.0)
    nv, needed = c["tile_vectors"], floor.products
    cut, loop = cuts.steps(c, at), cuts.loops(c)
    blocks, panels, high, lanes = cut.blocks, cut.panels, cut.high, loop.lanes
    over = cut.cycles / cut.ideal
    functions = block[_STEPS]
    rest = 2 * (c["light"] + _WEIGHTS @ functions)
    useful = loop.length / (loop.vectors * lanes)
    core = (needed * over * (1 + c["tile_padding"]) + rest / useful) / at.flops
    again = np.ceil(rows / np.maximum(c["group_rows"], 1.0))
    traffic = c["bytes_in"] + c["bytes_const"] + c["bytes_out"]
    of_rows, of_panel = rows * depth * 4, depth * nv * lanes * 4
    by_const, by_left, by_traffic, by_moved = at.bandwidth(
        np.array([c["bytes_const"] + c["bytes_in"], of_rows + of_panel, traffic, c["most_moved"]])
    )
    weights = c["bytes_const"] * again / by_const
    arrive = np.maximum(weights, traffic / by_traffic)
    tasks = np.where(c["mma"] > 0, blocks * panels, loop.count)
    more = c["mma"] + 1
    logs = np.array([
        floor.compute, floor.memory, core, arrive, of_rows * panels / by_left, c["bytes_out"] / by_traffic,
        np.maximum(core, arrive), core + arrive,
        c["light"], c["function"], c["divide"], c["reduced"], rest,
        t, rows, columns, depth, wide, loop.length, loop.vectors, loop.turns, blocks, panels, again, of_panel, high * depth * 4,
        np.maximum(tasks, 1) / np.maximum(c["threads"], 1), more / (c["mma"] + rest + 1),
        (c["moved"] + 1) / (traffic + 1), (needed + 1) / more,
        traffic, loop.count, c["mma"] + c["light"] + c["divide"] + c["function"], *[c[n] for n in _COUNTS],
    ])  # fmt: skip
    over_roof, per_element, counts = (logs[part] for part in _PARTS)
    over_roof /= t
    per_element /= elements
    per_element += 1
    counts += 1
    same_set = np.where(depth % 1024 == 0, 2.0, depth % 512 == 0)
    x = np.empty((len(table), len(NAMES)), np.float32)
    n, m = len(logs), len(logs) + len(_PER_ELEMENT)
    x[:, :n] = np.log(np.maximum(logs, 1e-30, out=logs), out=logs).T
    x[:, n : m - 1], x[:, m - 1] = (functions / elements).T, loop.turned / elements
    x[:, m : m + len(_MADE)] = np.array(
        [kind, useful, loop.left / loop.turns, high, over, lanes, floor.level, same_set]
    ).T
    x[:, m + len(_MADE) :] = table[:, _AS_IS]
    counted = Counted(c, block, at, needed, cut, loop, weights, by_moved)
    return Features(x, floor, kind, amounts(counted).T)


_OVER_ROOF = ("compute", "memory", "core", "arrive", "left", "writes", "core_or_arrive", "both")
_EACH = ("light", "function", "divide", "reduced", "each")
_EXTENTS = ("log_roof", "rows", "columns", "depth", "width", "length", "vectors", "turns", "blocks", "panels", "again",
            "panel_bytes", "block_bytes", "shares", "mma", "moved", "needed")  # fmt: skip
_COUNTS = ("bytes_in", "bytes_const", "bytes_out", "picked", "pooled", "steps", "window", "groups", "elements",
           "group_rows")  # fmt: skip
_PER_ELEMENT = (*STEPS, "turned")
_MADE = ("family", "useful", "tail", "high", "step", "lanes", "level", "same_set")
_PLAIN = ("softmax", "norm", "extremum", "nodes", "calls", "indexing", "reduction", "streams", "small_inputs", "strided",
          "element_bytes", "narrow", "stride", "tile_height", "tile_vectors", "tile_sets", "tile_padding", "registers",
          "threads")  # fmt: skip
NAMES = (*_OVER_ROOF, *_EACH, *_EXTENTS, "traffic", "starts", "flops", *_COUNTS, *_PER_ELEMENT, *_MADE, *_PLAIN)
"""Columns of a feature matrix, in order: logarithms, shares of elements, plain figures."""
_PARTS = (
    slice(len(_OVER_ROOF)),
    slice(len(_OVER_ROOF), len(_OVER_ROOF) + len(_EACH)),
    slice(len(_OVER_ROOF) + len(_EACH) + len(_EXTENTS), None),
)
"""Of logarithms: times over the roofline's, operations of an element, counts that may be zero."""
_STEPS, _AS_IS, _EXTENT = (
    np.array([COLUMN[n] for n in names]) for names in (STEPS, _PLAIN, ("rows", "columns", "depth", "elements", "width"))
)
_WEIGHTS = np.array(list(STEPS.values()))


def family_name(number: int) -> str:
    """The family of a number."""
    return FAMILIES[number]
