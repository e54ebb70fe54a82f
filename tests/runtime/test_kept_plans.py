# pyright: reportPrivateUsage=false
# Graphs as they were captured, and units that fail, have no public name.
"""What the next process begins with: a plan that won, one that nobody judged, one that lacks kernels; never one that lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address
from hotfuse.compile import recipes
from hotfuse.compile.recipes import Recipe
from hotfuse.compile.value import ANY_DEMAND
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_units, remembered
from hotfuse.runtime.plan import Plan

WIDE = 32


class Net(nn.Module):
    """Two kinds of units with what has no kernel between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(WIDE, 64), nn.Linear(64, WIDE), nn.LayerNorm(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.norm(x + self.down(torch.nn.functional.gelu(self.up(x)))).sort(-1)[0]
        return x


class Ended(Exception):
    """Stands for the end of the process."""


Made = tuple[Graph, Mapping[str, torch.Tensor], torch.Tensor, Settings]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A captured graph, and settings with an empty cache."""
    x = torch.randn(6, WIDE)
    fast = hotfuse.jit(Net().eval(), settings=Settings(capture="inline", tiers=0))
    with torch.no_grad():
        fast(x)
    (site,) = fast._engine.sites.values()
    (entry,) = site.entries
    return entry.baseline.graph, entry.weights, x, Settings(cache_dir=tmp_path)


def begun(made: Made) -> Recipe:
    """A process makes a plan of what there is after a first kernel, and ends. Where that is kept."""
    graph, weights, x, settings = made
    plans: list[Plan] = []

    def progress(make: Callable[[], Any], _headway: Any) -> None:
        plans.append(make())
        raise Ended

    with torch.no_grad(), pytest.raises(Ended):
        compile_units(graph, weights, [x], settings, progress)
    assert plans[0].recipe is not None
    return plans[0].recipe


def recalled(made: Made) -> Recipe | None:
    """What the next process begins with, proven."""
    graph, weights, x, settings = made
    with torch.no_grad():
        plan = remembered(graph, weights, [x], settings)
        if plan is None:
            return None
        torch.testing.assert_close(plan.run(x), LibraryBackend().compile(graph, weights).run(x), rtol=1e-4, atol=1e-4)
    return plan.recipe


def whole(made: Made) -> Recipe:
    """Where a whole plan is kept that is compiled now."""
    graph, weights, x, settings = made
    with torch.no_grad():
        plan = compile_units(graph, weights, [x], settings)
    assert plan.recipe is not None and not plan.recipe.stale and plan.account is not None and plan.account.counts["compiled"] >= 2
    return plan.recipe


def test_a_part_of_a_plan_is_there_for_the_next_process_and_never_taken_for_the_whole(made: Made) -> None:
    part = begun(made)
    found = recalled(made)
    assert found is not None and found.stale == recipes.UNFINISHED and found.verdict is None and found.address == part.address
    assert whole(made).address != part.address


def test_what_won_comes_before_what_nobody_judged_and_what_lost_does_not_come(made: Made) -> None:
    assert recalled(made) is None
    part, all_of_it = begun(made), whole(made)
    found = recalled(made)
    assert found is not None and found.address == all_of_it.address and found.verdict is None and not found.stale
    part.judged(won=True, evidence={"us_before": 2.0, "us_after": 1.0})
    found = recalled(made)
    assert found is not None and found.address == part.address and found.verdict == {"us_before": 2.0, "us_after": 1.0}
    all_of_it.judged(won=True, evidence={})
    found = recalled(made)
    assert found is not None and found.address == all_of_it.address and found.verdict is not None
    all_of_it.judged(won=False, evidence={})
    found = recalled(made)
    assert found is not None and found.address == part.address
    part.judged(won=False, evidence={})
    assert recalled(made) is None


def test_a_plan_for_other_sizes_that_beats_the_one_for_these_is_what_they_begin_with(made: Made) -> None:
    kept = whole(made)
    here = replace(kept, address=Address(kept.address.kind, kept.address.subject, {**kept.address.basis, "sizes": "others"}))
    assert kept.beat(here, {"us_before": 2.0, "us_after": 1.0}) and not kept.beat(kept, {})
    found = recipes.find(here, ANY_DEMAND)
    assert found is not None and found.recipe.verdict == {"us_before": 2.0, "us_after": 1.0} and not found.recipe.stale
    part = kept.unfinished()
    assert not part.beat(here, {})  # nothing is kept there


def test_a_plan_for_another_number_of_threads_is_raced_and_what_it_is_worth_here_is_not_said_of_it_there(made: Made) -> None:
    graph, weights, x, settings = made
    kept = whole(made)
    other = (graph, weights, x, settings.with_(threads=2 if torch.get_num_threads() == 1 else 1))
    found = recalled(other)
    assert found is not None and found.address == kept.address and "number of threads" in found.stale
    assert found.verdict is None and not found.proven, "nobody had proven it"
    kept.judged(won=True, evidence={"us_before": 2.0})
    found = recalled(other)
    assert found is not None and found.verdict is None and found.proven, "a race decides, at once"
    found.judged(won=False, evidence={})
    back = recalled(made)
    assert back is not None and back.verdict == {"us_before": 2.0} and not back.stale
    own = whole(other)
    found = recalled(other)
    assert found is not None and found.address == own.address != kept.address and not found.stale and not found.other_threads
    kept.judged(won=False, evidence={})
    assert recalled(made) is None and recalled(other) is not None


def test_a_plan_without_the_kernels_that_failed_serves_until_they_are_made(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse.base.errors import CaptureError
    from hotfuse.compile.compilation import Compilation

    absorb, failed = Compilation._absorb, list[str]()

    def failing(self: Any, unit: Any, future: Any) -> None:
        if not failed:
            failed.append(unit.key)
            future = type(future)()
            future.set_exception(CaptureError("its worker died"))
        absorb(self, unit, future)

    graph, weights, x, settings = made
    with torch.no_grad(), monkeypatch.context() as now:
        now.setattr(Compilation, "_absorb", failing)
        lacking = compile_units(graph, weights, [x], settings)
    assert lacking.account is not None and lacking.account.counts["failed"] == 1 and lacking.recipe is not None
    lacking.recipe.judged(won=True, evidence={})
    found = recalled(made)
    assert found is not None and found.stale == recipes.FAILED and found.verdict is not None
    made_anew = whole(made)
    made_anew.judged(won=True, evidence={})
    found = recalled(made)
    assert found is not None and not found.stale and found.address == made_anew.address
