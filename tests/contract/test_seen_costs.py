"""What calls were seen to bring decides how a graph is grouped: the same graph, other statistics, another plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hotfuse.analysis.resources import CorePeaks
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.unit.units import described
from hotfuse.compile.workers.checked_json import decoded, encoded
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.criteria import Criterion
from hotfuse.fusion.decision_lines import lines
from hotfuse.fusion.forecast import Figures, Predictor, RooflinePredictor
from hotfuse.fusion.fusion_engine import FusionPlanner, Planned, apart
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.kinds import CandidateKind, GroupKind
from hotfuse.fusion.seen_costs import MAX_OFF, SeenCosts, correction
from hotfuse.hpm.work import Candidate as Question
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.profile.traffic import MaskShare, MeasuredPiece, SizesShare, TrafficSeen, data_size
from hotfuse.specialize.data_sizes import data_symbols, unsuited
from hotfuse.specialize.recurring_sizes import at_sizes
from tests.contract.test_fusion_engine import CHAIN

PICKED = """
graph main(%x: f32[s0, 512], %m: bool[s0]) where (2 <= s0) {
  %y: f32[u0, 512] = aten.index.Tensor(%x, [%m])
  %a: f32[u0, 512] = aten.relu.default(%y)
  %b: f32[u0, 512] = aten.mul.Tensor(%a, %y)
  %c: f32[u0, 512] = aten.neg.default(%b)
  return %c
}
"""
MASKED = """
graph main(%q: f32[2, 8, 256, 64], %k: f32[2, 8, 256, 64], %v: f32[2, 8, 256, 64], %m: bool[2, 1, 1, 256]) {
  %w: bool[2, 1, 256, 256] = aten.expand.default(%m, [2, 1, 256, 256])
  %y: f32[2, 8, 256, 64] = aten.scaled_dot_product_attention.default(%q, %k, %v, %w)
  return %y
}
"""
SIZES = {"s0": 64}


def planner(seen: TrafficSeen, predict: Predictor | None = None, **changes: object) -> FusionPlanner:
    made = FusionPlanner(predict or RooflinePredictor(CorePeaks()), kernel_cache().core, seen=SeenCosts(seen))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def planned(text: str, seen: TrafficSeen, sizes: Mapping[str, int] = SIZES, predict: Predictor | None = None,
            **changes: object) -> Planned:  # fmt: skip
    graph = verify(parse(text))
    return planner(seen, predict, **changes).plan(graph, apart(graph, group(graph)), seen.with_data_sizes(sizes))


def taking(seconds: Callable[[Graph, Mapping[str, int], bool], float]) -> Predictor:
    """A predictor by graph, sizes, and whether the library runs it."""

    def predict(asks: Sequence[Question]) -> Figures:
        found = np.array([seconds(a.graph, a.sizes, a.core is None) for a in asks])
        return Figures(found, found / 1.01, found * 1.01, found, np.zeros(len(asks)))

    return predict


def served(text: str, nodes: Sequence[int], us: float, n: int = 400) -> MeasuredPiece:
    """What some nodes of a graph took while they served as a kernel."""
    closed = UseIndex(parse(text), SIZES).closed(nodes)
    return MeasuredPiece(show(closed), SIZES, library=False, us=us, noise=0.02, n=n, bytes=0, cycles=None, uj=0.0)


# --- sizes that data tell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "fused"), [((40, 41, 38, 40, 39), True), ((1, 64, 3, 60, 20, 2), False)])
def test_a_boundary_is_fused_across_where_its_data_are_predictable(rows: tuple[int, ...], fused: bool) -> None:
    seen = TrafficSeen(sizes=(data_size("u0", rows),))
    found = planned(PICKED, seen)
    assert any({1, 2, 3} <= set(g.nodes) for g in found.groups) is fused
    decided = [c for c in found.choices if c.kind is CandidateKind.VERTICAL and c.accepted is fused]
    reasons = [r for c in decided for r in c.reasons if r.criterion is Criterion.PREDICTABLE]
    assert reasons and all(r.holds is fused and r.evidence["samples"] == len(rows) for r in reasons)
    assert any(f"{len(rows)} samples" in said for said in lines(found)), "what calls showed is part of the decision's text"


def test_sizes_that_nobody_saw_are_not_fused_across() -> None:
    groups = planned(PICKED, TrafficSeen()).groups
    assert len(groups) > 1 and all(len(g.nodes) == 1 for g in groups)


def test_no_code_is_made_for_sizes_that_operators_may_refuse() -> None:
    assert data_symbols(parse(PICKED)) == {"u0"} and not unsuited(parse(PICKED))
    first = "%b: f32[u0, 512] = aten.mul.Tensor(%a, %y)\n  %c: f32[512] = {}"
    for op in ("aten.select.int(%b, 0, 0)", "aten.amax.default(%b, [0])"):
        text = PICKED.replace("%b: f32[u0, 512] = aten.mul.Tensor(%a, %y)\n  %c: f32[u0, 512] = aten.neg.default(%b)",
                              first.format(op))  # fmt: skip
        refused = unsuited(verify(parse(text)))
        assert refused == {"u0": op.split(".")[1]}
        assert not data_size("u0", (40, 40), refused["u0"]).predictable
    halves = "%c: f32[(u0 // 2), 1024] = aten.view.default(%b, [-1, 1024])"
    parts = PICKED.replace("%c: f32[u0, 512] = aten.neg.default(%b)", halves)
    assert unsuited(parse(parts)) == {"u0": "view"}


# --- sizes of calls -----------------------------------------------------------------------------------------------------


def by_size(small_us: float, large_us: float) -> Predictor:
    """One kernel for the chain gains so much over three at few and at many rows."""

    def seconds(graph: Graph, sizes: Mapping[str, int], _library: bool) -> float:
        each = 1e-4
        won = small_us if sizes["s0"] < 1000 else large_us
        return each * len(graph.nodes) - won * 1e-6 * (len(graph.nodes) - 1)

    return taking(seconds)


def test_a_plan_is_for_the_sizes_that_calls_have_and_not_for_those_of_the_first_call() -> None:
    def groups(large: float) -> int:
        mix = (SizesShare({"s0": 64}, 1 - large), SizesShare({"s0": 4096}, large)) if large else ()
        return len(planned(CHAIN, TrafficSeen(mix=mix), predict=by_size(5, -5)).groups)

    assert groups(0.0) == 1, "at the first call's size it pays"
    assert groups(0.1) == 1 and groups(0.9) == 3


def test_a_gain_that_differs_from_size_to_size_is_worth_less() -> None:
    even = (SizesShare({"s0": 64}, 0.5), SizesShare({"s0": 4096}, 0.5))
    assert len(planned(CHAIN, TrafficSeen(mix=even), predict=by_size(6, 5)).groups) == 1
    found = planned(CHAIN, TrafficSeen(mix=even), predict=by_size(30, -20))  # as much on average
    assert len(found.groups) == 3
    assert all(c.gain.deviation < 5e-6 for c in found.choices), "how sure predictions are is another matter: contests rest on that"
    assert any("predictability: saves -20.0 to 30.0 us at the 2 sizes that calls have" in c.because for c in found.choices)


# --- what partitions took -----------------------------------------------------------------------------------------------


def linear_us(each: float) -> Predictor:
    return taking(lambda graph, _sizes, library: (1.5 if library else 1.0) * each * 1e-6 * len(graph.nodes))


def test_what_a_group_took_while_it_served_stands_in_the_place_of_its_prediction() -> None:
    whole = [Group((0, 1, 2), GroupKind.ROWS)]
    graph = verify(parse(CHAIN))

    def found(*pieces: MeasuredPiece) -> Planned:
        made = planner(TrafficSeen(pieces=pieces), linear_us(10), kinds=frozenset({CandidateKind.LIBRARY}))
        return made.plan(graph, whole, SIZES)

    assert found().before.seconds == pytest.approx(30e-6) and found().groups[0].kind == GroupKind.ROWS
    slow = found(served(CHAIN, (0, 1, 2), us=60.0))
    assert slow.before.seconds == pytest.approx(60e-6, rel=0.02) and slow.groups[0].kind == GroupKind.LIBRARY
    assert any("1 of 1 as measured while serving" in c.because for c in slow.choices if c.accepted)


def test_measurements_correct_predictions_of_what_would_replace_them() -> None:
    graph = verify(parse(CHAIN))
    whole, parts = [Group((0, 1, 2), GroupKind.ROWS)], frozenset({CandidateKind.SPLIT})
    seen = TrafficSeen(pieces=(served(CHAIN, (0, 1, 2), us=60.0),))
    found = planner(seen, linear_us(10), kinds=parts).plan(graph, whole, SIZES)
    assert found.groups == tuple(whole), "its halves were predicted by what was off for the whole: they are no faster"
    better = replace(seen, pieces=(*seen.pieces, served(CHAIN, (0,), us=5.0), served(CHAIN, (1, 2), us=9.0)))
    split = planner(better, linear_us(10), kinds=parts).plan(graph, whole, SIZES)
    assert [g.nodes for g in split.groups] == [(0,), (1, 2)] and split.after.seconds == pytest.approx(14e-6, rel=0.05)


def test_few_samples_correct_little_and_none_by_more_than_a_bound() -> None:
    piece = served(CHAIN, (0,), us=20.0)
    assert 1.9 < correction([(piece, 10e-6)]) < 2.0
    assert 1.0 < correction([(replace(piece, n=1), 10e-6)]) < 1.2
    assert correction([(replace(piece, us=1e6), 10e-6)]) == MAX_OFF and correction([]) == 1.0


def test_a_piece_is_known_again_in_the_graph_for_fixed_sizes() -> None:
    seen = SeenCosts(TrafficSeen(pieces=(served(CHAIN, (0, 1, 2), us=60.0),)))
    fixed = at_sizes(parse(CHAIN), SIZES)
    assert seen.measured(UseIndex(fixed, {}), (0, 1, 2), library=False) is not None
    assert seen.measured(UseIndex(fixed, {}), (0, 1, 2), library=True) is None
    assert seen.measured(UseIndex(parse(CHAIN), {"s0": 65}), (0, 1, 2), library=False) is None


def test_units_are_worth_what_was_measured_of_them() -> None:
    graph, seen = verify(parse(CHAIN)), SeenCosts(TrafficSeen(pieces=(served(CHAIN, (0, 1, 2), us=60.0),)))
    plain, told = (described(graph, (0, 1, 2), GroupKind.ROWS, SIZES, {}, s) for s in (None, seen))
    assert told.kernel_s == pytest.approx(60e-6) and told.measured_us == 60.0 and plain.measured_us is None


# --- masks --------------------------------------------------------------------------------------------------------------


def test_attention_costs_the_part_of_its_keys_that_masks_leave_open() -> None:
    graph = verify(parse(MASKED))
    groups = group(graph)

    def cost(*masks: MaskShare) -> Planned:
        return planner(TrafficSeen(masks=masks), kinds=frozenset[CandidateKind]()).plan(graph, groups, {})

    whole, quarter = cost(), cost(MaskShare("m", 0.25, 0.01, 40))
    assert quarter.before.seconds == pytest.approx(0.25 * whole.before.seconds)
    wild = cost(MaskShare("m", 0.25, 0.25, 40))
    assert wild.before.deviation > 1.5 * quarter.before.deviation, "an unsteady share is less certain"
    at = next(g for g in groups if g.kind == GroupKind.ATTENTION)
    seen = SeenCosts(TrafficSeen(masks=(MaskShare("m", 0.25, 0.01, 40),)))
    dense, told = (described(graph, at.nodes, at.kind, {}, {}, s) for s in (None, seen))
    assert dense.roofline_s is not None and dense.library_s is not None
    assert told.roofline_s == pytest.approx(0.25 * dense.roofline_s) and told.library_s == dense.library_s


# --- as a value ---------------------------------------------------------------------------------------------------------


def test_what_was_seen_travels_whole_and_plans_are_kept_by_what_matters_of_it() -> None:
    seen = TrafficSeen((data_size("u0", (40, 41)),), (MaskShare("m", 0.25, 0.01, 40),),
                       (SizesShare({"s0": 64}, 0.5), SizesShare({"s0": 9}, 0.5)), (served(CHAIN, (0,), us=20.0),))  # fmt: skip
    assert decoded(TrafficSeen, encoded(seen), "a test") == seen and not TrafficSeen().address()
    nearly = replace(seen, pieces=(served(CHAIN, (0,), us=20.4),), masks=(MaskShare("m", 0.26, 0.011, 41),))
    assert nearly.address() == seen.address(), "figures that decide the same share a plan"
    assert replace(seen, pieces=(served(CHAIN, (0,), us=60.0),)).address() != seen.address()
