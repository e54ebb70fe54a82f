"""What a model reads of a candidate: ratios against the machine, all computed from rows of `hpm.work` at once.

Times are held against the roofline; extents are logarithms; a core-time model says how long the arithmetic takes when issued as
the tile is cut, a cache model how long its operands take to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotfuse.hpm.roofline import Least, Roof, Vector, least
from hotfuse.hpm.work import COLUMN, FAMILIES, Matrix, families

STEPS = {"exp": 16.0, "sigmoid": 24.0, "tanh": 24.0, "erf": 30.0, "root": 10.0, "special": 40.0}
"""Instructions that an element of a function takes, roughly: trees correct what is wrong with it, class by class."""
LATENCY = 4.0
"""Cycles of a multiply-add."""


@dataclass(frozen=True, slots=True)
class Features:
    """A matrix for the model, and what predictions are relative to."""

    x: Matrix
    roof: Least
    family: np.ndarray[tuple[int], np.dtype[np.int64]]


def _log(v: Vector) -> Vector:
    return np.log(np.maximum(v, 1e-30))


def derive(table: Matrix, at: Roof) -> Features:
    """Features of rows on a machine."""
    if not len(table):
        return Features(np.zeros((0, len(NAMES))), least(table, at), families(table))
    c = {n: table[:, i] for n, i in COLUMN.items()}
    floor = least(table, at)
    t = floor.seconds
    kind = families(table)
    rows, columns, depth = (np.maximum(c[n], 1.0) for n in ("rows", "columns", "depth"))
    lanes = np.maximum(c["lanes"], 1.0)
    mr, nv, sets = c["tile_rows"], c["tile_vectors"], c["tile_sets"]
    blocks = np.ceil(rows / mr)
    high = rows / blocks  # rows of a block, on average
    panels = np.ceil(columns / (nv * lanes))
    # One step of K: multiply-adds on two pipes, loads on two ports, or the wait for the sums before.
    step = np.maximum.reduce([high * nv / 2, (high + nv) / 2, LATENCY / np.maximum(sets, 1.0), (high * nv + high + nv + 1) / 6])
    ideal = np.maximum(high * nv / 2, 1e-9)
    product = c["mma"] * step / ideal * (1 + c["tile_padding"])
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
    made = {
        "family": kind.astype(np.float64), "log_roof": _log(t), "compute": _log(floor.compute / t),
        "memory": _log(floor.memory / t), "core": _log(core / t), "arrive": _log(arrive / t), "left": _log(left / t),
        "writes": _log(writes / t), "core_or_arrive": _log(np.maximum(core, arrive) / t), "both": _log((core + arrive) / t),
        "flops": _log(c["mma"] + c["light"] + c["divide"] + c["function"] + 1), "traffic": _log(traffic + 1),
        "bytes_in": _log(c["bytes_in"] + 1), "bytes_const": _log(c["bytes_const"] + 1), "bytes_out": _log(c["bytes_out"] + 1),
        "mma": _log((c["mma"] + 1) / (c["mma"] + rest + 1)), "light": _log(1 + c["light"] / elements),
        "function": _log(1 + c["function"] / elements), "divide": _log(1 + c["divide"] / elements),
        "reduced": _log(1 + c["reduced"] / elements), **{n: c[n] / elements for n in STEPS},
        "softmax": c["softmax"], "norm": c["norm"], "extremum": c["extremum"], "each": _log(1 + rest / elements),
        "moved": _log((c["moved"] + 1) / (traffic + 1)), "nodes": c["nodes"], "calls": c["calls"], "indexing": c["indexing"],
        "reduction": c["reduction"], "picked": _log(c["picked"] + 1), "streams": c["streams"], "small_inputs": c["small_inputs"],
        "strided": c["strided"], "element_bytes": c["element_bytes"], "narrow": c["narrow"], "steps": _log(c["steps"] + 1),
        "rows": _log(rows), "columns": _log(columns), "depth": _log(depth), "window": _log(c["window"] + 1),
        "groups": _log(c["groups"] + 1), "stride": c["stride"], "elements": _log(c["elements"] + 1), "width": _log(wide),
        "starts": _log(starts + 1), "useful": useful, "vectors": _log(vectors), "tail": np.mod(wide, lane16) / lane16,
        "tile_rows": mr, "tile_vectors": nv, "tile_sets": sets, "tile_padding": c["tile_padding"], "high": high,
        "blocks": _log(blocks), "panels": _log(panels), "step": step / ideal, "group_rows": _log(c["group_rows"] + 1),
        "again": _log(again), "panel_bytes": _log(depth * nv * lanes * 4), "block_bytes": _log(high * depth * 4),
        "same_set": np.where(np.mod(depth, 1024) == 0, 2.0, (np.mod(depth, 512) == 0) * 1.0), "lanes": lanes,
        "registers": c["registers"], "level": floor.level.astype(np.float64), "threads": c["threads"],
        "shares": _log(np.maximum(np.where(c["mma"] > 0, blocks * panels, starts), 1) / np.maximum(c["threads"], 1)),
    }  # fmt: skip
    return Features(np.column_stack([made[n] for n in NAMES]), floor, kind)


NAMES = (
    "family", "log_roof", "compute", "memory", "core", "arrive", "left", "writes", "core_or_arrive", "both", "flops", "traffic",
    "bytes_in", "bytes_const", "bytes_out", "mma", "light", "function", "divide", "reduced", "moved", "nodes", "calls", "indexing",
    "reduction", "picked", "streams", "small_inputs", "strided", "element_bytes", "narrow", "steps", "rows", "columns", "depth",
    "window", "groups", "stride", "elements", "width", "starts", "useful", "vectors", "tail", "tile_rows", "tile_vectors",
    "tile_sets", "tile_padding", "high", "blocks", "panels", "step", "group_rows", "again", "panel_bytes", "block_bytes",
    "same_set", "lanes", "registers", "level", "threads", "shares", "exp", "sigmoid", "tanh", "erf", "root", "special", "softmax",
    "norm", "extremum", "each",
)  # fmt: skip
"""Columns of a feature matrix, in order."""


def family_name(number: int) -> str:
    """The family of a number."""
    return FAMILIES[number]
