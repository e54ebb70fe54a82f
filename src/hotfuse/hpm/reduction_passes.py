"""How the rows of a reduction are gone through, told from a candidate's row: what lowering (`lower.cpu.loop_nest`) makes of them.

row     one pass for every result that it is folded to, and one more that writes where the result is as long as the row
pass    turns of several vectors, turns of one, and a rest; each width has sums of its own, put together across lanes at the end
rest    of a power of two elements is a narrower vector; of others it is written through a mask, and who reads it back in the next
        pass waits until it has reached the cache

Where a reduction leaves the dim that lies innermost, or rows suit vectors better than columns, lanes are results of their own:
nothing is put together, but every turn waits for the one before, along the whole reduction, and reads a strip of memory that is as
wide as the turn.

Every rule that lowering decides by is in `analysis.vector_loops`; turns are held to those of lowered kernels by
`tests/contract/test_hpm_passes.py` (decision 501).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotfuse.analysis.vector_loops import (
    HEAVY_VECTORS,
    KEPT_BYTES,
    LIGHT_VECTORS,
    fits_three_rows,
    rest_vector,
    whole_turns,
)
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.cuts import LARGE_RESULT_BYTES, LATENCY, lanes_are_rows
from hotfuse.hpm.roofline import Column

_LEVELS = (0.0, 1.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class RowLoop:
    """A loop along a row."""

    whole: Column
    """Turns of several vectors."""
    single: Column
    """Turns of one, a rest among them."""
    sums: Column
    """Widths that there are."""
    masked: Column
    """Whether a rest is no vector."""

    @property
    def turns(self) -> Column:
        """All of them."""
        return self.whole + self.single


def cut(length: Column, lanes: Column, several: float) -> RowLoop:
    """A loop of known length whose turns take `several` vectors, then one, then a rest, by the rules of `lower.cpu.write`."""
    whole = whole_turns(length, lanes * several)
    left = length - whole * (lanes * several)
    full = whole_turns(left, lanes)
    rest = left - full * lanes
    some, vector = rest > 0, rest_vector(rest)
    narrower, masked = some & (vector < lanes), some & (vector > rest)
    return RowLoop(whole, full + some, 1.0 * (whole > 0) + ((full > 0) | (some & ~narrower)) + narrower, masked)


def _either(which: Column, one: RowLoop, other: RowLoop) -> RowLoop:
    return RowLoop(np.where(which, one.whole, other.whole), np.where(which, one.single, other.single),
               np.where(which, one.sums, other.sums), other.masked)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Passes:
    """How much there is of what, in cycles or things that take a few of them; zeros where there is no reduction."""

    amounts: tuple[Column, ...]
    """One for each of `TERMS`."""
    sums: Column
    """Of a row, put together across lanes."""
    masked: Column
    """Whether a row ends with a mask: 2 where the next pass reads it back."""
    reads: Column
    """How often operands are read: in every pass, unless the first one keeps what it made of them."""


TERMS = (
    "once_whole", "once_single", "once_sums", "once_masked",
    "again_whole", "again_single", "again_sums", "again_masked", "kept_masked", "kept_vectors",
    "again_vectors", "again_far",
    "three_rows", "three_turns", "three_rests", "lanes_wait", "lanes_far", "pool_turns", "pool_extremum", "pool_masked",
)  # fmt: skip
"""Rows that are gone through once; several times, each pass waiting for the one before, what is kept for the next pass, rows that
the first level does not hold; softmaxes that have three rows in hand; lanes that are results; windows."""


def passes(c: Mapping[str, Column], lanes: Column, at: Any) -> Passes:
    """What the loops of a reduction are."""
    reduces = (c["reduction"] > 0) & ~((c["library"] > 0) | (c["mma"] > 0))
    softmax, width = c["softmax"] > 0, np.maximum(c["width"], 1.0)
    rows, written = c["elements"] / width, c["bytes_out"] >= LARGE_RESULT_BYTES * c["elements"]
    windows = (c["pooled"] > 0) & (c["pooled"] > c["window"] * width)
    turned = lanes_are_rows(c) & ~(c["across"] > 0)
    across = reduces & ~windows & (turned | (c["across"] > 0) | (c["pooled"] > 0))
    along = reduces & ~(windows | across)
    three = along & softmax & (c["nodes"] == 1) & fits_three_rows(width, lanes, c["l2"])
    several = along & ~three & ((c["folds"] > 1) | written)
    # which passes compute functions, and what they leave for the next
    own = c["sigmoid"] + c["tanh"] + c["erf"] + c["root"] + c["special"] + c["exp"] - softmax * c["reduced"]
    heavy, folds = own > 0, np.maximum(c["folds"], 1.0)
    kept = ((c["joined"] > 0) | heavy) & (c["element_bytes"] * width <= KEPT_BYTES)
    light, dear = cut(width, lanes, LIGHT_VECTORS), cut(width, lanes, HEAVY_VECTORS)
    first, later = _either(heavy, dear, light), _either(softmax, dear, light)
    once, again, sums = (along & ~(three | several)) * rows, several * rows, first.sums + (folds - 1) * later.sums
    vectors, count = width / lanes, folds + written
    held = at.between(width * 4 * (c["streams"] + written + kept), _LEVELS)
    lined = np.where(turned, rows, width)
    strips = _either(heavy | softmax, cut(lined, lanes, HEAVY_VECTORS), cut(lined, lanes, LIGHT_VECTORS))
    strip = across * count * (c["elements"] / lined) * strips.turns * LATENCY
    window = (reduces & windows) * (c["pooled"] / width)
    place = at.between(c["bytes_in"] + c["bytes_const"] + c["bytes_out"], _LEVELS)
    return Passes(
        (
            once * first.whole, once * first.single, once * first.sums, once * light.masked,
            again * (first.whole + (folds - 1) * later.whole + written * light.whole),
            again * (first.single + (folds - 1) * later.single + written * light.single),
            again * sums, again * light.masked, again * (light.masked & kept), again * kept * vectors,
            again * count * vectors, again * count * vectors * held,
            three * rows, three * rows * dear.whole, three * rows * (dear.single > 0),
            strip, strip * place, window * light.turns, window * light.turns * (c["extremum"] > 0), window * light.masked,
        ),
        along * sums, along * (light.masked + 1.0 * (several & light.masked & kept)), np.where(several & ~kept, count, 1.0),
    )  # fmt: skip
