"""Small models for the session and fault tests: every kind of thing a model file can hold, in a few kilobytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

node = helper.make_node
value = helper.make_tensor_value_info
F, I64, B, S = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


def raw(name: str, array: Any) -> TensorProto:
    """A tensor whose data is raw bytes."""
    return numpy_helper.from_array(np.asarray(array), name)


def typed(name: str, array: Any) -> TensorProto:
    """A tensor whose data is in the field of its type."""
    a = np.asarray(array)
    return helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.reshape(-1).tolist())


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Iterable[TensorProto] = (),
    *,
    opset: int = 17,
    ir: int = 9,
    **meta: Any,
) -> ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir, **meta)


def _branch(name: str, op: str, const: TensorProto) -> GraphProto:
    out = f"{name}_out"
    return helper.make_graph(
        [node(op, ["features", const.name], [out], name=name)], name, [], [value(out, F, None)], [const]
    )


def _loop_body() -> GraphProto:
    return helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Mul", ["state", "rate"], ["next"])],
        "body",
        [value("i", I64, []), value("go", B, []), value("state", F, [None, 5])],
        [value("go_on", B, []), value("next", F, [None, 5])],
    )


def small() -> ModelProto:
    """Convolution, normalizations, If, Loop, Reshape, MatMul; constants raw, typed, as a node and in branches."""
    rng = np.random.default_rng(7)

    def noise(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.4).astype(np.float32)

    nodes = [
        node("Conv", ["x", "conv_w", "conv_b"], ["conv"], name="conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["conv", "bn_s", "bn_b", "bn_m", "bn_v"], ["normed"], name="bn", epsilon=1e-4),
        node("Relu", ["normed"], ["features"], name="relu"),
        node("ReduceMean", ["x"], ["mean"], name="mean", keepdims=0),
        node("Constant", [], ["zero"], name="zero", value=raw("", np.float32(0))),
        node("Greater", ["mean", "zero"], ["positive"], name="positive"),
        node(
            "If",
            ["positive"],
            ["chosen"],
            name="choose",
            then_branch=_branch("then", "Mul", raw("two", np.float32(2))),
            else_branch=_branch("else", "Add", typed("one", np.float32([[[1]], [[2]], [[0]], [[0.5]]]))),
        ),
        node("Reshape", ["chosen", "flat"], ["rows"], name="reshape"),
        node("MatMul", ["rows", "proj"], ["mixed"], name="matmul"),
        node("LayerNormalization", ["mixed", "ln_s", "ln_b"], ["layer"], name="ln", axis=-1, epsilon=1e-5),
        node("Loop", ["trips", "", "layer"], ["looped"], name="loop", body=_loop_body()),
        node("Softmax", ["looped"], ["y"], name="softmax", axis=-1),
        node("ArgMax", ["y"], ["best"], name="argmax", axis=1, keepdims=0),
    ]
    constants = [
        raw("conv_w", noise(4, 3, 3, 3)),
        typed("conv_b", noise(4)),
        typed("bn_s", 1 + noise(4)),
        raw("bn_b", noise(4)),
        typed("bn_m", noise(4)),
        raw("bn_v", np.abs(noise(4)) + 0.5),
        typed("flat", np.int64([-1, 16])),
        raw("proj", noise(16, 5)),
        raw("ln_s", 1 + noise(5)),
        typed("ln_b", noise(5)),
        typed("trips", np.int64(3)),
        raw("rate", np.float32([0.9])),
    ]
    made = model(
        nodes,
        [value("x", F, ["N", 3, 4, 4])],
        [value("y", F, [None, 5]), value("best", I64, [None])],
        constants,
        producer_name="hotfuse-tests",
        doc_string="small",
    )
    onnx.checker.check_model(made)
    return made


def small_feed(n: int = 2) -> dict[str, Any]:
    """Inputs for `small`."""
    return {"x": np.random.default_rng(3).standard_normal((n, 3, 4, 4)).astype(np.float32)}


def save_external(folder: Path) -> Path:
    """`small` with its larger constants in a file beside it."""
    made = small()
    path = folder / "small.onnx"
    onnx.save_model(made, path, save_as_external_data=True, location="small.bin", size_threshold=64)
    return path


def loop(trips: int, opset: int = 17) -> ModelProto:
    """A counted loop that carries one number."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Add", ["state", "step"], ["next"])],
        "body",
        [value("i", I64, []), value("go", B, []), value("state", F, [])],
        [value("go_on", B, []), value("next", F, [])],
    )
    return model(
        [node("Loop", ["trips", "", "x"], ["y"], body=body)],
        [value("x", F, [])],
        [value("y", F, [])],
        [raw("trips", np.int64(trips)), raw("step", np.float32(1))],
        opset=opset,
    )
