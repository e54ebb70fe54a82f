"""Weights that nobody can change are packed and folded once for all plans of a process; of others every plan has its own."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse.base.fixed_weights import fix, is_fixed, made_of
from hotfuse.ir.types import DType
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.run.constants import Constants
from hotfuse.ops.folded_conv import FoldedConv, Window, affine

SPEC = PackSpec((PackSource("w", WeightOrder.NK, 24),), 16, 8, DType.F32)


def _memory(plan: Constants) -> int:
    return int(plan.pack(SPEC).ctypes.data)


def test_plans_of_fixed_weights_share_what_they_pack() -> None:
    w = torch.randn(24, 16)
    fix([w, "no tensor"])
    one, other = Constants({"w": w}), Constants({"w": w})
    assert _memory(one) == _memory(other)
    assert one.bytes == other.bytes == SPEC.bytes, "each says what it holds"
    other_order = PackSpec(SPEC.sources, 16, 4, DType.F32)
    assert int(one.pack(other_order).ctypes.data) != _memory(one)


def test_plans_of_weights_that_may_change_have_their_own() -> None:
    """A weight that was written to keeps its address: the plan made afterwards has to see the new numbers."""
    w = torch.randn(24, 16)
    one = Constants({"w": w})
    before = one.pack(SPEC).copy()
    with torch.no_grad():
        w.mul_(2)
    assert np.array_equal(Constants({"w": w}).pack(SPEC), 2 * before)
    assert np.array_equal(one.pack(SPEC), before)


def test_what_nobody_has_any_more_is_made_again() -> None:
    w = torch.randn(4)
    fix([w])
    made: list[int] = []

    def make() -> torch.Tensor:
        made.append(1)
        return w + len(made)

    kept = made_of([w], "sum", make)
    assert made_of([w], "sum", make) is kept and len(made) == 1
    del kept
    gc.collect()
    made_of([w], "sum", make)
    assert len(made) == 2


def test_a_name_is_the_tensors_own() -> None:
    """Ids are used again; a tensor that was fixed says nothing of the next one at its place, or of a view of it."""
    w = torch.randn(8)
    fix([w])
    assert is_fixed(w) and not is_fixed(w.detach()) and not is_fixed(torch.randn(8))
    at = id(w)
    del w
    others = [torch.randn(8) for _ in range(100)]
    assert not any(is_fixed(t) for t in others), [id(t) == at for t in others]


def test_folded_convolutions_share_weights_where_they_fold_the_same() -> None:
    w, b = torch.randn(8, 4, 3, 3), torch.randn(8)
    fix([w, b])
    window = Window((1, 1), (1, 1), (1, 1), 1)
    scales = torch.rand(8) + 0.5
    x = torch.randn(2, 4, 6, 5)

    def conv(scale: torch.Tensor) -> FoldedConv:
        return FoldedConv(w, b, window, affine(scale), "none", affine(), lambda y: y)

    one, same, other = conv(scales), conv(scales.clone()), conv(scales + 1)
    kept = [conv.steps[0][1][1].data_ptr() for conv in (one, same, other)]
    assert kept[0] == kept[1] != kept[2]
    plain = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), padding=1)
    for folded, scale in ((one, scales), (same, scales), (other, scales + 1)):
        torch.testing.assert_close(folded(x).double(), plain * scale.double().reshape(1, -1, 1, 1), rtol=1e-5, atol=1e-5)


def test_a_session_says_that_its_weights_are_fixed() -> None:
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    with hotfuse.InferenceSession(model.SerializeToString()) as session:
        weights = list(session._module.weights.values())
        assert weights and all(is_fixed(w) for w in weights)
