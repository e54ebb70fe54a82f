"""The passes of this machine's cores: binding, freezing, tier 0 on the library, tier 1 of kernels that workers make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends import registry
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.debug import ASSEMBLY, LLVM, TILES, UNITS, say
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.passes import Pass, run, run_all
from hotfuse.base.settings import Settings
from hotfuse.compile import recipes
from hotfuse.compile.freeze import WeightedGraph, frozen, may_copy
from hotfuse.compile.literals import with_numbers
from hotfuse.compile.parts import NativeParts, RunParts, without_runs
from hotfuse.compile.value import ANY_DEMAND, CompileProgress, Demand
from hotfuse.frontends.captured import Captured
from hotfuse.frontends.ship import restore
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.native import guard, model_guard, publish
from hotfuse.partition.cut import Partitioning, cut
from hotfuse.pipeline.job import GraphKernels, GraphRuns, Job, sizes_of, verify_graph
from hotfuse.runtime.plan import Plan, build
from hotfuse.runtime.serve.native_plan import assembled
from hotfuse.runtime.serve.parallel_branches import measured
from hotfuse.runtime.tierup.lull import QUIET_S, Lull

if TYPE_CHECKING:
    from hotfuse.compile.compilation import Compilation

PRELOADED = (guard, publish, model_guard, registry.host())
"""Imported before the first call although no pass needs it: hot calls do, and so does loading and entering code (decision 50)."""


def _bind(done: Captured, tensors: Sequence[torch.Tensor]) -> WeightedGraph:
    shared = {k: tensors[n] for k, n in done.shared.items()}
    return WeightedGraph(done.graph, {**shared, **{k: restore(info) for k, info in done.constants.items()}})


def _freeze(found: WeightedGraph, settings: Settings) -> WeightedGraph:
    return WeightedGraph(*frozen(found.graph, found.weights, widen=may_copy(settings)))


def _numbers(found: WeightedGraph, _settings: Settings) -> WeightedGraph:
    return WeightedGraph(with_numbers(found.graph, found.weights), found.weights)


BIND = Pass("bind", Captured, WeightedGraph, _bind, verify_graph)
"""Knows the tensors that were shipped, by their number."""
PREPARE = (
    Pass("freeze", WeightedGraph, WeightedGraph, _freeze, verify_graph),
    Pass("numbers", WeightedGraph, WeightedGraph, _numbers, verify_graph),
)
"""What tiers that are withdrawn when a weight changes begin with."""


def _cut(found: WeightedGraph, job: Job) -> Partitioning:
    return cut(found.graph, job.settings.partition_nodes)


def _library(parts: Partitioning, job: Job) -> Plan:
    return build(parts, LibraryBackend(constant=job.constant), job.weights, tier=0)


TIER0 = (
    Pass("partitions", WeightedGraph, Partitioning, _cut, verify_graph),
    Pass("library", Partitioning, Plan, _library),
)


def _kernels(found: WeightedGraph, job: Job) -> GraphKernels:
    from hotfuse.compile.fetch import begin, finished

    graph = found.graph
    demand = job.demand or ANY_DEMAND
    seen = demand.seen(graph)
    sizes = seen.with_data_sizes(sizes_of(graph, job.sample))
    compilation = begin(show(graph), sizes, job.settings, demand)
    compilation.seen = seen
    compilation.latest = lambda: _of_late(graph, job.demand)
    if job.started is not None:
        job.started(compilation)

    def early(parts: Callable[[], NativeParts], progress: CompileProgress) -> None:
        assert job.progress is not None
        job.progress(lambda: planned(GraphKernels(graph, parts(), sizes, unfinished=True), compilation, job), progress)

    return GraphKernels(graph, finished(compilation, None if job.progress is None else early), sizes)


def _of_late(graph: Graph, demand: Demand | None) -> Mapping[str, int] | None:
    """The sizes that most calls have by now, where there are such and the graph is for them."""
    shapes = demand.of_late() if demand is not None and demand.of_late is not None else None
    sizes = None if shapes is None else bind(graph, list(shapes))
    return None if isinstance(sizes, Mismatch) else sizes


def _runs(found: GraphKernels, job: Job) -> GraphRuns:
    return GraphRuns(found.graph, _run_parts(found, job), found.sizes)


def _run_parts(found: GraphKernels, job: Job) -> RunParts:
    from hotfuse.compile.fetch import fetch_runs

    why = registry.kernels(job.settings.backend).runs_unavailable()
    if not why:
        try:
            return fetch_runs(found.parts, found.sizes, job.settings, unfinished=found.unfinished)
        except CaptureError as e:
            if e.why not in (Why.TIMEOUT, Why.WORKER_DIED):
                raise
            why = e.what  # what there is serves
    plain = without_runs(found.parts)
    return replace(plain, notes=(*plain.notes, f"every kernel is entered from Python: {why}"))


def _link(found: GraphRuns, job: Job) -> Plan:
    backend = registry.kernels(job.settings.backend)
    plan = assembled(found.parts, job.weights, found.graph, found.sizes, backend, named=job.settings.perf_map)
    for kernel in plan.kernels.values() if job.settings.debug >= TILES else ():
        for level, stage in zip((TILES, LLVM, ASSEMBLY), backend.stages, strict=False):
            say(job.settings.debug, level, lambda kernel=kernel, stage=stage: backend.text(stage, kernel))
    why = backend.serial_because()
    notes = (f"kernels run on one thread: {why}",) if why else ()
    return replace(plan, notes=(*notes, *plan.notes), live=plan.live & job.unfolded)


def _parallel_branches(plan: Plan, job: Job) -> Plan:
    if not plan.switches:
        return plan
    if job.settings.capture == "inline":
        return measured(plan, job.sample, job.settings.race_s)
    lull = Lull()
    lull.await_one(2 * QUIET_S)  # whether anybody calls shows meanwhile
    with lull.computing(at_least=2):
        return measured(plan, job.sample, job.settings.race_s)


def within_kernels() -> tuple[Pass[Any, Any, Any], ...]:
    """Passes that workers run for the kernels of a graph."""
    from hotfuse.compile.unit.grouping import GROUPING  # a worker's, as those below
    from hotfuse.compile.unit.kernel_cache import KERNEL

    return (*GROUPING, *KERNEL)


def _within_runs() -> tuple[Pass[Any, Any, Any], ...]:
    from hotfuse.compile.run.runs import RUNS

    return RUNS


TIER1 = (
    Pass("kernels", WeightedGraph, GraphKernels, _kernels, within=within_kernels),
    Pass("runs", GraphKernels, GraphRuns, _runs, within=_within_runs),
    Pass("link", GraphRuns, Plan, _link),
    Pass("parallel branches", Plan, Plan, _parallel_branches),
)


def planned(made: GraphKernels, compilation: Compilation, job: Job) -> Plan:
    """A plan of the kernels that there are, kept before it is proven: a process that ends in its race leaves it to the next one."""
    from hotfuse.compile.fetch import account

    native = run(TIER1[1], made, job)
    if not made.unfinished:
        compilation.remember()  # a worker that writes it down does nothing else meanwhile
    plan: Plan = run_all(TIER1[2:], native, job)
    told, recipe = account(compilation), job.recipe
    say(job.settings.debug, UNITS, told.lines)
    if recipe is not None:
        recipe = recipes.keep(recipe, native.parts, made.parts.message, told, unfinished=made.unfinished)
    return replace(plan, account=told, recipe=recipe)
