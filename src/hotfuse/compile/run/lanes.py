"""Which calls of a run could go side by side: stretches that fall apart into parts that need nothing of each other.

Estimates only say where it might pay, in vector operations as kernels themselves reckon; a measurement in the serving process
decides (`runtime.tierup.attempt_runner`). Towers of a model, heads behind one trunk and products of one input are found this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from math import inf

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.run.run_plan import RunPlanner
from hotfuse.compile.run.run_steps import PlannedCall, PlannedChoice, PlannedMark, PlannedStep
from hotfuse.ir.dims import Dim, evaluate, symbols
from hotfuse.lower.common.algebra import add
from hotfuse.lower.cpu.thread_work import AWAKE_WORK, WORK_PER_THREAD, work
from hotfuse.lower.run.arena import Arena, Live, allocate
from hotfuse.lower.run.forks import Fork
from hotfuse.native.target import host
from hotfuse.tile.program import Kernel, Stmt

PAIRS = 60_000
"""Beginnings and ends of forks that are looked at in a stretch: all of them, unless it has hundreds of calls."""
MIN_SAVED_WORK = AWAKE_WORK
"""Work that a fork must save by estimate: about two microseconds."""
MAX_KEPT = 256
"""Kernels whose work is known as an expression."""


@dataclass(frozen=True, slots=True)
class LaneCall:
    """A call as far as forks are concerned."""

    step: int
    reads: frozenset[int]
    writes: frozenset[int]
    work: float


@dataclass(slots=True)
class _Components:
    """Calls joined wherever one writes what another touches."""

    parent: list[int] = field(default_factory=list[int])
    work: list[float] = field(default_factory=list[float])
    readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    writers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    count: int = 0

    def add(self, piece: LaneCall) -> None:
        me = len(self.parent)
        self.parent.append(me)
        self.work.append(piece.work)
        self.count += 1
        for root in piece.reads | piece.writes:
            for other in (*self.writers.get(root, ()), *(self.readers.get(root, ()) if root in piece.writes else ())):
                self._join(me, other)
        for root in piece.reads:
            self.readers.setdefault(root, []).append(me)
        for root in piece.writes:
            self.writers.setdefault(root, []).append(me)

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def _join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[a] = b
            self.work[b] += self.work[a]
            self.count -= 1

    def longest(self, lanes: int) -> float:
        """The work of the fullest lane, the largest parts dealt out first."""
        full = [0.0] * lanes
        for w in sorted((self.work[i] for i, p in enumerate(self.parent) if p == i), reverse=True):
            full[full.index(min(full))] += w
        return max(full)

    def dealt(self, lanes: int) -> list[list[int]]:
        """The calls of each lane, in order."""
        full, given = [0.0] * lanes, dict[int, int]()
        for i in sorted((i for i, p in enumerate(self.parent) if p == i), key=lambda i: -self.work[i]):
            lane = full.index(min(full))
            full[lane] += self.work[i]
            given[i] = lane
        return [[i for i in range(len(self.parent)) if given[self.find(i)] == lane] for lane in range(lanes)]


def alone(amount: float, threads: int) -> float:
    """The time of a call by itself, on the threads that it takes."""
    taken = min(threads, int(amount // WORK_PER_THREAD))
    return amount if taken < 2 else amount / taken + AWAKE_WORK


def forks(stretches: Iterable[Sequence[LaneCall]], threads: int) -> tuple[Fork, ...]:
    """Where to fork, in stretches of calls with nothing but calls between them."""
    return tuple(f for pieces in stretches for f in _stretch(pieces, threads)) if threads > 1 else ()


def _stretch(pieces: Sequence[LaneCall], threads: int) -> list[Fork]:
    """The split of a stretch into single calls and forks that takes the least time."""
    window = max(2, PAIRS // max(1, len(pieces)))
    best = [0.0] + [inf] * len(pieces)
    begun = [-1] * (len(pieces) + 1)
    """Where the fork that ends here begins; -1 where a single call ends here."""
    for i, piece in enumerate(pieces):
        single = best[i] + alone(piece.work, threads)
        if single < best[i + 1]:
            best[i + 1], begun[i + 1] = single, -1
        parts, one_by_one = _Components(), 0.0
        for j in range(i, min(len(pieces), i + window)):
            parts.add(pieces[j])
            one_by_one += alone(pieces[j].work, threads)
            if parts.count < 2:
                continue
            together = AWAKE_WORK + parts.longest(min(threads, parts.count))
            if together + MIN_SAVED_WORK < one_by_one and best[i] + together < best[j + 1]:
                best[j + 1], begun[j + 1] = best[i] + together, i
    found: list[Fork] = []
    at = len(pieces)
    while at > 0:
        if (begin := begun[at]) < 0:
            at -= 1
            continue
        parts = _Components()
        for piece in pieces[begin:at]:
            parts.add(piece)
        lanes = parts.dealt(min(threads, parts.count))
        found.append(Fork(pieces[begin].step, pieces[at - 1].step + 1,
                          tuple(tuple(pieces[begin + i].step for i in lane) for lane in lanes)))  # fmt: skip
        at = begin
    return found[::-1]


@lru_cache(maxsize=MAX_KEPT)
def _work(body: tuple[Stmt, ...], lanes: int) -> Dim:
    """A kernel's work, cached across runs and plans: building the expression takes milliseconds, finding it a tenth of that."""
    return work(body, lanes)


