"""On a CUDA device: sessions with the CUDA provider, arrays in and out, values bound on the device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse as hf
from hotfuse import session as session_errors
from hotfuse.base.settings import Settings

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
SETTINGS = Settings(record=False, idle=False, cache="off")
LAYERS, WIDTH = 12, 64


def model() -> bytes:
    rng = np.random.default_rng(3)
    nodes, weights, last = [], [], "x"
    for i in range(LAYERS):
        weights.append(numpy_helper.from_array((rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32), f"w{i}"))
        nodes += [helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"]), helper.make_node("Relu", [f"h{i}"], [f"r{i}"])]
        last = f"r{i}"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(made)
    return made.SerializeToString()


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    y = x.astype(np.float64)
    for _ in range(LAYERS):
        y = np.maximum(y @ (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32).astype(np.float64), 0)
    return y


def close(got: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> bool:
    want = expected(x)
    return got.dtype == np.float32 and bool(np.abs(got - want).max() <= 3e-3 * np.abs(want).max())


def fresh(rows: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng().standard_normal((rows, WIDTH)).astype(np.float32)


def on_device(session: hf.InferenceSession) -> bool:
    plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"]]
    return any("cuda" in text for p in plans for text in p["inputs"])


def test_arrays_in_and_out_values_bound_on_the_device_and_where_it_runs() -> None:
    session = hf.InferenceSession(model(), providers=CUDA, settings=SETTINGS)
    assert session.get_providers() == CUDA and hf.get_device() == "GPU"
    assert session.get_provider_options()["CUDAExecutionProvider"]["device_id"] == "0"
    until = time.monotonic() + 40
    while time.monotonic() < until and not on_device(session):
        x = fresh()
        assert close(session.run(None, {"x": x})[0], x)
    assert on_device(session), str(session.explain(full=True))
    for rows in (8, 1, 3, 0, 17, 8):
        x = fresh(rows)
        got = session.run(["y"], {"x": x})[0]
        assert got.shape == (rows, WIDTH) and (not rows or close(got, x))
    x = fresh()
    held = hf.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
    assert held.device_name() == "cuda" and held.data_type() == "tensor(float)" and np.array_equal(held.numpy(), x)
    assert close(session.run(None, {"x": held})[0], x)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", held)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    (out,) = binding.get_outputs()
    assert out.device_name() == "cuda" and close(out.numpy(), x) and close(binding.copy_outputs_to_cpu()[0], x)
    target = hf.OrtValue.ortvalue_from_shape_and_type([8, WIDTH], np.float32, "cuda", 0)
    memory = torch.from_numpy(x).cuda()
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, [8, WIDTH], memory.data_ptr())
    binding.bind_ortvalue_output("y", target)
    for _ in range(3):
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        assert close(target.numpy(), x)
    binding.bind_output("y", "cuda", 0, np.float32, [8, WIDTH], memory.data_ptr())  # over its own input, as programs with loops do
    session.run_with_iobinding(binding)
    assert close(memory.cpu().numpy(), x)
    session.close()


def test_errors_and_the_host_given_what_is_on_a_device() -> None:
    with pytest.raises(session_errors.InvalidArgument, match="there is no CUDA device 99"):
        hf.InferenceSession(model(), providers=[("CUDAExecutionProvider", {"device_id": 99})])
    session = hf.InferenceSession(model(), providers=["CPUExecutionProvider", "CUDAExecutionProvider"], settings=SETTINGS)
    assert session.get_providers() == ["CPUExecutionProvider"]
    x = fresh()
    assert close(session.run(None, {"x": hf.OrtValue.ortvalue_from_numpy(x, "cuda", 0)})[0], x)
    session.set_providers(CUDA)
    assert session.get_providers() == CUDA and close(session.run(None, {"x": x})[0], x)
    session.close()
