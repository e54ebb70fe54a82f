"""Lowering: a group of graph nodes becomes one tile kernel, or a reason why not."""
