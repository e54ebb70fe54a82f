"""A plan that bets on which way a branch goes: the values the condition needs, then straight-line code for that outcome.

An inline cache by outcome: each outcome that is frequent enough has code of its own, and one that has none runs the general
code from the condition on. Nothing that takes time is computed twice, so a wrong bet costs what it would have cost without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass

Ask = Callable[..., bool]
"""The condition as a function of the graph's inputs."""


@dataclass(slots=True)
class OutcomeHits:
    """How often a call found code for its outcome."""

    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class BranchSide:
    """Code behind a condition."""

    run: Run
    wants: bool
    """Whether it takes what the prefix computed, after the graph's inputs."""


def betting(
    prefix: Run, takes: tuple[int, ...], condition: int, hot: Mapping[bool, BranchSide], cold: BranchSide, outcomes: OutcomeHits,
    ask: Ask | None = None, tell: Callable[[bool], None] | None = None,
) -> Run:
    """One function of the graph's inputs. `takes` are the inputs the prefix reads; the prefix is not run where `ask` knows the
    outcome and the side that follows wants nothing of it. `tell` hears of every outcome.
    """

    def run(*inputs: Any) -> tuple[Any, ...]:
        known: tuple[Any, ...] | None = None
        if ask is None:
            known = prefix(*[inputs[i] for i in takes])
            outcome = bool(known[condition])
        else:
            outcome = ask(*inputs)
        if tell is not None:
            tell(outcome)
        side = hot.get(outcome)
        if side is None:
            outcomes.misses += 1
            side = cold
        else:
            outcomes.hits += 1
        if not side.wants:
            return side.run(*inputs)
        if known is None:
            known = prefix(*[inputs[i] for i in takes])
        return side.run(*inputs, *known)

    return run
