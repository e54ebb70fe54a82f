"""What a piece of a graph would take if it were built: the question, the form of the answer, and an answer that needs no training.

    question   `hpm.work.Candidate`: a closed graph, the sizes of a call, the core it would be cut for or None for the library
    forecast   per question: seconds with an interval, joules, bytes that enter and leave

The performance model answers from measurements. The roofline stands in where there is none, and says with its wide intervals how
little it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotfuse.analysis.cost import value_bytes
from hotfuse.analysis.resources import CorePeaks, Work, library_seconds, roofline_seconds, work_of
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.closed import UseIndex
from hotfuse.hpm import model as hpm
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.energy import watts_per_core
from hotfuse.ops.table import Access, lookup

Vector = npt.NDArray[np.float64]
REACH = 0.85
"""The part of the roofline that kernels reach, as a rule; without measurements, nobody's are thought to be better."""
ENTRY_S = 0.3e-6
"""Calling one more kernel inside a native run."""
SPILL_BYTES_PER_S = 100e9
"""What goes out of registers and comes back passes the first-level cache."""
SPREAD = 1.6
"""Roofline times are within this factor, four times in five."""


class Forecast(Protocol):
    """Predictions, one number per ask; unknown ones (sizes that depend on data) are NaN."""

    @property
    def seconds(self) -> Vector:
        """Time."""
        ...

    @property
    def low_s(self) -> Vector:
        """One in ten is faster."""
        ...

    @property
    def high_s(self) -> Vector:
        """One in ten is slower."""
        ...

    @property
    def joules(self) -> Vector:
        """Energy."""
        ...

    @property
    def memory(self) -> Vector:
        """Bytes that enter and leave."""
        ...

    @property
    def exposed(self) -> Vector:
        """Seconds more if memory and arithmetic took turns; empty where that is part of the prediction."""
        ...


Predictor = Callable[[Sequence[Candidate]], Forecast]


@dataclass(frozen=True, slots=True)
class Figures:
    """A forecast as plain arrays."""

    seconds: Vector
    low_s: Vector
    high_s: Vector
    joules: Vector
    memory: Vector
    exposed: Vector = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class RooflinePredictor:
    """The predictor that needs no measurements."""

    peaks: CorePeaks = CorePeaks()

    def __call__(self, asks: Sequence[Candidate]) -> Figures:
        """Each at the part of its roofline that kernels reach as a rule, and a call."""
        seconds, memory, exposed = np.full(len(asks), np.nan), np.zeros(len(asks)), np.zeros(len(asks))
        counted: dict[tuple[int, int], Work] = {}  # variants of a kernel compute the same, and are asked of at the same sizes
        for i, ask in enumerate(asks):
            same = (id(ask.graph), id(ask.sizes))
            work = counted.get(same)
            if work is None:
                work = counted[same] = work_of(ask.graph, ask.sizes)
            if work.flops is None or work.traffic is None:
                continue
            memory[i] = work.traffic
            moving = work.traffic / self.peaks.bandwidth(work.traffic)
            exposed[i] = min(work.flops / self.peaks.flops_per_s, moving) / REACH / max(1, ask.threads)
            if ask.core is None:
                found = library_seconds(ask.graph, ask.sizes, self.peaks)
                seconds[i] = np.nan if found is None else found / REACH / max(1, ask.threads)
            else:
                least = roofline_seconds(work, self.peaks) or 0.0
                again = spilled(ask.graph, ask.sizes, ask.core.registers) + repeated(ask.graph, ask.sizes, ask.core.lanes)
                least += again / SPILL_BYTES_PER_S
                seconds[i] = ENTRY_S + least / REACH / max(1, ask.threads)
        threads = np.asarray([a.threads for a in asks], dtype=np.float64)
        joules = seconds * watts_per_core() * threads + memory * assumed_core().joules_per_byte
        return Figures(seconds, seconds / SPREAD, seconds * SPREAD, joules, memory, exposed)


def spilled(graph: Graph, sizes: Mapping[str, int], registers: int) -> int:
    """Bytes that a kernel over elements moves because it holds more values at once than there are registers."""
    if any(lookup(n.op).access is not Access.POINTWISE for n in graph.nodes):
        return 0
    index = UseIndex(graph, sizes)
    over = live_values(index, range(len(graph.nodes))) - registers
    if over <= 0:
        return 0
    return 2 * over * max((index.size(v) or 0 for n in graph.nodes for v in n.outs), default=0)


PANEL = 3
"""Vectors of columns that a product computes at once, as a rule."""


def repeated(graph: Graph, sizes: Mapping[str, int], lanes: int) -> int:
    """Bytes that a product's kernel goes through again because it computes in front of every panel of columns what it reads."""
    made = {v.name: n for n in graph.nodes for v in n.outs}
    total = 0
    for node in graph.nodes:
        if lookup(node.op).access is not Access.CONTRACTION or not node.outs or not isinstance(node.outs[0].type, TensorType):
            continue
        columns = node.outs[0].type.shape[-1]
        panels = -(-columns // (PANEL * lanes)) if isinstance(columns, int) else 1
        front = [v for v in node.ins if v.name in made]
        total += (panels - 1) * sum(2 * (value_bytes(v, sizes) or 0) for v in front)
    return total


def live_values(index: UseIndex, nodes: Sequence[int]) -> int:
    """Most values of a group that are alive at once: each needs a register in a kernel over elements."""
    inside = set(nodes)
    last: dict[str, int] = {}
    for i in sorted(inside):
        for v in index.graph.nodes[i].ins:
            last[v.name] = i
    live: set[str] = set()
    most = 0
    for i in sorted(inside):
        node = index.graph.nodes[i]
        live |= {v.name for v in (*node.ins, *node.outs)}
        most = max(most, len(live))
        live -= {n for n in live if last.get(n, -1) <= i}
    return most


@dataclass(frozen=True, slots=True)
class Trained:
    """The performance model of this machine; what depends on data is unknown to it too."""

    model: hpm.CostPredictor

    def __call__(self, asks: Sequence[Candidate]) -> Figures:
        """All at once; one by one only where a candidate among them cannot be predicted."""
        try:
            return _plain(self.model.predict(asks))
        except (HotfuseError, KeyError, IndexError):  # a size that nobody knows
            if len(asks) == 1:
                unknown = np.full(1, np.nan)
                return Figures(unknown, unknown, unknown, unknown, np.zeros(1))
        single = [self([a]) for a in asks]
        seconds, low, high, joules, memory = (
            np.concatenate(each)
            for each in zip(*((f.seconds, f.low_s, f.high_s, f.joules, f.memory) for f in single), strict=True)
        )
        return Figures(seconds, low, high, joules, memory)


def _plain(found: hpm.Predictions) -> Figures:
    joules = found.joules + found.memory * assumed_core().joules_per_byte
    return Figures(found.seconds, found.low_s, found.high_s, joules, found.memory)
