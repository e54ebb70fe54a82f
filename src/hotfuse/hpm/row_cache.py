"""Rows of candidates, for a whole batch at once.

Rows of nodes and bytes of values are kept: candidates of one graph share their nodes, so a new candidate costs look-ups, and a
batch a few sums over tables. Native loops look up and add (`hpm.compiled.row_lookup`, `hpm.compiled.row_sums`,
`hpm.compiled.recompute_counts`); what they do not find is learned in Python, and then asked for again.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from hotfuse.analysis.cost import value_bytes
from hotfuse.hpm import recompute_factor
from hotfuse.hpm.compiled import recompute_counts, row_lookup, row_sums
from hotfuse.hpm.compiled.row_lookup import Words
from hotfuse.hpm.work import (
    COLUMN,
    NAMES,
    NO_TILE,
    Candidate,
    CoreShape,
    Matrix,
    Tiler,
    UnknownWork,
    node_row,
)
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Node, Param, Value, output_values
from hotfuse.ir.types import TensorType, bits
from hotfuse.ops.table import Access, lookup

MAX_KEPT = 20_000
"""Nodes and values whose rows are kept; more of them begin anew."""
_COMPUTED = np.array(recompute_counts.COMPUTED)
_SIZES, _THREADS = attrgetter("sizes"), attrgetter("threads")
Ids = Words | None
"""Where candidates are; None where native loops cannot read them."""
_LIBRARY = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)


class _Table:
    """Rows of numbers, each with a place of its own; doubles when it is full."""

    def __init__(self, width: int) -> None:
        self.rows, self.count = np.zeros((256, width)), 0

    def add(self, row: Sequence[float]) -> int:
        if self.count == len(self.rows):
            self.rows = np.vstack([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = row
        self.count += 1
        return self.count - 1


class _Sized:
    """What is known at some sizes, by its number: places of nodes and values by identity, which `kept` keeps alive."""

    __slots__ = ("env", "kept", "number", "places")

    def __init__(self, env: Mapping[str, int], number: int) -> None:
        self.env, self.number = env, number
        self.places: dict[int, int] = {}
        self.kept: list[Node | Value | Param] = []


class RowCache:
    """Rows of nodes and values, kept; one for each machine's core and tiler."""

    def __init__(self, tiler: Tiler) -> None:
        self._tiler = tiler
        self._turn = threading.Lock()
        """Native loops read tables by places that were looked up before: nobody may clear them between."""
        self._clear()

    def _clear(self) -> None:
        self._sized: dict[tuple[tuple[str, int], ...], _Sized] = {}
        self._numbers: dict[tuple[tuple[str, int], ...], int] = {}
        """The same, as native loops know them."""
        self._nodes = _Table(row_sums.NODE_WIDTH)
        """A node's row, its kind for what is computed again, its elements."""
        self._values = _Table(row_sums.VALUE_WIDTH)
        """Bytes, whether strides are odd, bytes of an element."""
        self._index = row_lookup.KeyTable(2)
        """Places by identity and sizes."""
        self._new: list[tuple[int, int, int]] = []
        """What is to be put there."""
        self._like: dict[Any, int] = {}
        self._cores: dict[int, CoreShape] = {}
        """Kept alive: tiles are known by their core's identity."""
        self._tiles = row_lookup.KeyTable(1 + len(row_lookup.ANCHOR))
        """Places of tilings, by core and anchor."""
        self._tilings = _Table(len(_LIBRARY))
        """How candidates are cut; the first row stands for the library's kernels."""
        self._tilings.add(_LIBRARY)

    def rows(self, candidates: Sequence[Candidate]) -> Matrix:
        """One row each; raises UnknownWork where a candidate's work depends on data."""
        table = np.zeros((len(candidates), len(NAMES)))
        if not len(candidates):
            return table
        with self._turn:
            if max(self._nodes.count, self._values.count, self._tiles.count) > MAX_KEPT:
                self._clear()
            ids = row_lookup.identities(candidates)
            counts, places = self._placed(candidates, ids)
            told = row_sums.fill(table, places, counts, self._nodes.rows, self._values.rows)
            self._cut(table, candidates, ids)
            _again(table, candidates, ids, told, self._nodes.rows, counts[::4])
        _less(table)
        return table

    # --- parts of rows -----------------------------------------------------------------------------------------------------

    def _placed(self, candidates: Sequence[Candidate], ids: Ids) -> tuple[Words, Words]:
        """Nodes, inputs, params and outputs of each candidate, counted; and where all their rows are."""
        if ids is None:
            return self._asked(candidates)
        keys = [tuple(s.items()) for s in map(_SIZES, candidates)]
        try:
            sized = np.fromiter(map(self._numbers.__getitem__, keys), np.int64, len(keys))
        except KeyError:
            sized = np.array([self._at(c.sizes).number for c in candidates], np.int64)
        counts = row_lookup.counted(ids)
        total = int(counts.sum())
        places, missed = row_lookup.placed(ids, sized, self._index.table, total)
        if missed.any():
            for i in np.flatnonzero(missed).tolist():
                self._learned(candidates[i])
            self._known()
            places, missed = row_lookup.placed(ids, sized, self._index.table, total)
        return self._asked(candidates) if missed.any() else (counts, places)

    def _asked(self, candidates: Sequence[Candidate]) -> tuple[Words, Words]:
        """The same without native loops: for candidates that are objects of another kind, or have outputs that are no values."""
        places: list[int] = []
        counts: list[int] = []
        for c in candidates:
            own = self._learned(c)
            places += itertools.chain.from_iterable(own)
            counts += map(len, own)
        self._known()
        return np.array(counts, np.int64), np.array(places, np.int64)

    def _learned(self, c: Candidate) -> tuple[list[int], list[int], list[int], list[int]]:
        """Places of a candidate's nodes, inputs, params and outputs, which are known from now on."""
        sized = self._at(c.sizes)
        graph = c.graph
        return ([self._node(sized, n) for n in graph.nodes], [self._value(sized, v) for v in graph.inputs],
                [self._param(sized, p) for p in graph.params], [self._value(sized, v) for v in output_values(graph)])  # fmt: skip

    def _cut(self, table: Matrix, candidates: Sequence[Candidate], ids: Ids) -> None:
        threads = np.fromiter(map(_THREADS, candidates), np.float64, len(candidates))
        if ids is None:
            tiling = [self._tiled(c.core, h) if c.core is not None else 0
                   for c, h in zip(candidates, _anchors(table), strict=True)]  # fmt: skip
            table[:, COLUMN["lanes"] : COLUMN["threads"]] = self._tilings.rows[tiling]
            table[:, COLUMN["threads"]], table[:, COLUMN["library"]] = threads, [c.core is None for c in candidates]
            return
        anchors, missed = row_lookup.cut(ids, table, self._tiles.table, self._tilings.rows, threads)
        if missed.any():
            new: dict[tuple[int, ...], int] = {}
            for i in np.flatnonzero(missed).tolist():
                core, anchor = candidates[i].core, anchors[i]
                key = (id(core), *anchor.view(np.int64).tolist())
                if core is not None and key not in new:
                    new[key] = self._tiled(core, anchor)
            self._tiles.put(np.array([(*key, at) for key, at in new.items()], np.int64))
            row_lookup.cut(ids, table, self._tiles.table, self._tilings.rows, threads)

    def _tiled(self, core: CoreShape, anchor: Matrix) -> int:
        rows, columns, depth, window, stride, groups = (int(n) for n in anchor)
        t = self._tiler(core, rows, columns, depth, window, stride, groups) if columns else NO_TILE
        self._cores[id(core)] = core
        return self._tilings.add((
            float(core.lanes), float(core.registers), float(core.l2), float(t.rows), float(t.vectors), float(t.sets), t.padding,
            float(t.group_rows), t.products,
        ))  # fmt: skip

    # --- what is kept ------------------------------------------------------------------------------------------------------

    def _at(self, sizes: Mapping[str, int]) -> _Sized:
        key = tuple(sizes.items())
        found = self._sized.get(key)
        if found is None:
            found = self._sized[key] = _Sized(dict(sizes), len(self._sized))
            self._numbers[key] = found.number
        return found

    def _keep(self, sized: _Sized, part: Node | Value | Param, at: int) -> int:
        sized.places[id(part)] = at
        sized.kept.append(part)
        self._new.append((id(part), sized.number, at))
        return at

    def _known(self) -> None:
        """Native loops find what was learned from now on."""
        if self._new:
            self._index.put(np.array(self._new, np.int64))
            self._new.clear()

    def _node(self, sized: _Sized, node: Node) -> int:
        """A node's place in the table: that of an equal one at equal sizes, or a new one."""
        at = sized.places.get(id(node))
        if at is not None:
            return at
        env = sized.env
        tensors = tuple((v.type, *_shape(v, env)) for v in (*node.outs, *node.ins) if isinstance(v.type, TensorType))
        plain = tuple(a for a in node.args if isinstance(a, int | float | tuple) and not isinstance(a, Value))
        key = (node.op, node.attrs, tensors, plain)
        try:
            at = self._like.get(key)
        except TypeError:
            key = None
        if at is None:
            at = self._nodes.add([*node_row(node, env), *_computed(node, env)])
            if key is not None:
                self._like[key] = at
        return self._keep(sized, node, at)

    def _value(self, sized: _Sized, v: object) -> int:
        assert isinstance(v, Value)
        at = sized.places.get(id(v))
        if at is None:
            size = value_bytes(v, sized.env)
            if size is None:
                raise UnknownWork(f"the size of %{v.name} depends on data")
            t = v.type
            own = (t.layout.strided, bits(t.dtype) / 8) if isinstance(t, TensorType) else (0, 4.0)
            at = self._keep(sized, v, self._values.add([size, *own]))
        return at

    def _param(self, sized: _Sized, p: Param) -> int:
        at = sized.places.get(id(p))
        return at if at is not None else self._keep(sized, p, self._value(sized, p.value))


