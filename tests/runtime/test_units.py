"""The compilation graph: units in the order of their value; cut, fused, replaced, refused; a plan at any time."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse import CaptureError, Settings
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.events import Why
from hotfuse.compile import compilation
from hotfuse.compile.answer_bodies import AnswerBody, MadeKernel, UnitCut, UnitKernel, UnitRefused, message, refusal
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.compilation_graph import UnitState
from hotfuse.compile.request_bodies import PlanRequest, UnitRequest
from hotfuse.compile.requests import Here
from hotfuse.compile.unit import units
from hotfuse.compile.value import CompileProgress, Expected, Facts, RooflineEstimator, worth
from hotfuse.compile.workers.service import counters, service
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.wire import Message
from hotfuse.fusion.bandit import Bandit, Budget
from hotfuse.hpm.bottleneck import Ledger, Strategy
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.partition.change import PartitionChange
from hotfuse.pipeline import compile_units
from tests.races import kernels_win

Answer = Callable[[Mapping[str, Any]], AnswerBody | CaptureError | None]


@pytest.fixture(autouse=True)
def clocks_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)


class Scripted(Here):
    """This process, but some units are answered by a script; remembers what it was asked."""

    def __init__(self, answer: Answer = lambda _h: None) -> None:
        self.answer = answer
        self.asked: list[Mapping[str, Any]] = []
        self.cancelled: list[str] = []

    def submit(self, task: Task) -> Future[Any]:
        self.asked.append(task.header)
        made = self.answer(task.header) if task.header["kind"] == "unit" else None
        if made is None:
            return super().submit(task)
        future: Future[Any] = Future()
        future.set_result(refusal(made) if isinstance(made, CaptureError) else said(made))
        return future

    def cancel(self, owner: str) -> int:
        self.cancelled.append(owner)
        return 0

    @property
    def units(self) -> list[Mapping[str, Any]]:
        return [h for h in self.asked if h["kind"] == "unit"]


def said(body: AnswerBody) -> Message:
    return message(body, [b"code"] if isinstance(body, UnitKernel) else [])


def a_kernel(text: str, us: float = 1.0, keys: tuple[str, ...] = (), **use: Any) -> UnitKernel:
    about = {"nodes": 1, "flops": 1000, "moved": 1000, "traffic": 1000, "largest": 0, "us": us, "bound": "memory",
             "utilization": 0.5, "scratch": 0, "vectors": 4, "parallel": 8, **use}
    made = MadeKernel("", "", (), (), (), text, 0.01, us, 2 * us, use=about)
    return UnitKernel(made, text, (), (), keys)


def chain(ops: list[str], size: str = "s0") -> str:
    lines = [f"graph main(%x0: f32[{size}, 64]) where (2 <= s0) {{"]
    lines += [f"  %x{i + 1}: f32[{size}, 64] = {op.format(f'%x{i}')}" for i, op in enumerate(ops)]
    return "\n".join([*lines, f"  return %x{len(ops)}", "}", ""])


WIDE = 96
ALL_DONE = CompileProgress(1.0, 1.0)
"""Too many for a kernel to sort: sorts of as many stay with the library, and keep apart what is around them."""


def layers(n: int) -> str:
    """Groups that an op without a kernel keeps apart: n of them alike."""
    f, i64 = f"f32[s0, {WIDE}]", f"i64[s0, {WIDE}]"
    lines = [f"graph main(%x0: {f}) where (2 <= s0) {{"]
    for i in range(n):
        lines += [f"  %a{i}: {f} = aten.tanh.default(%x{i})", f"  %b{i}: {f} = aten.exp.default(%a{i})",
                  f"  %x{i + 1}: {f}, %i{i}: {i64} = aten.sort.default(%b{i})"]
    return "\n".join([*lines, f"  return %x{n}", "}", ""])


def compiled(text: str, executor: Here | None = None, **options: Any) -> Compilation:
    made = Compilation(executor or Scripted(), text, {"s0": 4}, **options)
    made.run()
    return made


def check(compilation: Compilation) -> list[list[int]]:
    """The body is a well-formed graph whose parts cover it in order."""
    header, codes = compilation.message()
    graph = verify(parse(header["graph"]))
    ends = [0, *(last for _, last, _ in header["parts"])]
    assert [first for first, _, _ in header["parts"]] == ends[:-1] and ends[-1] == len(graph.nodes)
    assert len(codes) == len(header["kernels"])
    return header["parts"]


def test_groups_that_are_alike_are_one_unit() -> None:
    asked = Scripted()
    done = compiled(layers(5), asked)
    assert [len(h["alike"]) for h in asked.units] == [5]
    assert [k for _, _, k in check(done)] == [0, -1] * 5
    assert done.graph.counts["deduplicated"] == 4 and done.graph.counts["compiled"] == 1 and done.progress == ALL_DONE


MIXED = f"""
graph main(%x: f32[s0, {WIDE}], %i: i64[s0]) where (2 <= s0) {{
  param %w: f32[{WIDE}, {WIDE}] = "w"
  %a: f32[s0, {WIDE}] = aten.linear.default(%x, %w, None)
  %s: f32[s0, {WIDE}], %p: i64[s0, {WIDE}] = aten.sort.default(%a)
  %b: f32[s0, {WIDE}] = aten.tanh.default(%s)
  %t: f32[s0, {WIDE}], %q: i64[s0, {WIDE}] = aten.sort.default(%b)
  %c: f32[s0, {WIDE}] = aten.softmax.int(%t, -1)
  return %c
}}
"""


def test_the_most_valuable_unit_goes_first_and_the_estimator_is_ours_to_choose() -> None:
    for order in (["linear", "tanh", "softmax"], ["softmax", "linear", "tanh"]):
        def estimate(facts: Facts, order: list[str] = order) -> Expected:
            return Expected(3.0 - order.index(facts.ops), 1.0)

        asked = Scripted()
        done = compiled(MIXED, asked, estimate=estimate)
        graph = parse(done.graph.levels[0].text)
        first = [graph.nodes[h["alike"][0][1][0]].op for h in asked.units]
        assert [op.split(".")[1] for op in first] == order


def test_value_is_saving_per_second_of_compiling() -> None:
    assert worth(Expected(saving_s=1e-3, compile_s=2.0), 3) == pytest.approx(3e-3 / 2.0)
    line = RooflineEstimator()
    facts = Facts("contract", units.work_of(parse(MIXED), {"s0": 4}), 1.7e-3, 1e-3)
    assert line(facts).saving_s == pytest.approx(1e-3)
    before = line(facts).compile_s
    for _ in range(50):
        line.learn("contract", 0.5)
    assert before < line(facts).compile_s == pytest.approx(0.5, rel=0.01)


def test_units_are_cut_by_what_workers_took_and_not_by_the_clock_of_a_busy_machine() -> None:
    text, hours = layers(2).replace("aten.exp.default", "aten.lgamma.default"), itertools.count(0.0, 20.0)

    class Tiring(Scripted):
        def submit(self, task: Task) -> Future[Any]:
            task.took(compilation.SPLIT_S)
            return super().submit(task)

    patient, tired = Scripted(), Tiring()
    done = Compilation(patient, text, {"s0": 4}, clock=lambda: next(hours))  # each look at it is 20 s later
    done.run()
    assert done.graph.counts["splits"] == 1 and all(h["split"] for h in patient.units) and len(patient.units) == 3
    Compilation(tired, text, {"s0": 4}).run()
    assert [h["split"] for h in tired.units] == [True, False, False]


def test_a_cut_is_one_decision_for_all_uses_and_part_of_the_history() -> None:
    text = layers(4).replace("aten.exp.default", "aten.lgamma.default")
    done = compiled(text)
    assert [k for _, _, k in check(done)] == [0, -1] * 4
    splits = [d for d in done.graph.history() if d.change is PartitionChange.SPLIT]
    assert len(splits) == 4 and all("cut before lgamma" in d.why for d in splits)
    assert done.graph.counts["splits"] == 1 and done.graph.counts["refused"] == 1
    assert any("tanh x4: has a kernel" in line for line in done.describe())


PAIR = """
graph main(%x: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[64, 64] = "w"
  %h: f32[s0, 64] = aten.linear.default(%x, %w, None)
  %y: f32[s0, 64] = aten.softmax.int(%h, -1)
  return %y
}
"""


def pairs(joined_us: float) -> Answer:
    def answer(h: Mapping[str, Any]) -> AnswerBody | None:
        if not h["joined"]:
            return a_kernel("linear" if h["group"] == "contract" else "softmax", 10.0)
        if joined_us >= h["beat"]:
            return UnitRefused(f"both: one kernel takes {joined_us} us where two take {h['beat']}")
        return a_kernel("both", joined_us, ("k",) * len(h["alike"]))

    return answer


def test_common_kernels_share_a_budget_and_what_they_promised_is_remembered() -> None:
    asked = Scripted(pairs(15.0))
    done = compiled(PAIR, asked, measuring=Budget(0.0))
    assert len(check(done)) == 2 and not any(h["joined"] for h in asked.units)
    assert done.graph.counts["not_measured"] == 1 and any("no time is left" in line for line in done.describe())
    good, bad = Bandit(), Bandit()
    helped, failed = Ledger(), Ledger()
    compiled(PAIR, Scripted(pairs(1.0)), trust=good, ledger=helped)
    compiled(PAIR, Scripted(pairs(25.0)), trust=bad, ledger=failed)
    assert good.arms["epilogue"].mean > 1.0 > bad.arms["epilogue"].mean
    ((won, first),), ((lost, second),) = helped.rows.items(), failed.rows.items()
    assert won == lost and won[1] is Strategy.EPILOGUE and (first.helped, second.helped) == (1, 0)


def test_two_kernels_become_one_where_that_is_faster() -> None:
    asked = Scripted(pairs(15.0))
    done = compiled(PAIR, asked)
    assert check(done) == [[0, 2, 2]]
    (diff,) = [d for d in done.graph.history() if d.change is PartitionChange.FUSE]
    assert diff.evidence == {"fused_us": 15.0, "apart_us": 20.0} and "faster than two" in diff.why
    assert done.graph.counts["fusions"] == 1
    assert [h["alike"][0][1] for h in asked.units if h["joined"]] == [[0, 1]]


def test_two_kernels_stay_two_where_one_is_slower_and_both_times_are_kept() -> None:
    done = compiled(PAIR, Scripted(pairs(25.0)))
    assert sorted(k for _, _, k in check(done)) == [0, 1]
    (refusal,) = done.graph.refusals
    assert "25.0" in refusal.because and "20.0" in refusal.because
    assert any("stay two kernels" in line for line in done.describe())


def test_the_worker_itself_refuses_a_common_kernel_that_does_not_beat_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    text = chain(["aten.tanh.default({})", "aten.exp.default({})"])
    planned, _ = units.plan(PlanRequest(text, {"s0": 4}))
    ident = planned.bodies[0].id
    request = UnitRequest("rows", {"s0": 4}, ((ident, (0, 1)),), split=False, joined=True, beat=1e9)
    won, codes = units.unit(request, [])
    assert isinstance(won, UnitKernel) and codes and len(won.keys) == 1
    lost, codes = units.unit(replace(request, beat=1e-3), [])
    assert isinstance(lost, UnitRefused) and "us where two take 0.0" in lost.refused and not codes


def test_what_is_left_of_a_cut_joins_a_neighbour_that_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh, exp | sort; the first unit is cut, and its second half and the unit behind it are tried as one."""
    text = f"""
graph main(%x: f32[s0, {WIDE}]) where (2 <= s0) {{
  %a: f32[s0, {WIDE}] = aten.tanh.default(%x)
  %b: f32[s0, {WIDE}] = aten.exp.default(%a)
  %s: f32[s0, {WIDE}], %p: i64[s0, {WIDE}] = aten.sort.default(%x)
  %c: f32[s0, {WIDE}] = aten.neg.default(%s)
  %d: f32[s0, {WIDE}] = aten.add.Tensor(%b, %c)
  return %d
}}
"""
    monkeypatch.setattr(units, "measuring", lambda _: None)  # groups as access classes suggest: no clock decides here
    planned, _ = units.plan(PlanRequest(text, {"s0": 4}))
    groups = [g for g in planned.bodies[0].groups if g.key is not None]
    assert len(groups) == 2, "the grouping no longer separates them: choose another graph"
    for wins in (True, False):
        seen: list[tuple[int, ...]] = []

        def answer(h: Mapping[str, Any], wins: bool = wins, seen: list[tuple[int, ...]] = seen) -> AnswerBody:
            nodes = h["alike"][0][1]
            seen.append(tuple(nodes))
            if h["joined"]:
                assert h["beat"] is None or 0 in nodes  # two that wait have nothing to beat but the library
                return a_kernel("joined", 3.0, ("k",)) if wins and 0 not in nodes else UnitRefused("joined: no")
            if h["split"] and len(nodes) == groups[0].nodes and len(seen) == 1:
                at = tuple(replace(groups[0], nodes=1, key=f"half{i}", ops=f"half{i}", kind="rows") for i in range(2))
                return UnitCut(1, "it loses", (at,))
            return a_kernel("+".join(map(str, nodes)), 5.0)

        def estimate(facts: Facts) -> Expected:
            return Expected(9.0 if facts.ops == groups[0].ops else 5.0 if "|" in facts.ops else 1.0, 1.0)

        made = compiled(text, Scripted(answer), estimate=estimate)
        check(made)
        assert (0, 1) not in seen[1:], "what was cut is not put together again"
        assert made.graph.counts["fusions_tried"] >= 1
        assert made.graph.counts["fusions"] == int(wins)
        assert all(u.state is not UnitState.HELD for u in made.graph.units.values())


