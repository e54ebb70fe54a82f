"""Which keys a mask leaves to a panel of queries, found in the mask itself.

    parallel (batch, panel of queries)                  once for all heads
      begin, end = keys that the mask leaves to one of the queries          causal, banded, block by block, padded: any mask
    parallel (batch, head, panel of queries)
      keys without a part (K and V of them are looked at): begin to end     else all of them

A key is left out where its weight is certainly 0, because the mask puts its score far enough below that of another key. A mask of
bools does, and so does a number of -2^126 or less; libraries write -inf, or the least float. Two things must hold for a panel. The
mask leaves each of its queries at least one key unchanged. And nothing that is left out could make a sum NaN: to see that, the
squares of the queries, and of the keys and values that are left out, are added up. Otherwise the panel takes every key. So nothing
is bet, and no call needs a guard.

Looking costs a pass over the mask, which heads share, and where keys are left out a pass over these.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.attention.attention_job import F32, NONE, Attention, AttentionView, Mask, added, greater
from hotfuse.lower.cpu.attention.tiling import AttentionTiling
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

CLOSED = -(2.0**126)
"""Numbers of a mask that hide a key, whatever its score."""
OPEN = -(2.0**120)
"""Numbers of a mask that leave a key a score far above that of every hidden one."""
MAX_SQUARES = 2.0**100
"""What squares of queries, of keys and of values may add up to: scores are below 2^100 then, and sums are finite."""
MIN_KEYS = 64
"""Fewer keys are not worth looking for."""
MIN_HEADS = 4
"""Heads that share the look at a mask: with fewer it would take a twentieth of the time that all keys take."""
BEGINS, ENDS = "keys_begin", "keys_end"
"""Memory of a kernel that looks at its mask."""
_ROWS = 4
"""Rows that are added up at once."""


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Where the keys of panels begin and end, in memory of the kernel's own."""

    begins: Buffer
    ends: Buffer
    panels: Dim
    by_batch: bool


def worth_looking(a: Attention) -> bool:
    """Whether a mask is worth looking at: one that all heads share."""
    if a.mask is None or a.band is not None or (isinstance(a.keys, int) and a.keys < MIN_KEYS) or a.heads < MIN_HEADS:
        return False
    return abs(a.scale) <= 1 and not _moves(a.mask.rows, 1)


def leaves_keys_out(text: str) -> bool:
    """Whether a kernel, by its text, looks at its mask for keys to leave out."""
    return f"shared {BEGINS}:" in text and f"shared {ENDS}:" in text


def find_keys(b: KernelBuilder, a: Attention, t: AttentionTiling) -> SeenKeys:
    """Look at the mask."""
    assert a.mask is not None
    by_batch = _moves(a.mask.rows, 0)
    panels = expr("ceildiv", a.queries, t.panel) if a.mask.per_query else 1
    lines = a.batch if by_batch else 1
    count = expr("max", 1, expr("*", lines, panels))
    found = SeenKeys(b.shared(BEGINS, DType.I64, (count,)), b.shared(ENDS, DType.I64, (count,)), panels, by_batch)
    with b.parallel("span", expr("*", lines, panels)) as span:
        batch, panel = (span.var, 0) if panels == 1 else (expr("//", span.var, panels), expr("%", span.var, panels))
        first = expr("*", panel, t.panel)
        rows = expr("min", t.panel, remaining(a.queries, first)) if a.mask.per_query else 1
        begin, end = _span(b, a, a.mask, t.lanes, (batch, first, rows))
        b.store(found.begins, (span.var,), begin)
        b.store(found.ends, (span.var,), end)
    return found


