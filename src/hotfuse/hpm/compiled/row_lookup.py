"""Where the rows of candidates' parts are, looked up natively for a batch: parts are known by identity, tilings by their numbers.

places  nodes, inputs, params and outputs of each candidate, at its sizes -> rows of the cache's tables
tilings a candidate's core and the extents of its anchor -> a row of the cache's tilings

What is not found is left to the row cache, which asks objects in Python and puts what it learned here. All loops hold the
interpreter lock and read objects that the candidates keep alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hotfuse.base.errors import InternalError
from hotfuse.base.once import once
from hotfuse.hpm.compiled import columns as native
from hotfuse.hpm.compiled import fields, native_writer
from hotfuse.hpm.compiled.native_writer import REAL, FunctionWriter, Number, Variable
from hotfuse.hpm.work import COLUMN, NAMES, TILING, Candidate, Matrix

Words = npt.NDArray[np.int64]
ANCHOR = ("rows", "columns", "depth", "window", "stride", "groups")
"""What a tile is chosen for."""
CUT = len(TILING) - 2
"""Columns that the tiling decides, the first of them."""
_MIX = -0x61C8864680B583EB
"""An odd number whose products spread over all words."""
_ROLES = ("nodes", "inputs", "params", "outputs")


class KeyTable:
    """Numbers by keys of several words, in one array with room to spare; where the first word is zero nothing is."""

    def __init__(self, key: int) -> None:
        self._key, self.count = key, 0
        self.table = np.zeros((256, key + 1), np.int64)

    def put(self, entries: Words) -> None:
        """Rows of a key and its number, none of them known yet."""
        put, table = _putting(self._key), self.table
        old = table[table[:, 0] != 0]
        needed = 2 * (len(old) + len(entries))
        if needed > len(table):  # look-ups that run meanwhile have the old one
            table = np.zeros((1 << (2 * needed - 1).bit_length(), self._key + 1), np.int64)
            put(old, len(old), table, len(table) - 1)
        put(np.ascontiguousarray(entries), len(entries), table, len(table) - 1)
        self.table, self.count = table, len(old) + len(entries)


def _slot(w: FunctionWriter, key: Sequence[Number], table: Number, mask: Number) -> tuple[str, str]:
    """Where a key lies, or would: the address of its row, and the first word there."""
    mixed = w.line(f"lshr i64 {key[0]}, 4")
    for part in key[1:]:
        mixed = w.line(f"xor i64 {w.times(mixed, _MIX)}, {part}")
        mixed = w.line(f"xor i64 {mixed}, {w.line(f'lshr i64 {mixed}, 32')}")
    high = w.line(f"lshr i64 {w.times(mixed, _MIX)}, 20")
    at = w.variable(w.line(f"and i64 {high}, {mask}"))
    width = 8 * (len(key) + 1)

    def another() -> str:
        row = w.plus(table, w.times(at.value, width))
        first = w.load(row)
        differs = w.holds(first, "ne", key[0])
        for i, part in enumerate(key[1:], 1):
            differs = w.one_of(differs, w.holds(w.load(row, i), "ne", part))
        return w.both(w.holds(first, "ne", 0), differs)

    with w.loop_while(another):
        at.put(w.line(f"and i64 {w.plus(at.value, 1)}, {mask}"))
    row = w.plus(table, w.times(at.value, width))
    return row, w.load(row)


def _putting(key: int) -> native.NativeFunction:
    return _put_pair() if key == 2 else _put_tiling()


def _put(key: int) -> Callable[[FunctionWriter], None]:
    def body(w: FunctionWriter) -> None:
        entries, count, table, mask = w.args
        with w.each(count) as i:
            own = w.plus(entries, w.times(i, 8 * (key + 1)))
            words = [w.load(own, k) for k in range(key + 1)]
            row, _ = _slot(w, words[:key], table, mask)
            for k, word in enumerate(words):
                w.store(word, row, k)

    return body


_ENTRIES = [native.ARRAY, native.NUMBER, native.ARRAY, native.NUMBER]


@once
def _put_pair() -> native.NativeFunction:
    return native_writer.compiled("put", _ENTRIES, _put(2))


@once
def _put_tiling() -> native.NativeFunction:
    return native_writer.compiled("put", _ENTRIES, _put(1 + len(ANCHOR)))


def _is(w: FunctionWriter, thing: str, sort: fields.Sort, fits: Variable) -> None:
    """Whether an object has the expected kind."""
    wrong = w.holds(w.load(thing, sort.word), "ne", sort.address)
    fits.put(w.either(wrong, 0, fits.value))


def known_fields() -> fields.Fields:
    """Where candidates keep what they hold, on an interpreter that was seen to."""
    found = fields.fields()
    if found is None:
        raise InternalError("candidates are not kept as native loops read them")
    return found


# --- places ------------------------------------------------------------------------------------------------------------------


def _checked(f: fields.Fields) -> Callable[[FunctionWriter], None]:
    def body(w: FunctionWriter) -> None:
        ids, count, fit = w.args
        fits = w.variable(1)
        with w.each(count) as i:
            candidate = w.load(ids, i)
            _is(w, candidate, f.candidate, fits)
            with w.when(w.holds(fits.value, "ne", 0)):
                graph = w.load(candidate, f.candidate.field["graph"])
                _is(w, graph, f.graph, fits)
                with w.when(w.holds(fits.value, "ne", 0)):
                    for role in _ROLES:
                        _is(w, w.load(graph, f.graph.field[role]), f.tuples, fits)
        w.store(fits.value, fit)

    return body


def _counted(f: fields.Fields) -> Callable[[FunctionWriter], None]:
    def body(w: FunctionWriter) -> None:
        ids, count, counts = w.args
        with w.each(count) as i:
            graph = w.load(w.load(ids, i), f.candidate.field["graph"])
            own = w.plus(counts, w.times(i, 8 * len(_ROLES)))
            for k, role in enumerate(_ROLES):
                w.store(w.load(w.load(graph, f.graph.field[role]), f.tuples.field["length"]), own, k)

    return body


def _placed(f: fields.Fields) -> Callable[[FunctionWriter], None]:
    def body(w: FunctionWriter) -> None:
        ids, count, sized, table, mask, places, missed = w.args
        at = w.variable(0)
        with w.each(count) as i:
            graph, size = w.load(w.load(ids, i), f.candidate.field["graph"]), w.load(sized, i)
            for role in _ROLES:
                parts = w.load(graph, f.graph.field[role])
                with w.each(w.load(parts, f.tuples.field["length"])) as k:
                    part = w.load(parts, w.plus(k, f.tuples.field["first"]))
                    row, first = _slot(w, [part, size], table, mask)
                    w.store(w.load(row, 2), places, at.value)
                    with w.when(w.holds(first, "eq", 0)):
                        w.store(1, missed, i)
                    at.put(w.plus(at.value, 1))

    return body


@once
def _checking() -> native.NativeFunction | None:
    f = fields.fields()
    return native_writer.compiled("checked", [native.ARRAY, native.NUMBER, native.ARRAY], _checked(f)) if f is not None else None


@once
def _counting() -> native.NativeFunction:
    return native_writer.compiled("counted", [native.ARRAY, native.NUMBER, native.ARRAY], _counted(known_fields()))


@once
def _placing() -> native.NativeFunction:
    f, a, n = known_fields(), native.ARRAY, native.NUMBER
    return native_writer.compiled("placed", [a, n, a, a, n, a, a], _placed(f))


def identities(candidates: Sequence[Candidate]) -> Words | None:
    """Where candidates are; None where native loops do not know how these are made up."""
    ids = np.fromiter(map(id, candidates), np.int64, len(candidates))
    run, fit = _checking(), np.zeros(1, np.int64)
    if run is not None:
        run(ids, len(ids), fit)
    return ids if fit[0] else None


def counted(ids: Words) -> Words:
    """Nodes, inputs, params, outputs of each."""
    counts = np.empty(4 * len(ids), np.int64)
    _counting()(ids, len(ids), counts)
    return counts


def placed(ids: Words, sized: Words, index: Words, total: int) -> tuple[Words, Words]:
    """Places of all parts by an index's table, one after the other, and of each candidate whether some are not known."""
    places, missed = np.empty(total, np.int64), np.zeros(len(ids), np.int64)
    _placing()(ids, len(ids), sized, index, len(index) - 1, places, missed)
    return places, missed


