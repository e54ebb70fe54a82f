"""Races whose winner is known beforehand: the clock is real, and the loser sleeps.

A verdict that is written into a test stays green while no plan can win. Here every round is run and timed, and the plan that a
better one has to beat takes milliseconds longer than any kernel of a test does, on however busy a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from hotfuse import api, torch_backend
from hotfuse.compile.variants import trial
from hotfuse.ir.graph import Graph
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup import improve
from hotfuse.runtime.tierup.race import Trial
from hotfuse.runtime.tierup.race import race as real_race
from hotfuse.session import serving

timed = trial._timed
"""A worker's rounds of a kernel and the library, before any test has replaced them."""
SLOWER_S = 0.02
"""What the loser takes longer: far more than the noise of a busy machine, for five rounds of a race a tenth of a second."""
LIBRARY_S = 0.003
"""The same for a worker's first run of a kernel, whose verdict is the least of several rounds: longer than any kernel of a test."""


class Held(NamedTuple):
    """A race that was held: what it measured, and what it was given."""

    found: Trial
    before: tuple[tuple[float, float], ...]
    """Rounds of the proof."""
    clock: Callable[[], float] | None


def sleeping(run: Callable[..., Any], seconds: float = SLOWER_S) -> Callable[..., Any]:
    """The same, later."""

    def slower(*args: Any) -> Any:
        if seconds:
            time.sleep(seconds)
        return run(*args)

    return slower


def new_plans_win(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """Rounds beside calls are run and timed as ever; what serves already sleeps in them, so that what is new wins."""
    raced(patch, lambda: (seconds, 0.0))


def new_plans_lose(patch: pytest.MonkeyPatch, seconds: float = SLOWER_S) -> None:
    """The same with sleep on the other side."""
    raced(patch, lambda: (0.0, seconds))


def raced(patch: pytest.MonkeyPatch, sleeps: Callable[[], tuple[float, float]], where: ModuleType = improve) -> list[Held]:
    """Rounds beside calls with so much sleep on the old and the new side, asked for each race; gives the list of races held."""
    held: list[Held] = []

    def race(
        old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Sequence[tuple[float, float]] = (), **how: Any
    ) -> Trial:
        old_s, new_s = sleeps()
        slowed = [(was + old_s, now + new_s) for was, now in before]  # rounds that a proof has run count like others
        found = real_race(sleeping(old, old_s), sleeping(new, new_s), *more, before=slowed, **how)
        held.append(Held(found, tuple(before), how.get("clock")))
        return found

    patch.setattr(where, "race", race)
    return held


def kernels_win(patch: pytest.MonkeyPatch, seconds: float = LIBRARY_S) -> None:
    """A worker runs and times a new kernel as ever; the library sleeps in its rounds."""
    patch.setattr(trial, "_timed", lambda native, library, inputs: timed(native, sleeping(library, seconds), inputs))


def kernels_lose(patch: pytest.MonkeyPatch, seconds: float = LIBRARY_S) -> None:
    """The same with sleep on the other side."""
    patch.setattr(trial, "_timed", lambda native, library, inputs: timed(sleeping(native, seconds), library, inputs))


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
