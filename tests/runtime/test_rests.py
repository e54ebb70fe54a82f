# pyright: reportPrivateUsage=false
"""Calls that no plan takes go to the model's own code at what a look-up costs, however their arguments are put together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.known_structure import MAX_KNOWN
from hotfuse.base.structure import Spec
from hotfuse.runtime import capturing, engine, plans
from hotfuse.runtime.admission import GraphAdmission
from hotfuse.runtime.capturing import MAX_RAISED, Capturer
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plans import MAX_AWAITED_S
from hotfuse.runtime.rests import CALLS_PER_REST, MAX_REST, Rests
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.site import LOOKS_IN_VAIN, MISSED_CALLS
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

INLINE = Settings(capture="inline", profiles=":memory:", tiers=0, watch=False)
MANY_CALLS = 6000


class Sums(nn.Module):
    def forward(self, parts: Any) -> torch.Tensor:
        values = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else [parts.x]
        return torch.stack([v.sum() for v in values]).sum()


class Appends(nn.Module):
    """Nothing of it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        self.seen.append(1)
        return parts[0] + len(parts)


class Odd:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """How often a function ran: its work is done all the same."""
    calls, real = [0], getattr(owner, name)

    def also(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, also)
    return calls


def test_lists_are_not_taken_apart_where_nothing_can_be_captured() -> None:
    fast = hotfuse.jit(Appends().eval(), settings=INLINE)
    known = fast._engine._known
    x, taken = [torch.ones(3), torch.ones(3)], [0]
    take = known.take

    def also(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken[0] += 1
        return take(args, kwargs)

    known.take = also
    with torch.no_grad():
        for _ in range(400):
            assert torch.equal(fast(x), torch.full((3,), 3.0))
    assert taken[0] < 100
    assert fast.stats()["calls_per_tier"]["module"] == fast.stats()["calls"] == 400


@pytest.mark.parametrize("argument", [
    lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2)),
    lambda: torch.ones(2, dtype=torch.complex64).conj(),
], ids=["sparse", "conjugate"])
def test_calls_that_are_never_captured_rest(argument: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    fast = hotfuse.jit(lambda x: x.sum(), settings=INLINE)
    looked, x = counted(monkeypatch, Capturer, "_wanted"), argument()
    with torch.no_grad():
        for _ in range(MANY_CALLS):
            fast(x)
    assert CALLS_PER_REST <= looked[0] < MANY_CALLS // 8
    assert any("argument" in text for text in fast._engine.limits.texts())


def test_calls_under_autocast_rest_and_others_are_captured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4).eval()
    fast, x = hotfuse.jit(model, settings=INLINE), torch.ones(2, 4)
    looked = counted(monkeypatch, Engine, "_under_modes")
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = model(x)
            for _ in range(MANY_CALLS):
                assert torch.equal(fast(x), want)
        assert looked[0] < MANY_CALLS // 8 and "under torch.autocast" in str(fast.explain())
        for _ in range(2 * MAX_REST):
            torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["graph_calls"] > 0


def test_calls_that_cannot_be_described_rest() -> None:
    fast = hotfuse.jit(Sums(), settings=INLINE)
    odd = Odd(torch.ones(3))
    with torch.no_grad():
        for _ in range(MANY_CALLS):
            assert fast(odd) == 3
    assert fast._engine.log.counts["unsupported_calls"] < MANY_CALLS // 8
    assert fast.stats()["calls_per_tier"]["module"] == MANY_CALLS


def test_a_kind_of_call_with_a_plan_is_served_beside_others_that_have_none() -> None:
    """Rests are had by kinds of calls that look alike from outside: where one of those has a plan, all are looked at."""
    fast = hotfuse.jit(Sums(), settings=INLINE)
    with torch.no_grad():
        for _ in range(1200):
            fast([torch.ones(3), torch.ones(3)])
            fast(Odd(torch.ones(3)))
    assert fast.stats()["calls_per_tier"]["0"] > 1100


