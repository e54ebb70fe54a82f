"""A plan that bets on which way a branch goes: the values the condition needs, then straight-line code for that outcome.

An inline cache by outcome: each way the branch went often enough has code of its own, and a way that has none runs the general
code from the condition on. Nothing is computed twice, so a wrong bet costs what it would have cost without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotfuse.backends.protocol import Run


@dataclass(slots=True)
class Outcomes:
    """How often a call found code for its outcome."""

    hits: int = 0
    misses: int = 0


def betting(
    prefix: Run, takes: tuple[int, ...], condition: int, given: bool, hot: Mapping[bool, Run], cold: Run, outcomes: Outcomes,
    tell: Callable[[bool], None] | None = None,
) -> Run:
    """One function of the graph's inputs. `takes` are the inputs the prefix reads; `given`: its results go to the sides.

    `tell` hears of every outcome.
    """

    def run(*inputs: Any) -> tuple[Any, ...]:
        known = prefix(*[inputs[i] for i in takes])
        outcome = bool(known[condition])
        if tell is not None:
            tell(outcome)
        chosen = hot.get(outcome)
        if chosen is None:
            outcomes.misses += 1
            chosen = cold
        else:
            outcomes.hits += 1
        return chosen(*inputs, *known) if given else chosen(*inputs)

    return run