def test_a_worker_that_has_not_seen_the_graph_gets_its_text() -> None:
    asked = Scripted()

    def forgetful(h: Mapping[str, Any]) -> None:
        if not h["texts"]:
            units.kernel_cache().graphs.clear()

    asked.answer = forgetful  # type: ignore[assignment]
    done = compiled(layers(2), asked)
    assert [bool(h["texts"]) for h in asked.units] == [False, True]
    assert [k for _, _, k in check(done)] == [0, -1] * 2


def test_a_unit_that_fails_stays_with_the_library_and_the_rest_goes_on() -> None:
    def answer(h: Mapping[str, Any]) -> CaptureError | None:
        return CaptureError("it broke", because="of a bug", why=Why.WORKER_DIED) if h["group"] == "contract" else None

    done = compiled(MIXED, Scripted(answer))
    assert any("it broke: of a bug" in n for n in done.graph.note_lines()) and done.graph.counts["failed"] == 1
    assert [k >= 0 for _, _, k in check(done)] == [False, True, False, True]


class Waiting(Scripted):
    """Keeps requests until it is told to do one, as a busy pool does."""

    size = 1

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[Task, Future[Any]]] = []
        self.ready = threading.Condition()

    def submit(self, task: Task) -> Future[Any]:
        if task.header["kind"] == "plan":
            return super().submit(task)
        future: Future[Any] = Future()
        with self.ready:
            self.asked.append(task.header)
            self.queue.append((task, future))
            self.ready.notify_all()
        return future

    def work(self) -> None:
        with self.ready:
            assert self.ready.wait_for(lambda: [f for _, f in self.queue if not f.cancelled()], 60)
            task, future = next((t, f) for t, f in self.queue if not f.cancelled())
            self.queue.remove((task, future))
        future.set_running_or_notify_cancel()
        future.set_result(Here().submit(task).result())


