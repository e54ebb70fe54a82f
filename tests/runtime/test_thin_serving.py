# pyright: reportPrivateUsage=false
"""Being served costs little where the own code is best, and what it costs is part of what plans are compared by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse import jit
from hotfuse.base.events import EventLog
from hotfuse.base.settings import Settings
from hotfuse.base.structure import counts_in, take_call
from hotfuse.native.call_context import usual
from hotfuse.runtime import call_learner, call_looks
from hotfuse.runtime import engine as engines
from hotfuse.runtime.call_gaps import IN_A_ROW, CallGaps
from hotfuse.runtime.capturing import RESTING_CALLS
from hotfuse.runtime.path_cost import path_seconds
from hotfuse.runtime.serve.answering import turn_of
from hotfuse.runtime.tally import NEVER
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.own_code import compare, decided
from hotfuse.runtime.tierup.race import LIVE, Trial
from hotfuse.torch_backend import CompiledGraph, explain_compiled

from .live import SETTINGS, Live

INLINE = {"capture": "inline", "watch": False}
OFF = Settings(capture="inline", tiers=0, record=False, watch=False, idle=False)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompiledGraph]]:
    """Dynamo's graphs of this test, in order."""
    met: list[CompiledGraph] = []
    made = CompiledGraph.__init__

    def kept(self: CompiledGraph, *args: Any) -> None:
        made(self, *args)
        met.append(self)

    torch._dynamo.reset()
    monkeypatch.setattr(CompiledGraph, "__init__", kept)
    yield met
    torch._dynamo.reset()


class Remembers(nn.Module):
    """Its state is a tensor in an attribute, another one in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(8, 8), torch.zeros(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(self.a(x) + self.h)
        return self.h * 2


class Held:
    def __init__(self) -> None:
        self.n = 3


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return torch.relu(self.a(x))


def test_dynamos_graph_runs_in_code_that_is_made(graphs: list[CompiledGraph]) -> None:
    """A lazy module's `forward` goes through the module in every call, for as long as it is held."""
    fast = torch.compile(lambda x: x.sin() + 1, backend="hotfuse", options=INLINE)
    fast(torch.randn(3))
    assert "lazy" not in graphs[0].own.__name__


