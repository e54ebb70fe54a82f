"""Decisions of the engine and the weights of a graph's edges, as lines and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.analysis.resources import CorePeaks
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.fusion_engine import FusionChoice, Planned
from hotfuse.fusion.groups import Group
from hotfuse.fusion.worth import PredictedCost
from hotfuse.ir.graph import Graph
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.energy import watts_per_core
from hotfuse.machine.topology import stated_hz
from hotfuse.ops.table import packet

PREDICTED, DERIVED = "predicted", "derived"
"""Where a weight comes from: rooflines and models; those scaled by measurements of what is around it."""


def line(choice: FusionChoice) -> str:
    """One decision for a reader: the trade in all three objectives, and what decided it."""
    times = f" x{choice.uses}" if choice.uses > 1 else ""
    head = f"{'take' if choice.accepted else 'leave'} {choice.kind.value} {choice.subject}{times}"
    return f"{head}: {trade(choice.before, choice.after)}{choice.because}"


def trade(before: PredictedCost, after: PredictedCost) -> str:
    """Time, energy and memory of both sides."""
    if not before.known or not after.known:
        return ""
    time = f"{before.seconds * 1e6:.1f} -> {after.seconds * 1e6:.1f} us"
    energy = f"{before.joules * 1e6:.1f} -> {after.joules * 1e6:.1f} uJ"
    return f"{time}, {energy}, {before.stored} -> {after.stored} bytes stored; "


def lines(planned: Planned, most: int = 64) -> list[str]:
    """What a planning decided: the taken first, then what was looked at, then the refused by what they promised."""
    head = (f"{len(planned.groups)} groups planned in {planned.seconds * 1e3:.0f} ms from {planned.predictions} predictions: "
            f"{trade(planned.before, planned.after).rstrip('; ')}")  # fmt: skip
    ranked = sorted(planned.choices, key=lambda c: (not c.accepted, not c.looked, -c.gain.mean * c.uses))
    return [head, *(line(c) for c in ranked[:most])]


@dataclass(frozen=True, slots=True)
class Edge:
    """A value with what handing it on costs: nothing but registers inside a group, a trip through a cache or memory between two."""

    value: str
    maker: str
    readers: int
    inside: bool
    bytes: int | None
    us: float | None
    cycles: float | None
    uj: float | None
    source: str = PREDICTED
    """Whether figures beside bytes rest on rooflines alone, or also on what the group that makes it took while it served."""

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return {"value": self.value, "maker": self.maker, "readers": self.readers, "inside": self.inside, "bytes": self.bytes,
                "us": self.us, "cycles": self.cycles, "uj": self.uj, "source": self.source}


def edges(
    graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int], peaks: CorePeaks, off: Mapping[Group, float] | None = None
) -> list[Edge]:
    """The weight of every edge that nodes make; `off`: how many times as long as predicted groups took while they served, which
    what they hand on is thought to have taken too.
    """
    index = UseIndex(graph, sizes)
    home = {i: g for g in groups for i in g.nodes}
    found: list[Edge] = []
    for i, node in enumerate(graph.nodes):
        for v in node.outs:
            readers = index.readers.get(v.name, [])
            inside = bool(readers) and v.name not in index.returned and all(home.get(r) is home.get(i) for r in readers)
            size = index.size(v)
            name = packet(node.op).removeprefix("aten.")
            if size is None:
                found.append(Edge(v.name, name, len(readers), inside, None, None, None, None))
                continue
            factor = (off or {}).get(home[i]) if i in home else None
            moved = 0 if inside else size * (1 + len({id(home.get(r)) for r in readers}))
            seconds = moved / peaks.bandwidth(size) * (factor or 1.0)
            joules = seconds * watts_per_core() + moved * assumed_core().joules_per_byte
            found.append(Edge(v.name, name, len(readers), inside, size, round(seconds * 1e6, 3),
                              round(seconds * stated_hz()), round(joules * 1e6, 4), PREDICTED if factor is None else DERIVED))
    return found
