"""The only list of stages: one tuple per tier. A stage is a named function from one value to the next.

Capture and simplification come before, in the worker (`compile.requests`): they must not hold the interpreter lock of a
process that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.partition.cut import Partitioning, cut
from hotfuse.runtime.plan import Plan, build


@dataclass(frozen=True, slots=True)
class Job:
    """What a compilation knows besides the value it works on."""

    settings: Settings
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step, with what it needs and gives, in words that `hotfuse show --stage` shares."""

    name: str
    run: Callable[[Any, Job], Any]
    needs: str
    gives: str


def _cut(graph: Graph, job: Job) -> Partitioning:
    return cut(graph, job.settings.partition_nodes)


def _library(parts: Partitioning, job: Job) -> Plan:
    return build(parts, LibraryBackend(), job.weights, tier=0)


TIER0: tuple[Stage, ...] = (
    Stage("partitions", _cut, needs="ir", gives="partitions"),
    Stage("library", _library, needs="partitions", gives="plan"),
)


def compile_tier0(graph: Graph, weights: Mapping[str, torch.Tensor], settings: Settings) -> Plan:
    """A graph as a tier-0 plan on these weights."""
    value: Any = graph
    job = Job(settings, weights)
    for stage in TIER0:
        value = stage.run(value, job)
    return value