def test_calls_go_straight_to_dynamos_graph(graphs: list[CompiledGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8).eval()
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
        (graph,) = graphs
        (site,) = graph.engines[0].sites.values()
        before = explain_compiled().to_dict()["counts"]["calls"]
        entered: list[Any] = []
        enter = graph._enter
        monkeypatch.setattr(graph, "_enter", lambda *args: entered.append(args) or enter(*args))
        site.resting = 3
        for _ in range(5):
            torch.testing.assert_close(fast(x), model(x))
    assert len(entered) == 2 and graph.own_calls == 3 and site.resting == 0
    assert explain_compiled().to_dict()["counts"]["calls"] == before + 5


def test_what_is_best_of_one_instance_says_nothing_of_another(graphs: list[CompiledGraph]) -> None:
    models = [nn.Linear(8, 8).eval() for _ in range(2)]
    fast = torch.compile(lambda m, x: torch.relu(m(x)), backend="hotfuse", options=INLINE)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(4):
            for model in models:
                torch.testing.assert_close(fast(model, x), torch.relu(model(x)))
        shared = [g for g in graphs if len(g.engines) == 2]
        for graph in shared:
            for engine in graph.engines:
                for site in engine.sites.values():
                    site.resting = 3
            assert graph._rest is NEVER
        for model in models:
            torch.testing.assert_close(fast(model, x), torch.relu(model(x)))
    assert shared and not any(g.own_calls for g in shared)


def test_tensors_that_a_module_keeps_anew_are_inputs(graphs: list[CompiledGraph]) -> None:
    torch.manual_seed(0)
    model, eager = Remembers().eval(), Remembers().eval()
    eager.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(1, 8)
            torch.testing.assert_close(fast(x), eager(x))
            torch.testing.assert_close(model.h, eager.h)
    assert [len(g.engines) for g in graphs] == [1]
    counts = explain_compiled().to_dict()["counts"]
    assert counts["graph_calls"] >= 8 and "inputs from here on" in str(explain_compiled(full=True))


def test_counts_that_go_on_make_rounds() -> None:
    """A model that counts its calls brings another size in each: a contest that waits for two alike never ends."""
    assert counts_in(take_call((Held(),), {}).spec) and not counts_in(take_call((torch.ones(3), 3), {}).spec)
    plan: Any = object()
    entry: Any = SimpleNamespace(contest=PlanContest(plan, plan), effects=None, counted=True)
    keys = [turn.key for n in (1000, 1001) if (turn := turn_of(entry, plan, (n,), (), grad=False)) is not None]
    assert len(keys) == 2 and keys[0] == keys[1]
    fast = jit(Counts().eval(), settings=OFF)
    with torch.no_grad():
        for _ in range(12):
            fast(torch.randn(1, 8))
    assert {e.counted for s in fast._engine.sites.values() for e in s.entries} == {True}


def test_state_serves_itself_while_the_own_code_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counts().eval()
    fast = jit(model, settings=OFF)
    with torch.no_grad():
        for _ in range(12):
            fast(torch.randn(1, 8))
        serving = fast._serving
        assert serving._site is not None
        serving._site.resting = 2
        entered: list[Any] = []
        serve = serving.engine.serve
        monkeypatch.setattr(serving.engine, "serve", lambda *args, **more: entered.append(more) or serve(*args, **more))
        for _ in range(3):
            fast(torch.randn(1, 8))
    assert sum("met" not in more for more in entered) == 1 and model.n == 15 and fast.stats()["calls"] == 15


def test_resting_calls_do_not_come_to_the_engine() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    fast = jit(model, settings=OFF)
    serving, rest = fast._serving, fast._rest
    with torch.no_grad():
        fast(x)
        (site,) = fast._engine.sites.values()
        assert site.rest is rest and not rest.left
        site.resting = 3
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
        assert rest.passed == 3 and site.resting == 0 and fast.stats()["calls"] == 5
        site.resting = 1
        object.__setattr__(fast, "_serving", None)  # a call that rests asks one object
        torch.testing.assert_close(fast(x), model(x))
        object.__setattr__(fast, "_serving", serving)
        assert rest.passed == 4
        compiled = torch.compile(lambda t: fast(t) + 1, backend="eager", fullgraph=True)
        for left in (5, 4, 0):
            site.resting = left
            torch.testing.assert_close(compiled(x), model(x) + 1)
            assert site.resting == left  # nothing of a trace rests on it
        site.resting = 5
        serving._serve_by(serving._observed)
        assert site.resting == 5 and not rest.left  # it has to see every call
        rest.left = 1  # by a thread that was just taking it down
        looks = serving._looks
        torch.testing.assert_close(fast(x), model(x))
        assert serving._looks == looks + 1 and not rest.left
        serving._serve_by(serving._plain.serve)
        assert site.rest is rest and rest.left == 4
        rest.left = 0
        fast(input=x)
        site.resting = 3
        assert len(fast._engine.sites) == 2 and not rest.left  # one's rest would hide the other
        fast(input=x)
        assert site.resting == 3 and rest.passed == 5


def test_finding_a_plan_in_cold_caches_counts_where_calls_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    for rare in (True, False):
        asked = [0.0]

        def cold(asked: list[float] = asked, rare: bool = rare) -> int:
            if rare and time.perf_counter() - asked[0] > 1e-3:  # in a loop everything is warm
                time.sleep(5e-3)
            asked[0] = time.perf_counter()
            return usual(gradients=False)

        monkeypatch.setattr(engines, "_read_context", cold)
        with Live(own_s=1e-3, settings=SETTINGS.with_(tiers=0)) as live, torch.no_grad():
            live.calls_until(lambda: live.captured)
            for _ in range(400):
                time.sleep(3e-3 if rare else 0)
                live.call()
                if live.entry.own_ratio is not None:
                    break
            assert live.entry.own_ratio is not None and live.entry.own is rare


def test_long_calls_that_follow_each_other_are_not_far_apart() -> None:
    gaps = CallGaps()
    for _ in range(2 * IN_A_ROW):
        gaps.note(1e-5, 1, 5e-3)  # compared, each is looked at
    for _ in range(2 * IN_A_ROW):
        gaps.note(63 * 5e-3 + 1e-4, 64, 5e-3)  # then one in 64
    assert (gaps.rare, gaps.changes) == (False, 0)
    for _ in range(IN_A_ROW):
        gaps.note(63 * 5e-3 + 64 * 2e-2, 64, 5e-3)
    assert (gaps.rare, gaps.changes) == (True, 1)


def test_calls_are_rare_or_frequent_when_looks_in_a_row_agree() -> None:
    gaps = CallGaps()
    gaps.note(4.0, 2000)
    assert gaps.rare
    for _ in range(2):
        for _ in range(IN_A_ROW - 1):
            gaps.note(1e-5, 1)
        gaps.note(1.0, 10)
    assert gaps.rare and not gaps.changes
    for _ in range(IN_A_ROW):
        gaps.note(1e-5, 1)
    assert not gaps.rare and gaps.changes == 1


def test_what_serving_takes_is_measured_and_counts_nothing() -> None:
    with Live() as live, torch.no_grad():
        live.calls_until(lambda: live.captured)
        live.call()
        (site,) = live.engine.sites.values()
        before, calls, x = live.engine.counts(), live.entry.calls, torch.randn(3, 4)
        found = path_seconds(live.engine.serve, live.engine._tally.mine, site, live.entry, (x,), usual(gradients=False))
        assert found is not None and found > 0
        assert live.engine.counts() == before and live.entry.calls == calls
        others = torch.randn(3, 4, dtype=torch.float64)  # for which there is no plan
        assert path_seconds(live.engine.serve, live.engine._tally.mine, site, live.entry, (others,), usual(gradients=False)) is None


def test_what_python_lost_is_decided_again_in_native_code() -> None:
    contest = PlanContest(object(), object(), own=True)  # pyright: ignore[reportArgumentType]
    contest._rounds.append((10e-6, 20e-6))
    plan: Any = object()
    opened: list[PlanContest] = []
    entry: Any = SimpleNamespace(
        close=lambda c: None, open=opened.append, dispatch_s=(15e-6, False, True), own=False, own_ratio=None,
        lost_by_dispatch=False, contest=None, improving=False, plan=plan, baseline=plan, grad_mode=False, heat=99,
    )  # fmt: skip
    decided(entry, contest, Trial(10.0, 20.0, 9, False, True, LIVE), EventLog(), "model")
    assert entry.own and entry.lost_by_dispatch
    table = SimpleNamespace(native=False)
    site: Any = SimpleNamespace(cache=lambda grad_mode: SimpleNamespace(table=table))
    compare(site, entry, Settings())
    assert not opened
    table.native = True
    compare(site, entry, Settings())
    compare(site, entry, Settings())
    assert len(opened) == 1 and not entry.lost_by_dispatch
    entry.dispatch_s = (5e-6, False, True)
    decided(entry, contest, Trial(10.0, 20.0, 9, False, True, LIVE), EventLog(), "model")
    assert entry.own and not entry.lost_by_dispatch  # whoever looks for the plan, it is slower


def test_short_calls_are_compared_without_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_looks, "SHORT_S", 60.0)  # whatever the machine does meanwhile
    with Live(settings=SETTINGS.with_(tiers=0, hot_calls=1 << 30)) as live, torch.no_grad():
        live.calls_until(lambda: live.captured)
        learned: list[int] = []
        learn = live.engine._learner.learn

        def noting(*args: Any, **more: Any) -> None:
            learned.append(args[1].calls)
            learn(*args, **more)

        monkeypatch.setattr(live.engine._learner, "learn", noting)
        contest = PlanContest(live.entry.baseline, live.entry.baseline, own=True)
        live.entry.open(contest)
        before = live.entry.calls
        live.calls_until(lambda: contest.rounds >= 2 or contest.trial is not None)
        took = live.entry.calls - before
        assert took >= 4 and len([n for n in learned if n % call_looks.LEARNED_ONCE_IN]) < took / 2


