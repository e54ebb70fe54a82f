"""What kernels compute more than once, counted natively for a batch; large ones are left to `hpm.recompute_factor`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.compiled import fields, native_writer, row_lookup
from hotfuse.hpm.compiled.native_writer import REAL, FunctionWriter
from hotfuse.hpm.compiled.row_lookup import Words
from hotfuse.hpm.compiled.row_sums import NODE_WIDTH, CandidateColumns
from hotfuse.hpm.recompute_factor import MOVED, POINTWISE, PRODUCT
from hotfuse.hpm.work import COLUMN, NAMES, SUMS, Matrix

COMPUTED = tuple(
    SUMS.index(n) for n in ("light", "divide", "function", "exp", "sigmoid", "tanh", "erf", "root", "special")
)
"""Columns of what nodes compute."""
MAX_VALUES = 256
"""Values of a graph that `again` keeps apart; larger ones are asked in Python."""


def _again(f: fields.Fields) -> Callable[[FunctionWriter], None]:
    """Where something may be computed again: `recompute_factor.factors`, and what nodes compute, added up so often."""
    length, first = f.tuples.field["length"], f.tuples.field["first"]

    def body(w: FunctionWriter) -> None:
        ids, count, table, kinds, sizes, smaller, places, rows, met, often, failed = w.args
        begin = w.variable(0)
        with w.each(count) as i:
            row = w.plus(table, w.times(i, 8 * len(NAMES)))
            nodes = w.load(w.load(w.load(ids, i), f.candidate.field["graph"]), f.graph.field["nodes"])
            many = w.load(nodes, length)
            some = w.holds(many, "sgt", 0)
            kind = w.load(kinds, w.either(some, begin.value, 0), REAL)
            with w.when(w.both(some, _maybe(w, row, w.load(smaller, i, REAL), kind))):
                across = w.real("fmul", _of(w, row, "tile_vectors"), w.larger(_of(w, row, "lanes"), 1.0))
                panels = w.larger(w.ceil(w.real("fdiv", _of(w, row, "columns"), across)), 1.0)
                fits = _times(
                    w, f, w.plus(nodes, 8 * first), many, panels, _From(begin.value, kinds, sizes, often), met
                )
                with w.when(w.holds(fits, "eq", 0)):
                    w.store(1, failed, i)
                with w.when(w.holds(fits, "ne", 0)):
                    for column in COMPUTED:
                        total = w.variable(0.0, REAL)
                        with w.each(many) as k:
                            place = w.plus(begin.value, k)
                            own = w.plus(rows, w.times(w.load(places, place), 8 * NODE_WIDTH))
                            each = w.real("fmul", w.load(own, column, REAL), w.load(often, place, REAL))
                            total.put(w.real("fadd", total.value, each))
                        w.store(total.value, row, column, REAL)
            begin.put(w.plus(begin.value, many))

    return body


def _of(w: FunctionWriter, row: str, column: str) -> str:
    return w.load(row, COLUMN[column], REAL)


def _maybe(w: FunctionWriter, row: str, smaller: str, kind: str) -> str:
    """Whether something of a kernel may be computed again: something small that is no product, or something in front of one."""
    small = w.both(w.compares(smaller, "ogt", 0.0), w.compares(_of(w, row, "mma"), "oeq", 0.0))
    before = w.both(w.compares(_of(w, row, "product"), "ogt", 0.0), w.compares(kind, "une", float(PRODUCT)))
    return w.both(w.one_of(small, before), w.compares(_of(w, row, "library"), "oeq", 0.0))


@dataclass(frozen=True, slots=True)
class _From:
    """Kinds and sizes of nodes, and how often they are computed, from one candidate's first node on."""

    begin: str
    kinds: str
    sizes: str
    often: str


def _times(w: FunctionWriter, f: fields.Fields, nodes: str, many: str, panels: str, of: _From, met: str) -> str:
    """As `recompute_factor.factors`: values met so far lie in `met`: (identity, wanted, in front); 0 where there are too many."""
    length, first = f.tuples.field["length"], f.tuples.field["first"]
    known, fits, left = w.variable(0), w.variable(1), w.variable(many)

    def last() -> str:
        return w.plus(met, w.times(known.value, 24))

    def find(value: str) -> str:
        """The address of a value's entry; the one behind the last where there is none."""
        at = w.variable(met)
        with w.loop_while(lambda: w.both(w.holds(at.value, "ne", last()), w.holds(w.load(at.value), "ne", value))):
            at.put(w.plus(at.value, 24))
        return at.value

    def entered(value: str) -> str:
        """The same; a new one is put there."""
        entry = find(value)
        with w.when(w.holds(entry, "eq", last())):
            w.store(value, entry)
            w.store(0.0, entry, 1, REAL)
            w.store(0, entry, 2)
            known.put(w.plus(known.value, 1))
        return entry

    with w.loop_while(lambda: w.holds(left.value, "sgt", 0)):
        left.put(w.plus(left.value, -1))
        node, place = w.load(nodes, left.value), w.plus(of.begin, left.value)
        kind, own = w.load(of.kinds, place, REAL), w.load(of.sizes, place, REAL)
        reads, makes = w.load(node, f.node.field["ins"]), w.load(node, f.node.field["outs"])
        want = w.variable(own, REAL)
        along = w.one_of(w.compares(kind, "oeq", float(POINTWISE)), w.compares(kind, "oeq", float(MOVED)))
        room = w.holds(w.plus(known.value, w.load(reads, length)), "slt", MAX_VALUES)
        fits.put(w.either(room, fits.value, 0))
        with w.when(w.both(along, room)):
            with w.each(w.load(makes, length)) as k:
                entry = find(w.load(makes, w.plus(k, first)))
                with w.when(w.holds(entry, "ne", last())):
                    more = w.larger(want.value, w.load(entry, 1, REAL))
                    front = w.holds(w.load(entry, 2), "ne", 0)
                    want.put(w.either(front, w.larger(more, w.real("fmul", own, panels)), more, REAL))
            with w.each(w.load(reads, length)) as k:
                entry = entered(w.load(reads, w.plus(k, first)))
                w.store(w.larger(w.load(entry, 1, REAL), want.value), entry, 1, REAL)
        reads_some = w.both(room, w.holds(w.load(reads, length), "ne", 0))
        with w.when(w.both(w.compares(kind, "oeq", float(PRODUCT)), reads_some)):
            w.store(1, entered(w.load(reads, first)), 2)
        w.store(w.real("fdiv", want.value, w.larger(own, 1.0)), of.often, place, REAL)
    return fits.value


@once
def _counting_again() -> native.NativeFunction:
    f, a, n = row_lookup.known_fields(), native.ARRAY, native.NUMBER
    return native_writer.compiled("again", [a, n, *[a] * 9], _again(f))


def again(ids: Words, table: Matrix, told: CandidateColumns, rows: Matrix) -> Words:
    """What kernels compute several times counts so often, in their rows; which candidates have too many values for that."""
    met, failed = np.empty((MAX_VALUES, 3), np.int64), np.zeros(len(ids), np.int64)
    often = np.empty(len(told.kinds))
    _counting_again()(ids, len(ids), table, told.kinds, told.sizes, told.smaller, told.places, rows, met, often, failed)
    return np.flatnonzero(failed)
