"""Rows of candidates, for a whole batch at once.

Rows of nodes and bytes of values are kept: candidates of one graph share their nodes, so a new candidate costs look-ups, and a
batch a few sums over tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.analysis.cost import value_bytes
from hotfuse.hpm import again, tally
from hotfuse.hpm.work import (
    COLUMN,
    EDGES,
    MAXIMA,
    NAMES,
    NO_TILE,
    SUMS,
    Candidate,
    Core,
    Matrix,
    Tiler,
    Unknown,
    node_row,
)
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Node, Value, output_values
from hotfuse.ir.types import TensorType, bits
from hotfuse.ops.table import Access, lookup

MAX_KEPT = 20_000
"""Nodes and values whose rows are kept; more of them begin anew."""
_WAY = len(SUMS) + len(MAXIMA) + len(EDGES)
_HEART = np.array([COLUMN[n] for n in ("rows", "columns", "depth", "window", "stride", "groups")])
_NO_WINDOW = np.array([0.0, 1.0, 1.0])
_COMPUTED = np.array(
    [SUMS.index(n) for n in ("light", "divide", "function", "exp", "sigmoid", "tanh", "erf", "root", "special")]
)
_VALUE = attrgetter("value")
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
    """What is known at some sizes: places of nodes and values by identity, which `kept` keeps alive."""

    __slots__ = ("env", "kept", "places")

    def __init__(self, env: Mapping[str, int]) -> None:
        self.env = env
        self.places: dict[int, int] = {}
        self.kept: list[Node | Value] = []


class Book:
    """Rows of nodes and values, kept; one for each machine's core and tiler."""

    def __init__(self, tiler: Tiler) -> None:
        self._tiler = tiler
        self._clear()

    def _clear(self) -> None:
        self._sized: dict[tuple[tuple[str, int], ...], _Sized] = {}
        self._nodes = _Table(tally.NODE_WIDTH)
        """A node's row, its kind for what is computed again, its elements."""
        self._values = _Table(tally.VALUE_WIDTH)
        """Bytes, whether strides are odd, bytes of an element."""
        self._like: dict[Any, int] = {}
        self._cores: dict[int, Core] = {}
        """Kept alive: tiles are known by their core's identity."""
        self._tiles: dict[tuple[int, bytes], int] = {}
        self._ways_table = _Table(len(_LIBRARY))
        """How candidates are cut; the first row stands for the library's kernels."""
        self._ways_table.add(_LIBRARY)

    def rows(self, candidates: Sequence[Candidate]) -> Matrix:
        """One row each; raises Unknown where a candidate's work depends on data."""
        table = np.zeros((len(candidates), len(NAMES)))
        if not len(candidates):
            return table
        if max(self._nodes.count, self._values.count, len(self._tiles)) > MAX_KEPT:
            self._clear()
        places: list[int] = []
        counts: list[int] = []
        sizes, sized = candidates[0].sizes, self._at(candidates[0].sizes)
        for c in candidates:
            if c.sizes is not sizes:
                sizes = c.sizes
                sized = self._at(sizes)
            graph = c.graph
            nodes, inputs, params, outputs = graph.nodes, graph.inputs, graph.params, graph.outputs
            try:
                everything = (*nodes, *inputs, *map(_VALUE, params), *outputs)
                places += list(map(sized.places.__getitem__, map(id, everything)))
            except KeyError:  # something new, or an output that is no value
                outputs = output_values(graph)
                places += [self._node(sized, n) for n in nodes]
                places += [self._value(sized, v) for v in (*inputs, *(p.value for p in params), *outputs)]
            counts += (len(nodes), len(inputs), len(params), len(outputs))
        each = np.fromiter(counts, np.int64, len(counts))
        place = np.fromiter(places, np.int64, len(places))
        told = tally.fill(table, place, each, self._nodes.rows, self._values.rows)
        self._ways(table, candidates)
        _again(table, candidates, told, self._nodes.rows, each[::4])
        _less(table)
        return table

    # --- parts of rows -----------------------------------------------------------------------------------------------------

    def _ways(self, table: Matrix, candidates: Sequence[Candidate]) -> None:
        heart = table[:, _HEART]
        np.maximum(heart[:, 3:], 1.0, out=heart[:, 3:])
        heart[table[:, COLUMN["convolution"]] <= 0, 3:] = _NO_WINDOW
        heart[heart[:, 1] * heart[:, 2] == 0] = 0.0  # nothing to cut
        raw, size, tiles = heart.tobytes(), heart.itemsize * len(_HEART), self._tiles
        ways: list[int] = []
        for at, c in enumerate(candidates):
            core, own = c.core, raw[at * size : (at + 1) * size]
            if core is None:
                ways.append(0)
            elif (known := tiles.get((id(core), own))) is not None:
                ways.append(known)
            else:
                ways.append(self._tiled(core, own))
        way = np.fromiter(ways, np.int64, len(ways))
        table[:, _WAY:-2] = self._ways_table.rows[way]
        table[:, -2] = [c.threads for c in candidates]
        table[:, -1] = way == 0

    def _tiled(self, core: Core, heart: bytes) -> int:
        rows, columns, depth, window, stride, groups = (int(n) for n in np.frombuffer(heart))
        t = self._tiler(core, rows, columns, depth, window, stride, groups) if columns else NO_TILE
        self._cores[id(core)] = core
        found = self._tiles[id(core), heart] = self._ways_table.add((
            float(core.lanes), float(core.registers), float(core.l2), float(t.rows), float(t.vectors), float(t.sets), t.padding,
            float(t.group_rows), t.products,
        ))  # fmt: skip
        return found

    # --- what is kept ------------------------------------------------------------------------------------------------------

    def _at(self, sizes: Mapping[str, int]) -> _Sized:
        key = tuple(sizes.items())
        found = self._sized.get(key)
        if found is None:
            found = self._sized[key] = _Sized(dict(sizes))
        return found

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
        sized.places[id(node)] = at
        sized.kept.append(node)
        return at

    def _value(self, sized: _Sized, v: object) -> int:
        assert isinstance(v, Value)
        at = sized.places.get(id(v))
        if at is None:
            size = value_bytes(v, sized.env)
            if size is None:
                raise Unknown(f"the size of %{v.name} depends on data")
            t = v.type
            own = (t.layout.strided, bits(t.dtype) / 8) if isinstance(t, TensorType) else (0, 4.0)
            at = sized.places[id(v)] = self._values.add([size, *own])
            sized.kept.append(v)
        return at


