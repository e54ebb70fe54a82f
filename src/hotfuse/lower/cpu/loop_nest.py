"""The loops of one nest: rows, the phases inside a row, what is kept between them, and where vectors run.

    for rows (parallel):
        phase 0: for columns: sum of x                       -> mean
        phase 1: for columns: sum of (x - mean)^2            -> variance      kept: x - mean
        phase 2: for columns: store (x - mean) * rstd * w

Counters that reductions' results depend on are rows; the rest are columns. Reductions at the same depth that run over the same
columns share a phase. Neighbouring counters become one loop where every access allows it. Vectors run along the counter that
most accesses walk in steps of one: a column (sums are finished across lanes) or a row (each lane is a row of its own).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import NoReturn

from hotfuse.analysis.vector_loops import KEPT_BYTES, vector_score
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType, bits
from hotfuse.lower.common.algebra import add, mul, normal, same
from hotfuse.lower.common.errors import CannotLower, NotInOneNest
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, tensor_type
from hotfuse.lower.common.positions import Coord, Position, Space, counters_of
from hotfuse.lower.common.steps import Definitions, Key
from hotfuse.lower.common.value_needs import ValueTrace, scanned_dim, trace
from hotfuse.lower.ops.views import shape_of


@dataclass(frozen=True, slots=True)
class Goal:
    """An output and where it lies in the loops."""

    value: Value
    position: Position


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """A reduction: its result's place in the row, its input's place in the columns."""

    node: Node
    position: Position
    input: Value
    at: Position
    columns: tuple[int, ...]
    depth: int

    @property
    def function(self) -> str:
        """sum, max, argmax, ..."""
        return self.node.op.rsplit(".", 1)[1]

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]

    @property
    def dims(self) -> tuple[int, ...]:
        """The reduced dims of the input."""
        dims = self.node.attr("dims")
        return tuple(int(d) for d in dims) if isinstance(dims, tuple) else ()  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """A running sum along the one column."""

    node: Node
    position: Position

    @property
    def function(self) -> str:
        """sum or prod."""
        return self.node.op.rsplit(".", 1)[1]


@dataclass(slots=True)
class NestPhase:
    """One run over the columns."""

    columns: tuple[int, ...]
    folds: list[FoldPlan]
    goals: list[Goal] = field(default_factory=list[Goal])
    kept: list[tuple[Value, Position]] = field(default_factory=list[tuple[Value, Position]])
    """What is stored for later phases."""
    scans: list[ScanPlan] = field(default_factory=list[ScanPlan])
    heavy: bool = False
    """Whether functions dominate, so that few vectors at once fill the registers."""

    @property
    def wanted(self) -> list[tuple[Value, Position]]:
        """Everything computed here."""
        return [(f.input, f.at) for f in self.folds] + [(g.value, g.position) for g in self.goals]


@dataclass(slots=True)
class NestPlan:
    """The loops of one nest."""

    space: Space
    rows: tuple[int, ...]
    phases: list[NestPhase]
    row_goals: list[Goal]
    merged: dict[int, int]
    """Counters that share a loop, with the innermost one, whose loop it is."""
    vector: frozenset[int]
    """The counters (leaders) that vectors run along: a row's, or one in each phase; empty for numbers one by one."""
    turned: int | None
    """A second counter with a tile axis: some accesses walk it in steps of one, others the vector's."""
    lanes: int
    """How many elements a vector of the widest element type holds."""
    heavy: bool
    """The same of what is computed for rows as vectors."""


def counter(k: int) -> Coord:
    """A counter itself."""
    return Coord(0, ((k, 1),))


