"""A wide MLP, served without a trained model: blocks of rows are offered, built, judged by measurement, and explain() says how it
ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.compile.learn.measure import BoundCall
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.unit.measuring_gate import UnitContests
from hotfuse.fusion.group_steps import Side
from tests.races import sleeping, slow_library

WIDTH, HIDDEN = 64, 512


class Wide(nn.Module):
    """Two products, and between them four times what the second-level cache holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def blocks(side: Sequence[Side]) -> bool:
    return sum(any("linear" in n.op for n in graph.nodes) for graph, _ in side) > 2


def served(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """What explain() says of blocks of rows, and how many products the plan has that serves."""
    slow_library(monkeypatch)
    model, x = Wide().eval(), torch.randn(kernel_cache().core.l2 * 4 // (4 * HIDDEN), WIDTH)
    with hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast, torch.no_grad():
        for _ in range(6):
            fast(x)
        assert fast.wait(60.0)
        got = fast(x)
        (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
        plan = site.entries[0].plan
        assert plan.tier >= 1, str(fast.explain(full=True))
        shown = str(fast.explain(full=True)).splitlines()
        want = model.double()(x.double())  # which takes the plan away: its weights are others now
        assert (got.double() - want).abs().max() < 1e-4 * want.abs().max()
        said = [line.strip().removeprefix("fusion: ") for line in shown if " tiling linear | linear" in line]
        return said, sum("linear" in n.op for n in plan.graph.nodes)


@pytest.mark.parametrize("pays", [True, False])
def test_blocks_of_rows_are_taken_where_they_measured_faster(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    held: list[bool] = []
    plain = UnitContests._timed  # pyright: ignore[reportPrivateUsage]

    def timed(contest: UnitContests, old: Sequence[Side], new: Sequence[Side], threads: int) -> tuple[float, float]:
        """As ever; the side that is to lose sleeps in its calls."""
        if not blocks(new):
            return plain(contest, old, new, threads)
        held.append(pays)
        losing = {id(graph) for graph, _ in (old if pays else new)}
        bound = UnitContests._bound  # pyright: ignore[reportPrivateUsage]

        def slower(contest: UnitContests, side: Side, threads: int) -> BoundCall | None:
            if (found := bound(contest, side, threads)) is not None and id(side[0]) in losing:
                found.call = sleeping(found.call)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(UnitContests, "_bound", slower)
            return plain(contest, old, new, threads)

    monkeypatch.setattr(UnitContests, "_timed", timed)
    said, products = served(monkeypatch)
    assert len(held) == 1 and len(said) == 1, said
    assert said[0].startswith("take" if pays else "leave") and "predictions cannot tell, a look can" in said[0]
    assert ("us, measured" if pays else "us, what there is") in said[0]
    assert products == (16 if pays else 2)


def test_blocks_of_rows_are_judged_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real kernels and a real clock: that there is a verdict, not which."""
    said, products = served(monkeypatch)
    assert len(said) == 1 and "a look can" in said[0] and "measured" in said[0]
    assert products == (16 if said[0].startswith("take") else 2)
