"""Tier 1 inside the branches of `if`: params that a branch captures are weights there, and both branches serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse import Settings
from hotfuse.backends.branching import branching
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.errors import InternalError
from hotfuse.compile import whole_graph
from hotfuse.ir.control_bodies import branches
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from tests.races import every_kernel_wins, kernels_lose

INLINE = Settings(capture="inline", hot_calls=1)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    every_kernel_wins(monkeypatch)
    with torch.no_grad():
        yield


CHOICE = """graph main(%x: f32[s0, 16], %c: bool[]) where (2 <= s0) {
  param %w: f32[96, 16] = "w"
  param %v: f32[96, 16] = "v"
  %y: f32[s0, 96] = control.if(%c, [%w, %x, %v]) {
    graph then(%a: f32[96, 16], %b: f32[s0, 16], %d: f32[96, 16]) {
      %h: f32[s0, 96] = aten.linear.default(%b, %a, None)
      %r: f32[s0, 96] = aten.relu.default(%h)
      return %r
    }
    graph else(%a: f32[96, 16], %b: f32[s0, 16], %d: f32[96, 16]) {
      %h: f32[s0, 96] = aten.linear.default(%b, %d, None)
      %s: f32[s0, 96], %i: i64[s0, 96] = aten.sort.default(%h, 1)
      return %s
    }
  }
  %z: f32[s0, 96] = aten.tanh.default(%y)
  return %z
}
"""
"""A sort of so many stays with the library."""


def test_captured_params_are_params_of_a_branch() -> None:
    graph = parse(CHOICE)
    then, other = branches(graph, graph.nodes[0])
    assert [v.name for v in then.graph.inputs] == ["b"] and then.takes == (1,)
    assert [(p.value.name, p.key) for p in other.graph.params] == [("a", "w"), ("d", "v")]
    verify(then.graph)
    with pytest.raises(InternalError, match="has no branches"):
        branches(graph, graph.nodes[1])


def test_branches_are_bodies_of_their_own() -> None:
    header, codes = whole_graph.make(parse(CHOICE), {"s0": 5})
    assert [part[:2] for part in header["parts"]] == [[0, 1], [1, 2]] and len(codes) == 3, header["notes"]
    assert [k >= 0 for _, _, k in header["parts"]] == [False, True]
    then, other = header["branches"]["0"]
    assert [k >= 0 for _, _, k in then["parts"]] == [True]
    assert [k >= 0 for _, _, k in other["parts"]] == [True, False]
    assert not then["branches"] and not other["branches"]


STRIDED = """graph main(%x: f32[1, 4, s0], %c: bool[]) where (5 <= s0) {
  param %w: f32[8, 4, 3] = "w"
  %h: f32[1, 8, (((s0 + -3) // 4) + 1)] = aten.conv1d.default(%x, %w, None, [4])
  %y: f32[1, 8, (((s0 + -3) // 4) + 1)] = control.if(%c, [%h]) {
    graph then(%a: f32[1, 8, (((s0 + -3) // 4) + 1)]) {
      %b: f32[1, 8, (((s0 + -3) // 4) + 1)] = aten.relu.default(%a)
      %d: f32[1, 8, (((s0 + -3) // 4) + 1)] = aten.exp.default(%b)
      return %d
    }
    graph else(%a: f32[1, 8, (((s0 + -3) // 4) + 1)]) {
      %b: f32[1, 8, (((s0 + -3) // 4) + 1)] = aten.sigmoid.default(%a)
      return %b
    }
  }
  return %y
}
"""


def test_a_branch_need_not_show_the_sizes_of_the_graph_around_it() -> None:
    """Behind a stride none of its own inputs shows `s0`: it was taken for malformed, and the whole graph got no kernels."""
    header, codes = whole_graph.make(parse(STRIDED), {"s0": 64})
    then, other = header["branches"]["1"]
    assert [k >= 0 for _, _, k in (*then["parts"], *other["parts"])] == [True, True] and codes, header["notes"]


class Strided(torch.nn.Module):
    """A branch behind a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 8, 3, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        return torch.cond(h.sum() > 0, lambda a: torch.exp(torch.relu(a)) + a, lambda a: torch.sigmoid(a) - a, (h,))


def test_branches_behind_a_stride_are_served_with_kernels_at_any_size() -> None:
    model = Strided().eval()
    fast = hotfuse.jit(model, settings=INLINE)
    for n in (64, 80, 96, 112) * 6:
        x = torch.randn(1, 4, n)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert any(p.tier == 1 and p.kernels for p in fast.plans()), str(fast.explain(full=True))
    fast.close()


def test_branches_without_kernels_stay_with_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_lose(monkeypatch)
    header, codes = whole_graph.make(parse(CHOICE), {"s0": 5})
    assert header["parts"] == [[0, 2, -1]] and header["branches"] == {} and not codes


def test_a_branching_artifact_means_what_the_node_does() -> None:
    graph = parse(CHOICE.replace("return %z", "return %y").replace("  %z: f32[s0, 96] = aten.tanh.default(%y)\n", ""))
    weights = {n: torch.randn(96, 16) for n in "wv"}
    library = LibraryBackend()
    made = [library.compile(b.graph, weights) for b in branches(graph, graph.nodes[0])]
    ours = branching(graph, [(a.run, [a]) for a in made], weights)
    assert ours.source == "then: 1 library; else: 1 library"
    whole = library.compile(graph, weights)
    for c in (True, False):
        x = torch.randn(3, 16)
        assert torch.equal(ours.run(x, torch.tensor(c))[0], whole.run(x, torch.tensor(c))[0])


def model() -> bytes:
    """y = positive ? relu(x @ w) : (deep ? x @ v * 2 : x @ v)."""
    rng = np.random.default_rng(1)
    weights = [numpy_helper.from_array(rng.standard_normal((16, 8)).astype(np.float32), n) for n in ("w", "v")]

    def out(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])

    def graph(name: str, nodes: list[Any], result: str) -> Any:
        return helper.make_graph(nodes, name, [], [out(result)])

    make = helper.make_node
    twice = graph("twice", [make("MatMul", ["x", "v"], ["p"]), make("Add", ["p", "p"], ["q"])], "q")
    once = graph("once", [make("MatMul", ["x", "v"], ["o"])], "o")
    then = graph("then", [make("MatMul", ["x", "w"], ["h"]), make("Relu", ["h"], ["r"])], "r")
    other = graph("other", [make("If", ["deep"], ["e"], then_branch=twice, else_branch=once)], "e")
    top = make("If", ["positive"], ["y"], then_branch=then, else_branch=other)
    flags = [helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in ("positive", "deep")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])
    whole = helper.make_graph([top], "g", [x, *flags], [out("y")], weights)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


def test_sessions_run_kernels_in_nested_branches() -> None:
    data = model()
    session = hotfuse.InferenceSession(data, settings=INLINE)
    rng = np.random.default_rng(2)
    w, v = (numpy_helper.to_array(t) for t in helper_initializers(data))
    for n, positive, deep in ((3, True, True), (3, True, False), (3, False, True), (3, False, False), (3, False, True),
                              (6, True, False), (6, False, True), (6, False, False), (6, True, True)):  # fmt: skip
        x = rng.standard_normal((n, 16)).astype(np.float32)
        feeds = {"x": x, "positive": np.array(positive), "deep": np.array(deep)}
        want = np.maximum(x @ w, 0) if positive else x @ v * (2 if deep else 1)
        np.testing.assert_allclose(session.run(None, feeds)[0], want, rtol=1e-4, atol=1e-4)
    plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    assert any(part["backend"] == "branches" for p in plans for part in p["partitions"]), str(session.explain(full=True))
    assert session.stats()["calls_per_tier"]["1"] >= 4


def helper_initializers(data: bytes) -> list[Any]:
    """The model's weights, in order."""
    return list(onnx.load_from_string(data).graph.initializer)
