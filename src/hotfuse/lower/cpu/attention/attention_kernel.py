"""softmax(Q Kᵀ · scale + mask) V as one tile program: no score leaves the core's caches.

    parallel (batch, head, panel of queries)
      keys that the mask leaves to the panel    found in the mask (`seen_keys`); all where it shows no structure
      Qt = (Q · scale)ᵀ                         queries become lanes: every later step is plain vector arithmetic
      for block of keys                         one block when all keys fit, else a running softmax
        P = K Qt + mask;  top = max over keys   register tiles of a few keys by all queries of the panel
        P = exp(P - top); total += P            in place
        O = O · rescale + Pᵀ V                  register tiles of a few queries by a part of V's width
      O / total                                 written where the output's layout wants it

Q, K, V and the output are views of what the projections write, read and written in place: rows any distance apart, elements of
a row next to each other. Keys need no transposing and softmax no reduction across lanes, because lanes are queries.

Special values are torch's: a row without any key left is 0; NaN and +inf among a row's scores make the row NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.attention.attention_job import (
    F32,
    NONE,
    Attention,
    AttentionView,
    Mask,
    Valid,
    added,
    finished,
    finite,
    greater,
    inverse,
    power,
)
from hotfuse.lower.cpu.attention.few_queries import attend_few_queries, has_few_queries
from hotfuse.lower.cpu.attention.seen_keys import find_keys, panel_keys, worth_looking
from hotfuse.lower.cpu.attention.tiling import AttentionTiling
from hotfuse.lower.cpu.tiling import balance
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Tile


def attend(b: KernelBuilder, a: Attention, t: AttentionTiling) -> None:
    """Write the program."""
    if has_few_queries(a):
        attend_few_queries(b, a, t)
        return
    panels = expr("ceildiv", a.queries, t.panel)
    found = find_keys(b, a, t) if worth_looking(a) else None
    with b.parallel("task", expr("*", a.batch, a.heads, panels)) as task:
        line, panel = apart(task.var, panels)
        batch, head = apart(line, a.heads)
        first = expr("*", panel, t.panel)
        with panel_keys(b, a, t, found, (batch, head, panel, first)) as keys:
            Panel(b, a, t, batch, head, first, keys).write()


def apart(i: Dim, inner: Dim) -> tuple[Dim, Dim]:
    """(i // inner, i % inner)."""
    return (i, 0) if inner == 1 else (expr("//", i, inner), expr("%", i, inner))


@dataclass(frozen=True, slots=True)
class _Keys:
    """A block of keys."""

    begin: Dim
    end: Dim

    @property
    def count(self) -> Dim:
        return remaining(self.end, self.begin)


class Panel:
    """The program of one panel: queries `first` and on of one head."""

    def __init__(
        self, b: KernelBuilder, a: Attention, t: AttentionTiling, batch: Dim, head: Dim, first: Dim,
        keys: tuple[Dim, Dim] | None = None,
    ) -> None:  # fmt: skip
        self.b, self.a, self.t = b, a, t
        self.batch, self.head, self.query = batch, head, first
        whole = isinstance(a.queries, int) and a.queries % t.panel == 0
        self.count = t.panel if whole else expr("min", t.panel, remaining(a.queries, first))
        self.begins, self.end = self.keys_of(first) if keys is None else keys
        self.one_block: bool | None = a.keys <= t.block if isinstance(a.keys, int) else None
        """Whether all keys fit one block; None where that shows only at run time."""
        most = expr("+", expr("min", t.block, a.most_keys or a.keys), max(t.lanes, *map(t.key_rows, range(1, t.vectors + 1))))
        wide = t.panel + t.out_rows  # a block's last tile of queries may reach beyond the panel
        self.qt = b.scratch("qt", F32, (a.width, t.panel))
        self.p = b.scratch("p", F32, (most, -(-wide // t.lanes) * t.lanes))
        self.inverse = b.scratch("inverse", F32, (t.panel,))
        if a.mask is not None and a.mask.per_query:
            self.columns = b.scratch("columns", F32, (most, t.panel))
        if self.one_block is not True:
            self.top, self.total, self.rescale = (b.scratch(n, F32, (wide,)) for n in ("top", "total", "rescale"))
            self.sums = b.scratch("sums", F32, (wide, a.padded))

    def read(self, x: AttentionView, row: Dim, element: Dim, shape: tuple[int, int], valid: Valid = ()) -> Tile:
        """Rows by elements of this panel's head."""
        return x.read(self.b, (self.batch, self.head, row, element), shape, valid)

    # -- which shapes can occur

    def keys_of(self, first: Dim) -> tuple[Dim, Dim]:
        """The keys that some query of the panel sees."""
        a, band = self.a, self.a.band
        begin: Dim = 0
        end = a.keys
        if band is not None and band.before is not None:
            begin = expr("max", 0, band.begin(first))
        if band is not None and band.after is not None:
            end = expr("min", end, band.end(expr("+", first, self.t.panel - 1)))
            end = end if band.shift == 0 else expr("max", 0, end)  # queries may stand before the first key
        return begin, end

    def widths(self) -> Iterator[tuple[int, Dim | None]]:
        """How many vectors of queries a panel is taken to have, and when it is (None: always).

        Where only the call tells how many queries there are, powers of 2 serve what is between them as well: each is as much code
        as a kernel of its own, and only the last panel of a head can be narrower than the others.
        """
        t, n = self.t, self.a.queries
        if isinstance(n, int):
            found = {-(-min(t.panel, n - q) // t.lanes) for q in range(0, n, t.panel)}
        else:
            found = {v for v in range(1, t.vectors + 1) if v & (v - 1) == 0 or v == t.vectors}
        filled, below = expr("ceildiv", self.count, t.lanes), 0
        for v in sorted(found):
            yield v, None if len(found) == 1 else expr("and", expr("<", below, filled), expr("<=", filled, v))
            below = v

    def write(self) -> None:
        """One pass when all keys fit a block; where that shows only at run time, both ways are there."""
        b, t = self.b, self.t
        self.transpose_queries()
        if self.one_block is True:
            self.weights(_Keys(self.begins, self.end))
            self.whole(_Keys(self.begins, self.end))
            return
        several = expr("<", t.block, self.a.keys)
        self.begin(several)
        with b.loop("block", self.begins, self.end, t.block) as block:
            keys = _Keys(block.var, expr("min", self.end, expr("+", block.var, t.block)))
            self.weights(keys)
            with b.when(expr("not", several)):
                self.whole(keys)
            with b.when(several):
                self.more(keys)
        with b.when(expr("or", several, self.none())), b.loop("o", 0, self.count) as o:
            self.finish(b.load(self.sums, (o.var, 0), (1, self.a.padded)), o.var, 1, 0)

    def transpose_queries(self) -> None:
        """Scaled queries as columns."""
        b, a, t = self.b, self.a, self.t
        with b.loop("j", 0, self.count, t.lanes) as j, b.loop("d", 0, a.width, t.lanes) as d:
            left = remaining(a.width, d.var) if a.width % t.lanes else None
            row = expr("+", a.first, self.query, j.var)
            x = self.read(a.q, row, d.var, (t.lanes, t.lanes), valid=(remaining(self.count, j.var), left))
            x = b.transpose(b.map("mul", x, a.factor), (1, 0))
            b.store(self.qt, (d.var, j.var), x, valid=(left, None))

    # -- block by block: what has been added up so far is rescaled whenever a greater score turns up

    def begin(self, several: Dim) -> None:
        """Nothing has been added up."""
        b, t = self.b, self.t
        b.store(self.top, (0,), b.fill(NONE, F32, (t.panel,)))
        for place in (self.total, self.inverse):
            b.store(place, (0,), b.fill(0.0, F32, (t.panel,)))
        with b.when(expr("or", several, self.none())), b.loop("z", 0, self.sums.shape[0]) as z:
            b.store(self.sums, (z.var, 0), b.fill(0.0, F32, (1, self.a.padded)))

    def none(self) -> Dim:
        """Whether no query of the panel sees any key."""
        return expr("==", self.end, 0) if self.begins == 0 else expr("<=", self.end, self.begins)

    def weights(self, keys: _Keys) -> None:
        """P, and what the sums have to be multiplied by."""
        b = self.b
        for vectors, when in self.widths():
            shape = (1, vectors * self.t.lanes)
            with _if(b, when):
                if self.one_block is True:
                    top = finite(b, self.scores(vectors, keys, b.fill(NONE, F32, shape)))
                    total = self.exponents(vectors, keys, top, b.fill(0.0, F32, shape))
                else:
                    before, total = (b.load(x, (0,), shape, axes=(-1, 0)) for x in (self.top, self.total))
                    greatest = self.scores(vectors, keys, before)
                    top = finite(b, greatest)
                    rescale = power(b, self.a, b.map("sub", before, top))
                    total = self.exponents(vectors, keys, top, b.map("mul", total, rescale))
                    for place, tile in ((self.top, greatest), (self.total, total), (self.rescale, rescale)):
                        b.store(place, (0,), b.reshape(tile, shape[1:]))
                b.store(self.inverse, (0,), b.reshape(inverse(b, self.a, total), shape[1:]))

    def whole(self, keys: _Keys) -> None:
        """All of Pᵀ V at once, to the output."""
        b = self.b
        for rows, g in self.groups():
            for lo, hi, step, width in self.parts():
                with b.loop("c", lo, hi, step) as c:
                    acc = self.values(keys, g, rows, c.var, b.fill(0.0, F32, (rows, width)))
                    self.finish(acc, g, rows, c.var)

    def more(self, keys: _Keys) -> None:
        """A block's part of Pᵀ V, added to what the blocks before gave."""
        b, rows = self.b, self.t.out_rows
        with b.loop("g", 0, self.count, rows) as g:
            factors = b.load(self.rescale, (g.var,), (rows, 1), axes=(0, -1))
            for lo, hi, step, width in self.parts():
                with b.loop("c", lo, hi, step) as c:
                    acc = b.map("mul", b.load(self.sums, (g.var, c.var), (rows, width)), factors)
                    b.store(self.sums, (g.var, c.var), self.values(keys, g.var, rows, c.var, acc))

    # -- scores

    def scores(self, vectors: int, keys: _Keys, top: Tile) -> Tile:
        """P = K Qt + mask for a block; gives the greatest score of every query, `top` included."""
        a, t = self.a, self.t
        rows = t.key_rows(vectors)
        if a.mask is not None and a.mask.per_query:
            self.mask_columns(a.mask, vectors, keys)
        if isinstance(keys.count, int) and a.band is None:
            cut = balance(keys.count, rows)
            split = expr("+", keys.begin, cut.extra * (cut.rows + 1))
            if cut.extra:
                top = self.score_run(vectors, cut.rows + 1, keys, keys.begin, split, top, full=True)
            return self.score_run(vectors, cut.rows, keys, split, keys.end, top, full=True) if cut.rows else top
        if a.band is not None and a.band.before is not None:  # what all queries see is not looked for
            return self.score_run(vectors, rows, keys, keys.begin, keys.end, top, full=False)
        if a.band is not None:  # keys up to the first query are seen by all of them
            seen = expr("max", 0, remaining(expr("min", keys.end, a.band.end(self.query)), keys.begin))
            split = expr("+", keys.begin, expr("*", expr("//", seen, rows), rows))
        else:  # the last tile overlaps the one before; fewer keys than a tile has go the other way
            split = expr("+", keys.begin, expr("*", keys.count, expr("<=", rows, keys.count)))
        top = self.score_run(vectors, rows, keys, keys.begin, split, top, full=True)
        few = rows if a.band is not None else max(2, rows // 2)
        return self.score_run(vectors, few, keys, split, keys.end, top, full=False)

    def score_run(self, vectors: int, rows: int, keys: _Keys, lo: Dim, hi: Dim, top: Tile, *, full: bool) -> Tile:
        """Tiles of so many keys, one after the other; if they are not `full`, some of their scores do not count."""
        b, a, lanes = self.b, self.a, vectors * self.t.lanes
        with b.loop("k", lo, hi, rows, carry=[top]) as k:
            (top,) = k.carried
            overlaps = full and a.band is None and not isinstance(keys.count, int)
            key = expr("min", k.var, remaining(keys.end, rows)) if overlaps else k.var
            s = self.score_tile(rows, lanes, key, full=full)
            if a.mask is not None:
                s = b.map("add", s, self.mask_tile(a.mask, rows, lanes, keys, key, full=full))
            if not full:
                s = b.map("select", self.counting(rows, lanes, keys, key), s, b.fill(NONE, F32))
            b.store(self.p, (remaining(key, keys.begin), 0), s)
            for i in range(rows):
                top = greater(b, b.extract(s, (i, 0), (1, lanes)), top)
            k.yields(top)
        return k.outs[0]

    def score_tile(self, rows: int, lanes: int, key: Dim, *, full: bool) -> Tile:
        """Some keys by all queries."""
        b, a, t = self.b, self.a, self.t
        acc = b.fill(0.0, F32, (rows, lanes))
        even = a.width // t.unroll * t.unroll

        def step(acc: Tile, at: Dim) -> Tile:
            return b.mma(acc, self.key_column(rows, key, at, full=full), b.load(self.qt, (at, 0), (1, lanes)))

        with b.loop("d", 0, even, t.unroll, carry=[acc]) as d:
            (acc,) = d.carried
            for u in range(t.unroll):
                acc = step(acc, expr("+", d.var, u))
                b.effect("barrier_spill")
            d.yields(acc)
        (acc,) = d.outs
        for at in range(even, a.width):
            acc = step(acc, at)
        return acc

    def key_column(self, rows: int, key: Dim, element: Dim, *, full: bool) -> Tile:
        """One element of some keys; keys beyond the last are the last again, and do not count."""
        b, a = self.b, self.a
        if full:
            return self.read(a.k, expr("+", a.first_key, key), element, (rows, 1))
        parts: list[Tile] = []
        for i in range(rows):
            row = expr("min", expr("+", key, i), expr("+", a.keys, -1))
            parts.append(self.read(a.k, expr("+", a.first_key, row), element, (1, 1)))
        return b.concat(parts, 0) if rows > 1 else parts[0]

    def counting(self, rows: int, lanes: int, keys: _Keys, key: Dim) -> Tile:
        """Where a key exists, and the query sees it."""
        b, i32, band = self.b, DType.I32, self.a.band
        counts = b.map("lt", b.iota(remaining(key, keys.end), (rows, 1), 0, i32), b.fill(0, i32))
        if band is None:
            return counts
        place = expr("+", self.query, band.shift)
        if band.after is not None:
            near = b.iota(remaining(key, expr("+", place, band.after)), (rows, 1), 0, i32)
            counts = b.map("and", b.map("le", near, b.iota(0, (1, lanes), 1, i32)), counts)
        if band.before is not None:
            near = b.iota(remaining(expr("+", key, band.before), place), (rows, 1), 0, i32)
            counts = b.map("and", b.map("ge", near, b.iota(0, (1, lanes), 1, i32)), counts)
        return counts

    # -- masks

    def mask_columns(self, mask: Mask, vectors: int, keys: _Keys) -> None:
        """Masks of single queries, turned so that queries are lanes."""
        b, t = self.b, self.t
        with b.loop("m", keys.begin, keys.end, t.lanes) as m:
            left = remaining(keys.end, m.var)
            for j in range(0, vectors * t.lanes, t.lanes):
                row, valid = expr("+", self.a.first, self.query, j), (remaining(self.count, j), left)
                x = self.read(mask.rows, row, m.var, (t.lanes, t.lanes), valid=valid)
                b.store(self.columns, (remaining(m.var, keys.begin), j), b.transpose(added(b, x, hides=mask.hides), (1, 0)))

    def mask_tile(self, mask: Mask, rows: int, lanes: int, keys: _Keys, key: Dim, *, full: bool) -> Tile:
        """What is added to a tile of scores."""
        b = self.b
        if mask.per_query:
            return b.load(self.columns, (remaining(key, keys.begin), 0), (rows, lanes))
        axis, step = mask.rows.walk(3)
        place = mask.rows.at(self.batch, self.head, 0, key)
        valid = () if full else (remaining(keys.end, key), None)
        return added(b, b.load(mask.rows.buffer, place, (rows, 1), axes=(axis, -1), step=(step, 1), valid=valid), hides=mask.hides)

    # -- softmax and values

    def exponents(self, vectors: int, keys: _Keys, top: Tile, total: Tile) -> Tile:
        """P = exp(P - top), in place; gives the sum over keys, `total` included."""
        b, lanes = self.b, vectors * self.t.lanes
        with b.loop("e", 0, keys.count, carry=[total]) as e:
            x = power(b, self.a, b.map("sub", b.load(self.p, (e.var, 0), (1, lanes)), top))
            b.store(self.p, (e.var, 0), x)
            e.yields(b.map("add", e.carried[0], x))
        return e.outs[0]

    def groups(self) -> Iterator[tuple[int, Dim]]:
        """Register tiles of queries: (how many, the first of them), inside the loop or condition they need."""
        b, most, count = self.b, self.t.out_rows, self.count
        if isinstance(count, int):
            cut = balance(count, most)
            split = cut.extra * (cut.rows + 1)
            for rows, lo, hi in ((cut.rows + 1, 0, split), (cut.rows, split, count)):
                if rows and lo < hi:
                    with b.loop("g", lo, hi, rows) as g:
                        yield rows, g.var
            return
        full = expr("*", expr("//", count, most), most)
        with b.loop("g", 0, full, most) as g:
            yield most, g.var
        left = remaining(count, full)
        heights = sorted({most, -(-most * 2 // 3), -(-most // 3)})
        for below, rows in zip([0, *heights], heights, strict=False):
            with b.when(expr("and", expr("<", below, left), expr("<=", left, rows))):
                yield rows, full

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """V's width in register tiles: (from, to, step, tile width); equal ones share their code."""
        widths = self.t.out_widths(self.a.padded)
        at = 0
        while at < len(widths):
            same = at
            while same < len(widths) and widths[same] == widths[at]:
                same += 1
            lo = sum(widths[:at])
            yield lo, lo + widths[at] * (same - at), widths[at], widths[at]
            at = same

    def values(self, keys: _Keys, group: Dim, rows: int, column: Dim, acc: Tile) -> Tile:
        """acc + Pᵀ V for some queries and a part of V's width."""
        b, a = self.b, self.a
        end, unroll = keys.end, self.t.unroll
        if a.band is not None and a.band.after is not None:
            end = expr("min", end, a.band.end(expr("+", self.query, group, rows - 1)))
        count = remaining(end, keys.begin)
        if isinstance(a.keys, int) and isinstance(count, int):
            split: Dim = count // unroll * unroll
        else:
            split = expr("*", expr("//", expr("max", 0, count), unroll), unroll)
        width = acc.type.shape[1]

        def step(acc: Tile, key: Dim) -> Tile:
            weights = b.load(self.p, (key, group), (rows, 1), axes=(1, 0))
            row = expr("+", a.first_key, keys.begin, key)
            return b.mma(acc, weights, self.read(a.v, row, column, (1, width), a.valid(None, column)))

        for lo, hi, by in ((0, split, unroll), (split, count, 1)):
            if lo == hi:
                continue
            with b.loop("k", lo, hi, by, carry=[acc]) as k:
                (acc,) = k.carried
                for u in range(by):
                    acc = step(acc, expr("+", k.var, u))
                    b.effect("barrier_spill")
                k.yields(acc)
            (acc,) = k.outs
        return acc

    def finish(self, acc: Tile, group: Dim, rows: int, column: Dim) -> None:
        """Divide by the sums of weights and store."""
        b, a = self.b, self.a
        left = remaining(self.count, group) if not isinstance(self.count, int) else None
        result = finished(b, a, acc, b.load(self.inverse, (group,), (rows, 1), axes=(0, -1)))
        place = (self.batch, self.head, expr("+", a.first, self.query, group), column)
        a.out.write(b, place, result, valid=a.valid(left, column))


def _if(b: KernelBuilder, when: Dim | None) -> AbstractContextManager[None]:
    return nullcontext() if when is None else b.when(when)
