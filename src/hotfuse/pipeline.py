"""The only list of passes, from capture to link: `PASSES`. Each is a value with a name, a type in and a type out (`base.passes`).

    capture  simplify | bind  freeze  numbers | kernels( rules appends layouts groups order | normalize lower generate-code )
    runs( bridges drivers ) | link  parallel-branches                          and for tier 0: partitions  library
    on a device, behind bind: masks | recordings, or device-kernels( device-groups order | device-lower device-code ) record;
    kernels-in-rooms where caches grow

The engine runs it pass by pass, workers run captures and what stands within brackets, and `hotfuse show --stage` runs the same
values up to the one it is asked for. What links and serves code that there is already is imported here; what has code compiled is
imported by the thread that does, since a process that finds its plans in the cache never needs it (decision 50).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hotfuse.analysis.growth import read_in_any_strides
from hotfuse.analysis.placement import accelerator_of
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends import registry
from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.protocol import DeviceBackend
from hotfuse.base.debug import ASSEMBLY, GRAPHS, LLVM, TILES, UNITS, say
from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, run, run_all
from hotfuse.base.settings import Settings
from hotfuse.compile import recipes, request_context
from hotfuse.compile.capturing import CAPTURE, SIMPLIFY
from hotfuse.compile.freeze import WeightedGraph, frozen, may_copy, unfolded
from hotfuse.compile.literals import with_numbers
from hotfuse.compile.parts import GeneratedPlan, NativeParts, RunParts, without_runs
from hotfuse.compile.recipes import Recipe
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.value import ANY_DEMAND, GENERATE, Demand, Headway
from hotfuse.compile.workers.service import in_background
from hotfuse.frontends.captured import Captured
from hotfuse.frontends.ship import restore
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.native import guard, model_guard, publish
from hotfuse.partition.cut import Partitioning, cut
from hotfuse.runtime.plan import Plan, build
from hotfuse.runtime.serve.native import assembled
from hotfuse.runtime.serve.parallel_branches import measured
from hotfuse.runtime.tierup.lull import QUIET_S, Lull
from hotfuse.runtime.tierup.verify import disagreement
from hotfuse.specialize.table import DEVICE_KERNELS

if TYPE_CHECKING:
    from hotfuse.compile.compilation import Compilation
    from hotfuse.compile.unit.grouping import GroupedGraph
    from hotfuse.fusion.groups import Group

BESIDE = (guard, publish, model_guard, registry.host())
"""What no pass needs, but calls that got hot do; and what loads and enters code."""
Progress = Callable[[Callable[[], Plan], Headway], None]
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


def _verify_graph(found: WeightedGraph | Partitioning) -> object:
    from hotfuse.ir.verify import verify  # by those who ask for it

    return verify(found.graph)


def _bind(done: Captured, tensors: Sequence[torch.Tensor]) -> WeightedGraph:
    shared = {k: tensors[n] for k, n in done.shared.items()}
    return WeightedGraph(done.graph, {**shared, **{k: restore(info) for k, info in done.constants.items()}})


def _freeze(found: WeightedGraph, settings: Settings) -> WeightedGraph:
    return WeightedGraph(*frozen(found.graph, found.weights, widen=may_copy(settings)))


def _numbers(found: WeightedGraph, _settings: Settings) -> WeightedGraph:
    return WeightedGraph(with_numbers(found.graph, found.weights), found.weights)


BIND = Pass("bind", Captured, WeightedGraph, _bind, _verify_graph)
"""Knows the tensors that were shipped, by their number."""
PREPARE = (
    Pass("freeze", WeightedGraph, WeightedGraph, _freeze, _verify_graph),
    Pass("numbers", WeightedGraph, WeightedGraph, _numbers, _verify_graph),
)
"""What tiers that are withdrawn when a weight changes begin with."""


def _cut(found: WeightedGraph, job: Job) -> Partitioning:
    return cut(found.graph, job.settings.partition_nodes)


def _library(parts: Partitioning, job: Job) -> Plan:
    return build(parts, LibraryBackend(constant=job.constant), job.weights, tier=0)


TIER0 = (
    Pass("partitions", WeightedGraph, Partitioning, _cut, _verify_graph),
    Pass("library", Partitioning, Plan, _library),
)


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
    """The same with native runs."""

    graph: Graph
    parts: RunParts
    sizes: Mapping[str, int]


def _kernels(found: WeightedGraph, job: Job) -> GraphKernels:
    from hotfuse.compile.fetch import begin, finished

    graph = found.graph
    sizes = _sizes(graph, job.sample)
    compilation = begin(show(graph), sizes, job.settings, job.demand or ANY_DEMAND)
    compilation.latest = lambda: _of_late(graph, job.demand)
    if job.started is not None:
        job.started(compilation)

    def early(parts: Callable[[], NativeParts], headway: Headway) -> None:
        assert job.progress is not None
        job.progress(lambda: _planned(GraphKernels(graph, parts(), sizes, unfinished=True), compilation, job), headway)

    return GraphKernels(graph, finished(compilation, None if job.progress is None else early), sizes)


def _sizes(graph: Graph, sample: Sequence[torch.Tensor]) -> Mapping[str, int]:
    """Of a real call."""
    sizes = bind(graph, [tuple(t.shape) for t in sample])
    if isinstance(sizes, Mismatch):
        raise InternalError("a sample call does not fit its own graph", because=str(sizes))
    return sizes


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


def _within_kernels() -> tuple[Pass[Any, Any, Any], ...]:
    from hotfuse.compile.unit.grouping import GROUPING  # a worker's, as those below
    from hotfuse.compile.unit.kernel_cache import KERNEL

    return (*GROUPING, *KERNEL)


def _within_runs() -> tuple[Pass[Any, Any, Any], ...]:
    from hotfuse.compile.run.runs import RUNS

    return RUNS


TIER1 = (
    Pass("kernels", WeightedGraph, GraphKernels, _kernels, within=_within_kernels),
    Pass("runs", GraphKernels, GraphRuns, _runs, within=_within_runs),
    Pass("link", GraphRuns, Plan, _link),
    Pass("parallel branches", Plan, Plan, _parallel_branches),
)
PASSES: tuple[Pass[Any, Any, Any], ...] = (CAPTURE, SIMPLIFY, BIND, *PREPARE, *TIER1)
"""From a model to a plan of kernels; tier 0 leaves it behind `bind` (`TIER0`)."""


def _masks(found: WeightedGraph, _job: Job) -> WeightedGraph:
    from hotfuse.compile.device.constant_masks import without_idle_masks  # with what lowering knows of ops

    return WeightedGraph(without_idle_masks(found.graph), found.weights)


def _library_on(found: WeightedGraph, job: Job) -> Plan:
    return run_all(TIER0, found, replace(job, constant=False))


def _recordings(found: WeightedGraph, job: Job) -> Plan:
    """A graph on a device: its library kernels as CUDA graphs, one for every kind of calls that recurs."""
    device, backend = _device_of(found.graph)
    plan = _library_on(found, job)
    artifacts = tuple(replace(a, backend=f"recorded on {device.type}") for a in plan.artifacts)
    note = f"library kernels on {device} are replayed as {backend.records}; no kernels are generated for it"
    made = replace(plan, tier=1, artifacts=artifacts, holds=_memory_of(job.weights))
    if read_in_any_strides(found.graph):
        from hotfuse.runtime.serve.device_rooms import RoomedRun, roomed_library  # by models with caches alone

        try:
            rooms = RoomedRun(plan.run, roomed_library(found.graph, job.weights), backend.recorder(device, in_background),
                              _differ(job.settings), in_background)  # fmt: skip
            return replace(made, run=rooms, notes=(note, "its caches lie in rooms, and grow there"), counters=rooms.counters)
        except CaptureError as e:
            note = f"{note}; its caches do not lie in rooms: {e.because}"
    run = backend.recorded(plan.run, device, in_background, _differ(job.settings))
    return replace(made, run=run, notes=(note,), counters=run.counters, ahead=run.replayed)


def _device_kernels(found: WeightedGraph, job: Job) -> GeneratedPlan:
    """Kernels that were generated for the sizes of the graph, where they beat the library's on the device."""
    from hotfuse.compile.device.fetch import generate
    from hotfuse.compile.device.rotations import turned

    device, _ = _device_of(found.graph)
    return generate(turned(found.graph), job.weights, job.sample, job.settings, device, _differ(job.settings), job.stop)


