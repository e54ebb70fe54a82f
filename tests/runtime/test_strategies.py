"""Proposals of the bottleneck analysis become real plans: compiled by the real compiler, proven, raced, and learned from."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Action, Why
from hotfuse.compile import request_context
from hotfuse.compile.learn import strategy_history
from hotfuse.compile.request_bodies import body_of
from hotfuse.compile.request_context import STRATEGIES, RequestContext, RequestSettings
from hotfuse.compile.requests import Here
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.hpm.bottleneck import ADDRESSES, Bottleneck, Ledger, Strategy, Tried
from hotfuse.runtime.observe.examine import Examiner
from hotfuse.runtime.observe.findings import Finding
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.specialize.outcomes import BetContext
from hotfuse.tile.program import Loop, LoopKind, Stmt, When
from tests.races import kernels_win, layouts_take, new_plans_win, raced
from tests.runtime.test_layouts import Rows, moved


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 160), nn.Linear(160, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_history, "_histories", {})
    monkeypatch.setattr(Examiner, "raced", lambda *_a: None)  # what limits a plan is the test's to say
    monkeypatch.setattr(Examiner, "look", lambda *_a: None)
    kernels_win(monkeypatch)  # a clock decides nothing here
    new_plans_win(monkeypatch)


def served(model: nn.Module, x: torch.Tensor, settings: Settings) -> tuple[hotfuse.api.Jit, Entry]:
    fast = hotfuse.jit(model, settings=settings)
    until = time.monotonic() + 90
    fast(x)
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    while time.monotonic() < until:
        fast(x)
        if site.entries and site.entries[0].plan.tier == 1:
            break
        time.sleep(0.0 if settings.capture == "inline" else 0.02)
    assert site.entries[0].plan.tier == 1, str(fast.explain(full=True))
    return fast, site.entries[0]


def only(ledger: Ledger, bound: Bottleneck, strategy: Strategy) -> None:
    """Teach that everything else has failed against a bottleneck; what workers remember of other tests goes."""
    ledger.rows.pop((bound, strategy), None)
    for other in ADDRESSES[bound]:
        if other is not strategy:
            ledger.rows[bound, other] = Tried(9, 0)


def parallel(plan: Plan) -> list[str]:
    def any_in(stmts: tuple[Stmt, ...]) -> bool:
        return any(
            isinstance(s, Loop | When) and (getattr(s, "kind", None) is LoopKind.PARALLEL or any_in(s.body))
            for s in stmts
        )

    return [k.name for k in plan.kernels.values() if any_in(k.body)]


def addressed(
    model: nn.Module, x: torch.Tensor, bound: Bottleneck, strategy: Strategy, settings: Settings
) -> tuple[Plan, Plan, hotfuse.api.Jit]:
    """The plans before and after calls that found a bottleneck; both are right."""
    with torch.no_grad():
        want = model.double()(x.double())
        model.float()
        fast, entry = served(model, x, settings)
        before = entry.plan
        (own,) = strategy_history._histories.values()  # pyright: ignore[reportPrivateUsage]
        only(own.ledger, bound, strategy)
        slowest = next(i for i, a in enumerate(before.artifacts) if a.backend == "llvm")
        entry.findings = (
            Finding(1, slowest, f"tier 1 partition {slowest}", "", 50.0, 0.9, bound, "", 48.0, 0, EVIDENCE),
        )
        for _ in range(600):
            fast(x)
            if entry.plan is not before:
                break
            time.sleep(0.0 if settings.capture == "inline" else 0.05)
        after = entry.plan
        assert after is not before, str(fast.explain(full=True))[-4000:]
        got = fast(x)
        assert (got.double() - want).abs().max() < 1e-4 * max(1.0, float(want.abs().max()))
        row = own.ledger.rows[bound, strategy]
        assert row.count == row.helped >= 1 and row.promise > Tried().promise, "the next choice has learned from it"
        said = [d for d in fast._engine.log.decisions if d.why is Why.BOTTLENECK]  # pyright: ignore[reportPrivateUsage]
        assert said and said[-1].evidence["strategy"] == strategy.value
        assert f"strategy={strategy.value}" in str(fast.explain(full=True))
    return before, after, fast


EVIDENCE = {"source": "derived", "rooflines": "guessed", "microjoules": 1.0, "energy_source": "estimated",
            "counters": {"cycles": 1}, "counters_source": "derived"}  # fmt: skip
INLINE = Settings(capture="inline", hot_calls=2)


def test_the_slowest_partition_goes_to_the_library() -> None:
    before, after, _ = addressed(Deep().eval(), torch.randn(300, 48), Bottleneck.COMPUTE, Strategy.LIBRARY, INLINE)
    old, new = ([a.backend for a in p.artifacts] for p in (before, after))
    assert old.count("library") < new.count("library") and "llvm" in new, "one of two products only"


def test_the_slowest_partition_runs_on_one_thread() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before, after, _ = addressed(Deep().eval(), torch.randn(300, 48), Bottleneck.LATENCY, Strategy.THREADS, INLINE)
    finally:
        torch.set_num_threads(threads)
    assert len(parallel(after)) == len(parallel(before)) - 1
    assert sum("_one_thread" in k.name for k in after.kernels.values()) == 1


def test_convolutions_are_laid_out_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts_take(monkeypatch, last_s=2e-3)
    before, after, _ = addressed(Rows().eval(), torch.randn(2, 6, 9, 17), Bottleneck.L1, Strategy.LAYOUT, INLINE)
    assert moved(before) is not moved(after)


def test_what_came_of_an_attempt_is_there_for_the_next_process(tmp_path: Path) -> None:
    addressed(Deep().eval(), torch.randn(300, 48), Bottleneck.COMPUTE, Strategy.LIBRARY, INLINE)
    (own,) = strategy_history._histories.values()  # pyright: ignore[reportPrivateUsage]
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with request_context.used_by(place.header()):
        strategy_history.handle(body_of({"kind": "learned", "more": own.more()}))
        state = strategy_history.states()
    count, helped, _ = state[STRATEGIES]["compute library"]
    assert count == helped >= 1
    later = strategy_history.StrategyHistory()
    later.begin(state)
    assert later.ledger.promise(Bottleneck.COMPUTE, Strategy.LIBRARY) > Tried().promise


@pytest.mark.parametrize(
    ("model", "shape", "bound", "strategy"),
    [
        (Deep, (300, 48), Bottleneck.COMPUTE, Strategy.LIBRARY),
        (Deep, (300, 48), Bottleneck.LATENCY, Strategy.THREADS),
        (Rows, (2, 6, 9, 17), Bottleneck.L1, Strategy.LAYOUT),
    ],
)
def test_what_the_real_race_measured_decides_and_is_learned(
    model: type[nn.Module],
    shape: tuple[int, ...],
    bound: Bottleneck,
    strategy: Strategy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever wins: the plan that serves, the decision and the ledger all follow the figures of one trial."""
    layouts_take(monkeypatch, last_s=2e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            x = torch.randn(shape)
            fast, entry = served(model().eval(), x, Settings(capture="inline", hot_calls=2, race_s=0.2))
            before = entry.plan
            held = raced(monkeypatch, lambda: (0.0, 0.0))
            (own,) = strategy_history._histories.values()  # pyright: ignore[reportPrivateUsage]
            only(own.ledger, bound, strategy)
            slowest = next(i for i, a in enumerate(before.artifacts) if a.backend == "llvm")
            entry.findings = (
                Finding(1, slowest, f"tier 1 partition {slowest}", "", 50.0, 0.9, bound, "", 48.0, 0, EVIDENCE),
            )
            log = fast._engine.log  # pyright: ignore[reportPrivateUsage]
            told = [d for d in log.decisions if "strategy" in d.evidence and "us_after" in d.evidence]
            for _ in range(600):
                fast(x)
                if told := [d for d in log.decisions if "strategy" in d.evidence and "us_after" in d.evidence]:
                    break
        assert told, str(fast.explain(full=True))[-4000:]
        (said,), (trial,) = told, [h.found for h in held]
        assert (said.evidence["us_before"], said.evidence["us_after"]) == (round(trial.old_us, 1), round(trial.new_us, 1))
        assert said.evidence["strategy"] == strategy.value and said.evidence["rounds"] == trial.rounds
        assert (said.action is Action.DEPLOY) is trial.won and (entry.plan is not before) is trial.won
        row = own.ledger.rows[bound, strategy]
        assert (row.count, row.helped) == (1, int(trial.new_us < 0.97 * trial.old_us))
        fast.close()
    finally:
        torch.set_num_threads(threads)


def test_a_process_that_begins_with_kept_plans_bets_by_what_earlier_ones_raced(tmp_path: Path) -> None:
    """No plan is asked for there whose answer would bring it: it is asked for by itself, once, before anything is bet."""
    place, earlier, row = RequestContext(str(tmp_path / "p.sqlite")), strategy_history.StrategyHistory(), "branch"
    for _ in range(6):
        earlier.outcomes.learn(row, BetContext(0.9), 1.0, 1.2, won=False)
    strategy_history.send(Here().submit, RequestSettings(), place, earlier)
    later = strategy_history.StrategyHistory()
    before = later.outcomes.promise(row, BetContext(0.9))
    assert strategy_history.recall(Here().submit, RequestSettings(), place, later)
    assert later.begun and later.outcomes.promise(row, BetContext(0.9)) == earlier.outcomes.promise(row, BetContext(0.9)) < before
    assert not strategy_history.recall(Here().submit, RequestSettings(), place, later), "it is there"
    assert not later.more(), "what was brought is not sent back"


def test_what_cannot_be_brought_holds_up_nothing(tmp_path: Path) -> None:
    def gone(_task: Task) -> Future[wire.Message]:
        future: Future[wire.Message] = Future()
        future.set_exception(CaptureError("the worker died"))
        return future

    place, own = RequestContext(str(tmp_path / "p.sqlite")), strategy_history.StrategyHistory()
    assert strategy_history.recall(gone, RequestSettings(), place, own) and not own.begun
    assert not strategy_history.recall(gone, RequestSettings(), place, own), "asked for once"