def test_new_sizes_replace_what_has_not_begun_and_old_refusals_are_asked_again() -> None:
    pool = Waiting()
    done = Compilation(pool, MIXED, {"s0": 4})
    thread = threading.Thread(target=done.run)
    thread.start()
    with pool.ready:
        assert pool.ready.wait_for(lambda: len(pool.queue) == 2, 60)  # one for the worker and one to go on with
    task, running = pool.queue.pop(0)
    running.set_running_or_notify_cancel()  # the worker has begun with the first
    done.reprofile({"s0": 9})
    assert done.graph.counts["replaced"] == 2  # the one that waited there, and the one that waited here
    running.set_result(said(UnitRefused("it loses at 4")))
    for _ in range(3):
        pool.work()
    thread.join(60)
    assert not thread.is_alive()
    dims = [h["dims"]["s0"] for h in pool.units]
    assert dims.count(4) == 2 and dims.count(9) == 3 and task.header["dims"]["s0"] == 4
    assert done.graph.counts["compiled"] == 3 and not done.graph.notes


def test_a_compilation_asks_between_units_which_sizes_calls_have_by_then() -> None:
    sizes = iter([None, {"s0": 4}, {"s0": 9}, {"s0": 9}])
    asked = Scripted()
    done = compiled(MIXED, asked, latest=lambda: next(sizes, None))
    dims = [h["dims"]["s0"] for h in asked.units]
    assert dims == [4] * 2 + [9] * (len(dims) - 2) and len(dims) == 3
    assert done.graph.counts["replaced"] == 1 and done.graph.counts["compiled"] == 3


