"""What passes know and what they hand on: a compilation's job, and graphs with the kernels and native runs made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.compile.freeze import WeightedGraph
from hotfuse.compile.parts import NativeParts, RunParts
from hotfuse.compile.recipes import Recipe
from hotfuse.compile.value import CompileProgress, Demand
from hotfuse.ir.graph import Graph
from hotfuse.partition.cut import Partitioning
from hotfuse.runtime.plan import Plan

if TYPE_CHECKING:
    from hotfuse.compile.compilation import Compilation

Progress = Callable[[Callable[[], Plan], CompileProgress], None]
"""Told while kernels are made: a plan of those there are, made on demand, and how far that is."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a compilation knows besides the value it works on."""

    settings: Settings
    weights: Mapping[str, torch.Tensor]
    sample: Sequence[torch.Tensor] = ()
    """Inputs of a real call."""
    progress: Progress | None = None
    demand: Demand | None = None
    """How much the graph is used, where that is known."""
    started: Callable[[Compilation], None] | None = None
    """Given the compilation when it begins: to cancel it, to ask how far it is."""
    constant: bool = False
    """Whether nobody can change the weights, so that they may be copied."""
    unfolded: frozenset[str] = frozenset()
    """Keys of weights of which nothing was computed ahead."""
    stop: Callable[[], bool] = lambda: False
    """Whether nobody wants the outcome any more."""
    recipe: Recipe | None = None
    """Where the plan is kept for later processes; None where nothing is."""


def verify_graph(found: WeightedGraph | Partitioning, _job: object) -> object:
    """What tests run behind every pass that gives a graph."""
    from hotfuse.ir.verify import verify  # by those who ask for it

    return verify(found.graph)


@dataclass(frozen=True, slots=True)
class GraphKernels:
    """A graph with the kernels that workers made of it, at the sizes of a call."""

    graph: Graph
    parts: NativeParts
    sizes: Mapping[str, int]
    unfinished: bool = False
    """Whether others are still being made."""


@dataclass(frozen=True, slots=True)
class GraphRuns:
    """A graph with kernels and native runs."""

    graph: Graph
    parts: RunParts
    sizes: Mapping[str, int]


def sizes_of(graph: Graph, sample: Sequence[torch.Tensor]) -> Mapping[str, int]:
    """The sizes of a graph's symbols in a real call."""
    sizes = bind(graph, [tuple(t.shape) for t in sample])
    if isinstance(sizes, Mismatch):
        raise InternalError("a sample call does not fit its own graph", because=str(sizes))
    return sizes
