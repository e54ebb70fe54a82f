"""A layer of bytes with constant weights: widened once, and one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse import Settings
from hotfuse.compile.unit import units
from tests.races import kernels_win, new_plans_win

INPUTS, HIDDEN = 96, 160
TORCH_ORDER = (0, 2, 3, 1)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    new_plans_win(monkeypatch)
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    with torch.no_grad():
        yield


def layer(rng: np.random.Generator, directions: int, per_channel: bool) -> tuple[bytes, torch.nn.LSTM]:
    """A file, and the same layer in float64."""
    def quantized(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q = rng.integers(-127, 128, (directions, n, 4 * HIDDEN)).astype(np.int8)
        shape = (directions, 4 * HIDDEN) if per_channel else (directions,)
        return q, rng.uniform(0.0005, 0.002, shape).astype(np.float32), np.zeros(shape, np.int8)

    (w, ws, wz), (r, rs, rz) = quantized(INPUTS), quantized(HIDDEN)
    b = rng.standard_normal((directions, 8 * HIDDEN)).astype(np.float32) * 0.1
    consts = {"w": w, "r": r, "b": b, "ws": ws, "wz": wz, "rs": rs, "rz": rz}
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "b", "", "", "", "", "ws", "wz", "rs", "rz"], ["y", "h", "c"],
        domain="com.microsoft", hidden_size=HIDDEN, direction="bidirectional" if directions == 2 else "forward",
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", 2, INPUTS])
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "yhc"]
    made = helper.make_graph([node], "g", [x], outs, [numpy_helper.from_array(a, n) for n, a in consts.items()])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(made, opset_imports=opsets, ir_version=9)

    reference = torch.nn.LSTM(INPUTS, HIDDEN, bidirectional=directions == 2).double()
    for d in range(directions):
        def ordered(a: np.ndarray) -> torch.Tensor:
            gates = torch.from_numpy(a).double().reshape(4, HIDDEN, -1)[list(TORCH_ORDER)]
            return gates.reshape(4 * HIDDEN, -1)

        suffix = "_l0_reverse" if d else "_l0"
        for name, q, scale in (("weight_ih", w, ws), ("weight_hh", r, rs)):
            getattr(reference, name + suffix).copy_(ordered((q[d] * scale[d].astype(np.float64)).T.copy()))
        getattr(reference, "bias_ih" + suffix).copy_(ordered(b[d][: 4 * HIDDEN])[:, 0])
        getattr(reference, "bias_hh" + suffix).copy_(ordered(b[d][4 * HIDDEN :])[:, 0])
    return model.SerializeToString(), reference


@pytest.mark.parametrize(("directions", "per_channel"), [(1, False), (2, True)])
def test_a_dynamic_lstm_is_one_kernel_on_weights_widened_once(directions: int, per_channel: bool) -> None:
    rng = np.random.default_rng(directions)
    model, reference = layer(rng, directions, per_channel)
    with hotfuse.InferenceSession(model, settings=Settings(capture="inline", hot_calls=1)) as session:
        for steps in (7, 7, 7, 7, 7):
            x = rng.standard_normal((steps, 2, INPUTS)).astype(np.float32)
            y, h, c = session.run(None, {"x": x})
            want, (want_h, want_c) = reference(torch.from_numpy(x).double())
            got = torch.from_numpy(y).transpose(1, 2).reshape(want.shape)
            for a, ref in ((got, want), (torch.from_numpy(h), want_h), (torch.from_numpy(c), want_c)):
                torch.testing.assert_close(a.double(), ref, rtol=1e-4, atol=1e-5)
        found = session.explain().to_dict()
        plans = [p for s in found["sites"] for p in s["plans"] if p["tier"] == 1]
        parts = [part for p in plans for part in p["partitions"]]
        assert parts and any(part["backend"] == "llvm" for part in parts), plans
        assert session.stats()["calls_per_tier"]["1"] > 0