def test_traffic_to_and_fro_does_not_keep_a_compilation_from_ending() -> None:
    sizes = itertools.cycle([{"s0": 9}, {"s0": 4}])
    asked = Scripted(lambda h: UnitRefused(f"it loses at {h['dims']['s0']}"))
    done = compiled(MIXED, asked, latest=lambda: next(sizes))
    assert len({tuple(h["dims"].items()) for h in asked.units}) <= 2 and len(asked.units) <= 3 * (compilation.TURNS + 1)
    assert done.progress == ALL_DONE


def test_a_cancelled_compilation_ends_and_says_so() -> None:
    pool = Waiting()
    done = Compilation(pool, MIXED, {"s0": 4})
    failed: list[CaptureError] = []

    def run() -> None:
        try:
            done.run()
        except CaptureError as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    with pool.ready:
        assert pool.ready.wait_for(lambda: len(pool.queue) == 2, 60)
    done.cancel()
    assert pool.cancelled == [done.owner]
    for _, future in pool.queue:
        future.cancel()
        future.set_running_or_notify_cancel()
    thread.join(60)
    assert failed and failed[0].why is Why.CANCELLED


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 64), nn.Linear(64, WIDE)
        self.norm = nn.LayerNorm(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.norm(x + self.down(torch.nn.functional.gelu(self.up(x)))).sort(-1)[0]
        return x


def captured(model: nn.Module, x: torch.Tensor) -> tuple[Graph, Mapping[str, torch.Tensor]]:
    import hotfuse

    fast = hotfuse.jit(model.eval(), settings=Settings(capture="inline", tiers=0))
    with torch.no_grad():
        fast(x)
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    (entry,) = site.entries
    return entry.baseline.graph, entry.weights


def test_a_plan_can_be_had_at_any_time_and_each_is_right() -> None:
    x = torch.randn(6, WIDE)
    graph, weights = captured(Net(), x)
    want = LibraryBackend().compile(graph, weights).run(x)
    seen: list[tuple[float, int]] = []

    def progress(make: Callable[[], Any], settled: CompileProgress) -> None:
        plan = make()
        torch.testing.assert_close(plan.run(x), want, rtol=1e-4, atol=1e-4)
        seen.append((settled.decided, sum(a.backend != "library" for a in plan.artifacts)))

    with torch.no_grad():
        plan = compile_units(graph, weights, [x], Settings(capture="inline"), progress)
        torch.testing.assert_close(plan.run(x), want, rtol=1e-4, atol=1e-4)
    assert len(seen) >= 2 and [s for s, _ in seen] == sorted(s for s, _ in seen) and seen[-1][0] <= 1.0
    assert [n for _, n in seen] == sorted(n for _, n in seen) and seen[0][1] >= 1
    assert plan.account is not None and plan.account.history[0].change is PartitionChange.BEGIN
    assert plan.account.counts["compiled"] >= 2 and plan.account.counts["deduplicated"] >= 2
    assert any("has a kernel" in line for line in plan.account.lines())


def test_workers_that_die_while_units_compile_lose_no_unit() -> None:
    x = torch.randn(6, WIDE)
    graph, weights = captured(Net(), x)
    want = LibraryBackend().compile(graph, weights).run(x)
    before = counters()
    killed: list[int] = []

    def progress(_make: Callable[[], Any], _settled: CompileProgress) -> None:
        worker = service().worker
        if not killed and worker is not None:
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    with torch.no_grad():
        plan = compile_units(graph, weights, [x], Settings(), progress)
        torch.testing.assert_close(plan.run(x), want, rtol=1e-4, atol=1e-4)
    after = counters()
    assert killed and after["workers_started"] >= 1  # where there are several, another one may have done the rest
    assert after["units_graphs"] == before["units_graphs"] + 1
    assert plan.account is not None and plan.account.counts["failed"] == 0
    assert after["worker_cpu_s"] > 0 and after["worker_peak_bytes"] > 0


def test_closing_the_service_ends_a_compilation_at_once() -> None:
    from hotfuse.compile.workers.process import Worker
    from hotfuse.compile.workers.worker_pool import Pool

    class Closing(Pool):
        """Closed by another thread while its first request waits for a worker that is only starting."""

        def submit(self, task: Task) -> Future[Any]:
            future = super().submit(task)
            threading.Thread(target=self.close).start()
            return future

    done = Compilation(Closing(start=Worker), layers(2), {"s0": 4})
    with pytest.raises(CaptureError):
        done.run()
