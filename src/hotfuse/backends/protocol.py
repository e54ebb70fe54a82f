"""What every back end gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hotfuse.ir.graph import Graph

Run = Callable[..., tuple[Any, ...]]
"""Takes the graph's inputs in order, gives its outputs in order."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A runnable graph, with what a reader may want to see of it."""

    graph: Graph
    run: Run
    backend: str
    source: str
    predicted_us: float | None = None
    """What a model of this machine said it would take, where there is one."""
    bytes: int = 0
    """Memory of weights that it has in another form."""


class Backend(Protocol):
    """Compiles a closed graph against its weights."""

    name: str

    def compile(self, graph: Graph, weights: Mapping[str, Any]) -> Artifact:
        """The graph as something that runs; weights by param key."""
        ...
