"""Providers, and sessions that are placed elsewhere: with the host as the device, calls go the way that they go on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse as hf
from hotfuse import session as session_errors
from hotfuse.base.events import Action, EventLog
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.ir.placed import placed
from hotfuse.ir.text import parse, show
from hotfuse.session.serving import DeviceModel, engine_for

SETTINGS = Settings(record=False, idle=False, cache="off", capture="inline", tiers=0)
NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")


def model(op: str = "Relu") -> bytes:
    rng = np.random.default_rng(3)
    w = numpy_helper.from_array(rng.standard_normal((4, 6)).astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Shape", ["h"], ["s"]),
             helper.make_node("Reshape", ["h", "s"], ["r"]), helper.make_node(op, ["r"], ["y"])]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(made)
    return made.SerializeToString()


@NO_DEVICE
def test_without_a_device_the_host_serves_and_says_so() -> None:
    with pytest.warns(UserWarning, match="CUDAExecutionProvider' is not in available provider names"):
        session = hf.InferenceSession(model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"] and session.get_provider_options() == {"CPUExecutionProvider": {}}
    assert hf.get_available_providers() == ["CPUExecutionProvider"] and hf.get_device() == "CPU"
    x = np.ones((2, 4), np.float32)
    assert session.run(None, {"x": x})[0].shape == (2, 6)
    with pytest.raises(session_errors.NotImplemented, match="torch sees 0 CUDA devices"):
        hf.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
    with pytest.raises(session_errors.NotImplemented, match="neither the host nor a CUDA device"):
        hf.OrtValue.ortvalue_from_numpy(x, "dml")
    binding = session.io_binding()
    with pytest.raises(session_errors.NotImplemented, match="CUDA"):
        binding.bind_output("y", "cuda")
    session.close()


def served(data: bytes) -> tuple[Any, DeviceModel, EventLog]:
    log = EventLog(64)
    engine, model = engine_for(OnnxModule(load(data)), SETTINGS, log, torch.device("cpu"))
    assert isinstance(model, DeviceModel)
    return engine, model, log


@torch.no_grad()
def test_a_graph_with_weights_of_its_own_on_the_device_answers() -> None:
    engine, _, _ = served(model())
    weights = OnnxModule(load(model())).weights.values()
    for rows in (3, 5, 6, 7, 1, 0):
        x = torch.randn(rows, 4)
        want = torch.relu(x @ next(w for w in weights if isinstance(w, torch.Tensor) and w.shape == (4, 6)))
        assert torch.allclose(engine.serve((x,), {})[0], want)
    assert engine.counts()["graph_calls"] > 0
    entry = next(e for s in engine.sites.values() for e in s.entries)
    assert all(p.key in entry.weights for p in entry.baseline.graph.params)
    engine.close()


@torch.no_grad()
def test_what_the_device_refuses_is_told_once_and_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model_, log = served(model())
    monkeypatch.setattr("hotfuse.session.serving.MAX_OF_FREE", 0.0)  # a device whose memory is full
    x = torch.randn(3, 4)
    for _ in range(6):  # memory may be free again later: it is tried three times
        assert engine.serve((x,), {})[0].shape == (3, 6)
    assert "free" in model_.off
    assert len([d for d in log.decisions if d.action is Action.FALLBACK]) == 1
    engine.close()


def test_placed_graphs_have_every_tensor_there_and_print_and_parse() -> None:
    text = """graph g(%x: f32[s0, 4]) where (2 <= s0) {
  param %w: f32[4] = "w"
  %a: f32[s0, 4] = aten.mul.Tensor(%x, %w)
  %z: f32[4] = aten.zeros.default([4], device=$device(cpu), pin_memory=False)
  %b: f32[s0, 4] = aten.add.Tensor(%a, %z)
  return %b
}"""
    graph = parse(text)
    there = placed(graph, "cuda:0")
    assert parse(show(there)) == there and "cpu" not in show(there)
    assert placed(there, "cpu") == graph
