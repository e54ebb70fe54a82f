"""One row per op: what the graph's vocabulary means, how it touches memory, what it costs."""
