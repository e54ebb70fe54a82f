"""Rows of zeros in what calls bring, from the public face: found, built, proven, raced, counted, given up, taken up again."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import Action, Why
from hotfuse.compile import compilation
from hotfuse.compile.learn import strategy_history
from hotfuse.compile.unit import grouping
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.lower.run.kernel_state import NEVER, KernelState
from hotfuse.profile.snapshot import GraphSeen, Share, ValueSeen
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.observe.examine import Examiner
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.skipping import MIN_SAMPLES, all_finite, suspected
from hotfuse.runtime.zero_rows import MAX_DENSE_CALLS, Sides
from hotfuse.specialize.table import ZERO_ROWS, AttemptKey
from tests.races import kernels_win, new_plans_lose, new_plans_win, skipping_pays
from tests.runtime.test_strategies import Deep

ROWS = AttemptKey(ZERO_ROWS)
INLINE = Settings(capture="inline", hot_calls=2)
NOTHING = Share(30, 0.0, 0.0)


def seen(zero_rows: float, samples: int = MIN_SAMPLES) -> GraphSeen:
    value = ValueSeen(1, 30, 0, (4, 4), NOTHING, replace(NOTHING, mean=zero_rows), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING,
                      0.0, 1.0, 1.0)  # fmt: skip
    return GraphSeen(1, samples, (), (value,), (), (), (), (), 0)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What sampled calls are said to show; what is to lose a race is slowed, so that no clock decides."""
    shown = {"zero rows": 0.0}
    monkeypatch.setattr(strategy_history, "_histories", {})
    monkeypatch.setattr(Examiner, "raced", lambda *_a: None)
    monkeypatch.setattr(Examiner, "look", lambda *_a: None)
    monkeypatch.setattr(CallSampler, "seen", lambda *_a: seen(shown["zero rows"]))
    kernels_win(monkeypatch)
    skipping_pays(monkeypatch)
    new_plans_win(monkeypatch)
    return shown


def padded(share: float, seed: int = 0, rows: int = 40) -> torch.Tensor:
    x = torch.randn(5, rows, 48, generator=torch.Generator().manual_seed(seed))
    x[:, round(rows * (1 - share)) :] = 0
    return x


def entry_of(fast: hotfuse.api.Jit) -> Entry:
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    return site.entries[0]


def decided(fast: hotfuse.api.Jit, action: Action) -> list[dict[str, Any]]:
    log = fast._engine.log  # pyright: ignore[reportPrivateUsage]
    return [dict(d.evidence) | {"why": d.why} for d in log.decisions if d.action is action and d.evidence.get("what") == ZERO_ROWS]


def served(fast: hotfuse.api.Jit, x: torch.Tensor, until: Any, most: int = 4000) -> None:
    for _ in range(most):
        fast(x)
        if until():
            return
    raise AssertionError(str(fast.explain(full=True))[-6000:])


def test_traffic_becomes_sparse_dense_and_sparse_again(traffic: dict[str, float]) -> None:
    model = Deep().eval()
    sparse, dense = padded(0.6), padded(0.0, seed=1)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        want = {id(x): model.double()(x.double()).float() for x in (sparse, dense)}
        model.float()

        def right(x: torch.Tensor) -> None:
            assert (fast(x) - want[id(x)]).abs().max() < 1e-4

        fast(dense)
        served(fast, dense, lambda: entry_of(fast).plan.tier == 1)
        served(fast, sparse, lambda: entry_of(fast).samples.taken >= 40)
        assert entry_of(fast).plan.sides is None, "nobody was told of zeros"

        traffic["zero rows"] = 0.6
        served(fast, sparse, lambda: entry_of(fast).plan.sides is not None)
        plan, sides = entry_of(fast).plan, entry_of(fast).plan.sides
        assert sides is not None and plan.tier == 2 and plan.layers == (ROWS,) and len(sides.states) == 1
        (begun,) = decided(fast, Action.SPECIALIZE)
        assert begun["products"] == 1, "the second product's rows are never zero: there is a bias"
        before = sides.counts()
        right(sparse)
        right(dense)
        after = sides.counts()
        assert after["calls_skipping_rows"] == before["calls_skipping_rows"] + 1
        assert after["calls_with_all_rows"] == before["calls_with_all_rows"] + 1
        text = str(fast.explain(full=True))
        assert "rows of zeros: skipped from" in text and "calls skipping rows" in text

        traffic["zero rows"] = 0.0
        served(fast, dense, lambda: not sides.states[0].on, 400_000)
        (gone,) = decided(fast, Action.DROP)
        assert gone["why"] is Why.NO_ZERO_ROWS and entry_of(fast).plan is plan
        before = sides.counts()
        right(sparse)
        right(dense)
        counts = sides.counts()
        assert counts["calls_skipping_rows"] == before["calls_skipping_rows"] and counts["products_not_looking"] == 1

        traffic["zero rows"] = 0.6
        served(fast, sparse, lambda: sides.states[0].on, 400_000)
        before = sides.counts()
        right(sparse)
        assert sides.counts()["calls_skipping_rows"] == before["calls_skipping_rows"] + 1
        assert fast.stats()["calls"] > 0


