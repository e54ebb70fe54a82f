"""Attention of a few queries, as a decoder asks it token by token: lanes are elements of a row, then keys.

    parallel (batch, head)
      P = q Kᵀ + mask                           tiles of keys by elements, summed up along the row
      P = exp(P - top);  total                  all keys of a query next to each other
      O = P V / total

With so few queries there is nothing to reuse: the time is that of reading K and V once, so nothing is transposed or blocked.
"""

from __future__ import annotations

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu.attention.attention_job import (
    F32,
    NONE,
    Attention,
    added,
    finished,
    finite,
    greater,
    inverse,
    power,
)
from hotfuse.lower.cpu.attention.tiling import AttentionTiling
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Tile

MAX_QUERIES = 4
"""More queries than this fill enough lanes of a panel."""


def has_few_queries(a: Attention) -> bool:
    """Whether this is the better way."""
    return isinstance(a.queries, int) and a.queries <= MAX_QUERIES and a.band is None


def attend_few_queries(b: KernelBuilder, a: Attention, t: AttentionTiling) -> None:
    """Write the program."""
    assert isinstance(a.queries, int)
    with b.parallel("task", expr("*", a.batch, a.heads)) as task:
        batch, head = (task.var, 0) if a.heads == 1 else (expr("//", task.var, a.heads), expr("%", task.var, a.heads))
        _HeadOfFewQueries(b, a, t, a.queries, batch, head).write()


class _HeadOfFewQueries:
    """The program of one head."""

    def __init__(self, b: KernelBuilder, a: Attention, t: AttentionTiling, queries: int, batch: Dim, head: Dim) -> None:
        self.b, self.a, self.t, self.n = b, a, t, queries
        self.batch, self.head = batch, head
        self.rows = t.few_rows(queries)
        self.q = b.scratch("q", F32, (queries, -(-a.width // t.lanes) * t.lanes))
        self.p = b.scratch("p", F32, (queries, expr("+", a.keys, t.lanes + self.rows)))

    def write(self) -> None:
        """All queries at once."""
        self.scale_queries()
        tops = [finite(self.b, self.b.reduce("max", top, 0)) for top in self.scores()]
        self.output([self.weights(i, top) for i, top in enumerate(tops)])

    def scale_queries(self) -> None:
        """Scaled queries, zero beyond their width."""
        b, a, t = self.b, self.a, self.t
        with b.loop("d", 0, a.width, t.lanes) as d:
            left = remaining(a.width, d.var) if a.width % t.lanes else None
            x = a.q.read(b, (self.batch, self.head, a.first, d.var), (self.n, t.lanes), valid=(None, left))
            b.store(self.q, (0, d.var), b.map("mul", x, a.factor))

    def scores(self) -> list[Tile]:
        """P = q Kᵀ + mask; gives each query's greatest scores, one per key of a tile."""
        b, keys, rows = self.b, self.a.keys, self.rows
        tops = [b.fill(NONE, F32, (rows,))] * self.n
        split = expr("*", keys, expr("<=", rows, keys))  # the last tile overlaps the one before, unless there is one only
        tops = self.score_run(0, split, tops, full=True)
        return self.score_run(split, keys, tops, full=False)

    def score_run(self, lo: Dim, hi: Dim, tops: list[Tile], *, full: bool) -> list[Tile]:
        if lo == hi:
            return tops
        b, a, rows = self.b, self.a, self.rows
        with b.loop("k", lo, hi, rows, carry=tops) as k:
            key = expr("min", k.var, remaining(a.keys, rows)) if full else k.var
            found: list[Tile] = []
            left = remaining(a.keys, key)
            for i, total in enumerate(self.products(key, full=full)):
                s = b.reshape(b.reduce("sum", total, 1), (rows,))
                if a.mask is not None:
                    x = a.mask.rows.read(b, (self.batch, self.head, i, key), (1, rows), valid=() if full else (None, left))
                    s = b.map("add", s, b.reshape(added(b, x, hides=a.mask.hides), (rows,)))
                if not full:
                    exists = b.map("lt", b.iota(remaining(key, a.keys), (rows,), 0, DType.I32), b.fill(0, DType.I32))
                    s = b.map("select", exists, s, b.fill(NONE, F32))
                b.store(self.p, (i, key), s)
                found.append(greater(b, s, k.carried[i]))
            k.yields(*found)
        return list(k.outs)

    def products(self, key: Dim, *, full: bool) -> list[Tile]:
        """For every query, its products with some keys, added up into as many lanes as a vector has."""
        b, a, t, rows = self.b, self.a, self.t, self.rows
        with b.loop("d", 0, a.width, t.lanes, carry=[b.fill(0.0, F32, (rows, t.lanes))] * self.n) as d:
            left = remaining(a.width, d.var) if a.width % t.lanes else None
            if full:
                place = (self.batch, self.head, expr("+", a.first_key, key), d.var)
                x = a.k.read(b, place, (rows, t.lanes), valid=(None, left))
            else:  # keys beyond the last are the last again
                parts: list[Tile] = []
                for i in range(rows):
                    row = expr("min", expr("+", key, i), expr("+", a.keys, -1))
                    place = (self.batch, self.head, expr("+", a.first_key, row), d.var)
                    parts.append(a.k.read(b, place, (1, t.lanes), valid=(None, left)))
                x = b.concat(parts, 0) if rows > 1 else parts[0]
            q = [b.load(self.q, (i, d.var), (1, t.lanes)) for i in range(self.n)]
            d.yields(*(b.map("fma", x, q[i], acc) for i, acc in enumerate(d.carried)))
        return list(d.outs)

    def weights(self, query: int, top: Tile) -> Tile:
        """P = exp(P - top), in place; gives what the query's sums are to be multiplied by."""
        b, a, lanes = self.b, self.a, self.t.lanes
        with b.loop("e", 0, a.keys, lanes, carry=[b.fill(0.0, F32, (lanes,))]) as e:
            left = (remaining(a.keys, e.var),)
            x = b.load(self.p, (query, e.var), (lanes,), valid=left, fill=NONE)
            x = power(b, a, b.map("sub", x, top))
            b.store(self.p, (query, e.var), x, valid=left)
            e.yields(b.map("add", e.carried[0], x))
        return inverse(b, a, b.reduce("sum", e.outs[0], 0))

    def output(self, factors: list[Tile]) -> None:
        """P V / total."""
        b, a, t = self.b, self.a, self.t
        factor = b.concat([b.reshape(f, (1, 1)) for f in factors], 0) if len(factors) > 1 else b.reshape(factors[0], (1, 1))
        widest = max(1, (t.registers - 8) // self.n) * t.lanes
        for column in range(0, a.padded, widest):
            width = min(widest, a.padded - column)
            acc = b.fill(0.0, F32, (self.n, width))
            split = expr("*", expr("//", a.keys, t.unroll), t.unroll)
            for lo, hi, by in ((0, split, t.unroll), (split, a.keys, 1)):
                if lo == hi:
                    continue
                with b.loop("k", lo, hi, by, carry=[acc]) as k:
                    (acc,) = k.carried
                    for u in range(by):
                        key = expr("+", k.var, u)
                        row = (self.batch, self.head, expr("+", a.first_key, key), column)
                        acc = b.mma(acc, b.load(self.p, (0, key), (self.n, 1)), a.v.read(b, row, (1, width), a.valid(None, column)))
                    k.yields(acc)
                (acc,) = k.outs
            a.out.write(b, (self.batch, self.head, a.first, column), finished(b, a, acc, factor), a.valid(None, column))
