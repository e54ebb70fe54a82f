"""What a recurrent layer's kernel is to compute: its data, the panels of its weights, and where tiles of its tensors lie."""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.lower.common.lowered import BufferView
from hotfuse.lower.cpu.tiling import Core, GemmTiling, rows_for
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Tile

GATES = {"lstm": (0, 1, 3, 2), "gru": (0, 1, 2)}
"""Per cell, torch's gates in the order in which a panel has them: those with a sigmoid first."""
UNROLL = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """One direction of one layer, packed by panels; biases are panels of one row."""

    inputs: int
    wi: Buffer
    wh: Buffer
    bi: Buffer | None
    bh: Buffer | None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """What is to be computed."""

    cell: str
    hidden: int
    steps: Dim
    batch: Dim
    directions: int
    weights: tuple[Weights, ...]
    """By layer, then direction."""
    x: BufferView
    """[step, batch, input], or [batch, step, input]."""
    batch_first: bool
    initial: tuple[BufferView | None, ...]
    """h and, for an LSTM, c: [layer and direction, batch, unit]; None is zero."""
    y: BufferView | None
    """Like x, of the last layer; None where nobody reads it."""
    finals: tuple[BufferView | None, ...]
    """The last states, laid out like the initial ones."""


def tiling(core: Core, cell: str) -> GemmTiling:
    """Panels of one vector per gate, and as many rows as that leaves registers for."""
    vectors = len(GATES[cell])
    rows = rows_for(core.registers, vectors)
    return GemmTiling(
        core.lanes, core.registers, vectors, rows, UNROLL, rows, 0, next_panel=False, why=f"{rows} rows, {vectors} gates"
    )


def _along(
    place: BufferView, where: tuple[Dim, ...], dims: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[int, ...], tuple[Dim, ...]]:
    """Index, axes and steps of a tile that walks along some dims of a value."""
    if not place.flat:
        return where, dims, ()
    at = expr("+", 0, *(expr("*", i, s) for i, s in zip(where, place.strides, strict=True)))
    return (at,), (0,) * len(dims), tuple(place.strides[d] for d in dims)


def read(
    b: KernelBuilder, place: BufferView, where: tuple[Dim, ...], dims: tuple[int, ...], shape: tuple[int, ...],
    valid: tuple[Dim | None, ...],
) -> Tile:  # fmt: skip
    """A tile along some dims of a value."""
    index, axes, step = _along(place, where, dims)
    return b.load(place.buffer, index, shape, axes=axes, step=step, valid=valid)


def write(
    b: KernelBuilder,
    place: BufferView,
    where: tuple[Dim, ...],
    dims: tuple[int, ...],
    tile: Tile,
    valid: tuple[Dim | None, ...],
) -> None:
    """The store that mirrors `read`."""
    index, axes, step = _along(place, where, dims)
    b.store(place.buffer, index, tile, axes=axes, step=step, valid=valid)