def test_sizes_that_recur_leave_rows_out_too(traffic: dict[str, float]) -> None:
    model = Deep().eval()
    wide = copy.deepcopy(model).double()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE.with_(watch_rate=2)) as fast:
        for n in (7, 9, 11, 12):
            fast(padded(0.5, rows=n))
        served(fast, padded(0.5, rows=13), lambda: entry_of(fast).plan.tier == 1)
        assert entry_of(fast).symbols, "sizes are open"
        traffic["zero rows"] = 0.5
        served(fast, padded(0.5, rows=40), lambda: bool(entry_of(fast).versions) and entry_of(fast).plan.sides is not None)
        entry = entry_of(fast)
        (version,) = entry.versions.values()
        assert entry.plan.layers == (ROWS,) and version.sides is not None and entry.plan.sides is not None
        for n, share in ((40, 0.5), (40, 0.0), (40, 1.0), (5, 0.6), (1, 1.0), (1, 0.0), (17, 0.3)):
            x = padded(share, seed=n, rows=n)
            assert (fast(x) - wide(x.double())).abs().max() < 1e-4, (n, share)
        skipped = version.sides.counts()["calls_skipping_rows"]
        fast(padded(0.5, rows=40))
        assert version.sides.counts()["calls_skipping_rows"] > skipped, "the version serves its size"


def test_zeros_within_rows_are_left_out_too(traffic: dict[str, float]) -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU()).eval()
    wide = copy.deepcopy(model).double()
    dense = padded(0.0)
    sparse = dense.clone()
    sparse[..., ::2] = 0  # channels that are dead; no row is zero
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        fast(sparse)
        served(fast, sparse, lambda: entry_of(fast).plan.tier == 1)
        traffic["zero rows"] = 0.5
        served(fast, sparse, lambda: entry_of(fast).plan.sides is not None)
        sides = entry_of(fast).plan.sides
        assert sides is not None and entry_of(fast).plan.layers == (ROWS,)
        before = sides.counts()
        for x in (sparse, dense):
            assert (fast(x) - wide(x.double())).abs().max() < 1e-4
        after = sides.counts()
        assert after["calls_skipping_rows"] == before["calls_skipping_rows"] + 1
        assert after["calls_with_all_rows"] == before["calls_with_all_rows"] + 1
        assert "zeros within rows: skipped from" in str(fast.explain(full=True))
        traffic["zero rows"] = 0.0
        served(fast, dense, lambda: not sides.states[0].on, 400_000)
        assert (fast(sparse) - wide(sparse.double())).abs().max() < 1e-4


