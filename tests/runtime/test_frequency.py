"""How often nested graphs run in a call, and what units in them are worth for that."""

from __future__ import annotations

import pytest
import torch

from hotfuse.analysis.cost import UNSEEN, node_cost
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.compilation_graph import UnitState
from hotfuse.compile.frequency import LIKELY_TRIPS, ControlBodies, frequencies, observed
from hotfuse.compile.value import CompileProgress, Demand, Expected, Facts
from hotfuse.ir.control_bodies import control_name
from hotfuse.ir.text import parse
from hotfuse.profile.snapshot import ControlSeen
from hotfuse.runtime.observe.control_outcomes import outcomes_of
from tests.races import kernels_win
from tests.runtime.test_units import Scripted

NEST = """graph main(%x: f32[s0, 64], %c: bool[], %n: i64[]) where (2 <= s0) {
  %y: f32[s0, 64] = control.if(%c, [%x]) {
    graph then(%a: f32[s0, 64]) {
      %r: f32[s0, 64] = aten.tanh.default(%a)
      return %r
    }
    graph else(%a: f32[s0, 64]) {
      %r: f32[s0, 64] = aten.exp.default(%a)
      return %r
    }
  }
  %z: f32[s0, 64] = control.loop(%n, True, [%y], []) {
    graph body(%i: i64[], %go: bool[], %h: f32[s0, 64]) {
      %k: f32[s0, 64] = aten.sin.default(%h)
      return %go, %k
    }
  }
  %w: f32[s0, 64] = aten.cos.default(%z)
  return %w
}
"""


def seen(n: int, *outcomes: tuple[int, float], loop: bool = False) -> ControlSeen:
    return ControlSeen(0, n, loop, outcomes)


def nest() -> list[list[ControlBodies]]:
    choice, loop = parse(NEST).nodes[:2]
    return [[ControlBodies(choice, (1, 2)), ControlBodies(loop, (3,))], [], [], []]


def test_frequencies_follow_what_was_seen_and_are_never_certain() -> None:
    assert frequencies(nest(), {}, {"s0": 4}) == (1.0, 0.5, 0.5, LIKELY_TRIPS)
    told = {"if y": seen(998, (0, 1.0)), "loop z": seen(98, (50, 0.5), (30, 0.5), loop=True)}
    main, then, other, body = frequencies(nest(), told, {"s0": 4})
    assert main == 1.0 and 0 < then == pytest.approx(0.001) and other == pytest.approx(0.999)
    assert body == pytest.approx((98 * 40 + 2 * LIKELY_TRIPS) / 100)


def test_control_nodes_inside_others_run_as_often_as_what_is_around_them() -> None:
    choice, loop = parse(NEST).nodes[:2]
    graphs = [[ControlBodies(loop, (1,))], [ControlBodies(choice, (2, 3))], [], []]
    inner = f"{control_name(loop)}, 0: {control_name(choice)}"
    told = {"loop z": seen(10**6, (20, 1.0), loop=True), inner: seen(10**6, (1, 0.25), (0, 0.75))}
    assert frequencies(graphs, told, {}) == pytest.approx((1.0, 20.0, 5.0, 15.0), rel=1e-4)


def test_a_scan_runs_as_often_as_its_length_says() -> None:
    text = """graph main(%h: f32[4], %x: f32[s0, 4]) where (2 <= s0) {
  %y: f32[4] = control.scan([%h], [%x], [], in_axes=[0], in_reverse=[False], out_axes=[], out_reverse=[]) {
    graph body(%a: f32[4], %b: f32[4]) {
      %r: f32[4] = aten.add.Tensor(%a, %b)
      return %r
    }
  }
  return %y
}
"""
    graphs = [[ControlBodies(parse(text).nodes[0], (1,))], []]
    assert frequencies(graphs, {}, {"s0": 37}) == (1.0, 37.0)
    assert frequencies(graphs, {}, {}) == (1.0, LIKELY_TRIPS), "no size is known"


def even(_facts: Facts) -> Expected:
    """Every unit saves the same and takes as long to compile."""
    return Expected(1e-3, 0.5)


