"""What a partition computes and moves at some sizes, worked out from its graph."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hotfuse.analysis.cost import FREE, Cost, node_cost, value_bytes
from hotfuse.compile.frequency import Outcomes, observed
from hotfuse.ir.graph import Kind, output_values, sources
from hotfuse.runtime.plan import Plan

UNKNOWN = -1
"""What records hold where data decide."""


def or_unknown(n: int | None) -> int:
    """A number of a record."""
    return UNKNOWN if n is None else n


def partition_cost(plan: Plan, index: int, env: Mapping[str, int], outcomes: Outcomes | None = None) -> Cost:
    """Flops and bytes, None where data decide and `outcomes` of calls that were seen do not tell how; lets go of the interpreter
    after every node, as serving goes on beside.
    """
    runs = observed(outcomes or {})
    part, total = plan.partitioning.parts[index], FREE
    for node in plan.graph.nodes[part.first : part.last]:
        total = total + node_cost(node, env, runs)
        time.sleep(0)
    made = plan.artifacts[index] if index < len(plan.artifacts) else None
    branches = any(n.kind is Kind.CONTROL for n in plan.graph.nodes[part.first : part.last])  # of which one side's weights are read
    if made is not None and made.backend != "library" and not branches:  # what is fused moves only what goes in and out
        ends = [value_bytes(v, env) for v in dict.fromkeys((*sources(made.graph), *output_values(made.graph)))]
        total = Cost(total.flops, None if None in ends else sum(e for e in ends if e is not None))
    return total