def test_calls_that_miss_every_plan_rest_until_one_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """More kinds of sizes come than may be captured: looking for a plan in vain takes longer than a small model does."""
    settings = INLINE.with_(max_captures=1)
    fast = hotfuse.jit(lambda x: x.reshape(2, -1).sum(1) if len(x) % 2 == 0 else x.sum(0, keepdim=True), settings=settings)
    even, odd = torch.ones(4), torch.ones(5)
    with torch.no_grad():
        fast(even)
        for _ in range(4):
            fast(even)
        looked = counted(monkeypatch, Capturer, "own_code")
        (site,) = fast._engine.sites.values()
        for _ in range(800):
            assert fast(odd) == 5
        assert MISSED_CALLS < looked[0] < 120
        served = fast.stats()["calls_per_tier"]["0"]
        for _ in range(100):
            assert torch.equal(fast(even), torch.full((2,), 2.0))
        assert fast.stats()["calls_per_tier"]["0"] >= served + 100 - MISSED_CALLS - 1 and not site.resting


def test_long_calls_that_are_never_captured_seldom_ask_whether_a_large_model_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input + torch.rand_like(input) * 0)

    looks, check = list[int](), ModelGuard.check

    def slow(guard: ModelGuard) -> WeightChange:
        looks.append(1)
        time.sleep(0.02)
        return check(guard)

    monkeypatch.setattr(capturing, "LONG_S", 0.0)  # no call rests
    model = Draws(4, 4)
    fast, x = hotfuse.jit(model, settings=INLINE), torch.randn(2, 4)
    with torch.no_grad():
        fast(x)
        assert fast.wait(60)
        monkeypatch.setattr(ModelGuard, "check", slow)
        for _ in range(30):
            torch.testing.assert_close(fast(x), nn.functional.linear(x, model.weight, model.bias))
        assert len(looks) <= 10, "each takes longer than the call"
        model.weight.mul_(2)
        fast._engine._capturer._look_again_at = 0.0
        torch.testing.assert_close(fast(x), nn.functional.linear(x, model.weight, model.bias))
    assert 2 <= len(looks) <= 11


def test_a_few_misses_keep_no_plan_from_its_calls() -> None:
    fast = hotfuse.jit(lambda x: x.reshape(2, -1).sum(1) if len(x) % 2 == 0 else x.sum(0, keepdim=True),
                       settings=INLINE.with_(max_captures=1))
    even, odd = torch.ones(4), torch.ones(5)
    with torch.no_grad():
        fast(even)
        for i in range(400):
            fast(odd if i % 4 == 0 else even)
    assert fast.stats()["calls_per_tier"]["0"] >= 300


