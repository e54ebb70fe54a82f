"""Rule tables that make a graph smaller without changing what anyone can observe of it; one theme a file."""

from hotfuse.ir.graph import Graph
from hotfuse.ir.rewrite import RewriteTrace, Rule, apply
from hotfuse.simplify import identities, redundant

TIER0: tuple[Rule, ...] = (*redundant.RULES, *identities.RULES)
"""What runs before tier 0: a fraction of a second at most, exact to the bit."""


def simplify(graph: Graph, rules: tuple[Rule, ...] = TIER0) -> tuple[Graph, tuple[RewriteTrace, ...]]:
    """The graph after every rule that fires, and the steps taken."""
    return apply(graph, rules)


__all__ = ["TIER0", "simplify"]
