"""Tier 1: generated kernels, generic in the graph's sizes; what is there of them serves before all of it is done, if that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from hotfuse.compile.value import CompileProgress
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.attempt import (
    PROVEN_ON,
    Attempt,
    AttemptContext,
    demand_of,
    exchange,
)
from hotfuse.runtime.warm_start import MadeOf
from hotfuse.specialize.table import PART_OF_TIER1, TIER1

EARLY = 0.5
"""Part of the expected saving that must be there before an unfinished plan is tried."""
EARLY_S = 5.0
"""Seconds of compilation before that."""
EARLY_REST_S = 8.0
"""Seconds that the rest is expected to take at the pace so far. An unfinished plan is made, proven and raced while workers go on,
which takes half a second of theirs; half of an image network's kernels gain little, since results change their layout between
kernels and library (an OCR model: 22.6 ms where the library takes 20.1 and all of them 13.4)."""
NEARLY_ALL = 0.95
"""Part of the expected saving from which on an unfinished plan is as good as the whole: what is left are branches that calls seldom
take. Then the rest need not take as long."""
NEARLY_ALL_REST_S = 3.0

AtOnce = Callable[[Attempt], Callable[[], None]]
"""Begins an attempt beside the compilation that it is a part of; returns what waits for its end."""

RECALLED_ON = 2
"""Calls that a plan of an earlier process is proven on: its code was proven there, and what is new are the packed weights."""


def fused(context: AttemptContext, entry: Entry, at_once: AtOnce) -> Attempt | None:
    """An attempt at tier 1, None where no call is kept; `at_once` tries an unfinished plan while the rest is made."""
    inputs = entry.samples.inputs()
    if inputs is None:
        return None
    begin, calls, tried = time.perf_counter(), entry.samples.several(PROVEN_ON), list[Callable[[], None]]()
    deploy = partial(exchange, entry)

    def early(make: Callable[[], Plan], progress: CompileProgress) -> None:
        passed, decided, worked = time.perf_counter() - begin, progress.decided, progress.worked
        rest_s = NEARLY_ALL_REST_S if decided >= NEARLY_ALL else EARLY_REST_S
        if not tried and decided >= EARLY and passed > EARLY_S and passed * (1 - worked) > rest_s * worked:
            about = {"decided": round(decided, 2)}
            tried.append(at_once(Attempt(PART_OF_TIER1, make, lambda: entry.baseline, list(calls), deploy, about=about)))

    def make() -> Plan:
        try:
            better = context.improve(entry.baseline.graph, entry.weights, inputs, progress=early, demand=demand_of(context, entry))
        finally:
            for finish in tried:
                finish()  # nothing is measured beside it, and whatever comes of it, it serves no longer than the whole
        context.vet(entry)
        later = [c for c in entry.samples.several(PROVEN_ON) if c is not calls[0]]
        calls[1:] = later[: PROVEN_ON - 1]  # kinds of calls that came meanwhile are proven on as well
        return better

    return Attempt(TIER1, make, lambda: entry.plan, calls, deploy)  # which part of it may serve already


def known(entry: Entry, plan: Plan, made_of: MadeOf) -> Attempt:
    """An attempt with the plan that an earlier process made of the graph, with copies of these weights. What lacks something and
    was never judged is no more than a part: if it loses, the whole is made all the same.
    """
    recipe = plan.recipe
    part = recipe is not None and bool(recipe.stale) and recipe.verdict is None
    key, calls = PART_OF_TIER1 if part else TIER1, entry.samples.several(RECALLED_ON)
    deploy = partial(exchange, entry)
    return Attempt(key, lambda: plan, lambda: entry.plan, calls, deploy, remembered=True, made_of=made_of)