class NestPlanner:
    """Plans one nest for one space; raises `Refine` when the space has to be finer."""

    def __init__(
        self, definitions: Definitions, memory: KernelBuffers, space: Space, extras: dict[tuple[str, ...], tuple[int, ...]]
    ) -> None:
        self.definitions, self.memory, self.space, self.extras = definitions, memory, space, extras
        self.folds: dict[Key, FoldPlan] = {}
        self.traces: list[ValueTrace] = []
        self.accesses: list[dict[int, Dim]] = []
        self.places: list[tuple[BufferView, Position]] = []

    def plan(self, goals: Sequence[Goal], rows: frozenset[int] | None, vector_bytes: int, *, scalar: bool) -> NestPlan:
        """`rows` are the counters of rows where the root says them; None: those that reductions' results depend on."""
        reach = self._traced([(g.value, g.position) for g in goals])
        own = [k for root in self.space.roots for k in root if not self._extra(k)]
        if rows is None:
            rows = frozenset(k for key in reach.folds for k in counters_of(key[1])) if reach.folds else frozenset(own)
            if not reach.folds and reach.scans:
                rows -= {self._along(node, key[1]) for key, node in reach.scans.items()}
        self.rows = tuple(k for k in own if k in rows and self.space.extents[k] != 1)
        self.columns = tuple(k for k in own if k not in rows and self.space.extents[k] != 1)
        for (_, position), node in reach.folds.items():
            self._fold(node, position)
        phases, row_goals = self._phases(goals)
        for phase in phases:
            self._scan(phase)
        for g in row_goals:
            found = trace(self.definitions, self.space, [(g.value, g.position)])
            for (_, position), node in found.scans.items():
                self._refuse(found, node, self._along(node, position), "a running sum is wanted once per row")
        self._keep(phases)
        self._gather_accesses(goals)
        classes = [self.rows, *dict.fromkeys(p.columns for p in phases)]
        apart = set[int]().union(*(t.apart for t in self.traces))
        for f in self.folds.values():
            if f.function.startswith("arg"):
                apart.update(f.columns)
        merged = self._merged(classes, apart)
        lanes = self._lanes(goals, vector_bytes)
        vector: frozenset[int] = frozenset() if scalar else self._vector(phases, merged, lanes)
        heavy = any(t.heavy for t in self.traces)
        turned = self._turned(vector, merged, phases, lanes)
        return NestPlan(self.space, self.rows, phases, row_goals, merged, vector, turned, lanes, heavy)

    def _extra(self, k: int) -> bool:
        return any(k in self.space.roots[r] for roots in self.extras.values() for r in roots)

    def _traced(self, wanted: Sequence[tuple[Value, Position]]) -> ValueTrace:
        found = trace(self.definitions, self.space, wanted)
        self.traces.append(found)
        return found

    # -- reductions

    def _fold(self, node: Node, position: Position) -> FoldPlan:
        key = (node.outs[0].name, position)
        if key in self.folds:
            return self.folds[key]
        if not counters_of(position) <= set(self.rows):
            because = f"{node.op} would run inside the loop of another reduction"
            raise NotInOneNest(node.outs[0], because, where=str(node.loc))
        (value,) = node.ins
        dims = node.attr("dims")
        shape = shape_of(value)
        reduced = tuple(int(d) for d in dims) if isinstance(dims, tuple) else ()  # type: ignore[arg-type]
        columns, coords = self._over(tuple(shape[d] for d in reduced))
        at = list(position)
        for d, c in zip(reduced, coords, strict=True):
            at[d] = c
        inner = self._traced([(value, tuple(at))])
        depth = 0
        for (_, where), other in inner.folds.items():
            depth = max(depth, self._fold(other, where).depth + 1)
        self.folds[key] = FoldPlan(node, position, value, tuple(at), columns, depth)
        return self.folds[key]

    def _along(self, node: Node, position: Position) -> int:
        """The counter that a running sum follows."""
        c = position[scanned_dim(node)]
        others = {k for i, o in enumerate(position) for k in counters_of((o,)) if i != scanned_dim(node)}
        if len(c.terms) != 1 or c.terms[0][1] != 1 or c.offset != 0 or c.terms[0][0] in others:
            if counters_of((c,)) or c.offset != 0:
                raise NotInOneNest(node.outs[0], "a running sum is wanted out of order")
            return -1  # a dim of extent 1
        return c.terms[0][0]

    def _scan(self, phase: NestPhase) -> None:
        found = trace(self.definitions, self.space, phase.wanted)
        for (_, position), node in found.scans.items():
            along = self._along(node, position)
            if (along,) != (phase.columns or (-1,)):
                self._refuse(found, node, along, "a running sum does not go along the only loop inside a row")
            if along >= 0 and not same(self.space.extents[along], shape_of(node.outs[0])[scanned_dim(node)]):
                raise NotInOneNest(node.outs[0], "a running sum is only a part of the loop that it goes along")
            phase.scans.append(ScanPlan(node, position))

    @staticmethod
    def _refuse(found: ValueTrace, node: Node, along: int, because: str) -> NoReturn:
        """Not in these loops: reductions for each of its places make rows of them, and come first; else the sum does itself."""
        rows = [f for (_, at), f in found.folds.items() if along in counters_of(at)]
        raise NotInOneNest((rows[0] if rows else node).outs[0], because)

    def _over(self, shape: tuple[Dim, ...]) -> tuple[tuple[int, ...], Position]:
        """The columns that run over these dims, and the places along them."""
        extents = tuple(self.space.extents[k] for k in self.columns)
        if self.columns and same(mul(*extents), mul(*shape)):
            return self.columns, self.space.reshaped(tuple(map(counter, self.columns)), extents, shape)
        key = tuple(str(normal(n)) for n in shape)
        if key not in self.extras:
            roots: list[int] = []
            for n in shape:
                self.space = self.space.with_root(n)
                roots.append(len(self.space.roots) - 1)
            self.extras[key] = tuple(roots)
        roots = list(self.extras[key])
        columns = tuple(k for r in roots for k in self.space.roots[r] if self.space.extents[k] != 1)
        return columns, tuple(self.space.root(r) for r in roots)

    def _phases(self, goals: Sequence[Goal]) -> tuple[list[NestPhase], list[Goal]]:
        grouped: dict[tuple[int, tuple[int, ...]], NestPhase] = {}
        for f in sorted(self.folds.values(), key=lambda f: f.depth):
            grouped.setdefault((f.depth, f.columns), NestPhase(f.columns, [])).folds.append(f)
        phases = list(grouped.values())
        row_goals: list[Goal] = []
        last = NestPhase(self.columns, [])
        for g in goals:
            used = counters_of(g.position)
            if used == frozenset(self.rows):
                row_goals.append(g)
            elif used == frozenset((*self.rows, *self.columns)):
                last.goals.append(g)
            else:
                raise CannotLower(f"%{g.value.name} would be stored more than once, or not wholly, by one nest of loops")
        return ([*phases, last] if last.goals else phases), row_goals

    # -- what is kept from one phase to the next

    def _keep(self, phases: list[NestPhase]) -> None:
        """Store what an earlier phase over the same columns computed, where computing it again would cost more."""
        available: dict[Key, tuple[Value, NestPhase]] = {}
        for n, phase in enumerate(phases):
            def stop(key: Key, phase: NestPhase = phase) -> bool:
                return key in available and available[key][1].columns == phase.columns

            found = trace(self.definitions, self.space, phase.wanted, stop=stop)
            columns = set(phase.columns)
            phase.heavy = any(columns & counters_of(at) for at in found.heavy)
            for key, value in found.stopped.items():
                made_in = available[key][1]
                if (value, key[1]) not in made_in.kept:
                    made_in.kept.append((value, key[1]))
            for key, value in found.computed.items():
                if n + 1 < len(phases) and self._worth_keeping(key, value, phase):
                    available[key] = (value, phase)
        for phase in phases:
            for g in list(phases[-1].goals):
                if phase is not phases[-1] and (g.value, g.position) in phase.kept:
                    phases[-1].goals.remove(g)
                    phase.goals.append(g)

    def _worth_keeping(self, key: Key, value: Value, phase: NestPhase) -> bool:
        if not set(phase.columns) & counters_of(key[1]):
            return False
        extents = [self.space.extents[k] for k in phase.columns]
        size = math.prod(n for n in extents if isinstance(n, int)) * bits(tensor_type(value).dtype) // 8
        below = trace(self.definitions, self.space, [(value, key[1])])
        wide = [v for (_, at), v in below.loads.items() if set(phase.columns) & counters_of(at)]
        converts = any(tensor_type(v).dtype in (DType.F16, DType.BF16) for v in wide)
        return size <= KEPT_BYTES and (bool(below.heavy) or len(wide) >= 2 or converts)

    # -- loops

    def _gather_accesses(self, goals: Sequence[Goal]) -> None:
        seen: set[Key] = set()
        for t in self.traces:
            for key, value in t.loads.items():
                if key not in seen:
                    seen.add(key)
                    self._access(self.memory.place(value), key[1])
        for g in goals:
            self._access(self.memory.output(g.value), g.position)

    def _access(self, place: BufferView, position: Position) -> None:
        self.places.append((place, position))
        walk: dict[int, Dim] = {}
        for c, s in zip(position, place.strides, strict=True):
            for k, f in c.terms:
                walk[k] = add(walk.get(k, 0), mul(f, s))
        self.accesses.append(walk)

    def _merged(self, classes: Sequence[tuple[int, ...]], apart: set[int]) -> dict[int, int]:
        merged: dict[int, int] = {}
        for order in dict.fromkeys(classes):
            for outer, inner in reversed(list(pairwise(order))):
                if self._joins(outer, inner, apart):
                    merged[outer] = merged.get(inner, inner)
        return merged

    def _joins(self, outer: int, inner: int, apart: set[int]) -> bool:
        """Whether one loop over both counters makes the same addresses."""
        if {outer, inner} & apart or self.space.cuts[outer] or self.space.cuts[inner]:
            return False
        for (place, _), walk in zip(self.places, self.accesses, strict=True):
            a, b = walk.get(outer, 0), walk.get(inner, 0)
            if (a != 0 or b != 0) and not (place.flat and same(a, mul(b, self.space.extents[inner]))):
                return False
        return True

    def extent(self, leader: int, merged: dict[int, int]) -> Dim:
        """How far a loop runs."""
        return mul(self.space.extents[leader], *(self.space.extents[k] for k, to in merged.items() if to == leader))

    def _lanes(self, goals: Sequence[Goal], vector_bytes: int) -> int:
        used = [v for t in self.traces for v in (*t.loads.values(), *t.computed.values())] + [g.value for g in goals]
        sizes = [bits(d) // 8 * (2 if d in (DType.F16, DType.BF16) else 1) for d in (tensor_type(v).dtype for v in used)]
        return max(vector_bytes // max(sizes), 1)

    def _score(self, leader: int, merged: dict[int, int], lanes: int) -> float:
        steps = [walk.get(leader, 0) for walk in self.accesses]
        walked = sum(step == 1 for step in steps)
        extent = self.extent(leader, merged)
        filled = min(1.0, extent / lanes) if isinstance(extent, int) else 1.0
        return vector_score(walked, sum(step != 0 for step in steps) - walked, filled)

    def _vector(self, phases: list[NestPhase], merged: dict[int, int], lanes: int) -> frozenset[int]:
        def best(order: tuple[int, ...]) -> tuple[float, int] | None:
            leaders = [k for k in order if k not in merged]
            scores = [(self._score(k, merged, lanes), i, k) for i, k in enumerate(leaders) if self._can_be_vector(k, merged)]
            return (max(scores)[0], max(scores)[2]) if scores else None

        row = best(self.rows)
        columns = {p.columns: best(p.columns) for p in phases}
        found = {k for b in columns.values() if b is not None for k in (b[1],)}
        top = max((b[0] for b in columns.values() if b is not None), default=-math.inf)
        if row is not None and (not found or row[0] > max(top, 0)):
            return frozenset({row[1]})
        return frozenset(found)

    def _can_be_vector(self, leader: int, merged: dict[int, int]) -> bool:
        """A counter inside a quotient, or along two dims of one strided tensor, stays a number."""
        group = {leader, *(k for k, to in merged.items() if to == leader)}
        for t in self.traces:
            for key in (*t.computed, *t.loads, *t.folds):
                if any(counters_of((Coord(c.offset),)) & group for c in key[1]):
                    return False
        return all(
            place.flat or sum(any(k in group for k, _ in c.terms) for c in position) <= 1 for place, position in self.places
        )

    def _turned(
        self, vector: frozenset[int], merged: dict[int, int], phases: list[NestPhase], lanes: int
    ) -> int | None:
        """For rows without phases: a counter that some access walks in steps of one while it jumps along the vector's."""
        if phases or len(vector) != 1:
            return None
        (along,) = vector
        points: dict[int, int] = {}
        for walk in self.accesses:
            if walk.get(along, 0) in (0, 1):
                continue
            for k, step in walk.items():
                if step == 1 and k not in merged and k != along and self._can_be_vector(k, merged):
                    extent = self.extent(k, merged)
                    if not isinstance(extent, int) or extent >= min(lanes, 4):
                        points[k] = points.get(k, 0) + 1
        return max(points, key=lambda k: points[k]) if points else None
