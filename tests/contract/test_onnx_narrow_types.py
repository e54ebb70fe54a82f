"""Element types that are narrow: weights of four bits, images of 16, numbers that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch.utils._python_dispatch import TorchDispatchMode

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.runtime.serve.effects import same_bits

INLINE = Settings(capture="inline", tiers=0, record=False)


def built(nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto], dtype: int = TensorProto.FLOAT) -> bytes:
    """A model from x to y."""
    port = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [port("x", dtype, None)], [port("y", dtype, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def four_bits(code: int, low: int) -> tuple[onnx.TensorProto, np.ndarray[Any, Any]]:
    """Weights, and the numbers that they are."""
    numbers = np.arange(8 * 6).reshape(8, 6) % 16 + low
    return helper.make_tensor("w", code, [8, 6], numbers.flatten().tolist()), numbers


@pytest.mark.parametrize(("code", "low", "dtype"), [(TensorProto.INT4, -8, torch.int8), (TensorProto.UINT4, 0, torch.uint8)])
def test_weights_of_four_bits_that_are_dequantized_are_bytes(code: int, low: int, dtype: torch.dtype) -> None:
    weight, numbers = four_bits(code, low)
    scale = np.random.default_rng(0).random((2, 6), dtype=np.float32)
    widens = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=4)
    nodes = [widens, helper.make_node("MatMul", ["x", "d"], ["y"])]
    data = built(nodes, [weight, numpy_helper.from_array(scale, "s")])
    held = load(data).graph.initializers["w"]
    assert isinstance(held, torch.Tensor) and held.dtype is dtype
    x = np.random.default_rng(1).random((3, 8), dtype=np.float32)
    session = hotfuse.InferenceSession(data, settings=INLINE)
    for _ in range(5):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ (numbers * scale.repeat(4, 0)), rtol=1e-5)


def test_what_else_reads_them_has_their_type_and_is_counted() -> None:
    weight, numbers = four_bits(TensorProto.INT4, -8)
    nodes = [helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "c"], ["y"])]
    data = built(nodes, [weight])
    assert isinstance(load(data).graph.initializers["w"], np.ndarray)
    session = hotfuse.InferenceSession(data, settings=INLINE)
    for _ in range(5):
        assert np.array_equal(session.run(None, {"x": np.zeros((8, 6), np.float32)})[0], numbers)
    assert session.stats()["memory"]["weights"] == numbers.size * 4, "as floats, which the cast was folded into"


class _Convolved(TorchDispatchMode):
    """Element types that convolutions are run on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_convolutions_of_float16_are_computed_in_float32(op: str) -> None:
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((8, 8, 3, 3)).astype(np.float16), rng.standard_normal(8).astype(np.float16)
    constants = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    data = built([helper.make_node(op, ["x", "w", "b"], ["y"])], constants, TensorProto.FLOAT16)
    x = torch.randn(2, 8, 9, 9, dtype=torch.float16)
    module = OnnxModule(load(data))
    with _Convolved() as mode:
        (y,) = module(x)
    assert mode.seen == {torch.float32} and y.dtype is torch.float16
    fn = F.conv2d if op == "Conv" else F.conv_transpose2d
    want = fn(x.double(), torch.from_numpy(w).double(), torch.from_numpy(b).double())
    assert float((y.double() - want).abs().max()) <= float(want.abs().max()) * 2**-10


def test_what_is_no_number_exceeds_no_threshold() -> None:
    module = OnnxModule(load(built([helper.make_node("ThresholdedRelu", ["x"], ["y"], alpha=1.0)], [])))
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 1.5])
    assert module(x)[0].tolist() == [0.0, float("inf"), 0.0, 0.0, 1.5]


def test_empty_arrays_with_strides_of_zero_hold_the_same() -> None:
    empty = torch.from_numpy(np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (0,), (0,)))
    assert same_bits(empty, empty.clone())


def test_a_session_serves_batches_of_nothing() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    session = hotfuse.InferenceSession(built(nodes, [], TensorProto.INT64), settings=INLINE)
    nothing = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (0,), (0,))
    for n in (3, 0, 0, 2, 0):
        x = np.arange(n) if n else nothing
        assert session.run(None, {"x": x})[0].tolist() == (-x).tolist()
