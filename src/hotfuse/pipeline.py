"""The only list of stages: one tuple per tier. A stage is a named function from one value to the next.

Capture and simplification come before, in the worker (`compile.requests`): they must not hold the interpreter lock of a
process that serves. What links and serves code that there is already is imported here; what has code compiled is imported by the
thread that does, since a process that finds its plans in the cache never needs it (decision 50).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends import registry
from hotfuse.backends.cuda.device import CudaDevice, device_of_graph
from hotfuse.backends.cuda.graphs import GraphRun
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.debug import ASSEMBLY, GRAPHS, LLVM, TILES, UNITS, say
from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from hotfuse.compile import recipes
from hotfuse.compile.freeze import frozen, may_copy, unfolded
from hotfuse.compile.literals import with_numbers
from hotfuse.compile.parts import NativeParts, RunParts, without_runs
from hotfuse.compile.recipes import Recipe
from hotfuse.compile.value import ANY_DEMAND, GENERATE, Demand
from hotfuse.compile.workers.service import in_background
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.native import guard, model_guard, publish
from hotfuse.partition.cut import Partitioning, cut
from hotfuse.runtime.plan import Plan, build
from hotfuse.runtime.serve.native import assembled
from hotfuse.runtime.serve.parallel_branches import measured
from hotfuse.runtime.tierup.verify import disagreement
from hotfuse.specialize.table import DEVICE_KERNELS

if TYPE_CHECKING:
    from hotfuse.compile.compilation import Compilation

BESIDE = (guard, publish, model_guard, registry.host())
"""What no stage needs, but calls that got hot do; and what loads and enters code."""
Progress = Callable[[Callable[[], Plan], float], None]
"""Told while kernels are made: a plan of those there are, made on demand, and which part of the expected saving is settled."""


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
    return build(parts, LibraryBackend(constant=job.constant), job.weights, tier=0)


TIER0: tuple[Stage, ...] = (
    Stage("partitions", _cut, needs="ir", gives="partitions"),
    Stage("library", _library, needs="partitions", gives="plan"),
)


def _asked(graph: Graph, job: Job) -> tuple[Graph, NativeParts, Mapping[str, int]]:
    from hotfuse.compile.fetch import begin, finished

    sizes = _sizes(graph, job.sample)
    compilation = begin(show(graph), sizes, job.settings, job.demand or ANY_DEMAND)
    compilation.latest = lambda: _of_late(graph, job.demand)
    if job.started is not None:
        job.started(compilation)

    def early(parts: Callable[[], NativeParts], decided: float) -> None:
        assert job.progress is not None
        job.progress(lambda: _run(TIER1[1:], (graph, parts(), sizes), job), decided)

    return graph, finished(compilation, None if job.progress is None else early), sizes


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


def _runs(asked: tuple[Graph, NativeParts, Mapping[str, int]], job: Job) -> tuple[Graph, RunParts, Mapping[str, int]]:
    from hotfuse.compile.fetch import fetch_runs

    graph, parts, sizes = asked
    if why := registry.kernels(job.settings.backend).runs_unavailable():
        plain = without_runs(parts)
        return graph, replace(plain, notes=(*plain.notes, f"every kernel is entered from Python: {why}")), sizes
    try:
        return graph, fetch_runs(parts, sizes, job.settings), sizes
    except CaptureError as e:
        if e.why not in (Why.TIMEOUT, Why.WORKER_DIED):
            raise
        plain = without_runs(parts)  # what there is serves
        return graph, replace(plain, notes=(*plain.notes, f"every kernel is entered from Python: {e.what}")), sizes


def _native(runs: tuple[Graph, RunParts, Mapping[str, int]], job: Job) -> Plan:
    graph, parts, sizes = runs
    backend = registry.kernels(job.settings.backend)
    plan = assembled(parts, job.weights, graph, sizes, backend, named=job.settings.perf_map)
    for kernel in plan.kernels.values() if job.settings.debug >= TILES else ():
        for level, stage in zip((TILES, LLVM, ASSEMBLY), backend.stages, strict=False):
            say(job.settings.debug, level, lambda kernel=kernel, stage=stage: backend.text(stage, kernel))
    why = backend.serial_because()
    notes = (f"kernels run on one thread: {why}",) if why else ()
    return replace(plan, notes=(*notes, *plan.notes), live=plan.live & job.unfolded)


def _side_by_side(plan: Plan, job: Job) -> Plan:
    return measured(plan, job.sample, job.settings.race_s) if plan.switches else plan


TIER1: tuple[Stage, ...] = (
    Stage("kernels", _asked, needs="ir", gives="object code"),
    Stage("runs", _runs, needs="object code", gives="native runs"),
    Stage("native", _native, needs="native runs", gives="plan"),
    Stage("side by side", _side_by_side, needs="plan", gives="plan"),
)


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
    if (device := device_of_graph(graph)) is not None:
        if demand is not None and GENERATE in demand.strategies:
            return _generated(graph, weights, sample, settings, device, stop)
        return _recorded(graph, weights, settings, device)
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
            made = _compiled(asked, job, begun, recipe)
    say(settings.debug, GRAPHS, lambda: show(made.graph))
    return made


def remembered(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings
) -> Plan | None:
    """The plan that an earlier process made of a graph and that won there, linked and packed; None where there is none."""
    if device_of_graph(graph) is not None:  # recordings hold addresses of this process
        return None
    job, asked, recipe = _prepared(graph, weights, sample, settings, None)
    kept = None if recipe is None else recipes.find(recipe, ANY_DEMAND, other_sizes=True)
    return None if kept is None or kept.recipe.verdict is None else _linked(kept, asked, job)


def _prepared(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings, demand: Demand | None
) -> tuple[Job, Graph, Recipe | None]:
    """What a compilation begins with, and where its outcome is kept."""
    folded, constants = frozen(graph, weights, widen=may_copy(settings))
    asked = with_numbers(folded, constants)
    job = Job(settings, constants, sample, demand=demand, unfolded=unfolded(graph, asked))
    return job, asked, recipes.recipe_of(show(asked), _sizes(asked, sample), settings, demand or ANY_DEMAND)


def _linked(kept: recipes.Kept, graph: Graph, job: Job) -> Plan:
    """A plan of object code that was kept."""
    if why := registry.kernels(job.settings.backend).runs_unavailable():
        raise InternalError("object code that was kept cannot be used", because=why)
    plan = _run(TIER1[2:], (graph, kept.parts, _sizes(graph, job.sample)), job)
    stale = f"; {kept.recipe.stale}, and it is compiled anew beside" if kept.recipe.stale else ""
    note = f"its code is from the cache: no kernel was compiled{stale}"
    return replace(plan, account=kept.account, recipe=kept.recipe, notes=(note, *plan.notes))


def _compiled(graph: Graph, job: Job, begun: Sequence[Compilation], recipe: Recipe | None = None) -> Plan:
    """A plan of kernels that are compiled now, and kept for later processes."""
    from hotfuse.compile.fetch import account

    asked = TIER1[0].run(graph, job)
    runs = TIER1[1].run(asked, job)
    plan = _run(TIER1[2:], runs, job)
    told = account(begun[0])
    say(job.settings.debug, UNITS, told.lines)
    if recipe is not None:
        recipes.keep(recipe, runs[1], asked[1].message, told)
    return replace(plan, account=told, recipe=recipe)


def _recorded(graph: Graph, weights: Mapping[str, torch.Tensor], settings: Settings, device: torch.device) -> Plan:
    """A graph on a device: its library kernels as CUDA graphs, one for every kind of calls that recurs."""
    plan = compile_tier0(graph, weights, settings)
    run = GraphRun(plan.run, CudaDevice(device, in_background), lambda got, want: disagreement(got, want, settings.rtol))
    artifacts = tuple(replace(a, backend="cuda graph") for a in plan.artifacts)
    note = f"library kernels on {device} are replayed as CUDA graphs; no kernels are generated for it"
    return replace(plan, run=run, tier=1, artifacts=artifacts, notes=(note,), counters=run.counters)


def _generated(
    graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], settings: Settings, device: torch.device,
    stop: Callable[[], bool],
) -> Plan:  # fmt: skip
    """The same with kernels that were generated for the sizes of the graph, where they beat the library's on the device."""

    from hotfuse.compile.device.fetch import generate

    def differ(got: Sequence[Any], want: Sequence[Any]) -> str:
        return disagreement(got, want, settings.rtol)

    made = generate(graph, weights, sample, settings, device, differ, stop)
    plan = compile_tier0(graph, weights, settings)
    run = GraphRun(made.run, CudaDevice(device, in_background), differ)
    artifacts = tuple(replace(a, backend="triton", source=made.source) for a in plan.artifacts)

    def counters() -> dict[str, int]:
        copied = sum(k.copies for k in made.kernels)
        return {**run.counters(), "generated_kernels": len(made.kernels), "copied_to_fit": copied}

    return replace(plan, run=run, tier=1, artifacts=artifacts, notes=made.notes, counters=counters, layers=(DEVICE_KERNELS,))


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
        """The plan that an earlier process made of a graph and that won there; None where there is none."""
        return remembered(graph, weights, sample, self._settings)

    def call_off(self) -> None:
        """End what runs, and whatever would begin from now on."""
        with self._lock:
            self._called_off, running = True, list(self._running.values())
        for compilation in running:
            compilation.cancel()


def _run(stages: tuple[Stage, ...], value: Any, job: Job) -> Any:
    for stage in stages:
        value = stage.run(value, job)
    return value


def compile_tier0(
    graph: Graph, weights: Mapping[str, torch.Tensor], settings: Settings, constant: bool = False
) -> Plan:
    """A graph as a tier-0 plan on these weights; `constant` where nobody can change them, and they may be copied."""
    say(settings.debug, GRAPHS, lambda: show(graph))
    return _run(TIER0, graph, Job(settings, weights, constant=constant))
