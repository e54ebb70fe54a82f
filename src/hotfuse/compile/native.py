"""A whole graph to kernels in one process: the request of kind `tier1`, and what tools and tests call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.compile.drive import Compilation, Here
from hotfuse.compile.host import host_core
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show

Message = tuple[dict[str, Any], list[bytes]]

__all__ = ["handle", "host_core", "make"]


def make(graph: Graph, sizes: Mapping[str, int]) -> Message:
    """Everything the serving process needs to build a tier-1 plan; `sizes` are those of a real call."""
    compilation = Compilation(Here(), show(graph), sizes)
    compilation.run()
    return compilation.message()


def handle(header: dict[str, Any], _blobs: Sequence[bytes]) -> Message:
    """The request of kind `tier1`: a graph as text, and the sizes of a real call."""
    compilation = Compilation(Here(), header["graph"], {str(k): int(v) for k, v in header["dims"].items()})
    compilation.run()
    return compilation.message()
