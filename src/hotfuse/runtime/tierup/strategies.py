"""Which strategy to try against what limits a plan: proposed by the diagnosis, ordered and given up by what came of it before.

| strategy | what is built |
| --- | --- |
| vertical, epilogue, ... split | the graph grouped anew by the fusion engine, with that kind of candidate alone |
| layout | the graph with its convolutions in the order that was decided against |
| library | the slowest partition by the library's kernels, all else as it was |
| threads | the slowest partition on the calling thread alone |

| none | the graph grouped anew by what its partitions took while they served, when that is not what it was planned by |

What is built is proven and raced as any plan is (`runtime.tierup.attempt_runner`); the outcome moves the promise of the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from hotfuse.analysis.convolution import is_convolution
from hotfuse.base.errors import CaptureError, InternalError
from hotfuse.base.events import Why
from hotfuse.compile.request_context import text_id
from hotfuse.hpm.bottleneck import Ledger, Strategy, Tried
from hotfuse.ir.hash import structural_hash
from hotfuse.ir.normal import normalized
from hotfuse.ir.text import show
from hotfuse.lower.common.own_sizes import with_own_sizes
from hotfuse.runtime.observe.findings import Finding
from hotfuse.runtime.observe.traffic import as_planned
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.attempt import PROVEN_ON, Attempt, AttemptContext, demand_of, exchange
from hotfuse.specialize.table import AGAINST, REPLANNED, AttemptKey

MIN_TIME_SHARE = 0.2
"""Part of the time that the slowest partition must take for a plan to be made anew because of it."""
MIN_PROMISE = 0.2
"""A strategy that helps more seldom against a bottleneck is not tried any more."""
MOVED = 0.15
"""Part of the time that must lie elsewhere than a plan was planned by for its graph to be planned again."""
MAX_REPLANS = 3
"""Times that a graph is planned again by weights until something else changes: groupings that measure alike must not take turns."""
_S = Strategy
FUSIONS = frozenset({_S.VERTICAL, _S.EPILOGUE, _S.HORIZONTAL, _S.TILING, _S.RECOMPUTE, _S.SPLIT})
"""Strategies that the fusion engine carries out."""
FOCUSED = frozenset({_S.LIBRARY, _S.THREADS})
"""Strategies about one partition."""


def attempts(entry: Entry, ledger: Ledger) -> Iterator[tuple[Finding, Strategy, AttemptKey]]:
    """What may be tried for a plan of tier 1 with the name of each attempt, the most promising first."""
    plain = entry.plan.tier == 1 and not entry.layers
    finding = entry.findings[0] if entry.findings and plain else None
    if finding is None or finding.tier != 1 or finding.share < MIN_TIME_SHARE or finding.index >= len(entry.plan.artifacts):
        return
    for strategy, _ in finding.strategies(ledger):
        attempt = AttemptKey(AGAINST, f"{strategy.value} against {finding.bottleneck.value}", 1)
        if attempt not in entry.refused and _possible(strategy, finding, entry.plan):
            yield finding, strategy, attempt


def _possible(strategy: Strategy, finding: Finding, plan: Plan) -> bool:
    """Whether there is anything to build."""
    if strategy in FUSIONS:
        return bool(finding.version)  # without a model nobody would group anew
    if strategy is Strategy.LAYOUT:
        return any(is_convolution(n) for n in plan.graph.nodes)
    if strategy in FOCUSED:
        several = strategy is Strategy.LIBRARY or torch.get_num_threads() > 1
        return several and plan.artifacts[finding.index].backend == "llvm"
    return False


def focus_of(plan: Plan, index: int) -> str:
    """A partition as workers call it: by its normal form."""
    own, _ = with_own_sizes(plan.artifacts[index].graph)
    return text_id(show(normalized(own)))


def against(context: AttemptContext, entry: Entry, finding: Finding, strategy: Strategy, attempt: AttemptKey) -> Attempt | None:
    """Tier 1 again, its kernels made by one strategy alone; None where no call is kept."""
    inputs, serving = entry.samples.inputs(), entry.plan
    if inputs is None:
        return None

    def make() -> Plan:
        focus = focus_of(serving, finding.index) if strategy in FOCUSED else ""
        demand = replace(demand_of(context, entry), strategies=(strategy.value,), focus=focus)
        if focus:  # names a group of the plan that serves
            demand = replace(demand, seen=as_planned(entry))
        better = context.improve(entry.baseline.graph, entry.weights, inputs, demand=demand)
        if kernels(better) == kernels(serving):
            raise InternalError("the plan is the one that serves", because=f"{strategy.value} changes nothing")
        return better

    calls = entry.samples.several(PROVEN_ON)
    return Attempt(attempt, make, lambda: entry.plan, calls, partial(exchange, entry), (finding.bottleneck, strategy))


def weights_moved(entry: Entry) -> float:
    """The part of the time that lies elsewhere than a plan of tier 1 was planned by, where that is enough to plan it again; else 0.
    What it was planned by are predictions at first, which say nothing of what was measured.
    """
    plan = entry.plan
    if plan.tier != 1 or entry.layers or plan.account is None or entry.replans >= MAX_REPLANS or not entry.weighed.steady():
        return 0.0
    moved = entry.weighed.moved(plan.account.seen.pieces if entry.planned_by is None else entry.planned_by)
    return moved if moved >= MOVED else 0.0


def replanned(context: AttemptContext, entry: Entry) -> Attempt | None:
    """Tier 1 grouped anew by measured weights; None where no call is kept. Where planning comes to the groups that serve, nothing
    is compiled and the plan stays.
    """
    inputs, serving = entry.samples.inputs(), entry.plan
    if inputs is None or serving.account is None:
        return None
    entry.planned_by, entry.replans = entry.weighed.pieces(), entry.replans + 1
    demand = replace(demand_of(context, entry), replanned=entry.weighed.coarse(), serving=serving.account.grouping)

    def make() -> Plan:
        better = context.improve(entry.baseline.graph, entry.weights, inputs, demand=demand)
        if kernels(better) == kernels(serving):
            raise CaptureError("the plan is the one that serves", because="measured weights change no kernel", why=Why.SAME_PLAN)
        return better

    calls = entry.samples.several(PROVEN_ON)
    return Attempt(REPLANNED, make, lambda: entry.plan, calls, partial(exchange, entry))


def failed_before(entry: Entry, strategy: Strategy, ledger: Ledger) -> Tried | None:
    """What came of a strategy against what limits a plan now, where that is too little to try again."""
    past = ledger.rows.get((entry.findings[0].bottleneck, strategy)) if entry.findings else None
    return past if past is not None and past.promise < MIN_PROMISE else None


def kernels(plan: Plan) -> list[tuple[str, str, str]]:
    """What runs what: equal for plans that are the same."""
    return [(structural_hash(a.graph), a.backend, a.source.partition(":")[0]) for a in plan.artifacts]
