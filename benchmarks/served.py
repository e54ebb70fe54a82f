"""A graph as a plan serves it: what the kernel benchmarks time as ours.

A plan enters native code with the tensors themselves, once for all of its kernels, and gets new tensors back. Where the library
was no slower in the worker's trial, the plan has the library's kernel, and the benchmark times that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.errors import InternalError
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0, compile_tier1


@dataclass(frozen=True, slots=True)
class Served:
    """What a call runs in."""

    run: Run
    native: bool
    """Whether generated code does all of it."""
    made_ms: float
    """From the graph to a function that can be called, worker and trial included."""


def served(graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor]) -> Served:
    """The plan of a graph, made for calls like the sample."""
    settings = Settings(capture="inline")
    start = time.perf_counter()
    try:
        plan = compile_tier1(graph, weights, sample, settings)
    except InternalError:  # no kernel paid
        plan = compile_tier0(graph, weights, settings)
    return Served(
        plan.run,
        bool(plan.units) and all(u.native is not None for u in plan.units),
        (time.perf_counter() - start) * 1e3,
    )
