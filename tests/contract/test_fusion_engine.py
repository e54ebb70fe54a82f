"""The fusion engine: each kind of candidate, refusals with reasons, values, the bandit's budget, and plans that stay right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.fusion_cases import KINDS, graph_of
from hotfuse.analysis.resources import CorePeaks
from hotfuse.backends.library import LibraryBackend
from hotfuse.cli.cost_report import costs
from hotfuse.compile.unit.kernel_cache import kernel_cache, piece_of
from hotfuse.compile.unit.layouts import laid_out
from hotfuse.compile.unit.measuring_gate import BUDGET_S, UnitContests
from hotfuse.compile.unit.planning import Gate, adjusted
from hotfuse.compile.unit.units import measuring
from hotfuse.compile.variants.trial import attempt
from hotfuse.fusion.bandit import Arm, Bandit, Budget, Option
from hotfuse.fusion.criteria import Criterion
from hotfuse.fusion.decision_lines import edges, line, lines
from hotfuse.fusion.forecast import Figures, RooflinePredictor, spilled
from hotfuse.fusion.fusion_engine import FusionChoice, FusionPlanner, Planned, Side, apart
from hotfuse.fusion.groups import Group, group, reordered
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.layout import channels_last, regions
from hotfuse.fusion.worth import Gain, PredictedCost, gain, value
from hotfuse.hpm.work import Candidate as Question
from hotfuse.ir.graph import Graph, sources
from hotfuse.ir.text import parse
from hotfuse.ir.types import Layout, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower import CannotLower, lower

PEAKS = CorePeaks()


def engine(**changes: Any) -> FusionPlanner:
    return FusionPlanner(RooflinePredictor(PEAKS), replace(kernel_cache().core, l2=PEAKS.l2), **changes)


def planned(text: str, sizes: Mapping[str, int] | None = None, *, merged: bool = False, **changes: Any) -> Planned:
    graph = verify(parse(text))
    found = engine(**changes).plan(graph, group(graph) if merged else apart(graph, group(graph)), sizes or {})
    check(graph, found, sizes or {})
    return found


def check(graph: Graph, found: Planned, sizes: Mapping[str, int]) -> None:
    """Every node once, in an order that runs, and with the same results on the library."""
    assert sorted(i for g in found.groups for i in g.nodes) == list(range(len(found.graph.nodes)))
    made = verify(reordered(found.graph, found.groups))
    generator = torch.Generator().manual_seed(7)
    data: dict[str, torch.Tensor] = {}
    for v in sources(graph):
        assert isinstance(v.type, TensorType)
        shape = [d if isinstance(d, int) else sizes[str(d.args[0])] for d in v.type.shape]
        data[v.name] = torch.randn(shape, generator=generator)
    weights = {p.key: data[p.value.name] for p in graph.params}
    inputs = [data[v.name] for v in graph.inputs]
    with torch.no_grad():
        want = LibraryBackend().compile(graph, weights).run(*inputs)
        got = LibraryBackend().compile(made, weights).run(*inputs)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def choices(found: Planned, kind: CandidateKind) -> list[FusionChoice]:
    return [c for c in found.choices if c.kind is kind]


def taken(found: Planned, kind: CandidateKind) -> list[FusionChoice]:
    return [c for c in choices(found, kind) if c.accepted]


CHAIN = """
graph main(%x: f32[s0, 512]) where (2 <= s0) {
  %a: f32[s0, 512] = aten.relu.default(%x)
  %b: f32[s0, 512] = aten.mul.Tensor(%a, %x)
  %c: f32[s0, 512] = aten.neg.default(%b)
  return %c
}
"""
LAYER = """
graph main(%x: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[32, 64] = "w"
  %h: f32[s0, 32] = aten.linear.default(%x, %w, None)
  %y: f32[s0, 32] = aten.tanh.default(%h)
  return %y
}
"""
INTO = """
graph main(%x: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[32, 64] = "w"
  %h: f32[s0, 64] = aten.relu.default(%x)
  %y: f32[s0, 32] = aten.linear.default(%h, %w, None)
  return %y
}
"""
SIBLINGS = """
graph main(%x: f32[s0, 512]) where (2 <= s0) {
  %a: f32[s0, 512] = aten.neg.default(%x)
  %b: f32[s0, 512] = aten.relu.default(%x)
  return %a, %b
}
"""
BLOCKS = """
graph main(%x: f32[2048, 256]) {
  param %w: f32[512, 256] = "w"
  param %v: f32[256, 512] = "v"
  %h: f32[2048, 512] = aten.linear.default(%x, %w, None)
  %y: f32[2048, 256] = aten.linear.default(%h, %v, None)
  return %y
}
"""
TWICE = """
graph main(%x: f32[s0, 512], %m: f32[512]) where (2 <= s0) {
  %a: f32[s0, 512] = aten.add.Tensor(%x, %m)
  %b: f32[s0] = aten.sum.dim_IntList(%a, [-1])
  %c: f32[s0] = aten.amax.default(%a, [-1])
  return %b, %c
}
"""


def test_producers_and_consumers_become_one_kernel() -> None:
    found = planned(CHAIN, {"s0": 64})
    assert [g.nodes for g in found.groups] == [(0, 1, 2)]
    assert len(taken(found, CandidateKind.VERTICAL)) == 2 and found.after.seconds < found.before.seconds
    assert found.after.stored == 0 < found.before.stored


def test_arithmetic_goes_into_the_product_before_it() -> None:
    found = planned(LAYER, {"s0": 64})
    assert [(g.nodes, g.kind) for g in found.groups] == [((0, 1), "contract")] and taken(found, CandidateKind.EPILOGUE)


def test_arithmetic_goes_into_the_product_behind_it_where_that_can_be_lowered() -> None:
    assert taken(planned(INTO, {"s0": 64}), CandidateKind.PROLOGUE)
    refused = planned(INTO, {"s0": 64}, lowers=lambda g: "products read in place" if len(g.nodes) > 1 else "")
    (choice,) = choices(refused, CandidateKind.PROLOGUE)
    assert not choice.accepted and choice.reasons[-1].criterion is Criterion.LOWERING and "in place" in choice.because


@pytest.mark.parametrize("rows", [1, 2, 9, 33])
@pytest.mark.parametrize("front", ["aten.relu.default(%x)", "aten.silu.default(%x)"])
def test_what_is_computed_in_front_of_a_product_is_right(rows: int, front: str) -> None:
    """Built and run, at sizes known and unknown, with widths that no vector divides."""
    text = INTO.replace("aten.relu.default(%x)", front).replace("64", "50").replace("f32[32", "f32[70").replace("32]", "70]")
    for graph in (parse(text), parse(text.replace("s0", str(rows)).replace(f" where (2 <= {rows})", ""))):
        piece = piece_of(graph, range(len(graph.nodes)), {"s0": rows})
        made = kernel_cache().kernel(piece)
        attempt(piece.normal, made.lowered, made.compiled, piece.sizes, float("inf"))  # raises where they differ


def test_products_do_not_wait_for_whole_rows_in_front_of_them() -> None:
    with pytest.raises(CannotLower):
        lower(parse(INTO.replace("aten.relu.default(%x)", "aten.softmax.int(%x, -1)")), kernel_cache().core)


def test_siblings_become_one_kernel() -> None:
    found = planned(SIBLINGS, {"s0": 512})
    assert [g.nodes for g in found.groups] == [(0, 1)] and taken(found, CandidateKind.HORIZONTAL)


def test_blocks_of_rows_keep_what_passes_in_cache() -> None:
    found = planned(BLOCKS, kinds=frozenset({CandidateKind.TILING}))
    (choice,) = choices(found, CandidateKind.TILING)
    assert choice.reasons[1].holds and any(r.criterion is Criterion.LOCALITY for r in choice.reasons)
    ready = engine(kinds=frozenset({CandidateKind.TILING}))
    ready.predict = Prefers("aten.slice.Tensor", "aten.cat.default")
    graph = parse(BLOCKS)
    tiled = ready.plan(graph, apart(graph, group(graph)), {})
    assert taken(tiled, CandidateKind.TILING) and sum(n.op == "aten.slice.Tensor" for n in tiled.graph.nodes) == 8
    check(graph, tiled, {})


def test_rows_that_are_not_known_are_not_tiled() -> None:
    found = planned(BLOCKS.replace("2048", "s0"), {"s0": 2048}, kinds=frozenset({CandidateKind.TILING}))
    (choice,) = choices(found, CandidateKind.TILING)
    assert not choice.accepted and "only at run time" in choice.because


def test_cheap_values_are_computed_again() -> None:
    found = planned(TWICE, {"s0": 4096}, kinds=frozenset({CandidateKind.RECOMPUTE}))
    assert taken(found, CandidateKind.RECOMPUTE) and len(found.graph.nodes) == 4 and len(found.groups) == 2
    assert found.after.stored == 0


def test_no_contest_is_held_about_next_to_nothing() -> None:
    """The kernel that a candidate would make better is a thousandth of the graph: what could be won is not worth the wait."""
    small = """
