"""What a model reads of a candidate: ratios against the machine, all computed from rows of `hpm.work` at once.

Times are held against the roofline; extents are logarithms; a core-time model says how long the arithmetic takes when issued as
the tile is cut, a cache model how long its operands take to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.hpm import cuts
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.fitted import STEPS, Counted, amounts
from hotfuse.hpm.reduction_passes import passes
from hotfuse.hpm.roofline import Column, Least, Roofline, Speeds, least_of
from hotfuse.hpm.work import COLUMN, Matrix, families_of
from hotfuse.machine.peaks import LEVELS


@dataclass(frozen=True, slots=True)
class Features:
    """A matrix for the model, and what predictions are relative to."""

    x: npt.NDArray[np.float32]
    roofline: Least
    family: npt.NDArray[np.int64]
    amounts: Matrix
    """What fitted rates are multiplied with, a column a term."""
    machine: npt.NDArray[np.float32]
    """The machine that each row is about, as `MACHINE` lists: what only models of several machines read."""

    def pick(self, where: npt.NDArray[Any]) -> Features:
        """Some rows."""
        return Features(self.x[where], self.roofline.pick(where), self.family[where], self.amounts[where], self.machine[where])


def joined(parts: Sequence[Features]) -> Features:
    """Rows of several machines, one after another."""
    x, family, counted, machine = (
        np.concatenate([getattr(p, n) for p in parts]) for n in ("x", "family", "amounts", "machine")
    )
    return Features(x, Least(*(np.concatenate([getattr(p.roofline, f.name) for p in parts]) for f in fields(Least))), family,
                    counted, machine)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Columns:
    """The same, column by column: arrays, or symbols of one row's numbers."""

    x: list[Column]
    roofline: Least
    family: Column
    amounts: list[Column]


def columns(c: Mapping[str, Column], at: Any) -> Columns:
    """What the features of rows are, by formulas; `at` is a machine's roofline, or its symbols."""
    floor, kind = least_of(c, at), families_of(c)
    t = floor.seconds
    rows, wide_rows, depth, elements, wide = (
        np.maximum(c[n], 1.0) for n in ("rows", "columns", "depth", "elements", "width")
    )
    nv, needed = c["tile_vectors"], floor.products
    cut, loop = cuts.steps(c, at), cuts.loops(c)
    blocks, panels, high, lanes = cut.blocks, cut.panels, cut.high, loop.lanes
    of_rows = passes(c, lanes, at)
    over = cut.cycles / cut.ideal
    rest = 2 * (c["light"] + sum(s * c[n] for n, s in STEPS.items()))
    useful = loop.length / (loop.vectors * lanes)
    core = (needed * over * (1 + c["tile_padding"]) + rest / useful) / at.flops
    again = np.ceil(rows / np.maximum(c["group_rows"], 1.0))
    traffic = c["bytes_in"] + c["bytes_const"] + c["bytes_out"]
    of_block, of_panel = rows * depth * 4, depth * nv * lanes * 4
    by_traffic = at.bandwidth(traffic)
    weights = c["bytes_const"] * again / at.bandwidth(c["bytes_const"] + c["bytes_in"])
    arrive = np.maximum(weights, traffic / by_traffic)
    tasks = np.where(c["mma"] > 0, blocks * panels, loop.count)
    more = c["mma"] + 1
    over_roofline = (
        floor.compute, floor.memory, core, arrive, of_block * panels / at.bandwidth(of_block + of_panel),
        c["bytes_out"] / by_traffic, np.maximum(core, arrive), core + arrive,
    )  # fmt: skip
    per_element = (c["light"], c["function"], c["divide"], c["reduced"], rest)
    extents = (
        t, rows, wide_rows, depth, wide, loop.length, loop.vectors, loop.turns, blocks, panels, again, of_panel, high * depth * 4,
        np.maximum(tasks, 1.0) / np.maximum(c["threads"], 1.0), more / (c["mma"] + rest + 1),
        (c["moved"] + 1) / (traffic + 1), (needed + 1) / more,
    )  # fmt: skip
    counts = (
        traffic, loop.count, c["mma"] + c["light"] + c["divide"] + c["function"], *(c[n] for n in _COUNTS)
    )  # fmt: skip
    logs = (*(v / t for v in over_roofline), *(v / elements + 1 for v in per_element), *extents, *(v + 1 for v in counts))
    same_set = np.where(_divides(1024, depth), 2.0, 1.0 * _divides(512, depth))
    x = [
        *(np.log(np.maximum(v, 1e-30)) for v in logs), *(c[n] / elements for n in STEPS), loop.turned / elements,
        kind, useful, loop.left / loop.turns, high, over, lanes, floor.level, same_set, of_rows.sums, of_rows.masked,
        *(c[n] for n in _PLAIN),
    ]  # fmt: skip
    counted = Counted(c, at, needed, cut, loop, of_rows, weights, at.bandwidth(c["most_moved"]))
    return Columns(x, floor, kind, amounts(counted))