def _record(made: GeneratedPlan, job: Job) -> Plan:
    device, backend = _device_of(made.graph)
    plan = _library_on(WeightedGraph(made.graph, job.weights), job)
    run = backend.recorded(made.run, device, in_background, _differ(job.settings))
    artifacts = tuple(replace(a, backend="triton", source=made.source) for a in plan.artifacts)

    def counters() -> dict[str, int]:
        copied = sum(k.copies for k in made.kernels)
        return {**run.counters(), "generated_kernels": len(made.kernels), "copied_to_fit": copied}

    return replace(plan, run=run, tier=1, artifacts=artifacts, notes=made.notes, counters=counters, layers=(DEVICE_KERNELS,),
                   ahead=run.replayed, holds=_memory_of(job.weights))


def _kernels_in_rooms(found: WeightedGraph, job: Job) -> Plan:
    """Kernels for steps whose caches lie in rooms, as many rows as short texts share; longer ones run on the library's."""
    from hotfuse.compile.device.fetch import generate
    from hotfuse.compile.device.rooms import in_rooms
    from hotfuse.compile.device.rotations import turned
    from hotfuse.runtime.serve.device_rooms import USUAL_ROWS, RoomedRun, capacity_for, roomed_library, sample_in_rooms

    device, backend = _device_of(found.graph)
    first = read_in_any_strides(found.graph)[0]
    rows = max(USUAL_ROWS, capacity_for(job.sample[first.input].shape[first.dim] + 1))
    roomed, differ = in_rooms(found.graph, rows), _differ(job.settings)
    with torch.no_grad():
        sample = sample_in_rooms(roomed, job.sample)
    made = generate(turned(roomed.graph), job.weights, sample, job.settings, device, differ, job.stop)
    plan = _library_on(found, job)
    run = RoomedRun(plan.run, roomed_library(found.graph, job.weights, {rows: made.run}), backend.recorder(device, in_background),
                    differ, in_background, rows)  # fmt: skip
    artifacts = tuple(replace(a, backend="triton", source=made.source) for a in plan.artifacts)

    def counters() -> dict[str, int]:
        return {**run.counters(), "generated_kernels": len(made.kernels)}

    return replace(plan, run=run, tier=1, artifacts=artifacts, notes=(f"its caches lie in rooms of {rows} rows", *made.notes),
                   counters=counters, layers=(DEVICE_KERNELS,), holds=_memory_of(job.weights))  # fmt: skip


