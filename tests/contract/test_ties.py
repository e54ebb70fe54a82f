"""Rounded outputs: which quantum they have, and that one quantum here and there is no disagreement, while more is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotfuse.analysis.ties import quanta, tied
from hotfuse.backends.protocol import Run
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Value
from hotfuse.ir.retype import widened
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.tierup.proof import NOISE, in_float64, prove, rounds_otherwise

QDQ = """graph g(%x: f32[4, 8]) {{
  param %s: f32[] = "s"
  %d: f32[4, 8] = aten.div.Tensor(%x, 0.5)
  %o: f32[4, 8] = aten.round.default(%d)
  %p: f32[4, 8] = aten.add.Tensor(%o, 3.0)
  %c: f32[4, 8] = aten.clamp.default(%p, 0, 255)
  %q: u8[4, 8] = aten.to.dtype(%c, u8)
  %f: f32[4, 8] = aten.to.dtype(%q, f32)
  %z: f32[4, 8] = aten.sub.Tensor(%f, 3.0)
  %y: f32[4, 8] = aten.mul.Tensor(%z, {scale})
  %v: f32[8, 4] = aten.t.default(%y)
  %n: f32[4, 8] = aten.tanh.default(%y)
  %e: f32[4, 8] = aten.exp.default(%x)
  return %q, %v, %n, %e }}"""


def test_the_quantum_is_the_scale_behind_the_rounding() -> None:
    assert quanta(parse(QDQ.format(scale="0.5"))) == (1.0, 0.5, 0.0, None)
    by_name = parse(QDQ.format(scale="%s"))

    def number(v: Value) -> float | None:
        return 0.25 if v.name == "s" else None

    assert quanta(by_name, number)[1] == 0.25 and quanta(by_name)[1] == 0.0


@pytest.mark.parametrize(
    ("quantum", "moved", "places", "fine"),
    [(0.5, 0.5, 3, True), (0.5, 0.51, 3, False), (0.5, 0.5, 30, False), (None, 0.5, 1, False), (0.0, 0.03, 1000, False),
     (0.0, 0.03, 20, True), (0.0, 0.05, 1, False)],
)  # fmt: skip
def test_floats(quantum: float | None, moved: float, places: int, fine: bool) -> None:
    want = torch.linspace(-10, 10, 1000)
    got = want.clone()
    got[:places] += moved
    assert tied(got, want, quantum) is fine


@pytest.mark.parametrize(("moved", "places", "fine"), [(1, 5, True), (2, 1, False), (1, 50, False)])
def test_integers(moved: int, places: int, fine: bool) -> None:
    want = torch.arange(1000, dtype=torch.int32)
    got = want.clone()
    got[:places] += moved
    assert tied(got, want, 1.0) is fine and not tied(got, want, None) and not tied(got, want, 0.0)


@pytest.mark.parametrize(("moved", "places", "fine"), [(0.5, 1, True), (0.5, 2, False), (0.51, 1, False)])
def test_one_of_a_few_places_may_be_a_tie(moved: float, places: int, fine: bool) -> None:
    """A classifier of ten classes: one in a hundred would be none."""
    want = torch.linspace(-10, 10, 10)
    got = want.clone()
    got[:places] += moved
    assert tied(got, want, 0.5) is fine


def test_what_is_not_finite_is_no_tie() -> None:
    want = torch.ones(200)
    got = want.clone()
    got[3] = torch.nan
    assert not tied(got, want, 0.5) and not tied(want, got, 0.5)


def test_a_proof_lets_ties_through_and_nothing_else() -> None:
    want = torch.arange(1000, dtype=torch.float32) * 0.5

    def baseline(*_inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (want,)

    def off(by: float) -> Run:
        got = want.clone()
        got[7] += by
        return lambda *_inputs: (got,)

    def wide(noise: int = 0) -> Run:
        return baseline

    assert not prove(off(0.5), baseline, [()], 1e-6, wide, (0.5,)).difference
    assert prove(off(1.0), baseline, [()], 1e-6, wide, (0.5,)).difference
    assert prove(off(0.5), baseline, [()], 1e-6, wide, (None,)).difference
    assert prove(off(0.5), baseline, [()], 1e-6, wide).difference


def test_the_judge_is_float64_where_the_graph_casts_to_narrower_floats() -> None:
    """Files cast their integers to float32, and to float16 between their inputs and outputs; beside weights in float64 the product
    of both would raise, and a plan beyond the tolerance would have no judge."""
    graph = widened(parse("""graph g(%x: u8[2, 4]) {
      param %w: f32[3, 4] = "w"
      %f: f32[2, 4] = aten.to.dtype(%x, f32)
      %z: f32[2, 4] = aten.zeros_like.default(%f, dtype=f32)
      %h: f16[2, 4] = aten.to.dtype(%f, f16)
      %y: f32[2, 3] = aten.linear.default(%h, %w, None)
      return %y, %z, %h
    }"""))
    weights = {"w": torch.randn(3, 4, dtype=torch.float64)}
    x = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
    y, z, h = compile_tier0(graph, weights, Settings()).run(x)
    assert torch.equal(y, x.double() @ weights["w"].T) and z.dtype is torch.float64 and h.dtype is torch.float64
    assert {v.name: v.type.dtype.value for n in graph.nodes for v in n.outs if isinstance(v.type, TensorType)} == {
        "f": "f64", "z": "f64", "h": "f64", "y": "f64"}


def test_the_judge_is_made_once_and_its_neighbours_are_others() -> None:
    """A proof asks it for every call."""
    graph = parse("""graph g(%x: f32[2, 4]) {
      param %w: f32[3, 4] = "w"
      %y: f32[2, 3] = aten.linear.default(%x, %w, None)
      return %y
    }""")
    weights = {"w": torch.randn(3, 4)}
    x = torch.randn(2, 4, dtype=torch.float64)
    wide = in_float64(graph, weights)
    assert wide() is wide() and wide(1) is not wide()
    assert torch.equal(wide()(x)[0], x @ weights["w"].double().T)
    off = (wide(1)(x)[0] - wide()(x)[0]).abs().max() / wide()(x)[0].abs().max()
    assert 0 < float(off) < 10 * NOISE and not torch.equal(wide(1)(x)[0], wide(2)(x)[0])


class Steps:
    """Layers whose results are rounded to steps, each of which doubles and triples what rounds the other way before it."""

    def __init__(self, layers: int = 10, *, rounded: bool = True) -> None:
        rng = torch.Generator().manual_seed(5)
        self.weights = [torch.linalg.qr(torch.randn(128, 128, generator=rng, dtype=torch.float64))[0] for _ in range(layers)]
        self.x = torch.randn(32, 128, generator=rng)
        self.rounded = rounded

    def run(self, noise: int = 0, dtype: torch.dtype = torch.float64, bias: float = 0.0) -> Run:
        rng = torch.Generator().manual_seed(noise)
        off = NOISE if noise else 0.0
        weights = [(w * (1 + (torch.rand(w.shape, generator=rng, dtype=w.dtype) * 2 - 1) * off)).to(dtype) for w in self.weights]

        def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = x.to(dtype)
            for w in weights:
                x = torch.sin((x @ w) * 3 + bias)
                x = torch.round(x * 1e4) * 1e-4 if self.rounded else x
            return (x @ weights[0],)

        return call


def test_a_model_that_amplifies_its_last_digit_is_judged_by_its_neighbours() -> None:
    """A plan whose answers differ as the model's own do when weights change in the last digit is right; one that computes something
    else is not, nor one of a model that rounds nothing, nor one of a model whose neighbours answer anything.
    """
    steps = Steps()
    exact = steps.run()

    def baseline(x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # happens to be nearer to float64 than others are
        return tuple((o * (1 - 1e-4)).float() for o in exact(x.double()))

    def difference(plan: Run, wide: Any = steps.run, quantum: float | None = 0.0) -> str:
        return prove(plan, baseline, [[steps.x]], 1e-6, wide, (quantum,)).difference

    for plan in (steps.run(dtype=torch.float32), steps.run(101, torch.float32), steps.run(102, torch.float32)):
        assert not difference(plan)
        assert difference(plan, lambda noise=0: exact)  # the neighbours are the reason
        assert difference(plan, quantum=None)
        assert difference(plan, lambda noise=0: lambda x: tuple(o * (1.0 + noise) for o in exact(x)))
        assert rounds_otherwise(plan(steps.x), baseline(steps.x), [steps.x], 1e-6, steps.run, (0.0,))  # a capture's question
        assert not rounds_otherwise(plan(steps.x), baseline(steps.x), [steps.x], 1e-6, steps.run, (None,))
    for bias in (1e-2, 1e-3):
        wrong = steps.run(dtype=torch.float32, bias=bias)
        assert difference(wrong)
        assert not rounds_otherwise(wrong(steps.x), baseline(steps.x), [steps.x], 1e-6, steps.run, (0.0,))


def test_a_model_that_rounds_nothing_is_judged_by_its_neighbours_too() -> None:
    """Which of two right programs has the larger error at the one place that decides is chance: the baseline was luckier here. What
    computes something else is refused still, in one place too, and so is everything where right answers are too far apart.
    """
    steep = Steps(layers=7, rounded=False)

    def difference(model: Steps, plan: Run, wide: Any = None) -> str:
        def lucky(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(o.float() for o in model.run()(x.double()))

        return prove(plan, lucky, [[model.x]], 1e-6, wide or model.run, (None,)).difference

    for plan in (steep.run(dtype=torch.float32), steep.run(101, torch.float32)):
        assert not difference(steep, plan)
        assert difference(steep, plan, lambda noise=0: steep.run())  # the neighbours are the reason
    assert difference(steep, steep.run(dtype=torch.float32, bias=1e-5))
    one = steep.run(dtype=torch.float32)(steep.x)[0].clone()
    one[3, 5] += 1e-2
    assert difference(steep, lambda x: (one,))
    steeper = Steps(layers=14, rounded=False)
    assert difference(steeper, steeper.run(dtype=torch.float32))


def test_a_capture_whose_output_lies_on_a_half_is_taken() -> None:
    """The interpreter adds in another order than the captured graph: ten rounded classes, one of which may go either way."""
    onnx = pytest.importorskip("onnx")
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    import hotfuse
    from hotfuse import Settings
    from hotfuse.runtime import admission

    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]  # fmt: skip
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 10]) for n in "xy"]
    constants = [numpy_helper.from_array(np.float32(0.5), "s"), numpy_helper.from_array(np.uint8(128), "z")]
    made = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], constants),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # fmt: skip
    assert onnx.checker.check_model(made) is None
    x = np.linspace(-3, 3, 10, dtype=np.float32)[None]
    for apart, fine in ((0.5, True), (0.75, False)):
        session = hotfuse.InferenceSession(made.SerializeToString(), settings=Settings(capture="inline", tiers=0, record=False))
        real = admission.disagreement

        def moved(got: Any, want: Any, rtol: float, apart: float = apart, real: Any = real) -> str:
            """The model's own answer as another order of sums would have it."""
            if len(want) == 1 and not getattr(want[0], "moved", False):
                want[0][0, 3] += apart
                want[0].moved = True
            return real(got, want, rtol)

        admission.disagreement = moved
        try:
            session.run(None, {"x": x})
        finally:
            admission.disagreement = real
        assert bool(session.explain().to_dict()["sites"][0]["plans"]) is fine