def _shape(v: Value, env: Mapping[str, int]) -> Iterable[int]:
    return (evaluate(d, env) for d in v.type.shape) if isinstance(v.type, TensorType) else ()


def _computed(node: Node, env: Mapping[str, int]) -> tuple[float, float]:
    """What kind of node it is for what is computed again, and its elements."""
    access = lookup(node.op).access
    shape = list(_shape(node.outs[0], env)) if node.outs else []
    along = bool(shape) and shape[-1] > 1
    other = _ALONG.get(access, recompute_factor.OTHER) if along else recompute_factor.OTHER
    kind = recompute_factor.PRODUCT if access is Access.CONTRACTION else other
    return float(kind), float(math.prod(shape))


_ALONG = {Access.POINTWISE: recompute_factor.POINTWISE, Access.MOVEMENT: recompute_factor.MOVED}


def _anchors(table: Matrix) -> Matrix:
    """What tiles are chosen for, as `row_lookup.cut` tells it."""
    anchor = table[:, [COLUMN[n] for n in row_lookup.ANCHOR]]
    np.maximum(anchor[:, 3:], 1.0, out=anchor[:, 3:])
    anchor[table[:, COLUMN["convolution"]] <= 0, 3:] = (0.0, 1.0, 1.0)
    anchor[anchor[:, 1] * anchor[:, 2] == 0] = 0.0  # nothing to cut
    return anchor