def test_numbers_that_never_return_cost_a_look_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them were captured, in vain: their sites are there, and nobody comes to them."""
    fast = hotfuse.jit(lambda x, t: x * t, settings=INLINE)
    looked, x, calls = counted(monkeypatch, Capturer, "_wanted"), torch.ones(3), 4000
    with torch.no_grad():
        for i in range(calls):
            assert torch.equal(fast(x, i * 0.5), x * (i * 0.5))
        assert looked[0] < calls // 4
        for _ in range(400):
            fast(x, 1.5)
    assert fast.stats()["calls_per_tier"]["0"] > 200


def test_calls_that_are_compared_are_not_all_learned_from_where_that_takes_longer() -> None:
    """Also long ones: of calls whose sizes vary, learning took as long as the call."""
    fast = hotfuse.jit(lambda x: x @ x, settings=INLINE)
    x = torch.randn(400, 400)
    with torch.no_grad():
        fast(x)
        fast(x)
        (site,) = fast._engine.sites.values()
        (entry,) = site.entries
        entry.own_ratio = None
        entry.open(PlanContest(entry.baseline, entry.baseline, own=True))
        entry.look_s, before = 10.0, entry.samples.taken
        for _ in range(8):
            fast(x)
    assert entry.samples.taken - before <= 2


def test_kept_calls_are_counted_as_they_come_and_go() -> None:
    """Many kinds of calls push each other out; every look asks how much is held."""
    samples, rng = CallSamples(20_000), random.Random(7)
    for _ in range(600):
        n = rng.randint(1, 400)
        samples.note((n,), [torch.zeros(n)], fits=rng.random() < 0.8)
        held = sum(t.numel() * t.element_size() for seen in samples._seen.values() for call in seen.kept for t in call)
        assert samples.bytes == held <= 20_000
    samples.vet(lambda call: call[0].numel() % 2 == 0)
    before = samples.bytes
    freed = samples.give_back()
    held = sum(t.numel() * t.element_size() for seen in samples._seen.values() for call in seen.kept for t in call)
    assert freed > 0 and samples.bytes == held == before - freed


def test_a_model_that_is_trained_meanwhile_is_not_said_to_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compare = nn.Linear(4, 4).eval(), GraphAdmission._compare

    def later(*args: Any) -> None:
        with torch.no_grad():
            model.weight += 1
        compare(*args)

    monkeypatch.setattr(GraphAdmission, "_compare", later)
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            wanted = model(x)
            assert torch.equal(fast(x), wanted)
    events = fast._engine.log.counts
    assert events.get("refuse.model_changed", 0) and not events.get("refuse.mismatch", 0)


def test_structures_that_have_code_are_not_named_again_to_find_their_site(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = hotfuse.jit(Sums(), settings=INLINE)
    x = [torch.ones(3), torch.ones(3)]
    with torch.no_grad():
        for _ in range(8):
            fast(x)
        named, real = [0], Spec.__hash__

        def also(spec: Spec) -> int:
            named[0] += 1
            return real(spec)

        monkeypatch.setattr(Spec, "__hash__", also)
        for _ in range(100):
            assert fast(x) == 6
    assert not named[0] and fast.stats()["graph_calls"] > 100


def changing() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    by = 1.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x / by

    def change(value: float) -> None:
        nonlocal by
        by = value

    return scaled, change


def test_numbers_of_structures_whose_code_went_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """More structures than have code at a time take it from each other, with a new number each time."""
    monkeypatch.setattr(engine, "MAX_NUMBERED", 40)
    settings = Settings(capture="inline", tiers=0, max_captures=64)
    fast: Any = hotfuse.jit(lambda x, how: torch.relu(x) * len(how[0]), settings=settings)
    x = torch.randn(8, 8)
    for _ in range(4):
        for n in range(1, MAX_KNOWN + 4):
            for _ in range(3):
                torch.testing.assert_close(fast(x, ("a" * n,)), torch.relu(x) * n)
    assert len(fast._engine.sites) > MAX_KNOWN
    assert 0 < len(fast._engine._known_sites) <= 40


def test_a_model_that_changes_in_every_call_is_left_alone_until_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(plans, "monotonic", lambda: now[0])
    model, change = changing()
    fast, x = hotfuse.jit(model, settings=INLINE), torch.ones(3)
    looked = counted(monkeypatch, Capturer, "_wanted")
    with torch.no_grad():
        for i in range(1000):
            now[0] += 0.001
            change(i + 1.0)
            torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
        assert fast.stats()["captures"] <= 16 and looked[0] < 300  # one a call before, and a capture whenever one was allowed
        assert "the model changed" in str(fast.explain())
        now[0] += MAX_AWAITED_S
        for _ in range(2000):
            torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    assert fast.stats()["graph_calls"] > 500


def test_rests_are_bounded() -> None:
    rests = Rests({})
    for i in range(2000):
        rests.without_site((1, f"name{i}"))
    assert len(rests._without_site) <= 256


class Refuses(nn.Module):
    """Some programs try what a model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            raise ValueError(f"{x.shape[0]} rows")
        return self.inner(x)


def test_calls_that_no_plan_is_for_are_looked_at_ever_more_rarely_beside_calls_in_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, large = Refuses().eval(), torch.randn(2, 4), torch.randn(3, 4)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        looks = counted(monkeypatch, Capturer, "_wanted")
        for _ in range(800):
            torch.testing.assert_close(fast(x), model(x))
            with pytest.raises(ValueError, match="3 rows"):
                fast(large)
        assert LOOKS_IN_VAIN < looks[0] < 300 and fast.stats()["graph_calls"] > 700 and fast.stats()["calls"] == 1600
        (site,) = fast._engine.sites.values()
        before = fast.stats()["captures"]
        wide = torch.randn(1, 4, dtype=torch.float64)
        model.double()
        for _ in range(4 * MISSED_CALLS):  # another kind of calls is captured some calls later
            torch.testing.assert_close(fast(wide), model(wide))
        assert fast.stats()["captures"] > before and site.in_vain < LOOKS_IN_VAIN


def test_a_site_where_every_call_raises_rests() -> None:
    with torch.no_grad(), hotfuse.jit(Refuses().eval(), settings=INLINE) as fast:
        large = torch.randn(3, 4)
        for _ in range(4 * MAX_RAISED):
            with pytest.raises(ValueError, match="3 rows"):
                fast(large)
        (site,) = fast._engine.sites.values()
        assert site.resting > 0 or fast._engine.everyone.rest.passed > 0