def _shape(v: Value, env: Mapping[str, int]) -> Iterable[int]:
    return (evaluate(d, env) for d in v.type.shape) if isinstance(v.type, TensorType) else ()


def _computed(node: Node, env: Mapping[str, int]) -> tuple[float, float]:
    """What kind of node it is for what is computed again, and its elements."""
    access = lookup(node.op).access
    shape = list(_shape(node.outs[0], env)) if node.outs else []
    along = bool(shape) and shape[-1] > 1
    kind = again.PRODUCT if access is Access.CONTRACTION else _ALONG.get(access, again.OTHER) if along else again.OTHER
    return float(kind), float(math.prod(shape))


_ALONG = {Access.POINTWISE: again.POINTWISE, Access.MOVEMENT: again.MOVED}


def _again(
    table: Matrix, candidates: Sequence[Candidate], told: tally.Told, nodes: Matrix, counts: npt.NDArray[np.int64]
) -> None:
    """What a kernel computes several times counts so often: rare, so only graphs in which it may be are looked at."""
    starts = counts.cumsum() - counts
    own = table[:, COLUMN["library"]] == 0
    maybe = (told.smaller > 0) & (table[:, COLUMN["mma"]] == 0)
    maybe |= (table[:, COLUMN["product"]] > 0) & (told.kinds[starts] != again.PRODUCT)
    maybe &= own
    some = np.flatnonzero(maybe)
    if not len(some):
        return
    across = table[some, COLUMN["tile_vectors"]] * np.maximum(table[some, COLUMN["lanes"]], 1.0)
    panels = np.maximum(np.ceil(table[some, COLUMN["columns"]] / across), 1.0)
    kinds, elements = told.kinds.tolist(), told.sizes.tolist()
    looked_at: list[int] = []
    often: list[float] = []
    begins: list[int] = []
    for i, first, wide in zip(some.tolist(), starts[some].tolist(), panels.tolist(), strict=True):
        graph = candidates[i].graph
        last = first + len(graph.nodes)
        begins.append(len(often))
        often += again.times(graph, kinds[first:last], elements[first:last], wide)
        looked_at += range(first, last)
    computed = nodes[told.places[looked_at][:, None], _COMPUTED] * np.array(often)[:, None]
    table[some[:, None], _COMPUTED] = np.add.reduceat(computed, begins)


def _less(table: Matrix) -> None:
    """Of tables that are only looked into, no more than what is read enters: weights first, then inputs."""
    skipped = table[:, COLUMN["skipped"]]
    if skipped.any():
        const, taken = table[:, COLUMN["bytes_const"]], table[:, COLUMN["bytes_in"]]
        of_const = np.minimum(skipped, const)
        table[:, COLUMN["bytes_const"]] = const - of_const
        table[:, COLUMN["bytes_in"]] = np.maximum(taken - (skipped - of_const), 0)
