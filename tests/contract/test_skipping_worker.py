"""Rows of zeros in the worker: where leaving them out begins to pay, how a request asks for it, what a reader is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hotfuse.analysis.resources import CorePeaks
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.cache.place import where
from hotfuse.compile.answer_bodies import UnitKernel
from hotfuse.compile.parts import kernel_from
from hotfuse.compile.request_bodies import PlanRequest, UnitRequest
from hotfuse.compile.request_context import RequestContext, text_id, used_by, value_id, wanted
from hotfuse.compile.unit import grouping, units
from hotfuse.compile.variants import breakpoints, skipping
from hotfuse.compile.variants.skipping import SHARES, Skipping, Zeroed, at_limit, break_even, expected, left, multiplied
from hotfuse.compile.variants.skips import SKIP, SPARSE, Skips
from hotfuse.fusion.crossover import Shifts
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.hpm.work import Candidate
from hotfuse.ir.text import show
from hotfuse.lower.common.lowered import StateArgument
from hotfuse.lower.run.kernel_state import NEVER, WHOLE
from hotfuse.profile.traffic import NOTHING_SEEN
from tests.contract.lowering import Group, group_of
from tests.races import kernels_win, skipping_pays


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "shifts", Shifts())
    monkeypatch.setattr(breakpoints, "notes", lambda: None)  # nobody's store


def product(m: int = 12, k: int = 40, n: int = 24, front: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Group:
    g = torch.Generator().manual_seed(3)
    w, bias = torch.randn(n, k, generator=g), torch.randn(n, generator=g)
    return group_of(lambda x: F.gelu(F.linear(front(x), w, bias)), [torch.randn(m, k)], constants=True)


def asked(group: Group, saved: Callable[[int], float]) -> Skipping:
    bench = units.kernel_cache()
    return Skipping(
        group.graph,
        {},
        bench.core,
        bench.peaks,
        RooflinePredictor(bench.peaks),
        measure=lambda s: (1e-4, 1e-4 - saved(s)),
    )


# --- the break_even


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ([(0, 100, 120), (250, 100, 90), (500, 100, 60)], 192),  # lines cross between the first two: 23 of 30 parts
        ([(0, 100, 90), (250, 100, 80)], 1),  # everywhere, but nothing is left out where nothing is zero
        ([(0, 100, 120), (250, 100, 110)], NEVER),
        ([(0, 100, 90), (250, 100, 110), (500, 100, 50)], 304),  # from the last loss on
        ([(0, 100, 120), (500, 100, 98)], NEVER),  # a little better is not enough
    ],
)
def test_where_leaving_out_begins_to_pay(times: list[tuple[int, float, float]], limit: int) -> None:
    assert break_even(times) == limit


def test_the_prediction_follows_the_work() -> None:
    peaks = CorePeaks()
    bench = units.kernel_cache()

    def share(n: int, panels: int) -> int:
        return expected(product(64, 256, n).graph, {}, bench.core, peaks, RooflinePredictor(peaks), panels)

    assert 1 <= share(512, 8) < WHOLE
    assert share(512, 8) < share(512, 64), "gathering for more panels costs more"
    assert share(4096, 8) < share(64, 8), "more columns are more to save"


def test_a_measured_crossing_corrects_the_next_prediction() -> None:
    group = product(64, 256, 512)
    first = asked(group, lambda s: (s - 400) * 1e-7).build()[1]
    second = asked(group, lambda s: (s - 400) * 1e-7).build()[1]
    assert abs(second.predicted - second.limit) < abs(first.predicted - first.limit)


# --- building


def test_the_kernel_begins_with_what_was_measured() -> None:
    made, skips = asked(product(), lambda s: (s - 400) * 1e-7).build()
    (state,) = [a for a in made.lowered.arguments if isinstance(a, StateArgument)]
    assert state.words == (skips.limit, 0, 0) and 400 < skips.limit < 500
    assert [s for s, _, _ in skips.points] == list(SHARES)
    assert made.lowered.kernel.name.endswith("_skipping")


def test_what_never_pays_is_refused_with_its_times() -> None:
    with pytest.raises(HotfuseError) as e:
        asked(product(), lambda _s: -1e-6).build()
    assert "not worth leaving out" in e.value.because and "100.0 / 101.0 us" in e.value.because


def test_the_real_clock_gives_times_at_every_share() -> None:
    group, bench = product(), units.kernel_cache()
    plain = Skipping(group.graph, {}, bench.core, bench.peaks, RooflinePredictor(bench.peaks))
    try:
        points = plain.build()[1].points
    except HotfuseError as e:  # whichever side won
        assert e.because.count(" us") == len(SHARES)
    else:
        assert len(points) == len(SHARES) and all(a > 0 and b > 0 for _, a, b in points)


def test_a_wrong_kernel_does_not_leave_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "at_limit", lambda lowered, _limit: at_limit(lowered, 0))
    real = skipping.agree
    seen: list[Any] = []

    def broken(got: Any, want: Any, *more: Any) -> None:
        seen.append(got)
        real(got + 1, want, *more)

    monkeypatch.setattr(skipping, "agree", broken)
    with pytest.raises(HotfuseError, match="differs from the library"):
        asked(product(), lambda s: s * 1e-7).build()
    assert seen


@pytest.mark.parametrize("share", [0, 250, 500, 950, 1000])
@pytest.mark.parametrize("front", [lambda x: x, torch.relu], ids=["as it comes", "behind relu"])
def test_made_up_rows_are_zero_in_the_share_that_is_asked(share: int, front: Callable[[torch.Tensor], torch.Tensor]) -> None:
    group = product(40, 16, 8, front)
    data, _, _ = Zeroed(share).of(Candidate(group.graph, {}, units.kernel_cache().core, 1), "")
    (x,) = [data[v.name] for v in group.graph.inputs]
    assert int((x == 0).all(-1).sum()) == 40 * share // 1000


def test_the_left_operand_is_found() -> None:
    assert left(product().graph).name == product().graph.inputs[0].name


# --- what travels


def test_plain_data_there_and_back() -> None:
    skips = Skips(310, 120, ((0, 10.0, 12.0), (250, 10.0, 9.0)))
    assert Skips.from_json(json.loads(json.dumps(skips.to_json()))) == skips and Skips.from_json(None) is None
    assert str(skips) == (
        "rows of zeros: skipped from 31% on; predicted 12%; measured 0%: 10.0 / 12.0 us, 25%: 10.0 / 9.0 us"
    )


def test_a_request_names_the_groups_it_is_about() -> None:
    a, b = "graph a", "graph b"
    with used_by({"strategies": [SKIP], "focus": f"{text_id(a)},{text_id('c')}"}):
        assert wanted(a) == (SKIP,) and wanted(b) == ()
    with used_by({"strategies": [SKIP], "focus": "*"}):
        assert wanted(a) == wanted(b) == (SKIP,)
    with used_by({"strategies": [SKIP], "focus": ""}):
        assert wanted(a) == ()
    with used_by({"strategies": [SKIP], "focus": f"{value_id('x')},{value_id('y')}"}):
        assert wanted(a, ["y"]) == (SKIP,) and wanted(a, ["z"]) == wanted(a) == ()


@pytest.mark.parametrize("by_value", [True, False])
@pytest.mark.parametrize("pays", [True, False])
def test_a_unit_gets_the_kernel_that_was_asked_for(pays: bool, by_value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    skipping_pays(monkeypatch, pays=pays)
    graph = product().graph
    piece = units.piece_of(graph, range(len(graph.nodes)), {})
    request = UnitRequest("contract", {}, (("g", tuple(range(len(graph.nodes)))),), ("g",))
    (name,) = multiplied(graph, range(len(graph.nodes)))
    with used_by({"strategies": [SKIP], "focus": value_id(name) if by_value else text_id(piece.text)}):
        answer, codes = units.unit(request, [show(graph).encode()])
    assert isinstance(answer, UnitKernel)
    made = kernel_from(answer.kernel, codes[0])
    assert (SKIP in made.about) is pays and made.lowered.kernel.name.endswith("_skipping") is pays
    assert any(SKIP in n for n in answer.notes) is not pays
    plain, plain_codes = units.unit(request, [show(graph).encode()])
    assert isinstance(plain, UnitKernel) and plain.kernel.skips is None
    assert "_skipping" not in kernel_from(plain.kernel, plain_codes[0]).about


def test_a_plan_about_single_groups_is_grouped_as_the_one_that_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measuring again what groups there should be may come out otherwise, and takes half a second."""
    grouped = list[str]()
    adjusted = grouping.adjusted
    monkeypatch.setattr(grouping, "adjusted", lambda *a, **k: grouped.append("again") or adjusted(*a, **k))  # type: ignore[func-returns-value]
    place = where(Settings(cache_dir=tmp_path))
    assert place is not None
    request = PlanRequest(show(product().graph), {}, NOTHING_SEEN)

    def planned(*strategies: str, focus: str = "", **more: object) -> list[tuple[str, ...]]:
        context = RequestContext(str(tmp_path / "profiles.sqlite"), False, place)
        with used_by({**context.header(), "strategies": strategies, "focus": focus, **more}):
            return [tuple(g.ops for g in b.groups) for b in units.plan(request)[0].bodies]

    first = planned()
    for strategies in ((SKIP,), (SPARSE,), (Strategy.LIBRARY.value,), (Strategy.THREADS.value,)):
        assert planned(*strategies, focus=value_id("x")) == first and len(grouped) == 1, strategies
    planned(CandidateKind.PROLOGUE.value)
    assert len(grouped) == 2, "of such strategies groups are made"
    planned(objective="memory")
    assert len(grouped) == 3
