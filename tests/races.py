"""Races whose winner is known beforehand: the clock is real, and the loser sleeps.

A verdict that is written into a test stays green while no plan can win. Here every round is run and timed, and the plan that a
better one has to beat takes milliseconds longer than any kernel of a test does, on however busy a machine.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from hotfuse import api, torch_backend
from hotfuse.backends.protocol import Run
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import BoundCall, CompiledCandidate, Shelf
from hotfuse.compile.unit import units
from hotfuse.compile.variants import trial
from hotfuse.compile.variants.alternatives import Variant, VariantQuestion
from hotfuse.compile.variants.skipping import Zeroed
from hotfuse.compile.variants.variant_search import VariantSearch
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import Layout, TensorType
from hotfuse.lower.common.lowered import StateArgument
from hotfuse.profile import agent
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve import parallel_branches
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup import attempt_runner
from hotfuse.runtime.tierup.race import Trial
from hotfuse.runtime.tierup.race import race as real_race
from hotfuse.session import serving

timed = trial._timed
"""A worker's rounds of a kernel and the library, before any test has replaced them."""
SLOWER_S = 0.02
"""What the loser takes longer: far more than the noise of a busy machine, for five rounds of a race a tenth of a second."""
CHARGED_S = 60.0
"""The same where nobody sleeps."""


class Held(NamedTuple):
    """A race that was held: what it measured, and what it was given."""

    found: Trial
    before: tuple[tuple[float, float], ...]
    """Rounds of the proof."""
    clock: Callable[[], float] | None


def sleeping(run: Callable[..., Any], seconds: float | Callable[[], float] = SLOWER_S) -> Callable[..., Any]:
    """The same, later: always by so much, or by what each call is told."""

    def slower(*args: Any) -> Any:
        time.sleep(seconds() if callable(seconds) else seconds)
        return run(*args)

    return slower if callable(seconds) or seconds else run


def prolonged(run: Callable[..., Any], times: float) -> Callable[..., Any]:
    """The same, so many times as long, and a millisecond."""

    def slower(*args: Any) -> Any:
        begin = time.perf_counter()
        found = run(*args)
        time.sleep(1e-3 + (times - 1) * (time.perf_counter() - begin))
        return found

    return slower


