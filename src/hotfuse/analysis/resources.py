"""What a piece of a graph uses of the machine: work by its graph, time as measured, and which resource binds it.

    work   flops, bytes moved node by node, bytes that enter and leave the whole piece, the largest value between two nodes
    use    work with a measured time: compute-bound, memory-bound, or neither because calling it is what takes the time

Peaks are estimates until the machine's own are measured; a verdict says how far from them the piece was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum

from hotfuse.analysis.cost import node_cost, value_bytes
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Node, output_values, sources
from hotfuse.ops.table import Access, lookup


@dataclass(frozen=True, slots=True)
class CorePeaks:
    """What one core can do at best."""

    flops_per_s: float = 60e9
    bytes_per_s: float = 12e9
    """From memory."""
    cache_bytes_per_s: float = 60e9
    """From the second-level cache."""
    l1: int = 32 << 10
    l2: int = 1 << 20
    registers: int = 16
    """For vectors: what every core that we know of has."""
    call_s: float = 3e-6
    """One library operator that does nothing."""

    def bandwidth(self, held: int) -> float:
        """Bytes per second for something that uses so many bytes over and over."""
        return self.cache_bytes_per_s if held <= self.l2 else self.bytes_per_s


LATENCY_BOUND_BELOW = 0.2
"""The part of a peak from which on it is what limits."""


class Bound(StrEnum):
    """What limits a piece."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LATENCY = "latency"
    """Neither: the cost of calling it, or a chain of dependent steps."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Work:
    """What a piece of a graph has to do, at given sizes; None where a figure depends on data."""

    nodes: int
    flops: int | None
    moved: int | None
    """Bytes that its operators read and write, each on its own."""
    traffic: int | None
    """Bytes that enter and leave the piece: what a single kernel moves at least."""
    largest: int | None
    """The largest value that lives only inside."""

    def to_dict(self) -> dict[str, int | None]:
        """A plain dict for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, int | None]) -> Work:
        """The inverse of `to_dict`."""
        return Work(int(data["nodes"] or 0), data["flops"], data["moved"], data["traffic"], data["largest"])

    @property
    def working_set(self) -> int | None:
        """Bytes in use at once, at least."""
        return None if self.traffic is None or self.largest is None else self.traffic + self.largest


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """What a piece really used."""

    work: Work
    us: float
    """Measured."""
    bound: Bound
    utilization: float
    """Of the resource that binds; beyond 1 where the estimated peak is too low."""
    scratch: int = 0
    """Bytes of memory of its own."""
    vectors: int = 0
    """Vector registers that its tiles need at once, at most; 0 where nobody counted."""
    parallel: int = 1
    """Iterations of its outermost parallel loop."""

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {**self.work.to_dict(), "us": round(self.us, 2), "bound": self.bound.value,
                "utilization": round(self.utilization, 3), "scratch": self.scratch, "vectors": self.vectors,
                "parallel": self.parallel}


def work_of(piece: Graph, env: Mapping[str, int]) -> Work:
    """The work of a closed piece at these sizes."""
    leaving = {v.name for v in output_values(piece)}
    picked = _picked(piece, env)
    edge = [picked.get(v.name, value_bytes(v, env)) for v in (*sources(piece), *dict.fromkeys(output_values(piece)))]
    inner = [value_bytes(v, env) for n in piece.nodes for v in n.outs if v.name not in leaving]
    flops, moved = (_sum([f(n, env) for n in piece.nodes]) for f in (_flops, _moved))
    return Work(len(piece.nodes), flops, moved, _sum(edge), None if None in inner else max([0, *filter(None, inner)]))


def library_seconds(piece: Graph, env: Mapping[str, int], peaks: CorePeaks) -> float | None:
    """A guess at the time of the piece's operators one by one: each on the roofline, and a call each."""
    total = 0.0
    for node in piece.nodes:
        flops, moved = _flops(node, env), _moved(node, env)
        if flops is None or moved is None:
            return None
        if moved or flops:
            total += peaks.call_s + max(flops / peaks.flops_per_s, moved / peaks.bandwidth(moved))
    return total


def roofline_seconds(work: Work, peaks: CorePeaks) -> float | None:
    """The least time of a piece as one kernel."""
    if work.flops is None or work.traffic is None:
        return None
    return max(work.flops / peaks.flops_per_s, work.traffic / peaks.bandwidth(work.traffic))


def used(work: Work, us: float, peaks: CorePeaks, *, scratch: int = 0, vectors: int = 0, parallel: int = 1) -> ResourceUse:
    """A measured time against the roofline."""
    if work.flops is None or work.traffic is None or us <= 0:
        return ResourceUse(work, us, Bound.UNKNOWN, 0.0, scratch, vectors, parallel)
    compute = work.flops / peaks.flops_per_s * 1e6 / us
    memory = work.traffic / peaks.bandwidth(work.traffic) * 1e6 / us
    most = max(compute, memory)
    bound = Bound.LATENCY if most < LATENCY_BOUND_BELOW else Bound.COMPUTE if compute >= memory else Bound.MEMORY
    return ResourceUse(work, us, bound, most, scratch, vectors, parallel)


def _flops(node: Node, env: Mapping[str, int]) -> int | None:
    return node_cost(node, env).flops


def _moved(node: Node, env: Mapping[str, int]) -> int | None:
    """Bytes a node reads and writes; of what it picks from, only what it picks, and nothing of what it only asks for its size."""
    if lookup(node.op).access is Access.HOST:
        return 0
    if lookup(node.op).access is not Access.INDEXING:
        return node_cost(node, env).bytes
    made = _sum([value_bytes(v, env) for v in node.outs])
    read = [value_bytes(v, env) for v in node.ins]
    return None if made is None else _sum([made, *(None if r is None else min(r, made) for r in read)])


def _picked(piece: Graph, env: Mapping[str, int]) -> dict[str, int | None]:
    """Values that nodes only pick from, with the bytes that are picked at most."""
    found: dict[str, list[int | None]] = {}
    whole: set[str] = set()
    for node in piece.nodes:
        if lookup(node.op).access is Access.INDEXING:
            made = _sum([value_bytes(v, env) for v in node.outs])
            for v in node.ins:
                size = value_bytes(v, env)
                found.setdefault(v.name, []).append(None if made is None or size is None else min(made, size))
        else:
            whole |= {v.name for v in node.ins}
    return {n: _sum(sizes) for n, sizes in found.items() if n not in whole}


def _sum(parts: list[int | None]) -> int | None:
    known = [p for p in parts if p is not None]
    return sum(known) if len(known) == len(parts) else None
