"""What being served takes besides a plan: a real call of the engine, in a plan that computes nothing.

Calls that go straight to the model's own code pay none of it, so a comparison with a plan adds it to the plan. Of one
small operator it is more than the operator takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from statistics import median
from typing import Any, cast

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve.dispatch import InlineCache
from hotfuse.runtime.site import NO_VERSIONS, Entry, Route, Site
from hotfuse.runtime.tally import ThreadCounts

CALLS = 9
"""That are measured; the middle one counts."""
_NOTHING = (None,)

Serve = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _OneRoute:
    """Finds a call's route as the real one does; all routes are one."""

    select: Callable[..., int]
    routes: Sequence[Route]
    native: bool


@dataclass(frozen=True, slots=True)
class _OneCache:
    table: _OneRoute


def path_seconds(
    serve: Serve, counts: ThreadCounts, site: Site, entry: Entry, leaves: Sequence[torch.Tensor], around: int
) -> float | None:
    """Seconds of `serve` for such a call, its plan left out; None where no plan is found for it."""
    cache = site.caches.get(around & site.mask)
    table = cache.table if cache is not None else None
    if table is None or table.select(*leaves) < 0:
        return None
    nothing = copy(entry)
    nothing.plan = nothing.baseline = _computes_nothing(entry.plan)
    nothing.versions, nothing.effects, nothing.contest, nothing.own = NO_VERSIONS, None, None, False
    nothing.bare, nothing.next_look, nothing.around = True, sys.maxsize, (around,)
    stand_in = Site(site.spec, 1)
    found = _OneCache(_OneRoute(table.select, [Route(nothing)] * len(table.routes), table.native))
    stand_in.mask, stand_in.caches = site.mask, {around & site.mask: cast("InlineCache[Route]", found)}
    before = {name: getattr(counts, name) for name in ThreadCounts.__slots__}
    times: list[float] = []
    try:
        for _ in range(CALLS):
            begin = time.perf_counter()
            serve((), {}, met=(stand_in, leaves, ()))
            times.append(time.perf_counter() - begin)
    finally:
        for name, count in before.items():
            setattr(counts, name, count)
    return median(times)


def _computes_nothing(plan: Plan) -> Plan:
    return replace(plan, run=lambda *leaves: _NOTHING, ahead=None)
