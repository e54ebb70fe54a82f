"""Loops and scans inside native runs: the same results as the library's, as one native call, whatever the number of iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import ModelError
from hotfuse.compile.run.loops import LoopPlanner
from hotfuse.compile.run.run_plan import RunPlanner
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.lower.run.description import OUTCOMES
from hotfuse.ops import control
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.runtime.plan import Plan
from tests.races import every_kernel_wins

INLINE = Settings(capture="inline", hot_calls=1)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    every_kernel_wins(monkeypatch)
    with torch.no_grad():
        yield


W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) * 0.3
WEIGHTS = {"w": W}

COUNTED = """graph main(%x: f32[s0, 8], %n: i64[], %c: bool[]) where (1 <= s0) {
  param %w: f32[8, 8] = "w"
  %y: f32[s0, 8], %z: f32[s0, 8] = control.loop(%n, %c, [%x, %x], [%w, %x]) {
    graph body(%i: i64[], %go: bool[], %a: f32[s0, 8], %b: f32[s0, 8], %v: f32[8, 8], %k: f32[s0, 8]) {
      %h: f32[s0, 8] = aten.linear.default(%a, %v, None)
      %f: f32[] = aten.to.dtype(%i, f32)
      %s: f32[s0, 8] = aten.add.Tensor(%h, %f)
      %t: f32[s0, 8] = aten.tanh.default(%s)
      %u: f32[s0, 8] = aten.add.Tensor(%t, %k)
      return %go, %b, %u
    }
  }
  %r: f32[s0, 8] = aten.relu.default(%y)
  return %r, %z
}
"""
"""Two carried values that change places in every iteration, and a captured weight."""

UNTIL = """graph main(%x: f32[4]) {
  %s: f32[] = aten.sum.default(%x)
  %c: bool[] = aten.lt.Scalar(%s, 100.0)
  %y: f32[4] = control.loop(None, %c, [%x], []) {
    graph body(%i: i64[], %go: bool[], %a: f32[4]) {
      %b: f32[4] = aten.mul.Tensor(%a, 1.5)
      %t: f32[] = aten.sum.default(%b)
      %d: bool[] = aten.lt.Scalar(%t, 100.0)
      return %d, %b
    }
  }
  %z: f32[4] = aten.neg.default(%y)
  return %z
}
"""

SCANNED = """graph main(%h: f32[4, 8], %x: f32[s0, 4, 8]) where (1 <= s0) {
  param %w: f32[8, 8] = "w"
  %y: f32[4, 8], %o: f32[4, s0, 8], %p: f32[s0, 4] = control.scan([%h], [%x], [%w], in_axes=[0], in_reverse=[REVERSE], out_axes=[1, 0], out_reverse=[False, REVERSE]) {
    graph body(%a: f32[4, 8], %b: f32[4, 8], %v: f32[8, 8]) {
      %l: f32[4, 8] = aten.linear.default(%a, %v, None)
      %s: f32[4, 8] = aten.add.Tensor(%l, %b)
      %t: f32[4, 8] = aten.tanh.default(%s)
      %m: f32[4] = aten.amax.default(%t, [1])
      return %t, %s, %m
    }
  }
  %e: f32[4, s0, 8] = aten.exp.default(%o)
  return %y, %e, %p
}
"""  # noqa: E501

NESTED = """graph main(%x: f32[4], %n: i64[], %m: i64[]) {
  %y: f32[4] = control.loop(%n, None, [%x], [%m]) {
    graph outer(%i: i64[], %go: bool[], %a: f32[4], %m: i64[]) {
      %b: f32[4] = control.loop(%m, None, [%a], []) {
        graph inner(%j: i64[], %on: bool[], %p: f32[4]) {
          %q: f32[4] = aten.mul.Tensor(%p, 0.5)
          return %on, %q
        }
      }
      %s: f32[] = aten.sum.default(%b)
      %c: bool[] = aten.gt.Scalar(%s, 0.5)
      %d: f32[4] = control.if(%c, [%b]) {
        graph then(%e: f32[4]) {
          %f: f32[4] = aten.neg.default(%e)
          return %f
        }
        graph else(%e: f32[4]) {
          %f: f32[4] = aten.add.Tensor(%e, 1.0)
          return %f
        }
      }
      return %go, %d
    }
  }
  %z: f32[4] = aten.abs.default(%y)
  return %z
}
"""


def plans(text: str, sample: Sequence[torch.Tensor]) -> tuple[Plan, Plan]:
    graph = verify(parse(text))
    return compile_tier1(graph, WEIGHTS, sample, INLINE), compile_tier0(graph, WEIGHTS, INLINE)


def agree(native: Plan, library: Plan, inputs: Sequence[torch.Tensor]) -> None:
    before = [t.clone() for t in inputs]
    got, want = native.run(*inputs), library.run(*inputs)
    for a, b in zip(inputs, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg="an input was written")
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def one_call(plan: Plan) -> None:
    assert [u.native is not None for u in plan.units] == [True], (plan.notes, [a.source for a in plan.artifacts])
    assert plan.counters()["fell_back"] == 0


def told(plan: Plan, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """What a native run says of its branches and loops."""
    run = plan.units[0].native
    assert run is not None
    _, inside = run.watched(OUTCOMES, *(inputs[[v.name for v in plan.graph.inputs].index(i.name)] for i in run.code.inputs))
    return dict(zip(run.code.branches, inside.outcomes, strict=True))


def test_a_counted_loop_is_one_call() -> None:
    native, library = plans(COUNTED, [torch.randn(5, 8), torch.tensor(4), torch.tensor(True)])
    one_call(native)
    for n in (4, 0, 1, 2, 3, 33, -1):
        for rows in (5, 1, 2, 19):
            for go in (True, False):
                agree(native, library, [torch.randn(rows, 8), torch.tensor(n), torch.tensor(go)])
    one_call(native)


def test_trips_are_told() -> None:
    native, _ = plans(COUNTED, [torch.randn(5, 8), torch.tensor(4), torch.tensor(True)])
    for n, go, want in ((4, True, 4), (0, True, 0), (7, False, 0), (31, True, 31)):
        assert told(native, [torch.randn(5, 8), torch.tensor(n), torch.tensor(go)]) == {"loop y": want + 1}
    run = native.units[0].native
    assert run is not None and run.code.loops == {"loop y"}


def test_a_condition_ends_a_loop() -> None:
    native, library = plans(UNTIL, [torch.ones(4)])
    one_call(native)
    for scale in (1.0, 30.0, 0.01, 24.9, float("nan")):
        agree(native, library, [torch.full((4,), scale)])
    one_call(native)


def test_an_endless_loop_is_the_fallbacks_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotfuse.backends.llvm.runs.loops.MAX_TRIPS", 50)
    monkeypatch.setattr(control, "MAX_TRIPS", 50)
    native, _ = plans(UNTIL, [torch.ones(4)])
    one_call(native)
    with pytest.raises(ModelError, match="more than 50 iterations"):
        native.run(torch.zeros(4))
    assert native.counters()["fell_back"] == 1
    counted, _ = plans(COUNTED, [torch.randn(5, 8), torch.tensor(4), torch.tensor(True)])
    with pytest.raises(ModelError, match="more than 50 iterations"):
        counted.run(torch.randn(5, 8), torch.tensor(51), torch.tensor(True))


@pytest.mark.parametrize("reverse", ["False", "True"])
def test_a_scan_is_one_call(reverse: str) -> None:
    native, library = plans(SCANNED.replace("REVERSE", reverse), [torch.randn(4, 8), torch.randn(6, 4, 8)])
    one_call(native)
    for n in (6, 1, 2, 17):
        x = torch.randn(n, 4, 8)
        x[0, 0, 0] = float("inf")
        agree(native, library, [torch.randn(4, 8), x])
    one_call(native)
    agree(native, library, [torch.randn(8, 4).t(), torch.randn(4, 3, 8).transpose(0, 1)])  # lies otherwise: the fallback's
    assert native.counters()["fell_back"] == 1


def test_loops_and_branches_in_a_loop() -> None:
    native, library = plans(NESTED, [torch.ones(4), torch.tensor(3), torch.tensor(2)])
    one_call(native)
    for n, m in ((3, 2), (0, 2), (3, 0), (1, 1), (9, 3)):
        agree(native, library, [torch.randn(4), torch.tensor(n), torch.tensor(m)])
    seen = told(native, [torch.ones(4), torch.tensor(9), torch.tensor(1)])
    assert seen["loop y"] == 10 and seen["loop y, 0: loop b"] == 2 and seen["loop y, 0: if d"] == 3  # both ways, in turn


def test_without_loops_a_run_ends_before_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopPlanner, "_branch", RunPlanner._branch)  # pyright: ignore[reportPrivateUsage]
    native, library = plans(UNTIL, [torch.ones(4)])
    assert not all(u.native is not None for u in native.units)
    agree(native, library, [torch.ones(4)])


def test_sizes_that_change_stay_with_the_library() -> None:
    text = """graph main(%x: f32[4], %n: i64[]) {
      %y: f32[u0] = control.loop(%n, None, [%x], []) {
        graph body(%i: i64[], %go: bool[], %a: f32[u1]) {
          %b: f32[2*u1] = aten.cat.default([%a, %a], 0)
          return %go, %b
        }
      }
      return %y
    }"""
    try:
        native, library = plans(text, [torch.ones(4), torch.tensor(2)])
    except hotfuse.HotfuseError:
        return  # no kernel at all is an answer too
    agree(native, library, [torch.randn(4), torch.tensor(3)])


STACKED = """graph main(%x: f32[s0, 4], %n: i64[]) where (1 <= s0) {
  %y: f32[4], %o: f32[s0, 4] = control.loop(%n, None, [%y0], [%x]) {
    graph body(%i: i64[], %go: bool[], %a: f32[4], %k: f32[s0, 4]) {
      %m: f32[4] = aten.amax.default(%k, [0])
      %b: f32[4] = aten.add.Tensor(%a, %m)
      %c: f32[4] = aten.exp.default(%b)
      return %go, %b, %c
    }
  }
  return %y, %o
}
""".replace("%y: f32[4], %o", "%y0: f32[4] = aten.amax.default(%x, [0])\n  %y: f32[4], %o")


def test_stacks_of_a_loop_whose_length_is_a_size() -> None:
    native, library = plans(STACKED, [torch.randn(6, 4), torch.tensor(6)])
    one_call(native)
    for n in (6, 1, 9):
        agree(native, library, [torch.randn(n, 4) * 0.1, torch.tensor(n)])
    one_call(native)
    for rows, trips in ((6, 5), (6, 7), (6, 0)):  # the type was wrong: nothing is written where there is no room
        agree(native, library, [torch.randn(rows, 4) * 0.1, torch.tensor(trips)])
    assert native.counters()["fell_back"] == 3


# --- as a user sees it ------------------------------------------------------------------------------------------------


def _model(op: str) -> bytes:
    f, i64 = TensorProto.FLOAT, TensorProto.INT64
    weight = numpy_helper.from_array(W.numpy(), "W")
    state = helper.make_tensor_value_info("h", f, [4, 8])
    step = [helper.make_node("MatMul", ["h", "W"], ["hw"]), helper.make_node("Add", ["hw", "xi"], ["s"]),
            helper.make_node("Tanh", ["s"], ["next"])]  # fmt: skip
    after = helper.make_tensor_value_info("next", f, [4, 8])
    inputs = [helper.make_tensor_value_info("x", f, ["n", 4, 8]), helper.make_tensor_value_info("h0", f, [4, 8])]
    outputs = [helper.make_tensor_value_info("y", f, [4, 8])]
    if op == "Loop over rows":  # how exporters write `for row in x: results.append(...)`
        head = [helper.make_tensor_value_info("i", i64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [])]
        nodes = [helper.make_node("Gather", ["x", "i"], ["xi"], axis=0), *step, helper.make_node("Identity", ["go"], ["on"]),
                 helper.make_node("Neg", ["next"], ["o"])]  # fmt: skip
        results = [helper.make_tensor_value_info("on", TensorProto.BOOL, []), after, helper.make_tensor_value_info("o", f, [4, 8])]
        body = helper.make_graph(nodes, "body", [*head, state], results)
        before = [helper.make_node("Shape", ["x"], ["all"]), helper.make_node("Gather", ["all", "zero"], ["trips"])]
        looped = helper.make_node("Loop", ["trips", "", "h0"], ["hl", "os"], body=body)
        outputs.append(helper.make_tensor_value_info("os", f, ["n", 4, 8]))
        more = [numpy_helper.from_array(np.array(0), "zero")]
        graph = helper.make_graph([*before, looped, helper.make_node("Relu", ["hl"], ["y"])], "m", inputs, outputs, [weight, *more])
        return onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    if op == "Loop":
        head = [helper.make_tensor_value_info("i", i64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, [])]
        nodes = [helper.make_node("Gather", ["x", "i"], ["xi"], axis=0), *step, helper.make_node("Identity", ["go"], ["on"])]
        body = helper.make_graph(nodes, "body", [*head, state], [helper.make_tensor_value_info("on", TensorProto.BOOL, []), after])
        inputs.append(helper.make_tensor_value_info("trips", i64, []))
        looped = helper.make_node("Loop", ["trips", "", "h0"], ["hl"], body=body)
    else:
        slices = helper.make_tensor_value_info("xi", f, [4, 8])
        nodes = [*step, helper.make_node("Neg", ["next"], ["o"])]
        body = helper.make_graph(nodes, "body", [state, slices], [after, helper.make_tensor_value_info("o", f, [4, 8])])
        looped = helper.make_node("Scan", ["h0", "x"], ["hl", "os"], body=body, num_scan_inputs=1)
        outputs.append(helper.make_tensor_value_info("os", f, ["n", 4, 8]))
    graph = helper.make_graph([looped, helper.make_node("Relu", ["hl"], ["y"])], "m", inputs, outputs, [weight])
    return onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


@pytest.mark.parametrize("op", ["Loop", "Scan", "Loop over rows"])
def test_an_onnx_model_is_one_native_call(op: str) -> None:
    session = hotfuse.InferenceSession(_model(op), settings=INLINE)
    plain = hotfuse.InferenceSession(_model(op), settings=INLINE.with_(tiers=0, capture="off"))
    rng = np.random.default_rng(0)
    for n in (6, 6, 6, 9, 9, 9, 2, 30):
        feed: dict[str, Any] = {"x": rng.standard_normal((n, 4, 8), "f"), "h0": rng.standard_normal((4, 8), "f")}
        if op == "Loop":
            feed["trips"] = np.array(n - 1)
        for a, b in zip(session.run(None, feed), plain.run(None, feed), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    sites = session.explain().to_dict()["sites"]
    runs = [p for s in sites for p in s["plans"] if p["tier"] == 1]
    assert runs and session.stats()["calls_per_tier"]["1"] >= 2, str(session.explain(full=True))
    assert all(p["counters"]["native_runs"] == 1 and p["counters"]["fell_back"] == 0 for p in runs), runs
