"""Races whose winner is known beforehand: the clock is real, and the loser sleeps.

A verdict that is written into a test stays green while no plan can win. Here every round is run and timed, and the plan that a
better one has to beat takes milliseconds longer than any kernel of a test does, on however busy a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotfuse import api, torch_backend
from hotfuse.ir.graph import Graph
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup import improve
from hotfuse.runtime.tierup.race import Trial
from hotfuse.session import serving

SLOWER_S = 0.02
"""What the loser takes longer: far more than the noise of a busy machine, for five rounds of a race a tenth of a second."""


def sleeping(run: Callable[..., Any], seconds: float = SLOWER_S) -> Callable[..., Any]:
    """The same, later."""

    def slower(*args: Any) -> Any:
        time.sleep(seconds)
        return run(*args)

    return slower


def new_plans_win(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """Rounds beside calls are run and timed as ever; what serves already sleeps in them, so that what is new wins."""
    real = improve.race

    def race(
        old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Sequence[tuple[float, float]] = (), **how: Any
    ) -> Trial:
        slowed = [(was + seconds, now) for was, now in before]  # rounds that a proof has run count like others
        return real(sleeping(old, seconds), new, *more, before=slowed, **how)

    patch.setattr(improve, "race", race)


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
