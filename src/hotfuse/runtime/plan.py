"""An immutable plan: a partitioned graph whose partitions are compiled, and one function that runs them in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotfuse.backends.protocol import Artifact, Backend, Run
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.graph import Graph, Kind, Node, output_values
from hotfuse.ir.subgraph import extract
from hotfuse.partition.cut import Cut, Partition, Partitioning


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call runs in, from beginning to end."""

    partitioning: Partitioning
    artifacts: tuple[Artifact, ...]
    run: Run
    tier: int
    notes: tuple[str, ...] = ()
    """What stayed with the library, and why."""

    @property
    def graph(self) -> Graph:
        """The graph this plan computes."""
        return self.partitioning.graph


def build(partitioning: Partitioning, backend: Backend, weights: Mapping[str, Any], tier: int = 0) -> Plan:
    """Compile every partition with one back end."""
    return assemble(partitioning, lambda _part, piece: backend.compile(piece, weights), weights, tier)


def assemble(
    partitioning: Partitioning,
    compiled: Callable[[Partition, Graph], Artifact],
    weights: Mapping[str, Any],
    tier: int,
    *,
    as_extracted: bool = False,
) -> Plan:
    """Have each partition compiled, and chain them; a single partition runs without a chain.

    With `as_extracted` that is only so where the graph is what `extract` makes of it: what was compiled elsewhere for the
    partition takes its inputs in that order.
    """
    graph = partitioning.graph
    if len(partitioning.parts) <= 1 and not (as_extracted and _reordered(graph)):
        part = partitioning.parts[0] if partitioning.parts else Partition(0, 0, 0, Cut.START, "")
        artifact = compiled(part, graph)
        return Plan(partitioning, (artifact,), artifact.run, tier)
    pieces = [
        compiled(p, extract(graph, range(p.first, p.last), f"{graph.name}.p{p.index}")) for p in partitioning.parts
    ]
    calls = {f"plan.p{i}": a for i, a in enumerate(pieces)}
    nodes = tuple(Node(Kind.OPERATOR, op, a.graph.inputs, output_values(a.graph)) for op, a in calls.items())
    outline = Graph(graph.name, graph.inputs, graph.params, nodes, graph.outputs)
    run, _ = flat_function(outline, lambda node: (calls[node.op].run, True), weights)
    return Plan(partitioning, tuple(pieces), run, tier)


def _reordered(graph: Graph) -> bool:
    """Whether all nodes taken out of a graph would have other inputs, params or outputs, or in another order."""
    whole = extract(graph, range(len(graph.nodes)), graph.name)
    return (whole.inputs, whole.params, whole.outputs) != (graph.inputs, graph.params, graph.outputs)