def test_rests_grow_where_nothing_can_be_captured() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1)
            return x + 1

    fast = jit(Appends().eval(), settings=OFF)
    x, longest = torch.randn(3), 0
    with torch.no_grad():
        for _ in range(6000):
            fast(x)
            longest = max(longest, *(s.resting for s in fast._engine.sites.values()), 0)
    assert longest > 2 * RESTING_CALLS


def test_pythons_look_through_a_model_is_not_charged_before_native_code_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[str] = []
    monkeypatch.setattr(call_learner, "path_seconds", lambda *_: whole.append("measured") or 0.5)
    guard = SimpleNamespace(native=False, unchanged=lambda: True)
    learner: Any = call_learner.CallLearner.__new__(call_learner.CallLearner)
    learner._plans, learner._context, learner.outside_s = SimpleNamespace(watch=guard), lambda: lambda: 0, lambda: 0.0
    learner._serve, learner._tally = None, SimpleNamespace(mine=None)
    table = SimpleNamespace(native=True, select=lambda *_: 0)
    site: Any = SimpleNamespace(cache=lambda grad_mode: SimpleNamespace(table=table))
    entry: Any = SimpleNamespace(dispatch_s=(0.0, False, False), grad_mode=False)
    x = torch.ones(2)
    with torch.no_grad():
        assert learner._dispatch_s(site, entry, [x]) < 0.1 and not whole  # Python still looks at every weight
        guard.native = True
        assert learner._dispatch_s(site, entry, [x]) == 0.5 and whole == ["measured"]
        assert learner._dispatch_s(site, entry, [x]) == 0.5 and whole == ["measured"]  # once
        guard.native = "a weight has a hook"  # for good
        assert learner._dispatch_s(site, entry, [x]) == 0.5
        entry.dispatch_s = (0.0, False, False)
        beside = torch.ones(2, device="meta")  # where a replay is launched before anybody looks
        assert learner._dispatch_s(site, entry, [beside]) < 0.1 and whole == ["measured"]
