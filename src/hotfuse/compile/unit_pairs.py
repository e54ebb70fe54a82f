"""Two units as one: which neighbours are worth a common kernel, and what happens when it won or lost.

Neighbours that both have kernels are judged by the fusion criteria on what those kernels really used, and their common kernel
must beat the two. Neighbours that both still wait, such as what is left of a unit that was cut and the one behind it, are held
back while their common kernel is tried against the library; if there is none, they are compiled as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hotfuse.analysis.cost import value_bytes
from hotfuse.analysis.resources import Bound, CorePeaks, Work
from hotfuse.compile.compilation_graph import CompileGraph, GraphLevel, Unit, UnitState, UseSite
from hotfuse.compile.value import Facts
from hotfuse.fusion.criteria import FusionSide, judge
from hotfuse.fusion.groups import MAX_NODES
from hotfuse.fusion.kinds import CandidateKind, GroupKind
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.hpm.bottleneck import Bottleneck
from hotfuse.ir.graph import Value
from hotfuse.partition.change import CannotChange
from hotfuse.partition.manager import fuse, part_needs, reads_from


def judged(
    graph: CompileGraph, unit: Unit, sizes: Mapping[str, int], threads: int, peaks: CorePeaks, seen: set[tuple[str, str]],
    costs: SeenCosts,
) -> None:  # fmt: skip
    """A unit has a kernel: judge it with each neighbour that has one; what passes becomes a unit of its own. `seen` are the pairs
    that were judged before, `costs` what calls showed.
    """
    for first, second, level, a, b in list(_neighbours(graph, unit)):
        if (first.key, second.key) in seen or first.use is None or second.use is None:
            continue
        seen.add((first.key, second.key))
        passed = _passed(level, a, b)
        between = sum(value_bytes(v, sizes) or 0 for v in passed)
        verdict = judge(FusionSide(first.kind, first.use), FusionSide(second.kind, second.use), between, threads, peaks,
                        costs.boundary(passed))  # fmt: skip
        if verdict.accepted:
            _together(graph, first, second, verdict.because).promised_us = verdict.saving_us
        else:
            graph.refuse(first, second, verdict.because)


def requeued(graph: CompileGraph, unit: Unit, seen: set[tuple[str, str]]) -> None:
    """A unit that waits, fresh from a cut: with a neighbour that waits too, both of rows, it is tried as one."""
    for first, second, *_ in list(_neighbours(graph, unit)):
        both = first.facts.work.nodes + second.facts.work.nodes
        rows = first.kind == second.kind == GroupKind.ROWS and both <= MAX_NODES
        waiting = rows and first.state is second.state is UnitState.WAITING
        if waiting and unit in (first, second) and (first.key, second.key) not in seen:
            seen.add((first.key, second.key))
            made = _together(graph, first, second, "both still waited")
            if made.uses and len(made.uses) == len(first.uses) == len(second.uses):
                first.state = second.state = UnitState.HELD
            else:
                made.state = UnitState.FUSED
            return


def joined(graph: CompileGraph, unit: Unit, keys: Sequence[str]) -> None:
    """A common kernel won: it takes the place of the two wherever they stand alike."""
    assert unit.of is not None and unit.use is not None
    first, second = unit.of
    kept: list[UseSite] = []
    apart = unit.apart_us
    for place, key in zip(unit.uses, keys, strict=False):
        number = partner(graph, unit, place)
        if number < 0 or key != keys[0]:
            continue
        level = graph.levels[place[0]]
        against = "the library" if apart is None else "two"
        level.parts = fuse(level.parts, place[1], number, f"one kernel is faster than {against}: {unit.why}",
                           fused_us=round(unit.use.us, 1), apart_us=None if apart is None else round(apart, 1))
        (made,) = level.parts.history.diffs[-1].added
        for old, of in ((place[1], first), (number, second)):
            del level.units[old]
            of.uses.remove((place[0], old))
        level.units[made] = unit.key
        kept.append((place[0], made))
    unit.uses = kept
    graph.counts["fusions"] += 1
    for u in (first, second):
        if not u.uses:
            u.state = UnitState.FUSED
        elif u.state is UnitState.HELD:
            u.state = UnitState.WAITING


def arm(unit: Unit) -> str:
    """The kind of promise that a unit put together from two is."""
    return (CandidateKind.VERTICAL if unit.kind == GroupKind.ROWS else CandidateKind.EPILOGUE).value


def held_back(unit: Unit, peaks: CorePeaks) -> Bottleneck:
    """What holds back the slower of the two that a unit would replace."""
    assert unit.of is not None
    slower = max((u.use for u in unit.of if u.use is not None), key=lambda use: use.us, default=None)
    if slower is None or slower.bound is Bound.UNKNOWN:
        return Bottleneck.UNKNOWN
    if slower.bound is Bound.MEMORY:
        return Bottleneck.L2 if (slower.work.working_set or 0) <= peaks.l2 else Bottleneck.MEMORY
    return Bottleneck.COMPUTE if slower.bound is Bound.COMPUTE else Bottleneck.LATENCY


def nodes_of(graph: CompileGraph, unit: Unit, place: UseSite) -> tuple[int, ...]:
    """The nodes of a use, in the level's graph."""
    parts = graph.levels[place[0]].parts
    if unit.of is None:
        return parts.part(place[1]).nodes
    return tuple(sorted((*parts.part(place[1]).nodes, *parts.part(partner(graph, unit, place)).nodes)))


