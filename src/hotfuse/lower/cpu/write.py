"""From a plan to statements: loops over rows, phases over columns, vectors with their tails.

A loop that vectors run along is written in up to three parts: several vectors at once, single vectors, and a last one of which
only some lanes exist. Values that do not change inside a loop are computed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hotfuse.analysis.vector_loops import rest_vector, step_vectors, whole_turns
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Value
from hotfuse.lower.common.algebra import add, at_most, mul, sub
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, tensor_type
from hotfuse.lower.common.positions import Coord, Position, counters_of
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.common.value_needs import trace
from hotfuse.lower.cpu import folds
from hotfuse.lower.cpu.loop_nest import FoldPlan, NestPhase, NestPlan
from hotfuse.tile.program import LoopKind, Tile

_CHUNK = 16384
"""Elements of a flat loop that one thread takes at a time."""

RUNNING = 0
Carried = dict[int, list[Tile]]
"""Accumulators by the width of the vectors that they belong to; under `RUNNING`, the running sums so far."""


@dataclass(frozen=True, slots=True)
class LoopStretch:
    """A stretch of a loop: elements per step, from, to, and whether the last step may have fewer."""

    width: int
    start: Dim
    stop: Dim
    partial: bool


def parts(start: Dim, stop: Dim, widths: Sequence[int]) -> list[LoopStretch]:
    """A stretch cut into steps of these widths, widest first, and a rest."""
    found: list[LoopStretch] = []
    at = start
    for width in dict.fromkeys(widths):
        left = sub(stop, at)
        if isinstance(left, int):
            if left < width:
                continue
            end = add(at, int(whole_turns(left, width)) * width)
        else:
            end = add(at, expr("*", expr("//", left, width), width))
        found.append(LoopStretch(width, at, end, partial=False))
        at = end
    left = sub(stop, at)
    if isinstance(left, int):
        if left > 0:
            if (width := int(rest_vector(left))) < left:
                raise InternalError(f"a rest of {left} elements", because=f"steps of {widths} leave more than a vector")
            found.append(LoopStretch(width, at, stop, left != width))
    elif widths[-1] > 1:
        found.append(LoopStretch(widths[-1], at, stop, partial=True))
    return found


class NestWriter:
    """Writes one nest."""

    def __init__(self, memory: KernelBuffers, definitions: Definitions, plan: NestPlan) -> None:
        self.plan, self.memory, self.b = plan, memory, memory.builder
        self.at = Evaluator(memory, definitions.graph, plan.space, plan.merged, definitions)
        self.row_vector = any(k in plan.rows for k in plan.vector)
        self.reused: dict[str, tuple[str, Position]] = {}
        """Outputs that hold something else before they get their own elements."""

    def write(self) -> None:
        """The whole nest."""
        leaders = [k for k in self.plan.rows if k not in self.plan.merged]
        last = [k for k in leaders if k == self.plan.turned] + [k for k in leaders if k in self.plan.vector]
        order = [k for k in leaders if k not in last] + last
        self.hoist()
        self.rows(order, outermost=True)

    # -- rows

    def extent(self, leader: int) -> Dim:
        """How far a loop runs."""
        space = self.plan.space
        return mul(space.extents[leader], *(space.extents[k] for k, to in self.plan.merged.items() if to == leader))

    def segments(self, leader: int) -> list[tuple[int, Dim, Dim]]:
        """A loop's stretches between its cuts."""
        space, extent = self.plan.space, self.extent(leader)
        limits: list[Dim] = [0]
        for cut in space.cuts[leader]:  # a cut may lie outside: then one of the stretches beside it is empty
            cut = cut if at_most(cut, extent, space.positive) else expr("min", cut, extent)
            limits.append(cut if at_most(0, cut, space.positive) else expr("max", cut, 0))
        limits.append(extent)
        return [(i, lo, hi) for i, (lo, hi) in enumerate(pairwise(limits))]

    def widths(self, *, heavy: bool) -> list[int]:
        """Elements per step along a counter with a tile axis."""
        lanes = self.plan.lanes
        return [lanes] if self.plan.turned is not None else [lanes * step_vectors(heavy=heavy), lanes]

    def rows(self, order: Sequence[int], *, outermost: bool = False) -> None:
        """The loops over rows from here on."""
        if not order:
            self.row()
            return
        leader, rest = order[0], order[1:]
        tiled = leader in self.plan.vector or leader == self.plan.turned
        for segment, lo, hi in self.segments(leader):
            if not tiled:
                kind = LoopKind.PARALLEL if outermost else LoopKind.SERIAL
                with self.b.loop(f"i{leader}", lo, hi, 1, kind) as loop, self.at.loops({leader: loop.var}, None, {leader: segment}):
                    self.hoist()
                    self.rows(rest)
            elif outermost:
                self.in_chunks(leader, lo, hi, lambda a, z, s=segment: self.row_parts(leader, s, a, z, rest))
            else:
                self.row_parts(leader, segment, lo, hi, rest)

    def in_chunks(self, leader: int, lo: Dim, hi: Dim, body: Callable[[Dim, Dim], None]) -> None:
        """A flat loop shared among threads, unless it is short for sure."""
        length = sub(hi, lo)
        chunk = _CHUNK // 16 if self.plan.phases or self.plan.turned is not None else _CHUNK
        if isinstance(length, int) and length <= chunk:
            body(lo, hi)
            return
        with self.b.loop(f"c{leader}", lo, hi, chunk, LoopKind.PARALLEL) as loop:
            body(loop.var, expr("min", add(loop.var, chunk), hi))

    def row_parts(self, leader: int, segment: int, lo: Dim, hi: Dim, rest: Sequence[int]) -> None:
        """A loop over rows that has a tile axis."""
        for part in parts(lo, hi, self.widths(heavy=self.plan.heavy)):
            with self.b.loop(f"v{leader}", part.start, part.stop, part.width) as loop:
                valid = sub(part.stop, loop.var) if part.partial else None
                along = (*self.at.axes, TileAxis(leader, part.width, valid))
                with self.at.loops({leader: loop.var}, along, {leader: segment}):
                    if not rest:  # tiles made before all axes are there would not fit those made inside
                        self.hoist()
                    self.rows(rest)

    def hoist(self, more: Sequence[tuple[Value, Position]] = ()) -> None:
        """Compute what the loops inside need and do not change."""
        wanted = list(more) or [*self.goals(), *((f.input, f.at) for f in self.needed())]
        open_ = {*self.at.at, *(k for k, to in self.plan.merged.items() if to in self.at.at)}
        space = self.plan.space
        found = trace(self.at.definitions, space, wanted, stop=self.at.stored, running=self.at.running, undecided=False)
        unknown = {key for key in (*found.folds, *found.scans) if self.at.known_key(key) is None}
        for key, value in found.computed.items():
            if counters_of(key[1]) <= open_ and not self._needs(value, key[1], unknown):
                self.at.tile(value, key[1])
        for p in found.picks:
            if counters_of(p.index.position) <= open_ and not self._needs(p.index.value, p.index.position, unknown):
                self.at.pick(p)

    def _needs(self, value: Value, position: Position, unknown: set[tuple[str, Position]]) -> bool:
        """Whether a reduction or running sum that has not been computed yet is below a value."""
        if not unknown:
            return False
        here = [(value, position)]
        below = trace(self.at.definitions, self.plan.space, here, stop=self.at.stored, running=self.at.running)
        return any(key in unknown for key in (*below.folds, *below.scans))

    # -- one row (or a vector of rows)

    def goals(self) -> list[tuple[Value, Position]]:
        """Every output and its place."""
        both = (*self.plan.row_goals, *(g for p in self.plan.phases for g in p.goals))
        return [(g.value, g.position) for g in both]

    def needed(self) -> list[FoldPlan]:
        """The reductions that the running segments' outputs depend on: beside a pad, or in another part of a cat, there
        is nothing to reduce."""
        plans = {(f.out.name, f.position): f for p in self.plan.phases for f in p.folds}
        if not any(self.plan.space.cuts):
            return list(plans.values())
        found: dict[tuple[str, Position], FoldPlan] = {}
        wanted = self.goals()
        while wanted:
            reach = trace(self.at.definitions, self.plan.space, wanted, running=self.at.running)
            new = [key for key in reach.folds if key not in found]
            found.update((key, plans[key]) for key in new)
            wanted = [(plans[key].input, plans[key].at) for key in new]
        return list(found.values())

    def row(self) -> None:
        """Phases, then what is stored once per row."""
        needed = self.needed()
        for phase in self.plan.phases:
            folds_here = [f for f in phase.folds if f in needed]
            if len(folds_here) == len(phase.folds):
                self.phase(phase)
            elif folds_here or phase.goals:
                self.phase(replace(phase, folds=folds_here, kept=[]))
        for g in self.plan.row_goals:
            self.at.store(g.value, g.position, self.at.tile(g.value, g.position))

    def phase(self, phase: NestPhase) -> None:
        """One run over the columns."""
        leaders = [k for k in phase.columns if k not in self.plan.merged]
        vector = next((k for k in leaders if k in self.plan.vector), None)
        if vector is not None:
            leaders = [k for k in leaders if k != vector] + [vector]
        self.hoist(phase.wanted)
        kept = self.places(phase)
        carried = self.first(phase, vector)
        if phase.scans:
            carried[RUNNING] = folds.running(self.b, phase.scans, [a.extent for a in self.at.axes])
        carried = self.columns(phase, leaders, vector, carried, kept)
        for n, fold in enumerate(phase.folds):
            self.at.give(fold.out, fold.position, self.finish(phase, fold, n, carried))
        for (value, position), (place, where) in kept.items():
            self.at.keep(value, position, place, where)

    def places(self, phase: NestPhase) -> dict[tuple[Value, Position], tuple[BufferView, Position]]:
        """Where this phase stores what later ones want: the output it is, or a scratch row."""
        found: dict[tuple[Value, Position], tuple[BufferView, Position]] = {}
        outputs = {(g.value.name, g.position): g for g in phase.goals}
        for value, position in phase.kept:
            if (value.name, position) in outputs:
                found[value, position] = (self.memory.output(value), position)
                continue
            if (reused := self.overwritten(phase, value, position)) is not None:
                found[value, position] = (reused, position)
                continue
            if self.row_vector:
                continue
            size: Dim = 1
            terms: list[tuple[int, Dim]] = []
            for k in reversed(phase.columns):
                terms.append((k, size))
                size = mul(size, self.plan.space.extents[k])
            buffer = self.b.scratch(f"kept.{value.name}", tensor_type(value).dtype, (size,))
            found[value, position] = (BufferView(buffer, (1,), flat=True), (Coord(0, tuple(sorted(terms))),))
        return found

    def overwritten(self, phase: NestPhase, value: Value, position: Position) -> BufferView | None:
        """An output that a later phase over the same columns stores at the same places: until then, it holds what is kept."""
        if any(self.plan.space.cuts):
            return None
        key = (value.name, position)
        later = self.plan.phases[self.plan.phases.index(phase) + 1:]
        for g in (g for p in later if p.columns == phase.columns for g in p.goals):
            same = g.position == position and tensor_type(g.value).dtype is tensor_type(value).dtype
            if same and self.reused.get(g.value.name, key) == key:
                self.reused[g.value.name] = key
                return self.memory.output(g.value)
        return None

    def first(self, phase: NestPhase, vector: int | None) -> Carried:
        """Accumulators before the first column, per width of vectors that will be used."""
        if not phase.folds:
            return {}
        widths = {1: [a.extent for a in self.at.axes]}
        if vector is not None:
            used = [p.width for _, lo, hi in self.segments(vector) for p in parts(lo, hi, self.widths(heavy=phase.heavy))]
            widths = {w: [w] for w in dict.fromkeys(used)} or {1: []}  # a dim of extent 0 has no parts
        return {w: [t for f in phase.folds for t in folds.start(self.b, f, shape)] for w, shape in widths.items()}

    def columns(
        self, phase: NestPhase, order: Sequence[int], vector: int | None, carried: Carried,
        kept: Mapping[tuple[Value, Position], tuple[BufferView, Position]],
    ) -> Carried:  # fmt: skip
        """The loops over columns from here on; gives the accumulators after them."""
        if not order:
            return self.column(phase, carried, 1, None, kept)
        leader, rest = order[0], order[1:]
        for segment, lo, hi in self.segments(leader):
            if leader == vector:
                for part in parts(lo, hi, self.widths(heavy=phase.heavy)):
                    carried = self.column_part(phase, leader, segment, part, carried, kept)
                continue
            flat = [t for tiles in carried.values() for t in tiles]
            with (
                self.b.loop(f"k{leader}", lo, hi, carry=flat) as loop,
                self.at.loops({leader: loop.var}, None, {leader: segment}),
            ):
                self.hoist(phase.wanted)
                inside = self.columns(phase, rest, vector, _like(carried, loop.carried), kept)
                loop.yields(*(t for tiles in inside.values() for t in tiles))
            carried = _like(carried, loop.outs)
        return carried

    def column_part(
        self, phase: NestPhase, leader: int, segment: int, part: LoopStretch, carried: Carried,
        kept: Mapping[tuple[Value, Position], tuple[BufferView, Position]],
    ) -> Carried:  # fmt: skip
        """A stretch of the loop that vectors run along."""
        mine, sums = carried.get(part.width, []), carried.get(RUNNING, [])
        with self.b.loop(f"k{leader}", part.start, part.stop, part.width, carry=[*mine, *sums]) as loop:
            valid = sub(part.stop, loop.var) if part.partial else None
            with self.at.loops({leader: loop.var}, (TileAxis(leader, part.width, valid),), {leader: segment}):
                present = None
                if valid is not None and (phase.folds or phase.scans):
                    present = self.b.map("lt", self.b.iota(0, (part.width,), 0), self.b.index(valid))
                before = {part.width: list(loop.carried[: len(mine)]), RUNNING: list(loop.carried[len(mine):])}
                inside = self.column(phase, before, part.width, present, kept)
                loop.yields(*inside.get(part.width, []), *inside.get(RUNNING, []))
        outs = {part.width: list(loop.outs[: len(mine)]), RUNNING: list(loop.outs[len(mine):])}
        return carried | {w: tiles for w, tiles in outs.items() if tiles}

    def column(
        self, phase: NestPhase, carried: Carried, width: int, present: Tile | None,
        kept: Mapping[tuple[Value, Position], tuple[BufferView, Position]],
    ) -> Carried:  # fmt: skip
        """What happens at one place of the columns."""
        held = list(carried.get(width, []))
        new: list[Tile] = []
        sums: list[Tile] = []
        for scan, before in zip(phase.scans, carried.get(RUNNING, []), strict=True):
            here = self.exists(phase, scan.node.outs[0], scan.position)
            sums.append(folds.scan(self.at, scan, before, present, across=not self.row_vector) if here else before)
        for fold in phase.folds:
            count = 2 if fold.function.startswith("arg") else 1
            mine, held = held[:count], held[count:]
            new += folds.step(self.at, fold, mine, present)
        goals = [(g, self.at.tile(g.value, g.position)) for g in phase.goals]  # all, before one is stored over what is kept
        stored = {(g.value.name, g.position) for g in phase.goals}
        aside = [
            (value, where, self.at.tile(value, position), place)
            for (value, position), (place, where) in kept.items()
            if (value.name, position) not in stored and self.exists(phase, value, position)
        ]
        for g, tile in goals:
            self.at.store(g.value, g.position, tile)
        for value, where, tile, place in aside:
            self.at.store(value, where, tile, place)
        return {w: tiles for w, tiles in ((width, new), (RUNNING, sums)) if tiles}

    def exists(self, phase: NestPhase, value: Value, position: Position) -> bool:
        """Whether a value is part of what the running segments compute: beside a pad, it is not even there."""
        if not any(self.plan.space.cuts):
            return True
        reach = trace(self.at.definitions, self.plan.space, phase.wanted, running=self.at.running)
        return (value.name, position) in reach.computed or (value.name, position) in reach.scans

    def finish(self, phase: NestPhase, fold: FoldPlan, n: int, carried: Carried) -> Tile:
        """A reduction's result from the accumulators of every width."""
        counts = [2 if f.function.startswith("arg") else 1 for f in phase.folds]
        skip = sum(counts[:n])
        total: list[Tile] | None = None
        for tiles in (t for w, t in carried.items() if w != RUNNING):
            mine = tiles[skip : skip + counts[n]]
            one = mine if self.at.axes else folds.across(self.b, fold, mine)
            total = one if total is None else folds.together(self.b, fold, total, one)
        assert total is not None
        return folds.result(self.at, fold, total)


def _like(carried: Carried, tiles: Sequence[Tile]) -> Carried:
    """The tiles in the same arrangement."""
    rest = iter(tiles)
    return {w: [next(rest) for _ in old] for w, old in carried.items()}