def _again(
    table: Matrix, candidates: Sequence[Candidate], ids: Ids, told: row_sums.CandidateColumns, nodes: Matrix, counts: Words
) -> None:
    """What a kernel computes several times counts so often: rare, so only graphs in which it may be are looked at."""
    left = range(len(candidates)) if ids is None else recompute_counts.again(ids, table, told, nodes).tolist()
    starts = counts.cumsum() - counts
    for i in left:
        row, own = table[i], slice(int(starts[i]), int(starts[i] + counts[i]))
        kinds, elements = told.kinds[own].tolist(), told.sizes[own].tolist()
        product = row[COLUMN["product"]] > 0 and kinds[0] != recompute_factor.PRODUCT
        if row[COLUMN["library"]] == 0 and (product or (told.smaller[i] > 0 and row[COLUMN["mma"]] == 0)):
            across = row[COLUMN["tile_vectors"]] * max(row[COLUMN["lanes"]], 1.0)
            often = recompute_factor.factors(
                candidates[i].graph, kinds, elements, max(math.ceil(row[COLUMN["columns"]] / across), 1.0)
            )
            row[_COMPUTED] = (nodes[told.places[own][:, None], _COMPUTED] * np.array(often)[:, None]).sum(0)


def _less(table: Matrix) -> None:
    """Count only what is read of tables that are looked up: skipped bytes come off the weights first, then off the inputs."""
    skipped = table[:, COLUMN["skipped"]]
    if skipped.any():
        const, taken = table[:, COLUMN["bytes_const"]], table[:, COLUMN["bytes_in"]]
        of_const = np.minimum(skipped, const)
        table[:, COLUMN["bytes_const"]] = const - of_const
        table[:, COLUMN["bytes_in"]] = np.maximum(taken - (skipped - of_const), 0)