def work_of(kernel: Kernel, sizes: Mapping[str, int]) -> float:
    """What a kernel does at these sizes; nothing where that cannot be told, so that it decides nothing."""
    try:
        return float(evaluate(_work(kernel.body, host().lanes), sizes))
    except (KeyError, ZeroDivisionError, HotfuseError):
        return 0.0


def touched(step: PlannedStep) -> frozenset[int]:
    """The buffers of a step that a lane may have."""
    return frozenset(root for call in _calls(step) for root, _ in (*call.reads, *call.writes))


def _calls(step: PlannedStep) -> tuple[PlannedCall, ...]:
    match step:
        case PlannedCall():
            return (step,)
        case PlannedChoice():
            return step.calls
        case _:
            return ()


def planned_forks(planner: RunPlanner, sizes: Mapping[str, int], threads: int) -> tuple[Fork, ...]:
    """Where a run may fork; nowhere with one thread."""
    if threads < 2:
        return ()
    into = planner.state.into

    def final(root: int) -> int:
        while root in into:
            root = into[root]
        return root

    stretches: list[list[LaneCall]] = [[]]
    for i, step in enumerate(planner.state.steps):
        if isinstance(step, PlannedMark):
            continue
        if not (made := _calls(step)):
            stretches.append([])
            continue
        kernel = planner.bench.lowered(made[0].kernel).kernel
        known = {n: evaluate(d, sizes) for n, d in zip(kernel.sizes, made[0].sizes, strict=True) if symbols(d) <= sizes.keys()}
        stretches[-1].append(LaneCall(
            i, frozenset(final(r) for c in made for r, _ in c.reads), frozenset(final(r) for c in made for r, _ in c.writes),
            work_of(kernel, known),
        ))  # fmt: skip
    return forks(stretches, threads)


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkSpan:
    """A fork as memory sees it: the steps it covers, and the buffers of each lane."""

    begin: int
    end: int
    lanes: tuple[frozenset[int], ...]


def allocate_lanes(
    values: Sequence[Live], inplace: Sequence[tuple[int, int]], sizes: Mapping[str, int], spans: Sequence[ForkSpan]
) -> Arena:
    """Offsets for all values where lanes run at the same time.

    What only one lane has, from beginning to end, shares memory within that lane, whose block nobody else has until all lanes are
    done; what else a fork touches is kept from its beginning to its end.
    """
    if not spans:
        return allocate(values, inplace, sizes)
    inner: dict[tuple[int, int], list[Live]] = {}
    outer: list[Live] = []
    for value in values:
        v, home = value, None
        for k, span in enumerate(spans):
            lanes = [n for n, roots in enumerate(span.lanes) if v.name in roots]
            if len(lanes) == 1 and span.begin <= v.first and v.last <= span.end:
                home = (k, lanes[0])
            elif lanes:
                v = Live(v.name, v.bytes, min(v.first, span.begin), max(v.last, span.end))
        if home is None:
            outer.append(v)
        else:
            inner.setdefault(home, []).append(v)
    blocks = {-1 - n: (home, allocate(lives, inplace, sizes)) for n, (home, lives) in enumerate(inner.items())}
    for block, ((k, _), made) in blocks.items():
        outer.append(Live(block, made.bytes, spans[k].begin, spans[k].end))
    found = allocate(outer, inplace, sizes)
    offsets = {name: at for name, at in found.offsets.items() if name not in blocks}
    for block, (_, made) in blocks.items():
        offsets |= {name: add(found.offsets[block], at) for name, at in made.offsets.items()}
    return Arena(offsets, found.bytes)
