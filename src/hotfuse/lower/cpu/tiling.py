"""How a matrix product is cut for a core: register tiles, panels of packed weights, groups of rows that stay in cache.

    C[M, N] = A[M, K] @ B[K, N],  B packed into panels of `nr` columns

A register tile has `mr` rows and `nr` columns: `mr * nr / lanes` accumulators, `nr / lanes` vectors of B and one number of A must
fit the register file. The wider and higher the tile, the fewer loads per multiply-add. A choice is a value with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Precision
from hotfuse.ir.dims import Dim

CHAINS = 10
"""Independent accumulators that hide a multiply-add's latency: 4 cycles on two pipes, and some slack."""
MAX_SETS = 4
"""Accumulator sets for small tiles; more would only lengthen the sum at the end."""
MAX_ROWS = 10
"""Rows of A that are read side by side: more of them, a multiple of a page apart, push each other out of an 8-way cache."""
LOAD_SHARE = 0.5
"""What a load costs next to a multiply-add: about half the loads find a free slot beside the arithmetic."""
MIN_GROUP = 96
"""Rows that a group has at least: every group reads all weights again, which may come from memory."""
SLACK = 0.02
"""How much dearer a preferred panel width may be."""
WORTH_CODE = 0.04
"""From which part of the columns on a narrower last panel is worth its code, which is written for both widths."""


@dataclass(frozen=True, slots=True)
class Core:
    """What tiling knows of a core."""

    lanes: int
    """fp32 numbers in a vector."""
    registers: int
    """Vector registers."""
    l1: int = 32 << 10
    l2: int = 1 << 20
    """Bytes of the caches that belong to one core."""
    precision: Precision = "fp32"
    """What operands of fp32 products may be rounded to: what the user allows and the machine has instructions for."""
    tiles: bool = False
    """Whether products of bf16 may be made on a matrix unit, where the machine has one that executes (`lower.cpu.gemm.amx`)."""
    dots_bytes: bool = True
    """Whether four products of bytes are one instruction; where not, convolutions multiply bytes as 16-bit numbers."""
    lean: bool = False
    """Whether weights may not be kept in a form that takes more memory than they do: the user asked for little memory."""
    threads: int = 1
    """How many such cores calls have: kernels are right on any number, and divided evenly for this one
    (`lower.cpu.work_division`)."""


def core_for(
    lanes: int, *, many_registers: bool, l1: int | None = None, l2: int | None = None, precision: Precision = "fp32"
) -> Core:
    """A core with 32 or 16 vector registers; caches that the system does not tell are taken as small ones."""
    return Core(lanes, 32 if many_registers else 16, l1 or 32 << 10, l2 or 1 << 20, precision)


@dataclass(frozen=True, slots=True)
class GemmTiling:
    """A tiling of a product."""

    lanes: int
    registers: int
    vectors: int
    """Vectors side by side in a panel."""
    mr: int
    """Most rows of a register tile."""
    unroll: int
    """Steps of K written out in the inner loop."""
    group_rows: int
    """Rows of A that are run through all panels before the next rows: they stay in the second-level cache."""
    ahead: int
    """How many steps of K ahead B is fetched into the first-level cache; 0 leaves it to the hardware."""
    next_panel: bool
    """Whether the next panel is fetched into the second-level cache while this one is used."""
    why: str
    width: int = 0
    """Columns of a panel where the last vector is a narrower one; 0 for whole vectors."""
    threads: int = 1
    """That share the tiles."""
    last: int = 0
    """Columns that are computed of the last panel, whole vectors; 0 for all. It is packed like the others."""

    @property
    def nr(self) -> int:
        """Columns of a panel."""
        return self.width or self.lanes * self.vectors

    def sets(self, rows: int) -> int:
        """Accumulator sets for a tile of so many rows: few accumulators alone would wait for each other."""
        used = rows * self.vectors
        fit = (self.registers - self.vectors - 1) // used
        return max(1, min(MAX_SETS, fit, -(-CHAINS // used)))


def rows_for(registers: int, vectors: int) -> int:
    """Most rows that leave room for the panel's vectors and one number of A."""
    return max(1, min(MAX_ROWS, (registers - vectors - 1) // vectors))


def choose(core: Core, m: Dim, ns: Sequence[int], k: int, *, together: bool = False, narrow: bool = False) -> GemmTiling:
    """The tiling for a product with one weight or several of so many columns; M may be known only at run time.

    `together` shares every panel equally among the weights. `narrow`: of the last panel of a single weight, empty vectors may be
    left out (`GemmTiling.last`).
    The panel's width depends on the columns and the core alone, so that generic and specialized code share packed weights.
    """
    vectors, last, why = _panel(core, ns, len(ns) if together else 1, narrow=narrow and len(ns) == 1)
    mr = rows_for(core.registers, vectors)
    group = max(MIN_GROUP, core.l2 // 2 // max(4 * k, 1))
    if isinstance(m, int) and m <= mr:
        why += f"; all {m} rows in one tile"
    # Code for all heights is long: there, a shorter inner loop costs nothing measurable and halves the compile time.
    unroll = 4 if isinstance(m, int) else 2
    return GemmTiling(
        core.lanes, core.registers, vectors, mr, unroll, group, 0, next_panel=True, why=why, threads=core.threads, last=last
    )


def last_panel(n: int, nr: int, lanes: int) -> int:
    """Columns to compute of the last of several panels, where leaving out its empty vectors is worth the code; else 0."""
    columns = -(-(n % nr) // lanes) * lanes
    return columns if n > nr and n % nr and nr - columns >= WORTH_CODE * n else 0


def _panel(core: Core, ns: Sequence[int], parts: int, *, narrow: bool) -> tuple[int, int, str]:
    """How many vectors wide a panel is, and how much of the last one is computed: columns computed in vain weighed against loads
    per multiply-add."""
    widths = (3, 4, 2, 1) if core.registers >= 32 else (2, 1)
    order = [v for v in widths if v % parts == 0] or [parts]
    lasts = {v: last_panel(ns[0], v * core.lanes, core.lanes) if narrow else 0 for v in order}
    padded = {v: sum(-n % (v // parts * core.lanes) for n in ns) - (v * core.lanes - lasts[v] if lasts[v] else 0) for v in order}
    costs = {v: _cost(core, sum(ns) + padded[v] - lasts[v], v) + _cost(core, lasts[v], v, lasts[v] // core.lanes) for v in order}
    least = min(costs.values())
    vectors = next(v for v in order if costs[v] <= least * (1 + SLACK))
    shape = f"{rows_for(core.registers, vectors)}x{vectors * core.lanes}"
    return vectors, lasts[vectors], f"{shape}: {padded[vectors]} columns beside {sum(ns)} are padding"


def _cost(core: Core, columns: int, vectors: int, side_by_side: int | None = None) -> float:
    """What columns cost in tiles whose rows are a panel of so many vectors, of which fewer may lie side by side."""
    if not columns:
        return 0.0
    return columns * (1 + LOAD_SHARE * (1 / (side_by_side or vectors) + 1 / rows_for(core.registers, vectors)))


@dataclass(frozen=True, slots=True)
class Blocks:
    """M in balanced blocks of rows: `extra` blocks of `rows + 1`, then blocks of `rows`."""

    count: int
    rows: int
    extra: int


def balance(m: int, mr: int) -> Blocks:
    """The fewest blocks of at most `mr` rows, none more than one row higher than another."""
    count = max(1, -(-m // mr))
    return Blocks(count, m // count, m % count)
