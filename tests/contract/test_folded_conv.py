"""Convolutions of ONNX files together with what follows them: the same numbers as step by step, in fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.constant_folding import Bounded
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load

Nodes = list[onnx.NodeProto]
CHANNELS = 6


def _module(nodes: Nodes, consts: dict[str, Any], outputs: tuple[str, ...] = ("y",), pack: bool = True) -> OnnxModule:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, ["n", 4, "h", "w"])],
        [info(o, TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in consts.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return OnnxModule(load(model.SerializeToString()), pack=pack)


def _node(op: str, ins: str, out: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, ins.split(), [out], **attrs)


def _constants() -> dict[str, Any]:
    return {
        "w": np.random.randn(CHANNELS, 4, 3, 3), "b": np.random.randn(CHANNELS), "k": np.random.randn(1, CHANNELS, 1, 1),
        "c": np.random.randn(1), "d": np.random.randn(1), "g": np.random.randn(CHANNELS), "v": np.random.rand(CHANNELS) + 0.5,
        "three": [3.0], "six": [6.0], "low": np.float32(0.0), "high": np.float32(6.0),
    }  # fmt: skip


def _hardswish(x: str, y: str) -> Nodes:
    return [
        _node("Add", f"{x} three", "plus"), _node("Clip", "plus low high", "clip"), _node("Mul", f"{x} clip", "times"),
        _node("Div", "times six", y),
    ]  # fmt: skip


CONV = _node("Conv", "x w b", "a", pads=[1, 1, 1, 1])
CASES: dict[str, tuple[Callable[[], Nodes], int]] = {
    "alone": (lambda: [_node("Conv", "x w", "y", strides=[2, 1], dilations=[1, 2])], 2),
    "shift": (lambda: [CONV, _node("Add", "a k", "y")], 2),
    "scales and shifts": (lambda: [CONV, _node("Mul", "k a", "m"), _node("Sub", "m c", "s"), _node("Div", "s d", "y")], 2),
    "norm and relu": (lambda: [CONV, _node("BatchNormalization", "a g b b v", "n"), _node("Relu", "n", "y")], 2),
    "hardswish": (lambda: [CONV, *_hardswish("a", "y")], 2),
    "affine around hardswish": (
        lambda: [CONV, _node("Mul", "c a", "m"), *_hardswish("m", "h"), _node("Mul", "d h", "s"), _node("Add", "s k", "y")], 2,
    ),
    "scale by channel behind relu stays": (lambda: [CONV, _node("Relu", "a", "r"), _node("Mul", "r k", "y")], 3),
    "from the left stays": (lambda: [CONV, _node("Sub", "c a", "s"), _node("Div", "c s", "y")], 4),
    "read twice": (lambda: [CONV, _node("Add", "a c", "s"), _node("Mul", "s a", "y")], 4),
    "then in rows": (lambda: [CONV, _node("Relu", "a", "r"), _node("Flatten", "r", "y")], 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 4, 5, 5), (0, 4, 7, 7), (3, 4, 1, 6)], ids=str)
def test_the_same_numbers_as_step_by_step(name: str, shape: tuple[int, ...]) -> None:
    nodes, consts, x = CASES[name][0](), _constants(), torch.randn(shape)
    plain, folded = _module(nodes, consts, pack=False), _module(nodes, consts)
    if name == "alone" and shape[2] < 3:  # the window is larger than the image
        for module in (plain, folded):
            with pytest.raises(ModelError, match="Kernel size can't be greater than actual input size"):
                module(x)
        return
    (want,), (got,) = plain(x), folded(x)
    assert got.shape == want.shape and got.is_contiguous() and got.dtype == want.dtype
    bound = 1e-4 * (1.0 + want.abs().max()) if want.numel() else 0.0
    if name == "from the left stays":  # a quotient has no bound of its own: these steps run as they stand
        bound = 1e-3 * (1.0 + want.abs().max()) if want.numel() else 0.0
    assert bool(((got - want).abs() <= bound).all())


@pytest.mark.parametrize("name", CASES)
def test_what_follows_is_part_of_the_convolution(name: str) -> None:
    """Counts calls: the mechanism, without which every step is one."""
    folded, plain = _module(CASES[name][0](), _constants()), _module(CASES[name][0](), _constants(), pack=False)
    calls = folded.program.ready().calls
    assert any(isinstance(call[0], Bounded) for call in calls)
    assert len(calls) == CASES[name][1]
    assert not any(isinstance(call[0], Bounded) for call in plain.program.ready().calls)
    assert folded.prepared_bytes > plain.prepared_bytes == 0


def test_what_is_no_number_stays_so() -> None:
    x = torch.randn(3, 4, 6, 6)
    x[0, 0, 2, 2], x[1, 1, 2, 2], x[2, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    for name in ("norm and relu", "hardswish", "affine around hardswish"):
        consts = _constants()
        (want,) = _module(CASES[name][0](), consts, pack=False)(x)
        (got,) = _module(CASES[name][0](), consts)(x)
        assert torch.equal(want.isnan(), got.isnan()), name
        assert torch.equal(want.isinf(), got.isinf()), name


def test_an_intermediate_that_is_an_output_is_kept() -> None:
    nodes, consts, x = [CONV, _node("Relu", "a", "y")], _constants(), torch.randn(1, 4, 6, 6)
    want, got = _module(nodes, consts, ("a", "y"), pack=False)(x), _module(nodes, consts, ("a", "y"))(x)
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
        assert g.is_contiguous()
    assert bool((got[0] < 0).any())  # relu works in place, but not here


def test_errors_and_other_types_are_as_before() -> None:
    module = _module([CONV, _node("Relu", "a", "y")], _constants())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(1, 4, 6, 6))[0].dtype == torch.bfloat16
    from hotfuse.base.errors import ModelError

    for wrong in (torch.randn(1, 5, 6, 6), torch.randn(4, 6, 6), torch.randn(1, 4, 6, 6).double()):
        with pytest.raises(ModelError, match="Conv"):
            module(wrong)


def test_the_input_is_left_alone() -> None:
    """Also where it lies with channels innermost, and the convolution comes first."""
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    before = x.clone()
    module = _module([CONV, *_hardswish("a", "y")], _constants())
    first, second = module(x)[0], module(x)[0]
    assert torch.equal(x, before) and torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(("group", "kernel", "stride", "dilation"), [(1, 1, 1, 1), (1, 3, 2, 1), (4, 5, 1, 2), (2, 3, 1, 1)])
def test_signals_are_images_of_one_row(group: int, kernel: int, stride: int, dilation: int) -> None:
    info = helper.make_tensor_value_info
    reach = (kernel - 1) * dilation // 2
    shapes = {"w": (4, 4 // group, kernel), "b": (4,), "k": (1, 4, 1), "n": (4, 1, 1), "u": (4, 4, 1)}
    nodes = [
        _node("Conv", "x w b", "a", group=group, strides=[stride], dilations=[dilation], pads=[reach, reach]),
        _node("Mul", "a k", "m"), _node("Relu", "m", "r"), _node("Conv", "r u", "c"),
        _node("Add", "c n", "y"),  # a number for each of four signals, though there are as many channels
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, [4, 4, "l"])], [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.random.randn(*shape).astype(np.float32), k) for k, shape in shapes.items()],
    )  # fmt: skip
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    fast, plain = OnnxModule(load(data)), OnnxModule(load(data), pack=False)
    for x in (torch.randn(4, 4, 17), torch.randn(4, 17, 4).transpose(1, 2)):
        (got,), (want,) = fast.forward(x), plain.forward(x)
        assert got.shape == want.shape and got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(c[0], Bounded) for c in fast.program.ready().calls) == 2
    assert "Add" in [c[-1].op for c in fast.program.ready().calls] and "Mul" not in [c[-1].op for c in fast.program.ready().calls]