def partner(graph: CompileGraph, unit: Unit, place: UseSite) -> int:
    """The consumer's partition beside a use of the producer, where both are as they were and may be one; else -1."""
    assert unit.of is not None
    level = graph.levels[place[0]]
    if level.units.get(place[1]) != unit.of[0].key:
        return -1
    for part in level.parts.parts:
        if level.units.get(part.number) == unit.of[1].key and reads_from(level.parts, part, place[1]):
            try:
                fuse(level.parts, place[1], part.number, "a test")
            except CannotChange:
                continue
            return part.number
    return -1


def _together(graph: CompileGraph, first: Unit, second: Unit, why: str) -> Unit:
    kind = next((u.kind for u in (first, second) if u.kind != GroupKind.ROWS), GroupKind.ROWS)
    work = Work(first.facts.work.nodes + second.facts.work.nodes, None, None, None, None)
    ops = f"{first.ops} | {second.ops}"
    unit = Unit(f"{first.key}+{second.key}", kind, ops, Facts(kind, work, None, None, ops), why=why, of=(first, second))
    unit.uses = [p for p in first.uses if partner(graph, unit, p) >= 0]
    graph.units[unit.key] = unit
    if unit.uses:
        graph.counts["fusions_tried"] += 1
    else:
        unit.state = UnitState.FUSED
    return unit


def _neighbours(graph: CompileGraph, unit: Unit) -> Iterator[tuple[Unit, Unit, GraphLevel, int, int]]:
    """(producer, consumer, their level, their partitions) around a unit's first use, where both are in the same state."""
    for body, number in unit.uses[:1]:
        level = graph.levels[body]
        needs = part_needs(level.parts)
        readers = [n for n, read in needs.items() if number in read]
        for a, b in [(n, number) for n in sorted(needs[number])] + [(number, n) for n in readers]:
            one, two = (graph.units.get(level.units.get(n, "")) for n in (a, b))
            if one is not None and two is not None and one is not two and one.state is two.state:
                yield one, two, level, a, b


def _passed(level: GraphLevel, a: int, b: int) -> list[Value]:
    """What one partition hands to another."""
    nodes = level.parts.graph.nodes
    read = {v.name for i in level.parts.part(b).nodes for v in nodes[i].ins}
    return [v for i in level.parts.part(a).nodes for v in nodes[i].outs if v.name in read]
