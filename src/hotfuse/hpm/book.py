"""Rows of candidates, for a whole batch at once.

Rows of nodes and bytes of values are kept: candidates of one graph share their nodes, so a new candidate costs look-ups, and a
batch a few sums over tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hotfuse.analysis.cost import value_bytes
from hotfuse.hpm import again
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
_NODE, _WAY = len(SUMS) + len(MAXIMA), len(SUMS) + len(MAXIMA) + len(EDGES)
_BROADCAST = 0.5
"""An input of less than this part of the largest tensor is read again and again."""
_HEART = [COLUMN[n] for n in ("rows", "columns", "depth", "window", "stride", "groups")]
_NO_WINDOW = np.array([0, 1, 1])
_COMPUTED = [SUMS.index(n) for n in ("light", "divide", "function", "exp", "sigmoid", "tanh", "erf", "root", "special")]
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

    __slots__ = ("env", "kept", "nodes", "values")

    def __init__(self, env: Mapping[str, int]) -> None:
        self.env = env
        self.nodes: dict[int, int] = {}
        self.values: dict[int, int] = {}
        self.kept: list[Node | Value] = []


class Book:
    """Rows of nodes and values, kept; one for each machine's core and tiler."""

    def __init__(self, tiler: Tiler) -> None:
        self._tiler = tiler
        self._clear()

    def _clear(self) -> None:
        self._sized: dict[tuple[tuple[str, int], ...], _Sized] = {}
        self._nodes = _Table(_NODE + 2)
        """A node's row, its kind for what is computed again, its elements."""
        self._values = _Table(3)
        """Bytes, whether strides are odd, bytes of an element."""
        self._like: dict[Any, int] = {}
        self._cores: dict[int, Core] = {}
        """Kept alive: tiles are known by their core's identity."""
        self._tiles: dict[tuple[int, ...], tuple[float, ...]] = {}

    def rows(self, candidates: Sequence[Candidate]) -> Matrix:
        """One row each; raises Unknown where a candidate's work depends on data."""
        table = np.zeros((len(candidates), len(NAMES)))
        if not len(candidates):
            return table
        if max(self._nodes.count, self._values.count, len(self._tiles)) > MAX_KEPT:
            self._clear()
        nodes: list[int] = []
        ends: list[int] = []
        read: list[int] = []
        reads: list[int] = []
        const: list[int] = []
        consts: list[int] = []
        made: list[int] = []
        mades: list[int] = []
        sized, last = self._at(candidates[0].sizes), candidates[0].sizes
        for c in candidates:
            if c.sizes is not last:
                sized, last = self._at(c.sizes), c.sizes
            graph, values = c.graph, sized.values
            try:
                nodes += map(sized.nodes.__getitem__, map(id, graph.nodes))
                read += [values[id(v)] for v in graph.inputs]
                const += [values[id(p.value)] for p in graph.params]
                made += [values[id(v)] for v in graph.outputs]
            except KeyError:  # something new, or an output that is no value
                del nodes[ends[-1] if ends else 0 :], read[reads[-1] if reads else 0 :]
                del const[consts[-1] if consts else 0 :], made[mades[-1] if mades else 0 :]
                nodes += [self._node(sized, n) for n in graph.nodes]
                read += [self._value(sized, v) for v in graph.inputs]
                const += [self._value(sized, p.value) for p in graph.params]
                made += [self._value(sized, v) for v in output_values(graph)]
            ends.append(len(nodes))
            reads.append(len(read))
            consts.append(len(const))
            mades.append(len(made))
        starts = [0, *ends[:-1]]
        found = self._nodes.rows[nodes]
        table[:, : len(SUMS)] = np.add.reduceat(found[:, : len(SUMS)], starts)
        table[:, len(SUMS) : _NODE] = np.maximum.reduceat(found[:, len(SUMS) : _NODE], starts)
        self._edges(table, (read, reads), (const, consts), (made, mades))
        self._ways(table, candidates)
        _again(table, candidates, found, starts, ends)
        _less(table)
        return table

    # --- parts of rows -----------------------------------------------------------------------------------------------------

    def _edges(self, table: Matrix, *groups: tuple[list[int], list[int]]) -> None:
        """Bytes that enter and leave, how many large streams and small inputs there are."""
        n = len(table)
        (read, reads), (const, consts), (made, mades) = groups
        every = self._values.rows[[*read, *const, *made]]
        size = every[:, 0]
        of_read = np.repeat(np.arange(n), np.diff(reads, prepend=0))
        of_const = np.repeat(np.arange(n), np.diff(consts, prepend=0))
        of_made = np.repeat(np.arange(n), np.diff(mades, prepend=0))
        inputs, outputs = every[: len(read)], every[len(read) + len(const) :]
        written = np.bincount(of_made, outputs[:, 0], n)
        most = written.copy()
        np.maximum.at(most, of_read, inputs[:, 0])
        large = np.bincount(of_read, inputs[:, 0] >= _BROADCAST * most[of_read], n)
        each = np.full(n, 4.0)
        each[of_made] = outputs[:, 2]
        table[:, _NODE:_WAY] = np.array([
            np.bincount(of_read, inputs[:, 0], n), np.bincount(of_const, size[len(read) : len(read) + len(const)], n), written,
            large + 1, np.bincount(of_read, minlength=n) - large, np.bincount(of_read, inputs[:, 1], n), each,
        ]).T  # fmt: skip

    def _ways(self, table: Matrix, candidates: Sequence[Candidate]) -> None:
        heart = table[:, _HEART].astype(np.int64)
        heart[:, 3:] = np.where(table[:, COLUMN["convolution"], None] > 0, np.maximum(heart[:, 3:], 1), _NO_WINDOW)
        tiles = self._tiles
        ways: list[tuple[float, ...]] = []
        for c, *own in zip(candidates, *heart.T.tolist(), strict=True):
            core = c.core
            ways.append(_LIBRARY if core is None else tiles.get((id(core), *own)) or self._tiled(core, own))
        table[:, _WAY:-2] = ways
        table[:, -2] = [c.threads for c in candidates]
        table[:, -1] = [c.core is None for c in candidates]

    def _tiled(self, core: Core, heart: Sequence[int]) -> tuple[float, ...]:
        t = self._tiler(core, *heart) if heart[1] and heart[2] else NO_TILE
        self._cores[id(core)] = core
        found = self._tiles[id(core), *heart] = (
            float(core.lanes), float(core.registers), float(core.l2), float(t.rows), float(t.vectors), float(t.sets), t.padding,
            float(t.group_rows), t.products,
        )  # fmt: skip
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
        at = sized.nodes.get(id(node))
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
        sized.nodes[id(node)] = at
        sized.kept.append(node)
        return at

    def _value(self, sized: _Sized, v: object) -> int:
        assert isinstance(v, Value)
        at = sized.values.get(id(v))
        if at is None:
            size = value_bytes(v, sized.env)
            if size is None:
                raise Unknown(f"the size of %{v.name} depends on data")
            t = v.type
            own = (t.layout.strided, bits(t.dtype) / 8) if isinstance(t, TensorType) else (0, 4.0)
            at = sized.values[id(v)] = self._values.add([size, *own])
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
    table: Matrix, candidates: Sequence[Candidate], found: Matrix, starts: Sequence[int], ends: Sequence[int]
) -> None:
    """What a kernel computes several times counts so often: rare, so only graphs in which it may be are looked at."""
    own = table[:, COLUMN["library"]] == 0
    kinds, elements = found[:, _NODE], found[:, _NODE + 1]
    largest = np.where(own & (table[:, COLUMN["mma"]] == 0), table[:, COLUMN["elements"]], 0.0)
    smaller = (kinds == again.POINTWISE) & (elements < np.repeat(largest, np.diff(ends, prepend=0)))
    maybe = np.logical_or.reduceat(smaller, starts)
    maybe |= own & (table[:, COLUMN["product"]] > 0) & (kinds[starts] != again.PRODUCT)
    for i in np.flatnonzero(maybe).tolist():
        nodes, row = slice(starts[i], ends[i]), table[i]
        panels = np.ceil(row[COLUMN["columns"]] / (row[COLUMN["tile_vectors"]] * max(row[COLUMN["lanes"]], 1.0)))
        often = again.times(
            candidates[i].graph, kinds[nodes].tolist(), elements[nodes].tolist(), max(1.0, float(panels))
        )
        row[_COMPUTED] = np.array(often) @ found[nodes][:, _COMPUTED]


def _less(table: Matrix) -> None:
    """Of tables that are only looked into, no more than what is read enters: weights first, then inputs."""
    skipped = table[:, COLUMN["skipped"]]
    if skipped.any():
        const, taken = table[:, COLUMN["bytes_const"]], table[:, COLUMN["bytes_in"]]
        of_const = np.minimum(skipped, const)
        table[:, COLUMN["bytes_const"]] = const - of_const
        table[:, COLUMN["bytes_in"]] = np.maximum(taken - (skipped - of_const), 0)
