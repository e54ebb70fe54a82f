"""Pure facts about a graph: liveness, sizes, cost."""