def _span(b: KernelBuilder, a: Attention, mask: Mask, lanes: int, at: tuple[Dim, Dim, Dim]) -> tuple[Tile, Tile]:
    """The keys that some of these queries sees; all of them where a query has none that is open."""
    i32, i64 = DType.I32, DType.I64
    batch, first, rows = at
    shape = (1, lanes)
    none, top = b.fill(2**31 - 1, i32, shape), b.fill(NONE, F32, shape)
    whole = isinstance(a.keys, int) and a.keys % lanes == 0
    with b.loop("query", 0, rows, carry=[none, b.fill(0, i32, shape), b.fill(-NONE, F32, (1, 1))]) as q:
        low, high, least = q.carried
        with b.loop("m", 0, a.keys, lanes, carry=[low, high, top]) as m:
            low, high, best = m.carried
            left = remaining(a.keys, m.var)
            x = mask.rows.read(b, (batch, 0, expr("+", first, q.var), m.var), shape, () if whole else (None, left))
            x = added(b, x, hides=mask.hides)
            if not whole:
                beyond = b.map("ge", b.iota(0, shape, 1, i32), b.cast(b.index(left), i32))
                x = b.map("select", beyond, b.fill(NONE, F32), x)
            hidden, place = b.map("le", x, CLOSED), b.iota(m.var, shape, 1, i32)
            low = b.map("min", low, b.map("select", hidden, none, place))
            high = b.map("max", high, b.map("select", hidden, b.fill(0, i32), b.map("add", place, 1)))
            m.yields(low, high, greater(b, x, best))
        low, high, best = m.outs
        best = b.reduce("max", best, 1)
        q.yields(low, high, b.map("select", b.map("lt", best, least), best, least))
    low, high, least = q.outs
    open_to_all = b.reshape(b.map("ge", least, OPEN), ())
    begin, end = (b.cast(b.reshape(b.reduce(f, x, 1), ()), i64) for f, x in (("min", low), ("max", high)))
    return b.map("select", open_to_all, begin, b.fill(0, i64)), b.map("select", open_to_all, end, b.index(a.keys))


@contextmanager
def panel_keys(
    b: KernelBuilder, a: Attention, t: AttentionTiling, keys: SeenKeys | None, place: tuple[Dim, Dim, Dim, Dim]
) -> Generator[tuple[Dim, Dim] | None]:
    """The keys of a panel (batch, head, which panel, its first query), as numbers to count by; None: all there are."""
    if keys is None:
        yield None
        return
    batch, head, panel, first = place
    which = expr("+", expr("*", batch if keys.by_batch else 0, keys.panels), 0 if keys.panels == 1 else panel)
    most = expr("+", a.keys, 1)
    span = b.scratch("span", DType.I64, (2,))
    with b.given("begin", keys.begins, (which,), 0, most) as begin, b.given("end", keys.ends, (which,), 0, most) as end:
        b.store(span, (0,), b.index(begin))
        b.store(span, (1,), b.index(end))
        with b.when(expr("or", expr("<", 0, begin), expr("<", end, a.keys))):
            rows = expr("min", t.panel, remaining(a.queries, first))
            queries = (expr("+", a.first, first), expr("+", a.first, first, rows))
            totals = [_squares(b, a.q, (batch, head), *queries, a.width, t.lanes)]
            for lo, hi in ((0, begin), (end, a.keys)):
                lo, hi = expr("+", a.first_key, lo), expr("+", a.first_key, hi)
                totals += [_squares(b, x, (batch, head), lo, hi, n, t.lanes) for x, n in ((a.k, a.width), (a.v, a.value_width))]
            fine = b.map("lt", totals[0], MAX_SQUARES)
            for total in totals[1:]:
                fine = b.map("and", fine, b.map("lt", total, MAX_SQUARES))
            b.store(span, (0,), b.map("select", fine, b.index(begin), b.fill(0, DType.I64)))
            b.store(span, (1,), b.map("select", fine, b.index(end), b.index(a.keys)))
    with b.given("begin", span, (0,), 0, most) as begin, b.given("end", span, (1,), 0, most) as end:
        yield begin, end


def _squares(b: KernelBuilder, x: AttentionView, of: tuple[Dim, Dim], lo: Dim, hi: Dim, width: int, lanes: int) -> Tile:
    """The sum of the squares of some rows; not a number, or infinite, where one of them is."""
    count = remaining(hi, lo)
    split = expr("+", lo, expr("*", expr("//", count, _ROWS), _ROWS))
    sums: list[Tile] = []
    for begin, end, rows in ((lo, split, _ROWS), (split, hi, 1)):
        with b.loop("row", begin, end, rows, carry=[b.fill(0.0, F32, (rows, lanes))]) as row:
            with b.loop("d", 0, width, lanes, carry=row.carried) as d:
                left = () if width % lanes == 0 else (None, remaining(width, d.var))
                v = x.read(b, (*of, row.var, d.var), (rows, lanes), left)
                d.yields(b.map("fma", v, v, d.carried[0]))
            row.yields(*d.outs)
        sums.append(b.reduce("sum", row.outs[0], 0))
    return b.reshape(b.reduce("sum", b.map("add", *sums), 1), ())


def _moves(view: AttentionView, counter: int) -> bool:
    return any(d.steps[counter] != 0 for d in view.dims)
