"""Which strategy to try against what limits a plan: proposed by the diagnosis, ordered and given up by what came of it before."""

from __future__ import annotations

from collections.abc import Iterator

from hotfuse.hpm.bottleneck import Ledger, Strategy, Tried
from hotfuse.runtime.findings import Finding
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry

WORTH = 0.2
"""Part of the time that the slowest partition must take for a plan to be fused anew because of it."""
LEAST_PROMISE = 0.2
"""A strategy that helps more seldom against a bottleneck is not tried any more."""
_S = Strategy
FUSIONS = frozenset({_S.VERTICAL, _S.EPILOGUE, _S.HORIZONTAL, _S.TILING, _S.RECOMPUTE, _S.SPLIT})
"""Strategies that the fusion engine carries out."""


def attempts(entry: Entry, ledger: Ledger) -> Iterator[tuple[Finding, Strategy, str]]:
    """What may be tried for a plan of tier 1 with the name of each attempt, the most promising first."""
    plain = entry.plan.tier == 1 and not entry.bets and not entry.plan.attempt
    finding = entry.findings[0] if entry.findings and plain else None
    if finding is None or finding.tier != 1 or finding.share < WORTH or not finding.version:
        return  # without a model nobody would group anew
    for strategy, _ in finding.strategies(ledger):
        attempt = f"{strategy.value} against {finding.bottleneck.value}, tier 1"
        if strategy in FUSIONS and attempt not in entry.refused:
            yield finding, strategy, attempt


def failed_before(entry: Entry, strategy: Strategy, ledger: Ledger) -> Tried | None:
    """What came of a strategy against what limits a plan now, where that is too little to try again."""
    past = ledger.rows.get((entry.findings[0].bottleneck, strategy)) if entry.findings else None
    return past if past is not None and past.promise < LEAST_PROMISE else None


def kernels(plan: Plan) -> list[tuple[int, int, str, str]]:
    """What runs what: equal for plans that are the same."""
    both = zip(plan.partitioning.parts, plan.artifacts, strict=True)
    return [(p.first, p.last, a.backend, a.source.partition(":")[0]) for p, a in both]