@pytest.mark.parametrize(
    ("told", "order"),
    [({"if y": seen(500, (1, 1.0)), "loop z": seen(500, (50, 1.0), loop=True)}, ["sin", "cos", "tanh", "exp"]),
     ({"if y": seen(500, (0, 1.0)), "loop z": seen(500, (0, 1.0), loop=True)}, ["cos", "exp", "sin", "tanh"])],
)  # fmt: skip
def test_what_runs_most_is_compiled_first_and_counts_most(told: dict[str, ControlSeen], order: list[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    kernels_win(monkeypatch)
    asked, steps = Scripted(), list[CompileProgress]()
    made = Compilation(asked, NEST, {"s0": 4}, Demand(outcomes=lambda: told), estimate=even)
    made.run(lambda _message, progress: steps.append(progress))
    by_level = {level.ident: parse(level.text) for level in made.graph.levels}
    ops = [by_level[ident].nodes[nodes[0]].op.split(".")[1] for h in asked.units for ident, nodes in h["alike"][:1]]
    assert ops == order
    assert all(u.state is UnitState.DONE for u in made.graph.units.values()), "what seldom runs is compiled as well"
    assert all(s.decided >= s.worked for s in steps) and steps[0].decided > steps[0].worked
    (line, *_rest) = [x for x in made.describe() if "loop z" in x]
    assert "500 seen" in line


def test_a_measured_call_is_split_among_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's time of a call holds fifty trips of the body, not one: units are not each thought fifty times as slow."""
    kernels_win(monkeypatch)
    told = {"if y": seen(10**6, (1, 1.0)), "loop z": seen(10**6, (50, 1.0), loop=True)}
    made = Compilation(Scripted(), NEST, {"s0": 4}, Demand(library_us=1000.0, outcomes=lambda: told))
    made.run()
    whole = sum((u.facts.library_s or 0.0) * made.graph.runs_of(u) for u in made.graph.units.values())
    assert whole == pytest.approx(1e-3, rel=0.02)


def test_order_follows_calls_while_units_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    told = dict[str, ControlSeen]()
    asked = Scripted(lambda _h: told.update({"if y": seen(500, (0, 1.0))}))
    made = Compilation(asked, NEST, {"s0": 4}, Demand(outcomes=lambda: dict(told)), estimate=even)
    made.run()
    assert made.graph.level_runs[2] > 0.99


def test_costs_are_those_of_the_branches_that_calls_took() -> None:
    """A side that nobody takes counts nothing, however dear it is; nothing is known where no call was seen."""
    choice, loop = parse(NEST).nodes[:2]
    sizes = {"s0": 4}
    one, exp = node_cost(loop.graphs[0].nodes[0], sizes), node_cost(choice.graphs[1].nodes[0], sizes)
    assert one.flops and exp.flops and one.bytes
    told = {"if y": seen(40, (0, 1.0)), "loop z": seen(40, (50, 0.5), (10, 0.5), loop=True)}
    assert node_cost(choice, sizes, observed(told)) == exp
    assert node_cost(loop, sizes, observed(told)) == one.times(30)
    assert node_cost(choice, sizes, observed({})) == node_cost(loop, sizes, observed({})) == UNSEEN
    assert node_cost(choice, sizes).flops == max(exp.flops, node_cost(choice.graphs[0].nodes[0], sizes).flops or 0)


def test_a_size_that_nobody_knows_does_not_matter_where_nobody_goes() -> None:
    text = NEST.replace("%r: f32[s0, 64] = aten.exp.default(%a)", "%q: f32[u0, 64] = aten.exp.default(%a)\n"
                        "      %r: f32[s0, 64] = aten.exp.default(%a)")
    choice = parse(text).nodes[0]
    assert node_cost(choice, {"s0": 4}).bytes is None
    told = {"if y": seen(40, (1, 1.0))}
    assert node_cost(choice, {"s0": 4}, observed(told)) == node_cost(choice.graphs[0].nodes[0], {"s0": 4})


def test_kept_calls_tell_which_way_they_go() -> None:
    graph = parse(NEST)
    calls = [[torch.randn(3, 64), torch.tensor(c), torch.tensor(n)] for c, n in ((True, 0), (False, 5), (False, 5), (False, 2))]
    found = outcomes_of(graph, {}, calls)
    assert found["if y"].n == 4 and dict(found["if y"].outcomes) == {0: 0.75, 1: 0.25}
    assert found["loop z"].loop and dict(found["loop z"].outcomes) == {5: 0.5, 0: 0.25, 2: 0.25}
    assert outcomes_of(graph, {}, []) == {}
