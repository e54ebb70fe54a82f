"""Rule tables that make a graph smaller without changing what anyone can observe of it; one theme a file."""

from hotfuse.ir.graph import Graph
from hotfuse.ir.rewrite import RewriteTrace, Rule, apply
from hotfuse.simplify import identities, redundant
from hotfuse.simplify.cells import cells_as_products
from hotfuse.simplify.dead_rows import without_dead_rows
from hotfuse.simplify.einsum import einsums_as_products
from hotfuse.simplify.expert_loops import expert_loops
from hotfuse.simplify.filled import filled_at_once
from hotfuse.simplify.masked_writes import masked_writes
from hotfuse.simplify.picked_rows import without_unpicked_rows

TIER0: tuple[Rule, ...] = (*redundant.RULES, *identities.RULES)
"""What runs before tier 0: a fraction of a second at most, exact to the bit."""


def simplify(graph: Graph, rules: tuple[Rule, ...] = TIER0) -> tuple[Graph, tuple[RewriteTrace, ...]]:
    """The graph after every rule that fires, and the steps taken."""
    return apply(graph, rules)


def simplify_captured(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """A graph as a front end gives it, as every tier begins with it: without needless nodes, with einsums, recurrent cells and
    loops over experts as products, with tensors put together once, writes where a mask says so as choices, and without rows that
    nobody reads or data do not pick.
    And what `explain()` says of that.
    """
    graph, _ = filled_at_once(graph)
    graph, _ = einsums_as_products(graph)
    graph, _ = cells_as_products(graph)
    graph, _ = masked_writes(graph)
    graph, _ = simplify(graph)
    graph, loops = expert_loops(graph)
    fewer, products = without_dead_rows(graph)
    picked, by_data = without_unpicked_rows(fewer)
    if not products and not by_data and not loops:
        return graph, ()
    said = (
        (f"{loops} loops over experts are products by expert: no expert picks rows of its own", loops),
        (f"rows that nobody reads are not computed: {products} products make one row of each sequence", products),
        (f"rows that data do not pick are not computed: {by_data} products make the picked ones alone", by_data),
    )
    return simplify(picked)[0], tuple(text for text, number in said if number)


__all__ = ["TIER0", "simplify", "simplify_captured"]