graph main(%x: f32[8], %a: f32[2048, 2048], %b: f32[2048, 2048]) {
  %c: f32[2048, 2048] = aten.mm.default(%a, %b)
  %y: f32[8] = aten.relu.default(%x)
  %z: f32[8] = aten.exp.default(%y)
  return %c, %z
}
"""
    asked: list[int] = []

    def contest(old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
        asked.append(len(old))
        return "", 1.0

    for text, held in ((small, False), (small.replace("2048", "4"), True)):
        asked.clear()
        found = planned(text, contest=contest, kinds=frozenset({CandidateKind.VERTICAL}))
        assert bool(asked) == held, text
        assert any("not worth measuring" in c.because for c in choices(found, CandidateKind.VERTICAL)) != held


class Prefers:
    """A predictor for tests: generated kernels cost their nodes, and pieces with certain ops nothing at all."""

    def __init__(self, *free: str, each: float = 1e-5, power: float = 1.0, library: float = 3.0) -> None:
        self.free, self.each, self.power, self.library = free, each, power, library

    def __call__(self, asks: Sequence[Question]) -> Figures:
        base = RooflinePredictor(PEAKS)(asks)
        for n, ask in enumerate(asks):
            nodes = [x for x in ask.graph.nodes if x.op not in self.free]
            small = any(f"{v.name}".endswith(f"rows{b}") for v in ask.graph.inputs for b in range(8))
            seconds = self.each * len(nodes) ** self.power * (0.05 if small else 1.0)
            base.seconds[n] = seconds * (self.library if ask.core is None else 1.0)
        return Figures(base.seconds, base.seconds / 1.05, base.seconds * 1.05, base.joules, base.memory)


def test_a_kernel_that_holds_too_much_is_split() -> None:
    """Cost grows with the square of a kernel's nodes, as where registers spill."""
    ready = engine()
    ready.predict = Prefers(power=2.0)
    graph = parse(CHAIN)
    found = ready.plan(graph, group(graph), {"s0": 64})
    assert len(found.groups) == 3 and taken(found, CandidateKind.SPLIT)
    check(graph, found, {"s0": 64})