def test_groups_that_a_look_decided_otherwise_leave_zeros_out_too(
    traffic: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are measured where no model is trained, so a plan that is made again may have others."""
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU()).eval()
    wide, grouped = copy.deepcopy(model).double(), list[int]()
    adjusted = grouping.adjusted

    def alone_at_first(*asked: Any, **more: Any) -> Any:
        graph, groups, choices = adjusted(*asked, **more)
        if not grouped:
            groups = tuple(Group((n,), g.kind if n == g.nodes[0] else GroupKind.ROWS) for g in groups for n in g.nodes)
        grouped.append(len(groups))
        return graph, groups, choices

    monkeypatch.setattr(grouping, "adjusted", alone_at_first)
    monkeypatch.setattr(compilation, "MEASURING_S", 0.0)  # for joining what was grouped apart
    sparse = padded(0.6)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        served(fast, sparse, lambda: entry_of(fast).plan.tier == 1)
        assert len(entry_of(fast).plan.artifacts) == 2
        traffic["zero rows"] = 0.6
        served(fast, sparse, lambda: entry_of(fast).plan.sides is not None)
        assert grouped == [2, 1] and len(entry_of(fast).plan.artifacts) == 1
        for x in (sparse, padded(0.0), padded(1.0)):
            assert (fast(x) - wide(x.double())).abs().max() < 1e-4


@pytest.mark.parametrize("where", ["beside", "inside a branch"])
def test_what_is_multiplied_by_infinity_anywhere_is_not_left_out(traffic: dict[str, float], where: str) -> None:
    """The products of a value may be in one group, whichever they are in now."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(48, 64), nn.Linear(48, 16)
            nn.init.constant_(self.b.weight, torch.inf)

        def forward(self, x: torch.Tensor) -> Any:
            if where == "beside":
                return F.gelu(self.a(x)), F.softplus(self.b(x))
            return F.gelu(self.a(x)), torch.cond(x.sum() > 0, lambda t: self.b(t) + 1, lambda t: self.b(t), (x,))

    model, x = Both().eval(), padded(0.6)
    want = model(x)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        served(fast, x, lambda: entry_of(fast).plan.tier == 1)
        traffic["zero rows"] = 0.6
        served(fast, x, lambda: ROWS in entry_of(fast).refused)
        for got, wanted in zip(fast(x), want, strict=True):
            assert torch.equal(torch.isnan(got), torch.isnan(wanted))


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (None, "0.0% of a product's rows are zero at most, and 0.0% of the steps of 2 rows"),
        (float("inf"), "no product has finite constant weights"),
        (float("nan"), "no product has finite constant weights"),
    ],
)
def test_what_is_not_offered_says_why(traffic: dict[str, float], spoil: float | None, because: str) -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU()).eval()
    x = padded(0.0 if spoil is None else 0.5)
    with torch.no_grad():
        if spoil is not None:
            model[0].weight[3, 5] = spoil  # type: ignore[index]
        want = model(x)
        with hotfuse.jit(model, settings=INLINE) as fast:
            fast(x)
            served(fast, x, lambda: entry_of(fast).plan.tier == 1)
            traffic["zero rows"] = 0.5
            served(fast, x, lambda: ROWS in entry_of(fast).refused)
            assert entry_of(fast).refused[ROWS] == because and entry_of(fast).plan.sides is None
            assert because in str(fast.explain(full=True))
            got, finite = fast(x), torch.isfinite(want)
            assert torch.equal(torch.isfinite(got), finite) and (got - want)[finite].abs().max() < 1e-4


