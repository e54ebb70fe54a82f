"""A whole graph to kernels in this process: what tools and tests call."""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.compile.compilation import Compilation
from hotfuse.compile.requests import Here
from hotfuse.compile.workers import wire
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show


def make(graph: Graph, sizes: Mapping[str, int]) -> wire.Message:
    """Everything the serving process needs to build a tier-1 plan; `sizes` are those of a real call."""
    compilation = Compilation(Here(), show(graph), sizes)
    compilation.run()
    return compilation.message()
