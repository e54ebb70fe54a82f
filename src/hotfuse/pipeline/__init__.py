"""The only list of passes, from capture to link: `PASSES`. Each is a value with a name, a type in and a type out (`base.passes`).

    capture  simplify | bind  freeze  numbers | kernels( rules appends layouts groups order | normalize lower generate-code )
    runs( bridges drivers ) | link  parallel-branches                          and for tier 0: partitions  library
    on a device, behind bind: masks | recordings, or device-kernels( device-groups order | device-lower device-code ) record;
    kernels-on-static-caches where caches grow

The engine runs it pass by pass, workers run captures and what stands within brackets, and `hotfuse show --stage` runs the same
values up to the one it is asked for. Modules that link and serve existing code are imported here. Modules that have code compiled
are imported by the thread that compiles, since a process that finds its plans in the cache never needs them (decision 50).

    job             what passes know and hand on   host_passes   passes of this machine's cores
    device_passes   passes of a device             plan_passes   from a graph to a plan, compiled now or kept by an earlier process
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotfuse.base.errors import InternalError
from hotfuse.base.passes import Pass, run
from hotfuse.base.settings import Settings
from hotfuse.compile import request_context
from hotfuse.compile.capture_passes import CAPTURE, SIMPLIFY
from hotfuse.compile.freeze import WeightedGraph
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.ir.graph import Graph
from hotfuse.pipeline.device_passes import GENERATED, MASKS, RECORDED, STATIC_CACHES
from hotfuse.pipeline.host_passes import BIND, PREPARE, TIER0, TIER1, within_kernels
from hotfuse.pipeline.job import GraphKernels, GraphRuns, Job
from hotfuse.pipeline.plan_passes import Units, compile_tier0, compile_tier1, compile_units, remembered

if TYPE_CHECKING:
    from hotfuse.compile.unit.grouping import GroupedGraph
    from hotfuse.fusion.groups import Group

__all__ = [
    "BIND", "BRANCHES", "CAPTURE", "GENERATED", "MASKS", "PASSES", "PREPARE", "RECORDED", "SIMPLIFY", "STATIC_CACHES", "TIER0",
    "TIER1", "GraphKernels", "GraphRuns", "Job", "Units", "compile_tier0", "compile_tier1", "compile_units", "graph_after",
    "remembered",
]  # fmt: skip
PASSES: tuple[Pass[Any, Any, Any], ...] = (CAPTURE, SIMPLIFY, BIND, *PREPARE, *TIER1)
"""From a model to a plan of kernels; tier 0 leaves it behind `bind` (`TIER0`)."""
BRANCHES: Mapping[str, tuple[Pass[Any, Any, Any], ...]] = {
    "every target": PASSES[:3], "this machine's cores": PASSES[3:], "tier 0": TIER0, "a device, tier 1": RECORDED,
    "a device, tier 2": GENERATED, "a device, tier 2, where caches grow": STATIC_CACHES,
}  # fmt: skip
"""Every pass there is, by what it is for: they part behind `bind`."""


def graph_after(name: str, found: WeightedGraph, sizes: Mapping[str, int], settings: Settings) -> tuple[Graph, tuple[Group, ...]]:
    """A model's graph behind one of the passes that give one, and its groups from there on where they are formed; for readers."""
    for step in PREPARE:
        found = run(step, found, settings)
        if step.name == name:
            return found.graph, ()
    from hotfuse.compile.unit import units  # a worker's

    with request_context.used_by({**settings_of(settings).header(), **context_of(settings).header()}):
        value: Graph | GroupedGraph = found.graph
        job = units.grouping_job(sizes, settings.objective, units.measuring(sizes))
        for step in within_kernels():
            value = run(step, value, job)
            if step.name == name:
                return (value, ()) if isinstance(value, Graph) else (value.graph, value.groups)
    raise InternalError(f"no pass {name!r} gives a graph")
