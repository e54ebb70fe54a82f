"""The passes of a device: library kernels as recordings, generated kernels between them, static caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.growth import read_in_any_strides
from hotfuse.analysis.placement import accelerator_of
from hotfuse.backends import registry
from hotfuse.backends.device_protocol import DeviceBackend
from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.passes import Pass, run_all
from hotfuse.base.settings import Settings
from hotfuse.compile.freeze import WeightedGraph
from hotfuse.compile.parts import GeneratedPlan
from hotfuse.compile.value import FEW_TILINGS
from hotfuse.compile.workers.service import in_background
from hotfuse.ir.graph import Graph
from hotfuse.pipeline.host_passes import TIER0
from hotfuse.pipeline.job import Job, verify_graph
from hotfuse.runtime.plan import UNTRIED, Plan
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.specialize.table import DEVICE_KERNELS


def _masks(found: WeightedGraph, _job: Job) -> WeightedGraph:
    from hotfuse.compile.device.constant_masks import without_idle_masks  # with what lowering knows of ops

    return WeightedGraph(without_idle_masks(found.graph), found.weights)


def _library_on(found: WeightedGraph, job: Job) -> Plan:
    return run_all(TIER0, found, replace(job, constant=False))


def _recordings(found: WeightedGraph, job: Job) -> Plan:
    """A graph on a device: its library kernels as CUDA graphs, one for every kind of calls that recurs."""
    from hotfuse.compile.device.late_checks import LateChecks, checked_late

    device, backend = _device_of(found.graph)
    late = checked_late(found.graph)
    plan = _library_on(found, job)
    artifacts = tuple(replace(a, backend=f"recorded on {device.type}") for a in plan.artifacts)
    note = f"library kernels on {device} are replayed as {backend.records}; no kernels are generated for it"
    made = replace(plan, tier=1, artifacts=artifacts, holds=memory_of(job.weights))
    if late is not found.graph:
        flat = _library_on(WeightedGraph(late, found.weights), job).run
        run = backend.recorded(flat, device, in_background, _differ(job.settings))
        return replace(made, run=LateChecks(run), notes=(note, "data it rests on are read behind a call"), counters=run.counters)
    if read_in_any_strides(found.graph):
        # Models with caches alone need it.
        from hotfuse.runtime.serve.device_caches import StaticCacheRun, static_cache_library

        try:
            graphs = static_cache_library(found.graph, job.weights)
            served = StaticCacheRun(plan.run, graphs, backend.recorder(device, in_background), _differ(job.settings), in_background)
            grown = "its caches are static: they grow in place, in preallocated buffers"
            return replace(made, run=served, notes=(note, grown), counters=served.counters)
        except CaptureError as e:
            note = f"{note}; its caches are not static: {e.because}"
    run = backend.recorded(plan.run, device, in_background, _differ(job.settings))
    return replace(made, run=run, notes=(note,), counters=run.counters, ahead=run.replayed)


def _device_kernels(found: WeightedGraph, job: Job) -> GeneratedPlan:
    """Kernels that were generated for the sizes of the graph, where they beat the library's on the device."""
    from hotfuse.compile.device.device_plan import generate
    from hotfuse.compile.device.late_checks import checked_late
    from hotfuse.compile.device.rotations import turned

    device, _ = _device_of(found.graph)
    late = checked_late(found.graph)
    made = generate(turned(late), job.weights, job.sample, job.settings, device, _differ(job.settings), job.stop, few=_few(job))
    return made if late is found.graph else replace(made, graph=found.graph, checks=True)


def _record(made: GeneratedPlan, job: Job) -> Plan:
    from hotfuse.compile.device.late_checks import LateChecks

    device, backend = _device_of(made.graph)
    plan = _library_on(WeightedGraph(made.graph, job.weights), job)
    run = backend.recorded(made.run, device, in_background, _differ(job.settings))
    artifacts = tuple(replace(a, backend="triton", source=made.source) for a in plan.artifacts)

    def counters() -> dict[str, int]:
        copied = sum(k.copies for k in made.kernels)
        return {**run.counters(), "generated_kernels": len(made.kernels), UNTRIED: made.untried, "copied_to_fit": copied}

    served, ahead = (LateChecks(run), None) if made.checks else (run, run.replayed)
    return replace(plan, run=served, tier=1, artifacts=artifacts, notes=made.notes, counters=counters, layers=(DEVICE_KERNELS,),
                   ahead=ahead, holds=memory_of(job.weights))


