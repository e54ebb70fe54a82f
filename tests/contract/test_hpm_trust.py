"""Models of few or bad rows decide nothing: what proposes is measured, or rooflines are asked instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotfuse.analysis.resources import CorePeaks
from hotfuse.compile.host import this_host
from hotfuse.compile.learn import learned, measure
from hotfuse.compile.learn.learned import Foresight
from hotfuse.compile.request_context import RequestContext, used_by
from hotfuse.compile.unit import planning
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.unit.measuring_gate import UnitContests
from hotfuse.compile.unit.planning import Gate, adjusted
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.fusion.group_steps import Side
from hotfuse.fusion.groups import group
from hotfuse.hpm import model
from hotfuse.hpm.features import NAMES, derive
from hotfuse.hpm.model import TrainingRows
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.trust import Trust, judged
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.profile.store import Store
from tests.contract.test_fusion_engine import CHAIN
from tests.contract.test_hpm import AT, candidates, drawn


def rows(problems: int, noise: float) -> TrainingRows:
    """Times by a law that features show, and by chance: log times off by so much."""
    chosen = drawn(problems)
    found = candidates(chosen)
    table = RowCache(measure.tile_of).rows(found)
    known = derive(table, AT)
    number = {id(p.graph): n for n, p in enumerate(chosen)}
    law = 1.2 + 1.8 / (1 + np.exp(known.x[:, NAMES.index("compute")]))
    chance = np.exp(noise * np.random.default_rng(5).normal(size=len(found)))
    group = np.array([number[id(c.graph)] for c in found])
    return TrainingRows(table, known.roofline.seconds * law * chance, np.full(len(found), 0.01), group)


@pytest.mark.parametrize(("held", "rooflines", "want"), [
    ({"mape": 0.35, "within20": 0.4}, {"mape": 0.32}, Trust.ASIDE),
    ({"mape": 0.25, "within20": 0.55}, {"mape": 0.33}, Trust.ASKED),
    ({"mape": 0.10, "within20": 0.85}, {"mape": 0.33}, Trust.BELIEVED),
    ({"mape": float("nan"), "within20": float("nan")}, {"mape": float("nan")}, Trust.ASKED),
    ({"mape": float("nan"), "within20": float("nan")}, {"mape": 0.3}, Trust.ASIDE),
    ({"mape": 0.10, "within20": 0.85}, None, Trust.BELIEVED),
    (None, None, Trust.ASKED),
])  # fmt: skip
def test_what_models_may_be_used_for(held: dict[str, float] | None, rooflines: dict[str, float] | None, want: Trust) -> None:
    found = judged({"held_out": held, "rooflines": rooflines})
    assert found.trust is want and found.because


@pytest.mark.parametrize(("problems", "noise", "want"), [
    (110, 0.0, Trust.BELIEVED), (110, 0.3, Trust.ASKED), (25, 1.2, Trust.ASIDE),
])  # fmt: skip
def test_rows_decide(tmp_path: Path, problems: int, noise: float, want: Trust) -> None:
    made = model.fit(rows(problems, noise), AT)
    assert judged(made.facts).trust is want, made.facts
    place = tmp_path / "p.sqlite"
    with Store.open(place) as store:
        model.save(store, made, this_host(store, measure_peaks=False).machine)
        ahead = Foresight.of(store)
        aside = [n for n in store.notes if "left aside" in n]
    if want is Trust.ASIDE:
        assert ahead is None and "rooflines alone by" in aside[0]
    else:
        assert ahead is not None and not aside and ahead.believed is (want is Trust.BELIEVED)
    learned.forget()
    with used_by(RequestContext(str(place), False).header()):
        assert (learned.foresight() is None) is (want is Trust.ASIDE)
        assert any("left aside" in n for n in learned.left_aside()) is (want is Trust.ASIDE)
    learned.forget()


class Halves:
    """A model that takes kernels of several nodes for very slow."""

    def predict(self, asks: Sequence[Any]) -> model.Predictions:
        seconds = np.array([1e-5 * len(a.graph.nodes) ** 3 for a in asks])
        zeros, none = np.zeros(len(asks)), np.zeros(len(asks), np.int64)
        return model.Predictions(seconds, seconds / 1.01, seconds * 1.01, zeros, seconds, zeros, none, none)


@pytest.mark.parametrize("believed", [True, False])
@pytest.mark.parametrize("faster", [True, False])
def test_a_model_that_is_only_asked_decides_nothing(monkeypatch: pytest.MonkeyPatch, believed: bool, faster: bool) -> None:
    held: list[int] = []

    def measured(old: Sequence[Side], new: Sequence[Side]) -> tuple[float, float]:
        held.append(len(new))
        return (2e-5, 1e-5) if faster else (1e-5, 2e-5)

    def build(_: Graph) -> Any:
        raise AssertionError("nothing is built here")

    with Store.open(":memory:") as store:
        made = model.fit(rows(25, 0.0), AT)
        model.save(store, made, this_host(store, measure_peaks=False).machine)
        ahead = Foresight.of(store)
    assert ahead is not None
    monkeypatch.setattr(planning, "foresight", lambda: replace(ahead, predictor=Halves(), believed=believed))  # pyright: ignore[reportArgumentType]
    graph, sizes = verify(parse(CHAIN)), {"s0": 64}
    whole = group(graph)
    gate = Gate(RooflinePredictor(CorePeaks()), UnitContests(build, kernel_cache().core, sizes, measured=measured))
    _, groups, _ = adjusted(graph, whole, sizes, kernel_cache().core, lambda _: "", gate=gate)
    assert bool(held) is not believed
    assert (len(groups) > len(whole)) is (believed or faster)
