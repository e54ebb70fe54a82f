"""Tier 0 with constant weights: convolutions of a captured graph together with what follows them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse.backends.library import LibraryBackend
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify

SHAPE = "f32[n, 6, h, w]"
CONV = f"%a: {SHAPE} = aten.conv2d.default(%x, %w, %b, [1, 1], [1, 1])"
CASES = {
    "norm and relu": (
        f"%m: {SHAPE} = aten.batch_norm.default(%a, %g, %b, %b, %v, False, 0.1, 1e-05, True)\n"
        f"  %y: {SHAPE} = aten.relu.default(%m)", 2,
    ),
    "hardswish with scales around": (
        f"%m: {SHAPE} = aten.mul.Tensor(%c, %a)\n  %p: {SHAPE} = aten.add.Tensor(%m, %three)\n"
        f"  %q: {SHAPE} = aten.clamp.default(%p, 0.0, 6.0)\n  %t: {SHAPE} = aten.mul.Tensor(%m, %q)\n"
        f"  %d: {SHAPE} = aten.div.Tensor(%t, 6.0)\n  %y: {SHAPE} = aten.add.Tensor(%d, %k)", 2,
    ),
    "read by a view": (f"%r: {SHAPE} = aten.relu.default(%a)\n  %y: f32[n, 6, 63] = aten.view.default(%r, [-1, 6, 63])", 3),
    "kept for another": (f"%r: {SHAPE} = aten.relu.default(%a)\n  %y: {SHAPE} = aten.add.Tensor(%r, %a)", 4),
    "number other than three": (
        f"%p: {SHAPE} = aten.add.Tensor(%a, 2.0)\n  %q: {SHAPE} = aten.clamp.default(%p, 0.0, 6.0)\n"
        f"  %y: {SHAPE} = aten.mul.Tensor(%a, %q)", 5,
    ),
}  # fmt: skip


def _weights() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(6, 4, 3, 3), "b": torch.randn(6), "g": torch.randn(6), "v": torch.rand(6) + 0.5, "c": torch.randn(1),
        "k": torch.randn(1, 6, 1, 1), "three": torch.tensor([3.0]),
    }  # fmt: skip


def _text(lines: str) -> str:
    shapes = {k: f"f32[{', '.join(map(str, v.shape))}]" for k, v in _weights().items()}
    params = "".join(f'  param %{k}: {t} = "{k}"\n' for k, t in shapes.items() if f"%{k}" in CONV + lines)
    return f"graph g(%x: f32[n, 4, h, w]) {{\n{params}  {CONV}\n  {lines}\n  return %y\n}}\n"


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_in_fewer_calls(name: str) -> None:
    lines, calls = CASES[name]
    graph, weights = parse(_text(lines)), _weights()
    plain, folded = LibraryBackend().compile(graph, weights), LibraryBackend(constant=True).compile(graph, weights)
    for x in (torch.randn(2, 4, 7, 9), torch.randn(1, 4, 7, 9).contiguous(memory_format=torch.channels_last)):
        (want,), (got,) = plain.run(x), folded.run(x)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want.contiguous(), rtol=1e-4, atol=1e-4)
    assert folded.source.replace("# hotfuse.region", "").count("# ") == calls
    assert "hotfuse.folded_conv" in folded.source and "hotfuse.folded_conv" not in plain.source
    assert folded.graph is graph  # what is analyzed and compiled further is what was captured
    assert folded.bytes > 0 == plain.bytes


def test_weights_that_can_change_are_left_alone() -> None:
    graph = verify(parse(_text(CASES["norm and relu"][0])))
    weights, x = _weights(), torch.randn(1, 4, 5, 5)
    run = LibraryBackend().compile(graph, weights).run
    before = run(x)[0]
    weights["w"].mul_(2.0)
    assert not torch.equal(run(x)[0], before)


def _model() -> bytes:
    consts = {"w": np.random.randn(6, 4, 3, 3), "c": np.random.randn(1), "k": np.random.randn(1, 6, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]), helper.make_node("Mul", ["a", "c"], ["m"]),
        helper.make_node("Add", ["m", "k"], ["s"]), helper.make_node("Relu", ["s"], ["y"]),
    ]  # fmt: skip
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, ["n", 4, "h", "v"])], [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in consts.items()],
    )  # fmt: skip
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return model.SerializeToString()


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_a_session_counts_the_memory(objective: str) -> None:
    """Where memory is what counts there are no copies."""
    data, x = _model(), np.random.randn(2, 4, 9, 8).astype(np.float32)
    settings = hotfuse.Settings(tiers=0, objective=objective)  # pyright: ignore[reportArgumentType]
    with hotfuse.InferenceSession(data, settings=settings) as session:
        (first,) = session.run(None, {"x": x})
        assert session.wait(120)
        (second,) = session.run(None, {"x": x})
        stats = session.stats()
    assert first.flags.c_contiguous and second.flags.c_contiguous
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
    assert stats["calls_per_tier"]["0"] == 1
    copies = stats["memory"]["prepared"], stats["memory"]["packed"]
    assert copies == (0, 0) if objective == "memory" else min(copies) > 0