def _divides(by: float, n: Column) -> Column:
    return np.floor(n / by) * by == n


class _Given(Speeds):
    """A machine's roofline as symbols, in the order of `_figures`."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.flops, self.hz, self.threads, self.call_s, self.fork_s = (read(i) for i in range(5))
        levels = len(LEVELS)
        self.speeds, self.log_speeds, self.log_knots, self.ends = (
            tuple(read(5 + part * levels + i) for i in range(levels - (part == 3))) for part in range(4)
        )


def _figures(at: Roofline) -> Matrix:
    return np.array(
        [at.flops, at.hz, at.threads, at.call_s, at.fork_s, *at.speeds, *at.log_speeds, *at.log_knots, *at.ends]
    )


@once
def _native() -> native.Compiled:
    """The formulas as code: figures of the roofline, the family and amounts as doubles, features as singles."""

    def formulas(row: Callable[[int], Any], given: Callable[[int], Any]) -> tuple[list[Any], list[Any]]:
        found = columns({n: row(i) for n, i in COLUMN.items()}, _Given(given))
        r = found.roofline
        return [r.seconds, r.compute, r.memory, r.bound, r.level, r.products, found.family, *found.amounts], found.x

    return native.compiled(len(COLUMN), formulas)


def derive(table: Matrix, at: Roofline) -> Features:
    """Features of rows on a machine."""
    found, x = _native()(table, _figures(at))
    seconds, compute, memory, bound, level, products, family = found[:, :7].T.copy()
    roofline = Least(seconds, compute, memory, bound, level.astype(np.int64), products)
    machine = np.broadcast_to(described(at), (len(x), len(MACHINE)))
    return Features(x, roofline, family.astype(np.int64), found[:, 7:], machine)


def described(at: Roofline) -> npt.NDArray[np.float32]:
    """A machine as a model of several reads it: what it does in a cycle, how its memory keeps up with that, where levels end."""
    balance = (s / at.flops for s in at.speeds)
    numbers = (at.flops / at.threads / at.hz, at.hz, *balance, *at.knots, at.call_s, at.fork_s + 1e-9, at.threads)
    return np.log(np.array(numbers)).astype(np.float32)


_OVER_ROOFLINE = ("compute", "memory", "core", "arrive", "left", "writes", "core_or_arrive", "both")
_EACH = ("light", "function", "divide", "reduced", "each")
_EXTENTS = ("log_roof", "rows", "columns", "depth", "width", "length", "vectors", "turns", "blocks", "panels", "again",
            "panel_bytes", "block_bytes", "shares", "mma", "moved", "needed")  # fmt: skip
_COUNTS = ("bytes_in", "bytes_const", "bytes_out", "picked", "pooled", "steps", "window", "groups", "elements",
           "group_rows")  # fmt: skip
_PER_ELEMENT = (*STEPS, "turned")
_MADE = ("family", "useful", "tail", "high", "step", "lanes", "level", "same_set", "sums", "masked")
_PLAIN = ("softmax", "norm", "extremum", "folds", "joined", "across", "nodes", "calls", "indexing", "reduction", "streams",
          "small_inputs", "strided", "element_bytes", "narrow", "stride", "tile_height", "tile_vectors", "tile_sets",
          "tile_padding", "registers", "threads")  # fmt: skip
NAMES = (*_OVER_ROOFLINE, *_EACH, *_EXTENTS, "traffic", "starts", "flops", *_COUNTS, *_PER_ELEMENT, *_MADE, *_PLAIN)
"""Columns of a feature matrix, in order: logarithms, shares of elements, plain figures."""
MACHINE = ("cycle_flops", "hz", *(f"balance_{n}" for n in LEVELS), *(f"ends_{n}" for n in LEVELS), "call", "fork", "team")
"""Columns of a machine's description: logarithms of measured peaks, cache sizes, clock and threads."""