def _kernels_on_static_caches(found: WeightedGraph, job: Job) -> Plan:
    """Kernels for steps whose caches are static, of as many rows as short texts share; longer ones run on the library's."""
    from hotfuse.compile.device.device_plan import generate
    from hotfuse.compile.device.rotations import turned
    from hotfuse.compile.device.static_caches import with_static_caches
    from hotfuse.runtime.serve.device_caches import (
        USUAL_ROWS,
        StaticCacheRun,
        capacity_for,
        static_cache_library,
        static_cache_sample,
    )

    device, backend = _device_of(found.graph)
    first = read_in_any_strides(found.graph)[0]
    rows = max(USUAL_ROWS, capacity_for(job.sample[first.input].shape[first.dim] + 1))
    static, differ = with_static_caches(found.graph, rows), _differ(job.settings)
    with torch.no_grad():
        sample = static_cache_sample(static, job.sample)
    made = generate(turned(static.graph), job.weights, sample, job.settings, device, differ, job.stop, few=_few(job))
    plan = _library_on(found, job)
    graphs = static_cache_library(found.graph, job.weights, {rows: made.run})
    run = StaticCacheRun(plan.run, graphs, backend.recorder(device, in_background), differ, in_background, rows)
    artifacts = tuple(replace(a, backend="triton", source=made.source) for a in plan.artifacts)

    def counters() -> dict[str, int]:
        return {**run.counters(), "generated_kernels": len(made.kernels), UNTRIED: made.untried}

    return replace(plan, run=run, tier=1, artifacts=artifacts, notes=(f"its caches are static, of {rows} rows", *made.notes),
                   counters=counters, layers=(DEVICE_KERNELS,), holds=memory_of(job.weights))  # fmt: skip


def _few(job: Job) -> bool:
    return job.demand is not None and FEW_TILINGS in job.demand.strategies


def memory_of(weights: Mapping[str, Any]) -> tuple[object, ...]:
    """What recordings read by address, whatever becomes of the tensors that it belongs to."""
    return tuple(t.untyped_storage() for t in weights.values() if isinstance(t, torch.Tensor))


def _differ(settings: Settings) -> Callable[[Sequence[Any], Sequence[Any]], str]:
    return lambda got, want: disagreement(got, want, settings.rtol)


def _device_of(graph: Graph) -> tuple[torch.device, DeviceBackend]:
    device = accelerator_of(graph)
    assert device is not None  # who comes here has asked
    found = registry.device(device.type)
    if found is None:
        raise InternalError(f"no plans are recorded on {device}", because=f"no back end is known for {device.type!r} devices",
                            hint=f"an installed package may bring one: an entry point of the group {registry.GROUP}")  # fmt: skip
    return device, found


def _within_device() -> tuple[Pass[Any, Any, Any], ...]:
    from hotfuse.compile.device.units import DEVICE_GROUPING, DEVICE_KERNEL

    return (*DEVICE_GROUPING, *DEVICE_KERNEL)


MASKS = Pass("masks", WeightedGraph, WeightedGraph, _masks, verify_graph)
RECORDED = (MASKS, Pass("recordings", WeightedGraph, Plan, _recordings))
"""Tier 1 on a device: library kernels, replayed."""
GENERATED = (
    MASKS,
    Pass("device kernels", WeightedGraph, GeneratedPlan, _device_kernels, within=_within_device),
    Pass("record", GeneratedPlan, Plan, _record),
)
"""Tier 2 on a device: kernels for its sizes, and library kernels between them, replayed."""
STATIC_CACHES = (MASKS, Pass("kernels on static caches", WeightedGraph, Plan, _kernels_on_static_caches, within=_within_device))
"""The same where caches grow."""
