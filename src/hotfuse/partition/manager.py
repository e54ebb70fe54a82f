"""The partition manager: a partitioned graph as an immutable value, and its two adjustments, fuse and split.

    fuse(p, a, b)        two partitions become one; what lies between them and does not depend on `a` runs before it, the rest after
    split(p, a, at)      the first `at` nodes of a partition, and the others

Each is checked against the graph's dependences, yields a new value, and adds a `Diff` to its history; a refusal raises
`CannotChange` and changes nothing. A call that runs in a plan made from an older value is not disturbed. Nodes are known by their
index in one base graph that no adjustment touches, so node lists stay valid while partitions come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hotfuse.base.events import EvidenceValue
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, makers
from hotfuse.partition.change import CannotChange, Diff, History, PartitionChange
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of


@dataclass(frozen=True, slots=True)
class PartitionCut:
    """A partition: its number, which is never given twice, and its nodes in the base graph's order."""

    number: int
    nodes: tuple[int, ...]
    cut: CutReason
    device: str

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A graph cut into partitions, in the order in which they run."""

    graph: Graph
    needs: tuple[tuple[int, ...], ...]
    """Per node of the graph the nodes it reads from; shared by all values made from one graph."""
    parts: tuple[PartitionCut, ...]
    history: History
    next: int
    """The number the next new partition gets."""

    def part(self, number: int) -> PartitionCut:
        """The partition of that number."""
        for p in self.parts:
            if p.number == number:
                return p
        raise CannotChange(f"there is no partition {number}", because=f"there are {[p.number for p in self.parts][:16]}")


def node_needs(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Per node, the nodes whose results it reads."""
    maker = makers(graph)
    return tuple(tuple(dict.fromkeys(maker[v.name] for v in n.ins if v.name in maker)) for n in graph.nodes)


def partitioned(graph: Graph, groups: Iterable[Sequence[int]], why: str, cuts: Sequence[CutReason] = ()) -> Partitioned:
    """A graph cut into these groups of nodes, in this order."""
    parts: list[PartitionCut] = []
    for k, nodes in enumerate(groups):
        if not nodes:
            raise CannotChange(f"partition {k} has no nodes")
        device = device_of(graph.nodes[nodes[0]]) or "cpu"
        parts.append(PartitionCut(k, tuple(sorted(nodes)), cuts[k] if cuts else (CutReason.REST if k else CutReason.START), device))
    seen = sorted(i for p in parts for i in p.nodes)
    if seen != list(range(len(graph.nodes))):
        raise CannotChange("partitions must hold every node once", because=f"{len(seen)} of {len(graph.nodes)} nodes")
    needs = node_needs(graph)
    _check_order(parts, needs)
    diff = Diff(PartitionChange.BEGIN, (), tuple(p.number for p in parts), len(graph.nodes), why)
    return Partitioned(graph, needs, tuple(parts), History().with_(diff), len(parts))


def fuse(of: Partitioned, a: int, b: int, why: str, **evidence: EvidenceValue) -> Partitioned:
    """Two partitions as one, which keeps the first one's place and reason."""
    if a == b:
        raise CannotChange(f"partition {a} cannot be fused with itself")
    places = {p.number: i for i, p in enumerate(of.parts)}
    first, last = sorted((places[of.part(a).number], places[of.part(b).number]))
    one, other = of.parts[first], of.parts[last]
    if one.device != other.device:
        raise CannotChange(f"partitions {a} and {b} run on different devices", because=f"{one.device}; {other.device}")
    between = of.parts[first + 1 : last]
    behind = _depending(one, between, of.needs)
    if behind:
        late = {i for p in behind for i in p.nodes}
        if any(m in late for i in other.nodes for m in of.needs[i]):
            names = ", ".join(str(p.number) for p in behind[:4])
            raise CannotChange(f"partitions {a} and {b} cannot be one", because=f"what {names} compute lies between them")
    after = {p.number for p in behind}
    made = PartitionCut(of.next, tuple(sorted((*one.nodes, *other.nodes))), one.cut, one.device)
    parts = (*of.parts[:first], *(p for p in between if p.number not in after), made, *behind, *of.parts[last + 1 :])
    diff = Diff(PartitionChange.FUSE, (one.number, other.number), (made.number,), len(made), why, evidence)
    return replace(of, parts=parts, history=of.history.with_(diff), next=of.next + 1)


def split(of: Partitioned, number: int, at: int, why: str, **evidence: EvidenceValue) -> Partitioned:
    """A partition in two; the base graph's order holds inside it, so the first part never waits for the second."""
    old = of.part(number)
    if not 0 < at < len(old):
        raise CannotChange(f"partition {number} cannot be cut at {at}", because=f"it has {len(old)} nodes")
    pieces = (
        PartitionCut(of.next, old.nodes[:at], old.cut, old.device),
        PartitionCut(of.next + 1, old.nodes[at:], CutReason.REST, old.device),
    )
    place = of.parts.index(old)
    diff = Diff(PartitionChange.SPLIT, (number,), (of.next, of.next + 1), len(old), why, evidence)
    parts = (*of.parts[:place], *pieces, *of.parts[place + 1 :])
    return replace(of, parts=parts, history=of.history.with_(diff), next=of.next + 2)


def part_needs(of: Partitioned) -> dict[int, frozenset[int]]:
    """Per partition, the partitions it reads from."""
    home = {i: p.number for p in of.parts for i in p.nodes}
    return {p.number: frozenset(home[m] for i in p.nodes for m in of.needs[i]) - {p.number} for p in of.parts}


def reads_from(of: Partitioned, reader: PartitionCut, number: int) -> bool:
    """Whether a partition reads what another one computes: the question about two, without the answer for all."""
    made = frozenset(of.part(number).nodes)
    return reader.number != number and any(m in made for i in reader.nodes for m in of.needs[i])


def partitioning(of: Partitioned) -> Partitioning:
    """The form a plan is assembled from: nodes in the order of execution, each partition a run of neighbours."""
    order = [i for p in of.parts for i in p.nodes]
    graph = of.graph
    if order != list(range(len(order))):
        graph = replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    parts: list[Partition] = []
    at = 0
    for k, p in enumerate(of.parts):
        parts.append(Partition(k, at, at + len(p), p.cut, p.device))
        at += len(p)
    return Partitioning(graph, tuple(parts))


def _depending(on: PartitionCut, candidates: Sequence[PartitionCut], needs: Sequence[tuple[int, ...]]) -> list[PartitionCut]:
    """Those of some partitions, in order of execution, that need results of `on`, directly or not."""
    tainted = set(on.nodes)
    found: list[PartitionCut] = []
    for p in candidates:
        if any(m in tainted for i in p.nodes for m in needs[i]):
            found.append(p)
            tainted.update(p.nodes)
    return found


def _check_order(parts: Sequence[PartitionCut], needs: Sequence[tuple[int, ...]]) -> None:
    """Every node comes after what it reads, and nothing of a partition depends on it through another one."""
    done: set[int] = set()
    for p in parts:
        own = set(p.nodes)
        for i in p.nodes:
            if late := [m for m in needs[i] if m not in done and m not in own]:
                because = f"node {i} reads node {late[0]}, which comes later"
                raise CannotChange(f"partition {p.number} cannot run there", because=because)
        done |= own