class Placed(torch.nn.Module):
    """Reads a slice of a parameter, which is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(48, 64), torch.nn.Linear(64, 8)
        self.places = torch.nn.Parameter(torch.randn(1, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x) + self.places[:, : x.shape[1]]))


def test_folded_weights_are_looked_at_like_others(traffic: dict[str, float]) -> None:
    sparse = padded(0.6)
    with torch.no_grad(), hotfuse.jit(Placed().eval(), settings=INLINE) as fast:
        served(fast, sparse, lambda: entry_of(fast).plan.tier == 1)
        traffic["zero rows"] = 0.6
        served(fast, sparse, lambda: bool(decided(fast, Action.SPECIALIZE)))
        assert not [d for d in fast._engine.log.decisions if d.why is Why.BACKGROUND_FAILED]  # pyright: ignore[reportPrivateUsage]


def test_what_loses_its_race_is_not_tried_again(traffic: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Deep().eval(), padded(0.5)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        fast(x)
        served(fast, x, lambda: entry_of(fast).plan.tier == 1)
        new_plans_lose(monkeypatch)
        traffic["zero rows"] = 0.5
        served(fast, x, lambda: ROWS in entry_of(fast).refused)
        assert re.search(r"\d us instead of \d", entry_of(fast).refused[ROWS]) and entry_of(fast).plan.sides is None


def test_changed_weights_withdraw_it(traffic: dict[str, float]) -> None:
    model, x = Deep().eval(), padded(0.5)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        fast(x)
        served(fast, x, lambda: entry_of(fast).plan.tier == 1)
        traffic["zero rows"] = 0.5
        served(fast, x, lambda: entry_of(fast).plan.sides is not None)
        model.up.weight[0, 0] = float("inf")  # zero times this is no number
        assert torch.isnan(fast(x)).any() and torch.equal(torch.isnan(fast(x)), torch.isnan(model(x)))


# --- the parts


def test_zeros_are_suspected_after_enough_samples() -> None:
    assert not suspected(None) and not suspected(seen(0.0)) and not suspected(seen(0.5, MIN_SAMPLES - 1))
    assert suspected(seen(0.5)) and not suspected(seen(0.05))


def test_sides_are_given_up_and_taken_up_more_and_more_seldom() -> None:
    state = KernelState((300, 0, 0))
    sides = Sides([state])
    words = state._words  # pyright: ignore[reportPrivateUsage]

    def waits() -> int:
        n = 1
        while not sides.may_look_again():
            n += 1
        return n

    words[2] = MAX_DENSE_CALLS - 1
    assert sides.one_sided() == 0 and state.on
    words[1] += 1  # one call left rows out: counting begins anew
    words[2] += 1
    assert sides.one_sided() == 0
    words[2] += MAX_DENSE_CALLS - 1
    assert sides.one_sided() == 0
    words[2] += 1
    assert sides.one_sided() == 1 and state.limit == NEVER and sides.one_sided() == 0
    assert sides.counts() == {"calls_skipping_rows": 1, "calls_with_all_rows": words[2], "products_not_looking": 1}
    assert waits() == MAX_DENSE_CALLS and sides.look_again() == 1 and state.limit == 300
    assert not sides.may_look_again(), "it looks"
    words[2] += MAX_DENSE_CALLS
    assert sides.one_sided() == 1
    assert waits() == 2 * MAX_DENSE_CALLS, "in vain: the next time takes longer"
    sides.look_again()
    words[1] += 1
    assert sides.one_sided() == 0
    words[2] += MAX_DENSE_CALLS
    assert sides.one_sided() == 1 and waits() == MAX_DENSE_CALLS, "that was not in vain"


def test_what_products_did_is_told_by_calls_since_the_plan_serves() -> None:
    states = [KernelState((300, 5, 5)), KernelState((300, 0, 7))]  # proofs and races
    sides = Sides(states, {states[0].address: 2})
    for skipped, all_, state in ((14, 6, states[0]), (4, 6, states[1])):  # ten calls, two products of the one and one of the other
        words = state._words  # pyright: ignore[reportPrivateUsage]
        words[1] += skipped
        words[2] += all_
    assert sides.of_calls() == (6, 4)
    sides.begin()
    assert sides.of_calls() == (0, 0)


class Shrinks(nn.Module):
    """What is no part of a product's kernel, and keeps rows of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + x.abs().sum(-1, keepdim=True))


@pytest.mark.parametrize("alike", [False, True])
def test_a_bet_is_told_by_value_and_by_call(traffic: dict[str, float], alike: bool) -> None:
    """Two products that leave zeros out in a call, of one kernel or of two, are one call in which the bet held, and save once what
    the race showed.
    """
    width = 48 if alike else 8
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), Shrinks(), nn.Linear(48, width), nn.ReLU(), Shrinks())
    nn.init.constant_(model[0].bias, -10.0)
    x = padded(0.6)
    with torch.no_grad(), hotfuse.jit(model.eval(), settings=INLINE) as fast:
        served(fast, x, lambda: entry_of(fast).plan.tier == 1)
        traffic["zero rows"] = 0.6
        served(fast, x, lambda: entry_of(fast).plan.sides is not None)
        entry, sides = entry_of(fast), entry_of(fast).plan.sides
        assert sides is not None and len(sides.states) == (1 if alike else 2)
        sides.begin()
        for _ in range(10):
            fast(x)
        (bet,) = [b for s in fast.explain(full=True).to_dict()["sites"] for p in s["plans"] for b in p["bets"]]
        won = entry.won[ROWS]
        assert bet["held"] + bet["missed"] == 10 == bet["held"] and "tensors_0" in bet["values"] and len(bet["values"]) == 2
        assert bet["ms_saved"] == pytest.approx(10 * max(0.0, won.us_before - won.us_after) * 1e-3, abs=1e-3)
        assert "bet on: zero rows (" in str(fast.explain()) and "held in 10 of 10 calls" in str(fast.explain())


def test_finite_weights() -> None:
    assert all_finite({"a": torch.ones(3), "b": torch.tensor([1, 2])})
    assert not all_finite({"a": torch.tensor([1.0, float("nan")])})