def test_the_library_is_taken_where_it_is_faster() -> None:
    ready = engine()
    ready.predict = Prefers(library=0.3)
    graph = parse(CHAIN)
    found = ready.plan(graph, group(graph), {"s0": 64})
    assert {g.kind for g in found.groups} == {"library"} and taken(found, CandidateKind.LIBRARY)


PLANAR = """
graph main(%x: f32[1, 4, 32, 32]) {
  param %w: f32[8, 4, 3, 3] = "w"
  %a: f32[1, 4, 32, 32] = aten.cumsum.default(%x, -1)
  %b: f32[1, 8, 32, 32] = aten.conv2d.default(%a, %w, None, [1, 1], [1, 1])
  %c: f32[1, 8, 32, 32] = aten.cumsum.default(%b, -1)
  return %c
}
"""


def test_a_layout_is_weighed_with_its_conversions() -> None:
    graph = parse("""
graph main(%x: f32[1, 32, 56, 56]) {
  param %w: f32[32, 32, 3, 3] = "w"
  %a: f32[1, 32, 56, 56] = aten.conv2d.default(%x, %w, None, [1, 1], [1, 1], [1, 1], 1)
  %b: f32[1, 32, 56, 56] = aten.relu.default(%a)
  return %b
}
""")
    other = channels_last(graph)
    library = tuple(replace(g, kind="library") for g in apart(graph, group(graph)))
    choice = engine().layout((graph, library), (other, group(other)), {}, "conv2d", None)
    assert choice.kind is CandidateKind.LAYOUT and choice.accepted and choice.reasons[0].evidence["conversions"] == 1
    assert choice.reasons[0].evidence["bytes"] == 2 * 32 * 56 * 56 * 4
    same = engine().layout((other, group(other)), (other, group(other)), {}, "conv2d", None)
    assert same.accepted and same.reasons[0].evidence["conversions"] == 0


