"""What an attention kernel works on: strided views of buffers, masks, and the job as a whole."""

from __future__ import annotations

import math

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

MAX_WIDTH = 256
"""The widest heads: wider ones would need more registers for outputs than there are."""
F32 = DType.F32
HALVES = (DType.F16, DType.BF16)
"""Operands of these are widened as they are read; everything is computed in fp32."""
_STEP = 8
"""Widths of V that need no masking are multiples of this."""
Valid = tuple[Dim | None, Dim | None] | tuple[()]
"""How many rows and elements exist; empty where all do."""


@dataclass(frozen=True, slots=True)
class AffineIndex:
    """An index along one dim of a buffer: offset + batch·steps[0] + head·steps[1] + row·steps[2] + element·steps[3]."""

    offset: Dim
    steps: tuple[Dim, Dim, Dim, Dim]


@dataclass(frozen=True, slots=True)
class AttentionView:
    """A [batch, head, row, element] view of a buffer."""

    buffer: Buffer
    dims: tuple[AffineIndex, ...]
    """One per dim of the buffer."""
    shared: int = 1
    """Heads one behind the other that are the same head of this view."""

    def at(self, batch: Dim, head: Dim, row: Dim, element: Dim) -> tuple[Dim, ...]:
        """An element's index."""
        head = expr("//", head, self.shared) if self.shared > 1 else head
        place = (batch, head, row, element)
        return tuple(
            expr("+", d.offset, *(expr("*", i, s) for i, s in zip(place, d.steps, strict=True))) for d in self.dims
        )

    def walk(self, counter: int) -> tuple[int, Dim]:
        """The buffer's dim that a counter (2 is the row, 3 the element) moves along, and how far; -1 if it does not move."""
        return next(((i, d.steps[counter]) for i, d in enumerate(self.dims) if d.steps[counter] != 0), (-1, 1))

    def read(self, b: KernelBuilder, place: tuple[Dim, Dim, Dim, Dim], shape: tuple[int, int], valid: Valid = ()) -> Tile:
        """Rows by elements from a place on; halves are widened."""
        (axis, step), (last, near) = self.walk(2), self.walk(3)
        tile = b.load(self.buffer, self.at(*place), shape, axes=(axis, last), step=(step, near), valid=valid)
        return b.cast(tile, F32) if self.buffer.dtype in HALVES else tile

    def write(self, b: KernelBuilder, place: tuple[Dim, Dim, Dim, Dim], tile: Tile, valid: Valid = ()) -> None:
        """Store rows by elements; a view that has one row takes one."""
        (axis, step), (last, near) = self.walk(2), self.walk(3)
        tile = b.cast(tile, self.buffer.dtype)
        if axis < 0:
            row = b.reshape(tile, tile.type.shape[1:])
            b.store(self.buffer, self.at(*place), row, axes=(last,), step=(near,), valid=valid[1:])
        else:
            b.store(self.buffer, self.at(*place), tile, axes=(axis, last), step=(step, near), valid=valid)


@dataclass(frozen=True, slots=True)
class Mask:
    """Added to the scores, or (bool) true where a key counts: a [batch, head, query, key] view."""

    rows: AttentionView
    per_query: bool
    """Whether queries have masks of their own."""
    hides: bool = False
    """Whether a bool mask is true where a key does not count."""


@dataclass(frozen=True, slots=True)
class Band:
    """Keys around a query's own place: query i stands at key i + shift, and sees `before` keys before it and `after` behind it."""

    before: int | None = None
    """None: all."""
    after: int | None = 0
    shift: Dim = 0

    def end(self, query: Dim) -> Dim:
        """The first key that a query does not see any more, where there is one."""
        return expr("+", query, self.shift, (self.after or 0) + 1)

    def begin(self, query: Dim) -> Dim:
        """The first key that it sees; negative where it sees from the first on."""
        return expr("+", query, self.shift, -(self.before or 0))


CAUSAL = Band()
"""Query i sees keys 0 to i."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What is to be computed."""

    q: AttentionView
    k: AttentionView
    v: AttentionView
    out: AttentionView
    batch: Dim
    heads: int
    queries: Dim
    keys: Dim
    width: int
    value_width: int
    scale: float
    band: Band | None = None
    """Which keys a query sees; None: all."""
    mask: Mask | None = None
    first: Dim = 0
    """Row where this sequence begins, of queries and results: sequences may lie one behind the other."""
    first_key: Dim = 0
    """The same of keys and values."""
    most_keys: Dim | None = None
    """The most that `keys` can be, where that changes in the kernel's loops."""
    empty_is_nan: bool = False
    """Whether a query that the mask leaves no key is NaN, as after a plain softmax, rather than 0."""
    nan_is_zero: bool = False
    """Whether weights that are NaN count as 0."""

    @property
    def padded(self) -> int:
        """The width of V in tiles: what is beyond `value_width` is neither read nor written."""
        return -(-self.value_width // _STEP) * _STEP

    def valid(self, rows: Dim | None, column: Dim) -> Valid:
        """How much of a tile that begins at a column of V exists."""
        if self.value_width != self.padded:
            return rows, remaining(self.value_width, column)
        return () if rows is None else (rows, None)

    @property
    def factor(self) -> float:
        """What queries are multiplied by."""
        return self.scale * (LOG2E if self.in_bits else 1.0)

    @property
    def in_bits(self) -> bool:
        """Whether scores are kept as powers of 2. With a mask of floats they are not: its least number must not overflow."""
        return self.mask is None or self.mask.rows.buffer.dtype is DType.BOOL


# --- pieces that every kernel of attention is made of

LOG2E = math.log2(math.e)
NONE = -math.inf
"""The score of a key that does not count."""


def greater(b: KernelBuilder, x: Tile, top: Tile) -> Tile:
    """The greater score; NaN never becomes the greatest, it comes through by its own power."""
    return b.map("select", b.map("gt", x, top), x, top)


def finite(b: KernelBuilder, top: Tile) -> Tile:
    """Where no key counts the greatest score is -inf, and 0 stands for it: all powers are 0 then, not NaN."""
    return b.map("select", b.map("eq", top, b.fill(NONE, F32)), b.fill(0.0, F32), top)


def power(b: KernelBuilder, a: Attention, x: Tile) -> Tile:
    """The exponential of scores."""
    return b.map("exp2", x if a.in_bits else b.map("mul", x, LOG2E))


def inverse(b: KernelBuilder, a: Attention, total: Tile) -> Tile:
    """1 / total; a row without keys has nothing to divide."""
    if a.empty_is_nan:
        if isinstance(a.keys, int) and a.keys > 0:
            return b.map("recip", total)
        none = b.cast(b.index(expr("==", a.keys, 0)), F32)  # a sum over no keys at all is 0, whatever it is divided by
        return b.map("recip", b.map("add", total, none))
    return b.map("recip", b.map("select", b.map("eq", total, b.fill(0.0, F32)), b.fill(1.0, F32), total))


def finished(b: KernelBuilder, a: Attention, sums: Tile, factor: Tile) -> Tile:
    """Sums of weighted values divided by the sum of weights."""
    result = b.map("mul", sums, factor)
    return b.map("select", b.map("isnan", factor), b.fill(0.0, F32), result) if a.nan_is_zero else result


def added(b: KernelBuilder, mask: Tile, *, hides: bool = False) -> Tile:
    """What is added to scores: a float mask itself, 0 or -inf for a bool one."""
    if mask.type.dtype is DType.BOOL:
        one, other = b.fill(0.0, F32), b.fill(NONE, F32)
        return b.map("select", mask, *((other, one) if hides else (one, other)))
    return b.cast(mask, F32)
