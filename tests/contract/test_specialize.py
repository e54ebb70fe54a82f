"""Specialized graphs compute what the general ones compute, and a wrong bet costs no wrong answer."""

from __future__ import annotations

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.specialize.branches import conditions, speculate
from hotfuse.specialize.recurring_sizes import at_sizes

VIEWED = """graph main(%x: f32[s0, 4]) where (2 <= s0), (s0 <= 4096) {
  param %w: f32[8, 4] = "w"
  %n: int(s0) = aten.sym_size.int(%x, 0)
  %h: f32[s0, 8] = aten.linear.default(%x, %w, None)
  %y: f32[s0, 2, 4] = aten.view.default(%h, [%n, 2, 4])
  return %y, %n
}
"""
NESTED = """graph main(%x: f32[s0, 4], %flag: bool[]) where (2 <= s0) {
  param %w: f32[4, 4] = "w"
  %before: f32[s0, 4] = aten.exp.default(%x)
  %total: f32[] = aten.sum.default(%x)
  %c: bool[] = aten.gt.Scalar(%total, 0)
  %y: f32[u0, 4] = control.if(%c, [%before, %flag, %w]) {
    graph then(%a: f32[s0, 4], %f: bool[], %v: f32[4, 4]) {
      %z: f32[s0, 4] = control.if(%f, [%a, %v]) {
        graph then(%a: f32[s0, 4], %v: f32[4, 4]) {
          %h: f32[s0, 4] = aten.linear.default(%a, %v, None)
          return %h
        }
        graph else(%a: f32[s0, 4], %v: f32[4, 4]) {
          %h: f32[s0, 4] = aten.neg.default(%a)
          return %h
        }
      }
      return %z
    }
    graph else(%a: f32[s0, 4], %f: bool[], %v: f32[4, 4]) {
      %z: f32[2, 4] = aten.narrow.default(%a, 0, 0, 2)
      return %z
    }
  }
  %r: f32[u0, 4] = aten.relu.default(%y)
  return %r, %before
}
"""


def run(graph: Graph, weights: dict[str, torch.Tensor], *inputs: object) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return LibraryBackend().compile(verify(graph), weights).run(*inputs)


def test_sizes_become_numbers() -> None:
    graph = verify(parse(VIEWED))
    fixed = verify(at_sizes(graph, {"s0": 6}))
    assert "s0" not in show(fixed) and "sym_size" not in show(fixed)
    x, weights = torch.randn(6, 4), {"w": torch.randn(8, 4)}
    (y, n), (want, m) = run(fixed, weights, x), run(graph, weights, x)
    assert torch.equal(y, want) and n == m == 6


def test_only_the_given_sizes_become_numbers() -> None:
    graph = parse("graph main(%x: f32[s0, s1]) {\n  %y: f32[s0, s1] = aten.exp.default(%x)\n  return %y\n}\n")
    assert "f32[3, s1]" in show(verify(at_sizes(graph, {"s0": 3})))


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("flag", [True, False])
def test_a_bet_on_a_branch_and_its_other_side(outcome: bool, sign: float, flag: bool) -> None:
    graph = verify(parse(NESTED))
    x, f = torch.rand(5, 4) * sign, torch.tensor(flag)
    weights = {"w": torch.randn(4, 4)}
    want = run(graph, weights, x, f)
    bet = speculate(graph, conditions(graph)[0], outcome=outcome)
    known = run(bet.prefix, weights, x)
    assert bool(known[bet.condition]) is (sign > 0)
    side = bet.hot if bool(known[bet.condition]) is outcome else bet.cold
    got = run(side, weights, *(x, f, *known)[: len(side.inputs)])
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_bet_leaves_no_condition_and_tells_sizes() -> None:
    graph = verify(parse(NESTED))
    hot = speculate(graph, 3, outcome=False).hot
    assert not conditions(hot) and "u0" not in show(hot) and "f32[2, 4] = aten.relu" in show(hot)
    outer = speculate(graph, 3, outcome=True).hot
    (inner,) = conditions(outer)
    straight = speculate(outer, inner, outcome=True)
    assert not conditions(straight.hot) and [v.name for v in straight.prefix.inputs] == ["flag"]
    x, f, weights = torch.rand(3, 4), torch.tensor(True), {"w": torch.randn(4, 4)}
    known = run(speculate(graph, 3, outcome=True).prefix, weights, x)
    got = run(straight.hot, weights, *(x, f, *known)[: len(straight.hot.inputs)])
    assert all(torch.equal(a, b) for a, b in zip(got, run(graph, weights, x, f), strict=True))


def test_only_conditions_can_be_bet_on() -> None:
    with pytest.raises(InternalError, match="not a condition"):
        speculate(parse(NESTED), 0, outcome=True)
