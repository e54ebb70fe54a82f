"""How a kernel is cut, told from its row: the steps of a product in registers, the turns of a loop along a row.

product   blocks of rows x panels of columns, each of them `depth` steps; a step takes the longest of multiplying, loading,
          waiting for the sums before, and issuing
loop      whole turns of several vectors, then single vectors, then one of which only some lanes exist
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotfuse.analysis.vector_loops import HEAVY_VECTORS, LIGHT_VECTORS, vector_score
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.roofline import Column

LATENCY = 4.0
"""Cycles of a multiply-add."""
PIPES = 2.0
"""Vectors that a core multiplies and adds in a cycle, at most."""
ISSUED = 6.0
"""Instructions in a cycle."""
WIDE = 16.0
"""Numbers of a vector, where nobody tells."""
LARGE_RESULT_BYTES = 2.0
"""Bytes of a result for each element, from which on it is as large as what it is computed from."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A product's."""

    cycles: Column
    """Of one step of a block."""
    ideal: Column
    """The same at the machine's peak."""
    blocks: Column
    high: Column
    """Rows of a block, on average."""
    panels: Column


def steps(c: Mapping[str, Column], at: Any) -> Steps:
    """A product as it is cut; a machine whose vectors go through in halves does not multiply two in a cycle."""
    rows, columns, lanes = (np.maximum(c[n], 1.0) for n in ("rows", "columns", "lanes"))
    nv, high = c["tile_vectors"], np.minimum(c["tile_height"], rows)
    a_cycle = at.flops / (at.hz * at.threads)
    pipes = np.minimum(a_cycle / 2 / lanes, PIPES)
    sums = high * nv
    cycles = np.maximum(
        np.maximum(sums / pipes, high / 2 + nv / pipes),
        np.maximum(LATENCY / np.maximum(c["tile_sets"], 1.0), (sums + high + nv + 1) / ISSUED),
    )
    return Steps(cycles, sums * lanes * (2 / a_cycle), rows / high, high, np.ceil(columns / (nv * lanes)))


@dataclass(frozen=True, slots=True)
class Loops:
    """How loops over rows are cut into vectors."""

    length: Column
    """Elements of a row; dense rows without operands of their own are one."""
    count: Column
    """Rows begun."""
    lanes: Column
    vectors: Column
    """Of a row, the last one maybe not full."""
    turns: Column
    """Of a row, each waiting for itself."""
    left: Column
    """Turns of one vector."""
    turned: Column
    """Elements that change places with their neighbours: only where something of that size lies the usual way."""


def loops(c: Mapping[str, Column]) -> Loops:
    """The loops of a kernel without a product."""
    lanes = np.where(c["lanes"] > 1, c["lanes"], WIDE)
    apart = c["small_inputs"] + c["bytes_const"] + c["turned"] + c["reduction"] + c["mma"] + c["picked"] + c["strided"]
    length = np.maximum(np.where(apart > 0, c["width"], c["elements"]), 1.0)
    heavy = c["exp"] + c["sigmoid"] + c["tanh"] + c["erf"] + c["root"] + c["special"] > 0
    several = np.where(heavy, float(HEAVY_VECTORS), float(LIGHT_VECTORS))
    vectors = np.ceil(length / lanes)
    whole = np.floor(length / (lanes * several))
    left = vectors - whole * several
    return Loops(length, c["elements"] / length, lanes, vectors, whole + left, left, c["turned"] * usual(c))


def usual(c: Mapping[str, Column]) -> Column:
    """Whether something else than what changes places decides how vectors run: a second input, or the result, as large as
    the whole; in a reduction, that columns suit vectors better than rows."""
    other = (c["streams"] > 2) | (c["bytes_out"] >= LARGE_RESULT_BYTES * c["elements"])
    reduces = c["reduction"] > 0
    return (reduces & ~lanes_are_rows(c)) | (~reduces & other)


def lanes_are_rows(c: Mapping[str, Column]) -> Column:
    """Whether vectors of a reduction along the innermost dim run across rows, each lane a row of its own: what accesses are
    (operands that lie otherwise walk rows, others walk columns, a result for each row walks rows), judged as lowering judges it."""
    lanes, written = np.where(c["lanes"] > 1, c["lanes"], WIDE), 1.0 * (c["bytes_out"] >= LARGE_RESULT_BYTES * c["elements"])
    otherwise = np.floor(c["turned"] / np.maximum(c["elements"], 1.0) + 0.5)
    others = np.maximum(c["streams"] - 1.0 - otherwise, 0.0)
    columns = vector_score(others + written, otherwise, np.minimum(np.maximum(c["width"], 1.0) / lanes, 1.0))
    return vector_score(otherwise + 1.0 - written, others + written, 1.0) > np.maximum(columns, 0.0)
