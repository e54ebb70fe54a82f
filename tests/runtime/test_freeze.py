"""Constants of a plan: computed once from weights, never from anything a call could change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hotfuse
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.settings import Settings
from hotfuse.compile.freeze import frozen
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from tests.races import slow_library

GATES = """graph main(%x: f32[2, 4]) {
  param %w: f32[8, 4] = "w"
  param %e: f32[4, 4] = "e"
  %a: f32[4, 4] = aten.slice.Tensor(%w, 0, 0, 4)
  %b: f32[4, 4] = aten.slice.Tensor(%w, 0, 4, 8)
  %c: f32[8, 4] = aten.cat.default([%b, %a])
  %n: f32[4, 4] = aten.neg.default(%e)
  %r: f32[4, 4] = aten.bernoulli.default(%e)
  %y: f32[2, 8] = aten.linear.default(%x, %c, None)
  %z: f32[4, 4] = aten.add.Tensor(%r, %e)
  return %y, %z, %n
}
"""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_only_what_weights_alone_decide_is_frozen() -> None:
    weights = {"w": torch.randn(8, 4), "e": torch.rand(4, 4)}
    graph, found = frozen(parse(GATES), weights)
    ops = [n.op for n in verify(graph).nodes]
    assert ops == ["aten.neg.default", "aten.bernoulli.default", "aten.linear.default", "aten.add.Tensor"], show(graph)
    assert [p.key for p in graph.params] == ["e", "frozen:c"], "what an output is made of stays computed"
    assert torch.equal(found["frozen:c"], torch.cat([weights["w"][4:], weights["w"][:4]]))


def test_large_results_of_small_weights_stay_computed() -> None:
    text = """graph main(%x: f32[1, 4096]) {
  param %w: f32[1, 4096] = "w"
  %a: f32[4096, 4096] = aten.repeat.default(%w, [4096, 1])
  %y: f32[4096, 4096] = aten.add.Tensor(%x, %a)
  return %y
}
"""
    graph = parse(text)
    assert frozen(graph, {"w": torch.zeros(1, 4096)})[0] == graph


def test_a_changed_weight_reaches_frozen_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            swapped = torch.cat([self.w[32:], self.w[:32]])
            return torch.tanh(torch.nn.functional.linear(x, swapped))

    model = Gated().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=1))
    x = torch.randn(16, 32)
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    model.w.mul_(2)
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_constants_of_branches_become_captures() -> None:
    text = """graph main(%x: f32[2, 4], %c: bool[]) {
  param %w: f32[4, 4] = "w"
  %y: f32[2, 4] = control.if(%c, [%x, %w]) {
    graph then(%a: f32[2, 4], %b: f32[4, 4]) {
      %n: f32[4, 4] = aten.neg.default(%b)
      %r: f32[2, 4] = aten.linear.default(%a, %n, None)
      return %r
    }
    graph else(%a: f32[2, 4], %b: f32[4, 4]) {
      %e: f32[4, 4] = aten.exp.default(%b)
      %n: f32[4, 4] = aten.tanh.default(%e)
      %r: f32[2, 4] = aten.linear.default(%a, %n, None)
      return %r
    }
  }
  return %y
}
"""
    graph, weights = parse(text), {"w": torch.randn(4, 4)}
    settled, constants = frozen(graph, weights)
    (node,) = verify(parse(show(settled))).nodes
    assert [[n.op for n in g.nodes] for g in node.graphs] == [["aten.linear.default"]] * 2
    x = torch.randn(2, 4)
    before, after = LibraryBackend().compile(graph, weights).run, LibraryBackend().compile(settled, constants).run
    for cond in (torch.tensor(True), torch.tensor(False)):
        assert torch.equal(before(x, cond)[0], after(x, cond)[0])


WIDENED = """graph main(%x: f32[2, 512], %o: f32[]) {
  param %q: i8[512, 1024] = "q"
  param %w: f32[1, 1024] = "w"
  %f: f32[512, 1024] = aten._to_copy.default(%q, dtype=f32)
  %t: f32[1024, 512] = aten.transpose.int(%f, 0, 1)
  %a: f32[1024, 1024] = aten.repeat.default(%w, [1024, 1])
  %y: f32[2, 1024] = aten.linear.default(%x, %t, None)
  %b: f32[1024, 1024] = aten.mul.Tensor(%a, %o)
  %s: f32[2, 1024] = aten.slice.Tensor(%b, 0, 0, 2)
  %r: f32[2, 1024] = aten.add.Tensor(%y, %s)
  return %r
}
"""


def test_weights_are_widened_once_and_what_is_repeated_is_not_kept() -> None:
    graph = parse(WIDENED)
    weights = {"q": torch.randint(-50, 50, (512, 1024), dtype=torch.int8), "w": torch.randn(1, 1024)}
    settled, found = frozen(graph, weights)
    assert [n.op for n in verify(settled).nodes] == ["aten.repeat.default", "aten.linear.default", "aten.mul.Tensor",
                                                     "aten.slice.Tensor", "aten.add.Tensor"]  # fmt: skip
    assert torch.equal(found["frozen:t"], weights["q"].float().t())
    assert frozen(graph, weights, widen=False)[0] == graph, "bytes stay bytes where memory counts"
    inputs = torch.randn(2, 512), torch.tensor(0.5)
    before, after = LibraryBackend().compile(graph, weights).run(*inputs), LibraryBackend().compile(settled, found).run(*inputs)
    torch.testing.assert_close(before[0], after[0])
