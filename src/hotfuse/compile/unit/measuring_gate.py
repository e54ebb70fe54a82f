"""The measuring gate of the fusion engine: a candidate's kernels are timed against the present ones before it is applied.

Rooflines select candidates, measurements decide. Both sides are built and run in turns on made-up data. The candidate has to be
faster by more than noise, twice in a row: a machine changes its speed for some milliseconds, and a side that ran in the slow ones
looks slower than it is. The time is bounded; a candidate that came too late is refused with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import BoundCall, CompiledCandidate
from hotfuse.compile.variants.served_threads import as_served
from hotfuse.fusion.exploration import MIN_GAIN
from hotfuse.fusion.fusion_engine import Side
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.lower import Core
from hotfuse.ops.table import Access, lookup

BUDGET_S = 0.5
"""Seconds of measuring for one graph, compiling included."""
TURN_S = 0.06
"""Most seconds for the turns of one look."""
PASSES = 6
WINS_IN_A_ROW = 2
"""How many times in a row a candidate has to win, each time over the best turns of all looks so far."""
ENTRY_S = 0.3e-6
"""Calling one more kernel of a native run."""
Build = Callable[[Graph], tuple[CompiledCandidate, Graph, Mapping[str, int]]]
"""The kernel of a closed piece, what it was built from, and that one's sizes; raises a HotfuseError where there is none."""


@dataclass(slots=True)
class UnitContests:
    """All contests of one graph."""

    build: Build
    core: Core
    sizes: Mapping[str, int]
    left_s: float = BUDGET_S
    clock: Callable[[], float] = time.perf_counter
    measured: Callable[[Sequence[Side], Sequence[Side]], tuple[float, float]] | None = None
    """For tests: instead of running kernels."""
    on: str = ""
    """Whether the last one had fewer threads than calls have, for a reader."""
    held: list[str] = field(default_factory=list[str])
    """Every contest that was held, for a reader."""

    def __call__(self, old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
        """Why a candidate may not be taken, empty if it may; and the seconds that it saves, as measured."""
        if self.left_s <= 0:
            return "no time is left for measuring it", 0.0
        begin = self.clock()
        try:
            before, after = (self.measured or self._measured)(old, new)
        except HotfuseError as e:
            return f"it cannot be measured: {e.because or e.what}", 0.0
        finally:
            self.left_s -= self.clock() - begin
        text = f"measured {after * 1e6:.1f} us, what there is {before * 1e6:.1f}{self.on}"
        self.held.append(text)
        return ("" if _better(before, after) else text), before - after

    def _measured(self, old: Sequence[Side], new: Sequence[Side]) -> tuple[float, float]:
        with as_served(self.core.threads) as threads:
            self.on = "" if threads == self.core.threads else f", on {threads} of {self.core.threads} threads: cores are busy"
            return self._timed(old, new, threads)

    def _timed(self, old: Sequence[Side], new: Sequence[Side], threads: int) -> tuple[float, float]:
        sides = [[b for s in side if (b := self._bound(s, threads)) is not None] for side in (old, new)]
        before = after = 0.0
        for _ in range(WINS_IN_A_ROW):
            measure.timed([b for side in sides for b in side], PASSES, self.clock() + TURN_S)
            before, after = (sum(b.figure()[0] + self._entering(b) for b in side) for side in sides)
            if not _better(before, after):
                break
        return before, after

    @staticmethod
    def _entering(b: BoundCall) -> float:
        """What a call costs beside the kernel: the library's own is in its time already."""
        return 0.0 if b.candidate.core is None else ENTRY_S

    def _bound(self, side: Side, threads: int) -> BoundCall | None:
        """A piece, ready to be timed; None for what only looks at data in another way, which costs nothing."""
        graph, library = side
        if all(lookup(n.op).access is Access.MOVEMENT and not _copies(n.op) for n in graph.nodes):
            return None
        if library:
            return measure.bind(Candidate(graph, self.sizes, None, threads), "library", None)
        made, normal, sizes = self.build(graph)
        return measure.bind(Candidate(normal, sizes, self.core, threads), "kernel", made)


def _better(before: float, after: float) -> bool:
    return after < before * (1 - MIN_GAIN)


def _copies(op: str) -> bool:
    return op.startswith(("aten.cat.", "aten.stack.", "aten.clone.", "aten.contiguous.", "aten.copy"))