def _memory_of(weights: Mapping[str, Any]) -> tuple[object, ...]:
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


MASKS = Pass("masks", WeightedGraph, WeightedGraph, _masks, _verify_graph)
RECORDED = (MASKS, Pass("recordings", WeightedGraph, Plan, _recordings))
"""Tier 1 on a device: library kernels, replayed."""
GENERATED = (
    MASKS,
    Pass("device kernels", WeightedGraph, GeneratedPlan, _device_kernels, within=_within_device),
    Pass("record", GeneratedPlan, Plan, _record),
)
"""Tier 2 on a device: kernels for its sizes, and library kernels between them, replayed."""
IN_ROOMS = (MASKS, Pass("kernels in rooms", WeightedGraph, Plan, _kernels_in_rooms, within=_within_device))
"""The same where caches grow."""
BRANCHES: Mapping[str, tuple[Pass[Any, Any, Any], ...]] = {
    "every target": PASSES[:3], "this machine's cores": PASSES[3:], "tier 0": TIER0, "a device, tier 1": RECORDED,
    "a device, tier 2": GENERATED, "a device, tier 2, where caches grow": IN_ROOMS,
}  # fmt: skip
"""Every pass there is, by what it is for: behind `bind` the way divides."""


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
        for step in _within_kernels():
            value = run(step, value, job)
            if step.name == name:
                return (value, ()) if isinstance(value, Graph) else (value.graph, value.groups)
    raise InternalError(f"no pass {name!r} gives a graph")


def compile_tier1(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings
) -> Plan:
    """A graph as a plan with generated kernels where they pay; raises InternalError where none does."""
    return compile_units(graph, weights, sample, settings)