def new_plans_win(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """Rounds beside calls are run and timed as ever; what serves already sleeps in them, so that what is new wins. It goes on
    serving: blocks of whole calls, where nobody sleeps and the clock would decide, are not begun.
    """
    patch.setattr(Entry, "in_whole_calls", lambda _entry, _plan: None)
    raced(patch, lambda: (seconds, 0.0))


def new_plans_lose(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """The same with sleep on the other side."""
    raced(patch, lambda: (0.0, seconds))


def new_plans_win_by(patch: pytest.MonkeyPatch, times: float) -> None:
    """The same for models whose calls take long: what serves already takes so many times as long as it would."""

    def race(
        old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Sequence[tuple[float, float]] = (), **how: Any
    ) -> Trial:
        return real_race(prolonged(old, times), new, *more, before=[(was * times, now) for was, now in before], **how)

    patch.setattr(attempt_runner, "race", race)


def nobody_wins(patch: pytest.MonkeyPatch, held: list[Held]) -> None:
    """Rounds are won by one and the other in turns, so that nothing is decided when the time is up; notes the races held."""

    def race(
        old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Sequence[tuple[float, float]] = (), **how: Any
    ) -> Trial:
        turns = [itertools.cycle((SLOWER_S, 0.0)), itertools.cycle((0.0, 2 * SLOWER_S))]  # first calls are no rounds
        sides = [sleeping(run, functools.partial(next, t)) for run, t in zip((old, new), turns, strict=True)]
        found = real_race(sides[0], sides[1], *more, **how)
        held.append(Held(found, tuple(before), how.get("clock")))
        return found

    patch.setattr(attempt_runner, "race", race)


def raced(
    patch: pytest.MonkeyPatch, sleeps: Callable[[], tuple[float, float]], held: list[Held] | None = None
) -> list[Held]:
    """Rounds beside calls with so much sleep on the old and the new side, asked for each race; gives the list of races held."""
    held = [] if held is None else held

    def race(
        old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Sequence[tuple[float, float]] = (), **how: Any
    ) -> Trial:
        old_s, new_s = sleeps()
        slowed = [(was + old_s, now + new_s) for was, now in before]  # rounds that a proof has run count like others
        found = real_race(sleeping(old, old_s), sleeping(new, new_s), *more, before=slowed, **how)
        held.append(Held(found, tuple(before), how.get("clock")))
        return found

    patch.setattr(attempt_runner, "race", race)
    return held


def forking(patch: pytest.MonkeyPatch, *, pays: bool) -> list[Held]:
    """A plan's parts are run and timed one after the other and side by side; the loser is charged seconds that nobody waits for.
    Threads meet in a round, and a busy machine holds that up for longer than a test may sleep. Gives the list of races held.
    """
    held: list[Held] = []

    def race(old: Callable[..., Any], new: Callable[..., Any], args: Sequence[Any], budget_s: float) -> Trial:
        charged = [0.0]

        def dear(*given: Any) -> Any:
            charged[0] += CHARGED_S
            return (old if pays else new)(*given)

        sides = (dear, new) if pays else (old, dear)
        found = real_race(*sides, args, budget_s, clock=lambda: time.perf_counter() + charged[0])
        held.append(Held(found, (), None))
        return found

    patch.setattr(parallel_branches, "race", race)
    return held


def kernels_charged(patch: pytest.MonkeyPatch, native_s: float, library_s: float) -> None:
    """A worker runs and times a new kernel and the library as ever; each call is charged seconds that nobody waits for."""

    def rounds(native: Run, library: Run, inputs: list[Any]) -> trial.Outcome:
        charged = [0.0]

        def dear(run: Run, seconds: float) -> Run:
            def called(*given: Any) -> Any:
                charged[0] += seconds
                return run(*given)

            return called

        return timed(dear(native, native_s), dear(library, library_s), inputs, lambda: time.perf_counter() + charged[0])

    patch.setattr(trial, "_timed", rounds)


def kernels_win(patch: pytest.MonkeyPatch) -> None:
    """New kernels are proposed, right and faster than the library."""
    kernels_charged(patch, 0.0, CHARGED_S)


def every_kernel_wins(patch: pytest.MonkeyPatch) -> None:
    """Kernels win in the worker, plans made of them win on calls, and groups are made by rule, without measuring any."""
    slow_library(patch)
    kernels_win(patch)
    patch.setattr(units, "measuring", lambda _sizes: None)


def samples_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    """As many calls are sampled as a rate asks for, whatever that takes on this machine."""
    patch.setattr(agent, "BUDGET", 1e9)
    patch.setattr(agent, "MAX_PER_SECOND", 1e9)


def kernels_lose(patch: pytest.MonkeyPatch) -> None:
    """They are right and slower."""
    kernels_charged(patch, CHARGED_S, 0.0)


Sleeps = Callable[[BoundCall, CompiledCandidate | None, Shelf | None], float]


def measured_with(patch: pytest.MonkeyPatch, sleeps: Sleeps) -> None:
    """What workers time in turns is bound, run and timed as ever, with so much sleep in each of its calls."""
    bind = measure.bind

    def slower(candidate: Candidate, group: str, made: CompiledCandidate | None, shelf: Shelf | None = None) -> BoundCall:
        bound = bind(candidate, group, made, shelf)
        bound.call = sleeping(bound.call, sleeps(bound, made, shelf))
        return bound

    patch.setattr(measure, "bind", slower)


def layouts_take(patch: pytest.MonkeyPatch, *, rows_s: float = 0.0, last_s: float = 0.0) -> None:
    """Convolutions are measured as ever, with so much sleep where images lie row by row, or with channels innermost."""

    def sleeps(bound: BoundCall, *_: object) -> float:
        nodes = bound.candidate.graph.nodes
        types = [v.type for n in nodes for v in n.outs if isinstance(v.type, TensorType)]
        if not any("conv" in n.op for n in nodes):
            return 0.0
        return rows_s if all(t.layout == Layout() for t in types) else last_s

    measured_with(patch, sleeps)


def variants_take(patch: pytest.MonkeyPatch, sleeps: Callable[[Variant, int], float]) -> None:
    """Variants are measured as ever at every size that the search asks for, each with so much sleep in its calls."""
    at, plain, bound = [0], VariantSearch._timed, VariantSearch._bound

    def timed(self: VariantSearch, question: VariantQuestion, variants: Sequence[Variant], n: int) -> dict[str, float]:
        at[0] = n
        return plain(self, question, variants, n)

    def slower(self: VariantSearch, variant: Variant, env: Mapping[str, int]) -> BoundCall:
        found = bound(self, variant, env)
        found.call = sleeping(found.call, sleeps(variant, at[0]))
        return found

    patch.setattr(VariantSearch, "_timed", timed)
    patch.setattr(VariantSearch, "_bound", slower)


SKIPPING_PAYS_FROM = 125
"""Per mille of rows that are zeros."""


def skipping_pays(patch: pytest.MonkeyPatch, *, pays: bool = True) -> None:
    """Both sides of a kernel that leaves rows of zeros out are timed; sleep has it pay from an eighth of the rows on, or never."""

    def sleeps(bound: BoundCall, made: CompiledCandidate | None, shelf: Shelf | None) -> float:
        if not isinstance(shelf, Zeroed) or made is None:
            return 0.0
        (limit,) = {a.words[0] for a in made.lowered.arguments if isinstance(a, StateArgument)}
        dense = 6e-3
        return dense if limit else dense + (6e-6 * (SKIPPING_PAYS_FROM - shelf.share) if pays else dense)

    measured_with(patch, sleeps)


def slow_kernels(patch: pytest.MonkeyPatch, seconds: float, plans: Callable[[Graph, Plan], bool] = lambda *_: True) -> None:
    """Plans of kernels, of graphs for which `plans` says so, take their time: what serves already wins its real race."""
    real = api.Units.__call__

    def late(self: Any, graph: Graph, *args: Any, **how: Any) -> Plan:
        plan = real(self, graph, *args, **how)
        return replace(plan, run=sleeping(plan.run, seconds)) if plans(graph, plan) else plan

    patch.setattr(api.Units, "__call__", late)


def slow_library(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """Library plans of whole graphs, which serve as tier 0, take their time: what is better wins its real race against them."""
    for place in (api, serving, torch_backend):
        plain = place.compile_tier0

        def compiled(
            graph: Graph, weights: Mapping[str, torch.Tensor], *more: Any, plain: Callable[..., Plan] = plain, **how: Any
        ) -> Plan:
            plan = plain(graph, weights, *more, **how)
            return replace(plan, run=sleeping(plan.run, seconds))

        patch.setattr(place, "compile_tier0", compiled)