# --- tilings -----------------------------------------------------------------------------------------------------------------


def _anchors(w: FunctionWriter, row: str) -> list[str]:
    """What a tile is chosen for, as words: zeros where there is nothing to cut, no window where nothing is convolved."""
    convolves = w.compares(w.load(row, COLUMN["convolution"], REAL), "ogt", 0.0)
    found = [w.load(row, COLUMN[n], REAL) for n in ANCHOR]
    for i, otherwise in ((3, 0.0), (4, 1.0), (5, 1.0)):
        found[i] = w.either(convolves, w.larger(found[i], 1.0), otherwise, REAL)
    some = w.compares(w.real("fmul", found[1], found[2]), "une", 0.0)
    return [w.line(f"bitcast double {w.either(some, v, 0.0, REAL)} to i64") for v in found]


def _cut(f: fields.Fields) -> Callable[[FunctionWriter], None]:
    def body(w: FunctionWriter) -> None:
        ids, count, table, index, mask, tilings, threads, anchors, missed = w.args
        cut = len(NAMES) - len(TILING)
        with w.each(count) as i:
            core = w.load(w.load(ids, i), f.candidate.field["core"])
            row, own = w.plus(table, w.times(i, 8 * len(NAMES))), w.plus(anchors, w.times(i, 8 * len(ANCHOR)))
            tiling, library = w.variable(0), w.holds(core, "eq", id(None))
            with w.when(w.line(f"xor i1 {library}, true")):
                key = _anchors(w, row)
                for k, word in enumerate(key):
                    w.store(word, own, k)
                place, first = _slot(w, [core, *key], index, mask)
                tiling.put(w.load(place, 1 + len(ANCHOR)))
                with w.when(w.holds(first, "eq", 0)):
                    w.store(1, missed, i)
            told = w.plus(tilings, w.times(tiling.value, 8 * CUT))
            for k in range(CUT):
                w.store(w.load(told, k), row, cut + k)
            w.store(w.load(threads, i), row, len(NAMES) - 2)
            w.store(w.line(f"uitofp i1 {library} to double"), row, len(NAMES) - 1, REAL)

    return body


@once
def _cutting() -> native.NativeFunction:
    f, a, n = known_fields(), native.ARRAY, native.NUMBER
    return native_writer.compiled("cut", [a, n, a, a, n, a, a, a, a], _cut(f))


def cut(ids: Words, table: Matrix, index: Words, tilings: Matrix, threads: Matrix) -> tuple[Matrix, Words]:
    """Fill the columns of how candidates are cut; `index` is no newer than `tilings`. Their anchors, and which are not known."""
    if tilings.shape[1] != CUT or table.shape[1] != len(NAMES):
        raise InternalError(f"tilings of {tilings.shape[1]} columns for rows of {table.shape[1]}")
    anchors, missed = np.empty((len(ids), len(ANCHOR))), np.zeros(len(ids), np.int64)
    _cutting()(ids, len(ids), table, index, len(index) - 1, tilings, threads, anchors, missed)
    return anchors, missed
