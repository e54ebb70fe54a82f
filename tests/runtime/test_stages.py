"""What serves, as values: plans, their kernels, and each kernel's code, cost and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import hotfuse
from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.tile.text import parse
from tests.races import every_kernel_wins

INLINE = Settings(capture="inline", hot_calls=1, record=False)


@pytest.fixture(autouse=True)
def kernels_are_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    every_kernel_wins(monkeypatch)
    with torch.no_grad():
        yield


def test_a_users_way_from_a_model_to_machine_code() -> None:
    fast = hotfuse.jit(nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval(), settings=INLINE)
    assert fast.plans() == ()
    for _ in range(6):
        fast(torch.randn(5, 16))
    (plan,) = fast.plans()
    assert plan.tier == 1 and plan.calls > 0 and plan.sizes == {} and "linear" in plan.text()
    kernel = plan.kernels[0]
    assert parse(kernel.text("tile")).name == kernel.name == parse(kernel.text()).name
    assert "define" in kernel.text("llvm") and kernel.name in kernel.text("asm")
    assert kernel.measured is not None and 0 < kernel.measured.kernel_us < kernel.measured.library_us
    assert kernel.cost.flops is not None and kernel.cost.flops >= 2 * 5 * 16 * 24 and kernel.cost.bytes
    with pytest.raises(InputError, match="no stage 'wasm'"):
        kernel.text("wasm")
    fast(torch.randn(1, 16))
    fast.close()
    assert fast.plans() == () and "define" in kernel.text("llvm"), "a value stays what it was"


def test_explain_has_the_same_kernels() -> None:
    fast = hotfuse.jit(nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval(), settings=INLINE)
    for _ in range(6):
        fast(torch.randn(5, 16))
    (shown,) = fast.explain().to_dict()["sites"][0]["plans"]
    assert shown["kernels"] == [k.to_dict() for k in fast.plans()[0].kernels] != []


def test_sessions_have_them_too(tmp_path: Path) -> None:
    w = np.ones((8, 8), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [onnx.numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    session = hotfuse.InferenceSession(str(tmp_path / "m.onnx"), settings=INLINE)
    for _ in range(6):
        session.run(None, {"x": np.ones((3, 8), np.float32)})
    (plan,) = session.plans()
    assert plan.tier == 1 and [k.name for k in plan.kernels]


def test_graphs_of_torch_compile_have_them_too() -> None:
    options = {"capture": "inline", "hot_calls": 1, "record": False}
    fast = torch.compile(nn.Sequential(nn.Linear(16, 24), nn.GELU()).eval(), backend="hotfuse", options=options)
    for _ in range(6):
        fast(torch.randn(5, 16))
    (plan,) = hotfuse.compiled_plans()
    assert plan.tier == 1 and "linear" in plan.text()
    kernel = plan.kernels[0]
    assert parse(kernel.text("tile")).name == kernel.name and "define" in kernel.text("llvm")
    assert kernel.measured is not None and kernel.cost.flops is not None