def compile_units(
    graph: Graph,
    weights: Mapping[str, torch.Tensor],
    sample: Sequence[torch.Tensor],
    settings: Settings,
    on_progress: Progress | None = None,
    demand: Demand | None = None,
    started: Callable[[Compilation], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The same unit by unit, the most valuable first; `on_progress` may deploy what there is before all of it is done."""
    if accelerator_of(graph) is not None:
        say(settings.debug, GRAPHS, lambda: show(graph))
        generated = IN_ROOMS if read_in_any_strides(graph) else GENERATED
        steps = generated if demand is not None and GENERATE in demand.strategies else RECORDED
        return run_all(steps, WeightedGraph(graph, weights), Job(settings, weights, sample, stop=stop))
    begun: list[Compilation] = []

    def note(compilation: Compilation) -> None:
        begun.append(compilation)
        if started is not None:
            started(compilation)

    job, asked, recipe = _prepared(graph, weights, sample, settings, demand)
    job = replace(job, progress=on_progress, started=note)
    if recipe is None:
        made = _compiled(asked, job, begun)
    elif (kept := recipes.find(recipe, job.demand or ANY_DEMAND)) is not None:
        return _linked(kept, asked, job)
    else:
        with recipe.folder.making(recipe.address, settings.unit_timeout_s, stop):
            if (kept := recipes.again(recipe, job.demand or ANY_DEMAND)) is not None:
                return _linked(kept, asked, job)
            made = _compiled(asked, replace(job, recipe=recipe), begun)
    say(settings.debug, GRAPHS, lambda: show(made.graph))
    return made


def remembered(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings
) -> Plan | None:
    """The plan that an earlier process made of a graph, unless it lost there, linked and packed; None where there is none."""
    if accelerator_of(graph) is not None:  # recordings hold addresses of this process
        return None
    job, asked, recipe = _prepared(graph, weights, sample, settings, None)
    kept = None if recipe is None else recipes.recall(recipe, ANY_DEMAND)
    return None if kept is None else _linked(kept, asked, job)


def _prepared(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings, demand: Demand | None
) -> tuple[Job, WeightedGraph, Recipe | None]:
    """What a compilation begins with, and where its outcome is kept."""
    found: WeightedGraph = run_all(PREPARE, WeightedGraph(graph, weights), settings)
    job = Job(settings, found.weights, sample, demand=demand, unfolded=unfolded(graph, found.graph))
    recipe = recipes.recipe_of(show(found.graph), _sizes(found.graph, sample), settings, demand or ANY_DEMAND)
    return job, found, recipe


def _linked(kept: recipes.Kept, found: WeightedGraph, job: Job) -> Plan:
    """A plan of object code that was kept."""
    if why := registry.kernels(job.settings.backend).runs_unavailable():
        raise InternalError("object code that was kept cannot be used", because=why)
    plan: Plan = run_all(TIER1[2:], GraphRuns(found.graph, kept.parts, _sizes(found.graph, job.sample)), job)
    stale = f"; {kept.recipe.stale}, and it is compiled anew beside" if kept.recipe.stale else ""
    note = f"its code is from the cache: no kernel was compiled{stale}"
    return replace(plan, account=kept.account, recipe=kept.recipe, notes=(note, *plan.notes))


def _compiled(found: WeightedGraph, job: Job, begun: Sequence[Compilation]) -> Plan:
    """A plan of kernels that are compiled now, and kept for later processes."""
    made = run(TIER1[0], found, job)
    return _planned(made, begun[0], job)


def _planned(made: GraphKernels, compilation: Compilation, job: Job) -> Plan:
    """A plan of the kernels that there are, kept before it is proven: a process that ends in its race leaves it to the next one."""
    from hotfuse.compile.fetch import account

    native = run(TIER1[1], made, job)
    plan: Plan = run_all(TIER1[2:], native, job)
    told, recipe = account(compilation), job.recipe
    say(job.settings.debug, UNITS, told.lines)
    if recipe is not None:
        recipe = recipes.keep(recipe, native.parts, made.parts.message, told, unfinished=made.unfinished)
    return replace(plan, account=told, recipe=recipe)


class Units:
    """`compile_units` for one model. What it has begun for a model that nobody serves any more is called off."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._running: dict[int, Compilation] = {}
        self._called_off = False

    def __call__(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], /,
        progress: Progress | None = None, demand: Demand | None = None,
    ) -> Plan:  # fmt: skip
        """A graph as a plan of kernels; raises a HotfuseError where there is none, or nobody wants it any more."""
        me = threading.get_ident()  # a thread makes one plan after the other

        def started(compilation: Compilation) -> None:
            with self._lock:
                self._running[me] = compilation
                late = self._called_off
            if late:
                compilation.cancel()

        try:
            return compile_units(graph, weights, sample, self._settings, progress, demand, started, lambda: self._called_off)
        finally:
            with self._lock:
                self._running.pop(me, None)

    def remembered(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], /
    ) -> Plan | None:
        """The plan that an earlier process made of a graph, unless it lost there; None where there is none."""
        return remembered(graph, weights, sample, self._settings)

    def call_off(self) -> None:
        """End what runs, and whatever would begin from now on."""
        with self._lock:
            self._called_off, running = True, list(self._running.values())
        for compilation in running:
            compilation.cancel()


def compile_tier0(
    graph: Graph, weights: Mapping[str, torch.Tensor], settings: Settings, *, constant: bool = False
) -> Plan:
    """A graph as a tier-0 plan on these weights; `constant` where nobody can change them, and they may be copied."""
    say(settings.debug, GRAPHS, lambda: show(graph))
    steps = TIER0 if accelerator_of(graph) is None else (MASKS, *TIER0)
    return run_all(steps, WeightedGraph(graph, weights), Job(settings, weights, constant=constant))
