"""What an attention kernel works on: strided views of buffers, masks, and the job as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.tile.program import Buffer


@dataclass(frozen=True, slots=True)
class Along:
    """An index along one dim of a buffer: offset + batch·steps[0] + head·steps[1] + row·steps[2] + element·steps[3]."""

    offset: Dim
    steps: tuple[Dim, Dim, Dim, Dim]


@dataclass(frozen=True, slots=True)
class Rows:
    """A [batch, head, row, element] view of a buffer."""

    buffer: Buffer
    dims: tuple[Along, ...]
    """One per dim of the buffer."""
    shared: int = 1
    """Heads one behind the other that are the same head of this view."""

    def at(self, batch: Dim, head: Dim, row: Dim, element: Dim = 0) -> tuple[Dim, ...]:
        """An element's index."""
        head = expr("//", head, self.shared) if self.shared > 1 else head
        place = (batch, head, row, element)
        return tuple(
            expr("+", d.offset, *(expr("*", i, s) for i, s in zip(place, d.steps, strict=True))) for d in self.dims
        )

    def walk(self, counter: int) -> tuple[int, Dim]:
        """The buffer's dim that a counter (2 is the row, 3 the element) moves along, and how far; -1 if it does not move."""
        return next(((i, d.steps[counter]) for i, d in enumerate(self.dims) if d.steps[counter] != 0), (-1, 1))


@dataclass(frozen=True, slots=True)
class Mask:
    """Added to the scores, or (bool) true where a key counts: a [batch, head, query, key] view."""

    rows: Rows
    per_query: bool
    """Whether queries have masks of their own."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What is to be computed."""

    q: Rows
    k: Rows
    v: Rows
    out: Rows
    batch: Dim
    heads: int
    queries: Dim
    keys: Dim
    width: int
    value_width: int
    scale: float
    causal: bool = False
    """Query i sees keys 0 to i."""
    mask: Mask | None = None
    first: Dim = 0
    """Row where this sequence begins, in all four: sequences may lie one behind the other."""

    @property
    def in_bits(self) -> bool:
        """Whether scores are kept as powers of 2. With a mask of floats they are not: its least number must not overflow."""
        return self.mask is None or self.mask.rows.buffer.dtype is DType.BOOL
