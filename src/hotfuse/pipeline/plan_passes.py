"""From a graph to a plan: compiled now, unit by unit, or linked from what an earlier process kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hotfuse.analysis.growth import read_in_any_strides
from hotfuse.analysis.placement import accelerator_of
from hotfuse.backends import registry
from hotfuse.base.debug import GRAPHS, say
from hotfuse.base.errors import InternalError
from hotfuse.base.passes import run, run_all
from hotfuse.base.settings import Settings
from hotfuse.compile import recipes
from hotfuse.compile.freeze import WeightedGraph, unfolded
from hotfuse.compile.recipes import Recipe
from hotfuse.compile.value import ANY_DEMAND, GENERATE, Demand
from hotfuse.compile.workers.service import sized
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.pipeline.device_passes import GENERATED, MASKS, RECORDED, STATIC_CACHES
from hotfuse.pipeline.host_passes import PREPARE, TIER0, TIER1, planned
from hotfuse.pipeline.job import GraphRuns, Job, Progress, sizes_of
from hotfuse.runtime.plan import Plan

if TYPE_CHECKING:
    from hotfuse.compile.ahead import AheadCompilation
    from hotfuse.compile.compilation import Compilation


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
        generated = STATIC_CACHES if read_in_any_strides(graph) else GENERATED
        steps = generated if demand is not None and GENERATE in demand.strategies else RECORDED
        return run_all(steps, WeightedGraph(graph, weights), Job(settings, weights, sample, demand=demand, stop=stop))
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
    recipe = recipes.recipe_of(show(found.graph, sources=False), sizes_of(found.graph, sample), settings, demand or ANY_DEMAND)
    return job, found, recipe


def _linked(kept: recipes.Kept, found: WeightedGraph, job: Job) -> Plan:
    """A plan of object code that was kept."""
    if why := registry.kernels(job.settings.backend).runs_unavailable():
        raise InternalError("object code that was kept cannot be used", because=why)
    plan: Plan = run_all(TIER1[2:], GraphRuns(found.graph, kept.parts, sizes_of(found.graph, job.sample)), job)
    stale = f"; {kept.recipe.stale}, and it is compiled anew beside" if kept.recipe.stale else ""
    note = f"its code is from the cache: no kernel was compiled{stale}"
    return replace(plan, account=kept.account, recipe=kept.recipe, notes=(note, *plan.notes))


def _compiled(found: WeightedGraph, job: Job, begun: Sequence[Compilation]) -> Plan:
    """A plan of kernels that are compiled now, and kept for later processes."""
    made = run(TIER1[0], found, job)
    return planned(made, begun[0], job)


class Units:
    """`compile_units` for one model. What it has begun for a model that nobody serves any more is called off."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._running: dict[int, Compilation] = {}
        self._called_off = False
        self._ahead: AheadCompilation | None = None

    def ahead(self, graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], /) -> None:
        """Have workers begin what a first plan of a graph takes, before anybody asks for it; returns at once."""
        if self._settings.capture != "background" or accelerator_of(graph) is not None:
            return

        def job() -> None:
            _, found, recipe = _prepared(graph, weights, sample, self._settings, None)
            if recipe is None or recipe.folder.peek(recipe.address) is not None:
                return
            from hotfuse.compile.ahead import AheadCompilation

            with self._lock:
                if self._called_off:
                    return
                begun = self._ahead = AheadCompilation()
            begun.run(show(found.graph), sizes_of(found.graph, sample), self._settings)

        sized(self._settings).submit(job, owner=(self, "ahead"))

    def _left(self) -> int:
        """Kernels that were made ahead: what follows is asked for, and finds them."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return 0 if ahead is None else ahead.leave()

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

        made = self._left()
        try:
            plan = compile_units(graph, weights, sample, self._settings, progress, demand, started, lambda: self._called_off)
        finally:
            with self._lock:
                self._running.pop(me, None)
        note = f"{made} of its kernels were compiled while tier 0 was built and compared"
        return replace(plan, notes=(*plan.notes, note)) if made else plan

    def remembered(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], sample: Sequence[torch.Tensor], /
    ) -> Plan | None:
        """The plan that an earlier process made of a graph, unless it lost there; None where there is none."""
        return remembered(graph, weights, sample, self._settings)

    def call_off(self) -> None:
        """End what runs, and whatever would begin from now on."""
        with self._lock:
            self._called_off, running, ahead = True, list(self._running.values()), self._ahead
        for compilation in running:
            compilation.cancel()
        if ahead is not None:
            ahead.stop()


def compile_tier0(
    graph: Graph, weights: Mapping[str, torch.Tensor], settings: Settings, *, constant: bool = False
) -> Plan:
    """A graph as a tier-0 plan on these weights; `constant` where nobody can change them, and they may be copied."""
    say(settings.debug, GRAPHS, lambda: show(graph))
    steps = TIER0 if accelerator_of(graph) is None else (MASKS, *TIER0)
    return run_all(steps, WeightedGraph(graph, weights), Job(settings, weights, constant=constant))