def test_a_contest_decides_about_a_layout() -> None:
    """Only the groups that differ are built; whichever order is measured faster is taken, and the outcome is learned."""
    graph = parse(PLANAR)
    asked: list[tuple[int, int]] = []

    def contest(rows_save: float) -> Callable[[Sequence[Side], Sequence[Side]], tuple[str, float]]:
        def held(old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
            asked.append((len(old), len(new)))
            return ("" if rows_save > 0 else "measured slower"), rows_save

        return held

    ready = engine()
    made, (choice,) = laid_out(graph, {}, ready, contest(1e-4))
    assert not choice.accepted and "saves 100.0 us" in choice.because and "conversions move" in choice.because
    assert all(v.type.layout == Layout() for n in made.nodes for v in n.outs if isinstance(v.type, TensorType))
    made, (choice,) = laid_out(graph, {}, engine(), contest(-1e-4))
    assert choice.accepted and any("contiguous" in n.op for n in made.nodes)
    assert asked == [(1, 1), (1, 1)], "the sums along rows are the same on both sides"
    other, _ = laid_out(graph, {}, engine(), contest(-1e-4), other=True)
    assert not any("contiguous" in n.op for n in other.nodes), "what was decided against, for a race"


def test_regions_are_decided_one_by_one() -> None:
    graph = parse(PLANAR.replace("  return %c", """  %d: f32[1, 8, 32, 32] = aten.conv2d.default(%c, %v, None, [1, 1], [1, 1])
  %e: f32[1, 8, 32, 32] = aten.relu.default(%d)
  %f: f32[1, 8, 32, 32] = aten.conv2d.default(%e, %v, None, [1, 1], [1, 1])
  return %f""").replace('= "w"\n', '= "w"\n  param %v: f32[8, 8, 3, 3] = "v"\n'))
    assert regions(verify(graph)) == [frozenset({1}), frozenset({3, 5})]
    some = verify(channels_last(graph, frozenset({3, 5})))
    moved = [n.outs[0].name for n in some.nodes if isinstance(t := n.outs[0].type, TensorType) and t.layout != Layout()]
    assert moved == ["d", "e", "f"]
    data = {v.name: torch.randn(v.type.shape) for v in sources(graph) if isinstance(v.type, TensorType)}  # type: ignore[arg-type]
    runs = [LibraryBackend().compile(g, {"w": data["w"], "v": data["v"]}).run(data["x"]) for g in (graph, some)]
    torch.testing.assert_close(runs[0], runs[1])


@pytest.mark.parametrize(("text", "sizes", "criterion", "part"), [
    (LAYER.replace("aten.tanh.default(%h)", "aten.softmax.int(%h, -1)"), {"s0": 64}, Criterion.OVERLAP, "no arithmetic"),
    (BLOCKS, {}, Criterion.LIMITS, "registers for themselves"),
    (CHAIN, {}, Criterion.PREDICTABLE, "depends on data"),
    ("""graph main(%x: f32[s0, 64]) where (2 <= s0) {
  param %w: f32[64, 64] = "w"
  %a: f32[s0, 64] = aten.tanh.default(%x)
  %b: f32[s0, 64] = aten.linear.default(%a, %w, None)
  %c: f32[s0, 64] = aten.add.Tensor(%a, %b)
  return %c
}""", {"s0": 64}, Criterion.DEPENDENCE, "needs the first"),
])  # fmt: skip
def test_refusals_have_reasons(text: str, sizes: dict[str, int], criterion: Criterion, part: str) -> None:
    graph = parse(text)
    found = engine().plan(graph, apart(graph, group(graph)), sizes)
    refused = [c for c in found.choices if not c.accepted]
    assert all(c.reasons and c.because for c in refused)
    assert any(r.criterion is criterion and not r.holds and part in r.text for c in refused for r in c.reasons)


def test_rows_that_threads_need_are_kept() -> None:
    text = CHAIN.replace("aten.neg.default(%b)", "aten.sum.dim_IntList(%b, [0])").replace("%c: f32[s0, 512]", "%c: f32[512]")
    found = planned(text, {"s0": 64}, threads=4)
    assert any(r.criterion is Criterion.PARALLEL and not r.holds for c in found.choices for r in c.reasons)


# --- value -------------------------------------------------------------------------------------------------------------


def test_value_grows_with_gain_and_use_and_falls_with_doubt() -> None:
    def worth(mean: float = 1e-3, deviation: float = 1e-4, trust: float = 1.0, uses: int = 1) -> float:
        return value(Gain(mean, deviation), trust, uses)

    assert worth(mean=2e-3) > worth() > worth(mean=5e-4)
    assert worth(deviation=0.0) > worth() > worth(deviation=1e-3)
    assert worth() > worth(trust=0.5) > worth(trust=0.0) == 0
    assert worth(uses=12) > worth()
    assert value(Gain(-1e-3, 0.0), 0.1, 1) == value(Gain(-1e-3, 0.0), 1.0, 1), "losses are not doubted away"


def test_most_of_two_predictions_error_cancels() -> None:
    a, b = PredictedCost(1e-3, 3e-4, 0.0, 0), PredictedCost(0.8e-3, 2.4e-4, 0.0, 0)
    won = gain(a, b, "latency", 1)
    assert won.mean == pytest.approx(2e-4) and won.deviation < 1e-4 < a.deviation


def test_objectives_weigh_differently() -> None:
    fast, frugal, small = PredictedCost(1e-3, 0, 9e-3, 1000), PredictedCost(1.5e-3, 0, 5e-3, 1000), PredictedCost(2e-3, 0, 9e-3, 0)
    assert gain(frugal, fast, "latency", 1).mean > 0 > gain(frugal, fast, "energy", 1).mean
    big = replace(fast, stored=1 << 30)
    assert gain(big, small, "memory", 1).mean > 0 > gain(big, small, "latency", 1).mean


def test_memory_takes_what_time_alone_would_not() -> None:
    graph = parse(CHAIN)
    results = {}
    for objective in ("latency", "memory"):
        ready = engine(objective=objective)
        ready.predict = Prefers(power=1.3, each=1e-6)
        results[objective] = ready.plan(graph, apart(graph, group(graph)), {"s0": 4096})
    assert len(results["latency"].groups) == 3 and len(results["memory"].groups) == 1


# --- the bandit --------------------------------------------------------------------------------------------------------


def test_the_bandit_stays_within_its_budget() -> None:
    rng = random.Random(3)
    for _ in range(200):
        options = [Option(i, f"arm {rng.randrange(5)}", rng.random(), rng.random()) for i in range(rng.randrange(12))]
        budget = Budget(rng.random() * 2)
        budget.spend(rng.random())
        picked = Bandit(rng=random.Random(rng.random())).choose(options, budget)
        assert sum(o.cost_s for o in picked) <= budget.left + 1e-9
        assert len({o.what for o in picked}) == len(picked)


def test_the_bandit_learns_whom_to_trust_and_still_explores() -> None:
    bandit = Bandit(rng=random.Random(1))
    for _ in range(40):
        bandit.learn("right", 1.0, 1.0)
        bandit.learn("wrong", 1.0, -0.5)
    assert bandit.trust("right") == pytest.approx(1.0) and bandit.trust("wrong") == 0.0 and bandit.trust("new") == 1.0
    first = [bandit.choose([Option(0, "wrong", 1.0, 1.0), Option(1, "right", 0.5, 1.0)], Budget(1.0))[0].what for _ in range(50)]
    assert set(first) == {1}
    arms = [Option("known", "right", 1.0, 1.0), Option("fresh", "new", 0.9, 1.0)]
    assert {bandit.choose(arms, Budget(1.0))[0].what for _ in range(50)} == {"known", "fresh"}


def test_arms_are_plain_numbers() -> None:
    bandit, other = Bandit(), Bandit()
    bandit.learn("a", 2.0, 1.0)
    other.restore(bandit.state())
    assert other.state() == {"a": [1.0, 0.5, 0.25]} and other.arms["a"].mean == bandit.arms["a"].mean < Arm().mean
    with pytest.raises(ValueError, match="outcomes"):
        other.restore({"a": [-1.0, 0.0, 0.0]})


def test_what_failed_before_is_not_tried_again() -> None:
    ready = engine()
    for _ in range(100):
        ready.bandit.learn(CandidateKind.VERTICAL.value, 1.0, -1.0)
    graph = parse(CHAIN)
    found = ready.plan(graph, apart(graph, group(graph)), {"s0": 64})
    assert not taken(found, CandidateKind.VERTICAL)


# --- any graph ---------------------------------------------------------------------------------------------------------


def _random_graph(rng: random.Random) -> Graph:
    """Arithmetic, norms, products and sums in any order, with several readers and results."""
    made = ["x"]
    body: list[str] = []
    params: list[str] = []
    for i in range(rng.randrange(3, 14)):
        a, b = rng.choice(made[-5:]), rng.choice(made)
        form = rng.choice(["tanh", "add", "mul", "linear", "softmax", "relu", "add"])
        if form == "linear":
            params.append(f'  param %w{i}: f32[16, 16] = "w{i}"')
            call = f"aten.linear.default(%{a}, %w{i}, None)"
        elif form in ("add", "mul"):
            call = f"aten.{form}.Tensor(%{a}, %{b})"
        elif form == "softmax":
            call = f"aten.softmax.int(%{a}, -1)"
        else:
            call = f"aten.{form}.default(%{a})"
        body.append(f"  %v{i}: f32[8, 16] = {call}")
        made.append(f"v{i}")
    results = ", ".join(f"%{v}" for v in dict.fromkeys([made[-1], *rng.sample(made[1:], min(2, len(made) - 1))]))
    return verify(parse("\n".join(["graph main(%x: f32[8, 16]) {", *params, *body, f"  return {results}", "}"])))


@pytest.mark.parametrize("seed", range(3))
def test_any_graph_gets_a_plan_that_runs_and_is_right(seed: int) -> None:
    rng = random.Random(seed)
    for n in range(100):
        graph = _random_graph(rng)
        ready = engine()
        if n % 2:
            ready.predict = Prefers(power=rng.choice([0.5, 1.0, 2.0]), library=rng.choice([0.5, 3.0]))
        start = group(graph) if n % 3 else apart(graph, group(graph))
        found = ready.plan(graph, start, {})
        assert found.after.seconds <= found.before.seconds * (1 + 1e-9), f"seed {seed}, graph {n}"
        check(graph, found, {})


# --- what is shown -----------------------------------------------------------------------------------------------------


def test_every_decision_can_be_shown() -> None:
    found = planned(CHAIN, {"s0": 64})
    text = "\n".join(lines(found))
    assert "take vertical" in text and "us" in text and "bytes stored" in text
    for c in found.choices:
        shown = line(c)
        assert shown.startswith("take" if c.accepted else "leave") and c.subject in shown, shown


def test_edges_have_weights() -> None:
    graph = parse(CHAIN)
    apart_ = {e.value: e for e in edges(graph, apart(graph, group(graph)), {"s0": 64}, PEAKS)}
    fused = {e.value: e for e in edges(graph, group(graph), {"s0": 64}, PEAKS)}
    assert apart_["a"].bytes == 64 * 512 * 4 and (apart_["a"].us or 0) > 0 and (apart_["a"].uj or 0) > 0
    assert fused["a"].inside and fused["a"].us == 0 and not fused["c"].inside
    unknown = edges(graph, group(graph), {}, PEAKS)
    assert unknown[0].bytes is None and unknown[0].us is None


def test_compilation_takes_over_what_a_model_knows_better() -> None:
    """Without a prediction groups stay as they are; with one the engine's are taken, and its decisions come along."""
    graph = parse(CHAIN)
    groups = group(graph)
    split = Prefers(power=2.0)
    made, better, said = adjusted(graph, groups, {"s0": 64}, kernel_cache().core, lambda _: "", predict=split)
    assert made is graph and len(better) == 3 > len(groups) and any("take split" in line for line in said)
    core = kernel_cache().core
    _, kept, _ = adjusted(graph, groups, {"s0": 64}, core, lambda g: "no kernel" if len(g.nodes) < 3 else "", predict=split)
    assert kept == groups


def test_costs_of_a_graph_are_plain_data() -> None:
    found = costs(parse(CHAIN), [(64, 512)])
    assert len(found["groups"]) == 1 and [e["inside"] for e in found["edges"]] == [True, True, False]
    assert found["total_us"] > 0 and found["decisions"] and found["edges"][2]["bytes"] == 64 * 512 * 4


# --- measured before it is taken -----------------------------------------------------------------------------------------


def gated(text: str, sizes: Mapping[str, int], outcome: Callable[[Sequence[Side], Sequence[Side]], tuple[float, float]],
          **changes: Any) -> tuple[tuple[Group, ...], list[str], UnitContests]:  # fmt: skip
    """Groups of a graph where nothing was trained, and contests end as a test says."""
    graph = verify(parse(text))

    def build(_: Graph) -> Any:
        raise AssertionError("nothing is built here")

    contest = UnitContests(build, kernel_cache().core, sizes, measured=outcome, **changes)
    gate = Gate(RooflinePredictor(PEAKS), contest)
    _, groups, said = adjusted(graph, group(graph), sizes, kernel_cache().core, lambda _: "", gate=gate)
    return groups, said, contest


def test_without_a_model_only_what_measured_faster_is_taken() -> None:
    before = len(group(verify(parse(INTO))))
    won, said, _ = gated(INTO, {"s0": 64}, lambda old, new: (2e-5, 1e-5))
    assert len(won) < before and any(line.startswith("take prologue") for line in said)
    lost, said, contest = gated(INTO, {"s0": 64}, lambda old, new: (1e-5, 2e-5))
    assert len(lost) == before and contest.held
    assert any("leave prologue" in line and "measured 20.0 us, what there is 10.0" in line for line in said)
    noise, _, _ = gated(INTO, {"s0": 64}, lambda old, new: (1e-5, 0.995e-5))
    assert len(noise) == before, "hardly better is not better"


@pytest.mark.parametrize("kind", [CandidateKind.TILING, CandidateKind.SPLIT])
def test_blocks_and_splits_are_offered_priced_and_taken_where_they_measured_faster(kind: CandidateKind) -> None:
    """Whatever rooflines think of them: what they think is only what makes them worth a look."""
    cases = KINDS[kind.value]
    text, (sizes, *_) = next(iter(cases.values()))
    graph = graph_of(text, sizes)
    whole = (Group(tuple(range(len(graph.nodes))), "rows"),)
    asked: list[int] = []

    def verdict(saved: float) -> Callable[[Sequence[Side], Sequence[Side]], tuple[str, float]]:
        def contest(old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
            asked.append(len(new))
            return "" if saved > 0 else "it measured slower", saved

        return contest

    for saved in (1e-4, -1e-4):
        ready = engine(kinds=frozenset({kind}), contest=verdict(saved))
        ready.predict = Prefers("aten.slice.Tensor", "aten.cat.default") if kind is CandidateKind.TILING else Prefers(power=2.0)
        asked.clear()
        found = ready.plan(graph, apart(graph, group(graph)) if kind is CandidateKind.TILING else whole, {})
        assert asked and min(asked) > 1, "several kernels for what there is"
        assert bool(taken(found, kind)) is (saved > 0)
        assert all(c.before.known and c.after.known for c in choices(found, kind) if c.gain.mean)
        if saved < 0:
            assert any("measured slower" in c.because for c in choices(found, kind))


def test_what_comes_too_late_to_be_measured_is_left() -> None:
    groups, said, contest = gated(INTO, {"s0": 64}, lambda old, new: (2e-5, 1e-5), left_s=0.0)
    assert len(groups) == 2 and not contest.held and any("no time is left for measuring" in line for line in said)


def test_a_contest_runs_both_sides() -> None:
    """Real kernels, a real clock: that it comes to a verdict and builds what it measures, not which verdict."""
    graph = verify(parse(INTO))
    gate = measuring({"s0": 64})
    _, groups, said = adjusted(graph, group(graph), {"s0": 64}, kernel_cache().core, lambda _: "", gate=gate)
    assert sorted(i for g in groups for i in g.nodes) == [0, 1] and said
    assert isinstance(gate.contest, UnitContests) and gate.contest.held and gate.contest.left_s < BUDGET_S


MANY = 24


def test_rooflines_foresee_that_a_kernel_spills() -> None:
    """More values at once than registers cost time on paper; halves are weighed against what then passes between them."""
    text = "graph main(%x: f32[64, 4096]) {\n"
    text += "".join(f"  %a{i}: f32[64, 4096] = aten.mul.Tensor(%x, {i + 1}.5)\n" for i in range(MANY))
    text += "".join(f"  %s{i}: f32[64, 4096] = aten.mul.Tensor(%{f's{i - 1}' if i else 'x'}, %a{i})\n" for i in range(MANY))
    graph = verify(parse(text + f"  return %s{MANY - 1}\n}}\n"))
    whole = (Group(tuple(range(len(graph.nodes))), "rows"),)
    few = FusionPlanner(
        RooflinePredictor(PEAKS), replace(kernel_cache().core, registers=8), kinds=frozenset({CandidateKind.SPLIT})
    ).plan(graph, whole, {})
    enough = FusionPlanner(
        RooflinePredictor(PEAKS), replace(kernel_cache().core, registers=64), kinds=frozenset({CandidateKind.SPLIT})
    ).plan(graph, whole, {})
    assert enough.groups == whole and all(c.before.known and c.after.known and c.because for c in choices(few, CandidateKind.SPLIT))
    assert choices(few, CandidateKind.SPLIT)
    assert spilled(graph, {}, 8) > spilled(graph, {}, 16) > 0 == spilled(graph, {}, 64)
    assert few.before.seconds > enough.before.seconds
