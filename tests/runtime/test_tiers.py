"""Promotion to a higher tier with a fake compiler and a fake clock: proof first, then measurement, then one swap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hotfuse.api import TorchModel, engine_stats
from hotfuse.base.errors import InternalError
from hotfuse.base.events import EventLog
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan, PlanMemory
from hotfuse.runtime.samples import KEPT_IDLE, KEPT_IDLE_BYTES, CallSamples, made_up
from hotfuse.runtime.tierup.attempt import demand_of
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.runtime.tierup.race import ALPHA, growth, race
from hotfuse.runtime.tierup.tiers import MANY_CALLS, MIN_SAMPLES, is_hot, threshold, weighs
from tests.races import new_plans_lose, new_plans_win

SETTINGS = Settings(capture="inline", hot_calls=2)


class Compiler:
    """Makes tier-1 plans that do what tier 0 does, changed by `twist`."""

    def __init__(self, twist: Callable[[Any], Any] = lambda out: out) -> None:
        self.made = 0
        self.twist = twist
        self.frozen = False

    def __call__(
        self, graph: Graph, weights: Mapping[str, torch.Tensor], _sample: Sequence[torch.Tensor], /, **_more: Any
    ) -> Plan:
        self.made += 1
        kept = {k: w.clone() for k, w in weights.items()}  # as packed weights are: copies
        plan = compile_tier0(graph, kept, SETTINGS)
        return replace(plan, tier=1, run=lambda *args: tuple(self.twist(o) for o in plan.run(*args)))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def race_says(monkeypatch: pytest.MonkeyPatch, won: bool) -> None:
    """Who is slower is known beforehand: he sleeps."""
    (new_plans_win if won else new_plans_lose)(monkeypatch, 0.005)


def served(model: nn.Module, compiler: Any, settings: Settings = SETTINGS) -> Engine:
    return Engine(TorchModel(model, settings), lambda g, w: compile_tier0(g, w, settings), lambda job: job(), settings,
                  EventLog(), compiler)


def tier(engine: Engine) -> int:
    return next(iter(engine.sites.values())).entries[0].plan.tier


def calls(engine: Engine, n: int, model: nn.Module) -> None:
    for _ in range(n):
        x = torch.randn(3, 4)
        torch.testing.assert_close(engine(x), model(x))


def test_a_hot_plan_is_exchanged_for_a_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler)
    calls(engine, 2, model)
    assert compiler.made == 0 and tier(engine) == 0
    calls(engine, 3, model)
    assert compiler.made == 1 and tier(engine) == 1
    stats = engine_stats(engine)
    assert stats["calls_per_tier"] == {"module": 1, "0": 2, "1": 2, "2": 0} and stats["events"]["deploy.faster"] == 1


@pytest.mark.parametrize(
    ("compiler", "won", "event"),
    [
        (Compiler(lambda out: out + 1), True, "refuse.mismatch"),
        (Compiler(lambda out: out.double()), True, "refuse.mismatch"),
        (Compiler(), False, "refuse.not_faster"),
    ],
)
def test_only_winners_deploy(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, won: bool, event: str) -> None:
    race_says(monkeypatch, won)
    model = nn.Linear(4, 4).eval()
    engine = served(model, compiler)
    calls(engine, 8, model)
    assert tier(engine) == 0 and compiler.made == 1  # a loser is not tried again
    assert engine_stats(engine)["events"][event] == 1


def test_a_compiler_that_fails_is_a_refusal() -> None:
    def broken(*_args: Any, **_more: Any) -> Plan:
        raise InternalError("no registers left")

    model = nn.Linear(4, 4).eval()
    engine = served(model, broken)
    calls(engine, 6, model)
    said = [d for d in engine.log.decisions if d.why.name == "NOT_COMPILED"]
    assert len(said) == 1 and said[0].evidence["what"] == "no registers left"


def test_changed_weights_fall_back_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler)
    calls(engine, 5, model)
    assert tier(engine) == 1
    model.weight.mul_(2)
    calls(engine, 1, model)
    assert tier(engine) == 0 and engine_stats(engine)["deopts"] == 1
    calls(engine, 4, model)
    assert tier(engine) == 1 and compiler.made == 2


def test_a_plan_that_raises_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    broken: list[bool] = []

    def twist(out: torch.Tensor) -> torch.Tensor:
        if broken:
            raise RuntimeError("a kernel failed")
        return out

    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(twist))
    calls(engine, 5, model)
    broken.append(True)
    calls(engine, 2, model)
    assert tier(engine) == 0 and engine_stats(engine)["events"]["drop.run_failed"] == 1


def test_tiers_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler, SETTINGS.with_(tiers=0))
    calls(engine, 6, model)
    assert compiler.made == 0


def test_a_race_is_decided_by_most_rounds_and_a_margin() -> None:
    now = [0.0]

    def taking(*steps: float) -> Callable[..., None]:
        turn = iter(steps * 400)

        def run(*_args: Any) -> None:
            now[0] += next(turn)

        return run

    def outcome(old: Callable[..., None], new: Callable[..., None]) -> bool:
        return race(old, new, (), 0.5, clock=lambda: now[0]).won

    assert outcome(taking(1.0), taking(0.5))
    assert not outcome(taking(1.0), taking(0.99))
    assert not outcome(taking(1.0), taking(1.2))
    assert not outcome(taking(1.0), taking(0.1, 1.1, 1.1))  # a lucky round or two is no win
    assert race(taking(0.001), taking(0.0005), (), 0.01, clock=lambda: now[0]).rounds == 5  # settled, so no more
    tied = race(taking(1.0), taking(0.5, 1.5), (), 1e6, clock=lambda: now[0])
    assert not tied.won and not tied.decided and tied.rounds == 200


def test_looking_often_does_not_make_a_loser_win() -> None:
    rng, grown = np.random.default_rng(11), functools.cache(growth)
    ever = 0
    for _ in range(1000):
        wins = np.cumsum(rng.random(200) < 0.5)
        ever += any(grown(int(w), n + 1) >= 1 / ALPHA for n, w in enumerate(wins))
    assert 0 < ever <= 1000 * ALPHA


def varied(engine: Engine, model: nn.Module, rows: Sequence[int]) -> None:
    for n in rows:
        x = torch.randn(n, 4)
        torch.testing.assert_close(engine(x), model(x))


def test_sizes_that_recur_get_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler, SETTINGS.with_(watch_rate=2))
    varied(engine, model, [3, 5, 6, 7] + [9] * 120)
    entry = next(iter(engine.sites.values())).entries[0]
    assert list(entry.versions) == [(9,)] and entry.versions[(9,)].tier == 2
    assert "s0" not in str(entry.versions[(9,)].graph.inputs[0].type)
    stats = engine_stats(engine)
    assert stats["calls_per_tier"]["2"] > 50 and stats["events"]["specialize.recurs"] == 1
    before = engine.counts()["tier1_calls"]
    varied(engine, model, [4, 8])  # other sizes: the generic plan, and no capture
    assert engine.counts()["tier1_calls"] == before + 2
    model.weight.mul_(2)
    varied(engine, model, [9])
    assert entry.plan is entry.baseline and not entry.versions


def test_the_rarest_version_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(), SETTINGS.with_(watch_rate=2, max_versions=2))
    varied(engine, model, [3, 5] + [9] * 150 + [11] * 300 + [13] * 600)
    entry = next(e for e in next(iter(engine.sites.values())).entries if e.symbols)
    assert set(entry.versions) == {(11,), (13,)} and engine_stats(engine)["events"]["drop.rare"] == 1


def test_without_kept_inputs_plans_are_proven_on_made_up_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(), SETTINGS.with_(keep_inputs=False))
    secret = torch.full((3, 4), 42.0)
    for _ in range(6):
        engine(secret)
    entry = next(iter(engine.sites.values())).entries[0]
    assert tier(engine) == 1 and not any(torch.equal(t, secret) for t in entry.samples.inputs() or ())


def test_float64_judges_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model = nn.Linear(4, 4).eval()
    strict = SETTINGS.with_(rtol=0.0)
    near = Compiler(lambda out: out * (1 + 2**-24))  # rounds to the same numbers or to their neighbours
    engine = served(model, near, strict)
    x = torch.randn(3, 4)
    for _ in range(6):
        engine(x)
    far = served(model, Compiler(lambda out: out * 1.001), strict)
    for _ in range(6):
        far(x)
    assert tier(far) == 0 and engine_stats(far)["events"]["refuse.mismatch"] == 1
    said = [d for d in far.log.decisions if d.why.name == "MISMATCH"]
    assert said[0].evidence["judge"] == "float64"


def test_more_threads_open_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=False)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler)
    calls(engine, 8, model)
    assert compiler.made == 1
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        calls(engine, 8, model)
    finally:
        torch.set_num_threads(threads)
    assert compiler.made == 2


def test_large_inputs_are_not_copied_in_every_call_that_is_looked_at() -> None:
    """Of which only one fits: each call's took the place of the last, in every call while two plans were compared. Copies take a
    thousandth of a second here, so that there is one in a fifth of a second."""
    now, copies = [0.0], list[int]()

    def copied(t: torch.Tensor) -> torch.Tensor:
        now[0] += 0.001
        copies.append(t.numel())
        return t

    samples = CallSamples(4 << 20, copied, lambda: now[0])
    calls = [torch.empty(n) for n in (600_000, 700_000, 2_000_000)]  # the last one is more than may be kept
    for n, call in enumerate(calls):
        for _ in range(50):
            samples.note((n,), [call])
    assert copies == [600_000, 600_000] and samples.inputs((0,)) is not None, "one that has room, one in its place"
    now[0] += 1.0
    samples.note((1,), [calls[1]])
    assert copies == [600_000, 600_000, 700_000] and samples.inputs((1,)) is not None, "what comes of late is kept all the same"
    for _ in range(1000):
        now[0] += 0.0001
        samples.note((1,), [calls[1]])
    assert len(copies) == 3
    small = CallSamples(100, copied, lambda: now[0])
    for n in range(5):
        small.note((n,), [torch.empty(25)])
    assert len(copies) == 8, "small ones are copied as they come"


def test_samples_stay_within_their_budget() -> None:
    samples = CallSamples(4000)
    for n in (*range(1, 101), *[7] * 60):
        samples.note((n,), [torch.zeros(n, 4)])
    assert samples.bytes <= 4000 and next(iter(samples.shares())) == (7,)
    assert samples.inputs((7,)) is not None and sum(samples.shares().values()) <= 1.001


def test_few_samples_are_kept_while_nobody_calls() -> None:
    samples = CallSamples(1 << 20)
    for n in (*range(1, 41), *[7] * 60):
        samples.note((n,), [torch.full((16, 4), float(n))])
    held, shares = samples.bytes, samples.shares()
    assert samples.give_back() == held - samples.bytes > 0
    assert samples.bytes == KEPT_IDLE * 16 * 4 * 4 and samples.shares() == shares
    kept = samples.inputs((7,))
    assert kept is not None and float(kept[0][0, 0]) == 7.0 and len(samples.several(64)) == KEPT_IDLE
    samples.note((3,), [torch.zeros(16, 4)])
    assert samples.inputs((3,)) is not None, "calls bring others"


@pytest.mark.parametrize(("share", "kept"), [(0.75, 1), (2.0, 1), (0.25, 4)])
def test_bytes_bound_the_samples_that_are_kept_while_nobody_calls(share: float, kept: int) -> None:
    samples = CallSamples(64 << 20)
    for n in range(1, 11):
        samples.note((n,), [torch.zeros(int(share * KEPT_IDLE_BYTES) // 4)])
    samples.give_back()
    assert len(samples.several(64)) == kept


@pytest.mark.parametrize(("nodes", "calls_needed"), [(10, 3), (256, 6), (2560, 33)])
def test_the_threshold_grows_with_the_code(nodes: int, calls_needed: int) -> None:
    assert threshold(3, nodes) == calls_needed
    assert is_hot(calls_needed, 0.0, 3, nodes) and not is_hot(calls_needed - 1, 0.0, 3, nodes)
    assert is_hot(3, 1.0, 3, nodes)  # long calls are hot sooner


def test_compiled_plans_stay_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()

    def heavy(*args: Any, **more: Any) -> Plan:
        return replace(compiler(*args, **more), memory=PlanMemory(constants=600))

    engine = served(model, heavy, SETTINGS.with_(watch_rate=2, code_bytes=1000))
    varied(engine, model, [3, 5, 6, 7] + [9] * 120)  # tier 1, then a version of it: both do not fit
    entry = next(e for e in next(iter(engine.sites.values())).entries if e.symbols)
    held = [p for p in (entry.plan, *entry.versions.values()) if p.tier]
    assert sum(p.memory.constants for p in held) <= 1000
    assert engine_stats(engine)["events"]["drop.too_much_memory"] >= 1
    varied(engine, model, [3, 9, 11])


def test_a_compilation_hears_which_sizes_most_calls_have() -> None:
    kept = CallSamples(1 << 20)
    entry: Any = SimpleNamespace(key=5, samples=kept, seconds=1.0, heat=10, plan=None, baseline=None)
    sampler = SimpleNamespace(outcomes=lambda key: {key: "seen"})
    context: Any = SimpleNamespace(plans=SimpleNamespace(call_sampler=sampler, log=EventLog()))
    demand = demand_of(context, entry)
    assert demand.outcomes() == {5: "seen"}
    assert demand.library_us == 1e5 and demand.of_late is not None and demand.of_late() is None
    for rows, calls, most in ((4, 8, 4), (9, 8, None), (9, 40, 9)):
        for _ in range(calls):
            kept.note((rows,), [torch.zeros(rows, 3)])
        assert demand.of_late() == (None if most is None else [(most, 3)])
    private = CallSamples(1 << 20, made_up)
    entry.samples = private
    private.note((5,), [torch.zeros(5, 3)])
    assert demand.of_late() == [(5, 3)]


def test_a_site_that_gave_up_special_cases_takes_them_again_when_the_traffic_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(), replace(SETTINGS, watch=False))
    calls(engine, 1, model)
    (site,) = engine.sites.values()
    (cache,), entry = site.caches.values(), site.entries[0]
    improver = engine._improver
    assert improver is not None
    for drifts, generic in ((0, True), (0, True), (1, False)):
        monkeypatch.setattr(engine.call_sampler, "drifts", lambda _key, n=drifts: n)
        cache.generic = True
        improver.consider(site, entry, entry.plan)
        assert cache.generic is generic
    engine.close()


def test_of_many_calls_few_looks_weigh_what_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: what every look did took most of what watching costs, and traffic that no bet is for pays that for ever."""
    assert all(weighs(MANY_CALLS - 1, looks) for looks in range(2 * MIN_SAMPLES))
    assert sum(weighs(MANY_CALLS, looks) for looks in range(2 * MIN_SAMPLES)) == 2
    weighed: list[int] = []
    rows = Improver._consider_rows  # pyright: ignore[reportPrivateUsage]

    def counted(self: Improver, *args: Any) -> bool:
        weighed.append(1)
        return rows(self, *args)

    monkeypatch.setattr(Improver, "_consider_rows", counted)
    engine = served(nn.Linear(4, 4), Compiler())
    for _ in range(64):
        engine(torch.randn(2, 4))
    (entry,) = (e for site in engine.sites.values() for e in site.entries)
    early = len(weighed) / entry.samples.taken
    entry.heat, looks = MANY_CALLS, entry.samples.taken
    weighed.clear()
    for _ in range(10 * MIN_SAMPLES):
        entry.next_look = 0
        engine(torch.randn(2, 4))
    late = len(weighed) / (entry.samples.taken - looks)
    assert early > 10 * late > 0
