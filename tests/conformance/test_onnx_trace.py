"""Traced graphs serve other sizes than they were traced with, and control flow that only a run decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from hotfuse.base.errors import InternalError
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.leaf import ControlLeaf, Leaf
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.leaves import leaf_name, parse_name
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import Traced, trace
from hotfuse.ops.control import ScanAxes, Stacked, run_loop, run_scan

F, I64, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def info(name: str, elem: int = F, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, elem, shape)


def const(name: str, value: Any) -> NodeProto:
    return node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))


def build(nodes: list[NodeProto], inputs: list[Any], outputs: list[str], weights: dict[str, Any] | None = None) -> OnnxModule:
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()]
    outs = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph(nodes, "main", inputs, outs, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return OnnxModule(load(proto.SerializeToString()))


def spec(t: torch.Tensor, *dynamic: int) -> TensorSpec:
    return TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, "cpu", frozenset(dynamic))


def agree(module: OnnxModule, traced: Traced, *inputs: torch.Tensor) -> None:
    want, got = module(*inputs), traced(*inputs)
    assert len(want) == len(got)
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w)


def nodes_of(gm: fx.GraphModule) -> list[fx.Node]:
    """Every node, those of nested graphs too."""
    found: list[fx.Node] = []
    for n in gm.graph.nodes:
        found.append(n)
        if isinstance(n.target, ControlLeaf):
            for inner in n.target.graphs:
                found += nodes_of(inner)
    return found


def controls(traced: Traced) -> list[str]:
    return [n.target.kind for n in nodes_of(traced.gm) if isinstance(n.target, ControlLeaf)]


def test_shape_arithmetic_stays_symbolic() -> None:
    module = build(
        [
            node("Shape", ["x"], ["s"]), const("i0", 0), const("i1", [1]), const("two", [2]), const("minus", [-1]),
            node("Gather", ["s", "i0"], ["n"]), const("ax", [0]), node("Unsqueeze", ["n", "ax"], ["n1"]),
            node("Gather", ["s", "i1"], ["m"]), node("Mul", ["m", "two"], ["m2"]), node("Div", ["m2", "two"], ["m3"]),
            node("Concat", ["n1", "m3", "minus"], ["target"], axis=0), node("Reshape", ["x", "target"], ["y"]),
        ],
        [info("x", F, ["n", "m", 6])], ["y"],
    )  # fmt: skip
    traced = trace(module, [spec(torch.zeros(2, 3, 6), 0, 1)])
    assert not traced.leaves
    for n, m in ((2, 3), (5, 4), (9, 11)):
        agree(module, traced, torch.randn(n, m, 6))
    assert not traced.shape_env.guards


def test_a_condition_on_sizes_is_decided_and_becomes_a_guard() -> None:
    then = helper.make_graph([node("Relu", ["x"], ["a"])], "then", [], [info("a")])
    other = helper.make_graph([node("Neg", ["x"], ["b"])], "else", [], [info("b")])
    module = build(
        [
            node("Shape", ["x"], ["s"]), const("i", 0), node("Gather", ["s", "i"], ["n"]), const("ten", 10),
            node("Less", ["n", "ten"], ["c"]), node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        ],
        [info("x", F, ["n"])], ["y"],
    )  # fmt: skip
    traced = trace(module, [spec(torch.zeros(4), 0)])
    assert controls(traced) == []
    assert any("10" in str(g.expr) for g in traced.shape_env.guards)
    agree(module, traced, torch.randn(7))


def _if_on_data() -> OnnxModule:
    weights = {"w": np.arange(3, dtype=np.float32)}
    then = helper.make_graph([node("Add", ["x", "w"], ["a"])], "then", [], [info("a")])
    other = helper.make_graph([const("k", np.float32(2)), node("Mul", ["x", "k"], ["b"])], "else", [], [info("b")])
    nodes = [node("If", ["c"], ["z"], then_branch=then, else_branch=other), node("Relu", ["z"], ["y"])]
    return build(nodes, [info("c", B, []), info("x", F, ["n", 3])], ["y"], weights)


def test_a_condition_on_data_keeps_both_branches() -> None:
    module = _if_on_data()
    traced = trace(module, [spec(torch.tensor(True)), spec(torch.zeros(2, 3), 0)])
    assert controls(traced) == ["if"]
    assert not traced.leaves
    for go in (True, False):
        agree(module, traced, torch.tensor(go), torch.randn(4, 3))


def test_nested_graphs_are_closed() -> None:
    module = _if_on_data()
    traced = trace(module, [spec(torch.tensor(True)), spec(torch.zeros(2, 3), 0)])
    assert [n for n in nodes_of(traced.gm) if n.op == "get_attr"] == []
    assert "w" in traced.keys
    assert traced.constants["w"] is module.weights["w"]
    (leaf,) = [n for n in traced.gm.graph.nodes if isinstance(n.target, ControlLeaf)]
    for gm in leaf.target.graphs:
        assert len([n for n in gm.graph.nodes if n.op == "placeholder"]) == len(leaf.args[1])


def test_branches_of_different_rank_give_a_value_of_unknown_type() -> None:
    then = helper.make_graph([const("ax", [0]), node("Unsqueeze", ["x", "ax"], ["a"])], "then", [], [info("a")])
    other = helper.make_graph([node("Relu", ["x"], ["b"])], "else", [], [info("b")])
    nodes = [node("If", ["c"], ["z"], then_branch=then, else_branch=other), node("Neg", ["z"], ["y"])]
    module = build(nodes, [info("c", B, []), info("x", F, [3])], ["y"])
    traced = trace(module, [spec(torch.tensor(True)), spec(torch.zeros(3))])
    assert traced.leaves == {"Neg": "an input's type is unknown"}
    for go in (True, False):
        agree(module, traced, torch.tensor(go), torch.randn(3))


def _growing_loop() -> OnnxModule:
    body: GraphProto = helper.make_graph(
        [
            node("Concat", ["acc", "x"], ["next"], axis=0), node("Identity", ["go"], ["again"]),
            node("ReduceSum", ["next"], ["total"], keepdims=0),
        ],
        "body", [info("i", I64, []), info("go", B, []), info("acc", F, None)],
        [info("again", B, []), info("next", F, None), info("total", F, [])],
    )  # fmt: skip
    nodes = [node("Loop", ["trip", "", "x"], ["all", "totals"], body=body), node("Neg", ["all"], ["y"])]
    return build(nodes, [info("trip", I64, []), info("x", F, ["n", 2])], ["y", "totals"])


def test_a_loop_whose_carried_value_grows() -> None:
    module = _growing_loop()
    traced = trace(module, [spec(torch.tensor(1)), spec(torch.zeros(3, 2), 0)])
    assert controls(traced) == ["loop"]
    assert not traced.leaves
    for trips in (0, 1, 4):
        agree(module, traced, torch.tensor(trips), torch.randn(5, 2))


def test_scan_runs_backwards_and_along_other_axes() -> None:
    body = helper.make_graph(
        [node("Add", ["s", "v"], ["t"]), node("Identity", ["t"], ["out"])],
        "body", [info("s", F, [2]), info("v", F, [2])], [info("t", F, [2]), info("out", F, [2])],
    )  # fmt: skip
    scan = node("Scan", ["s0", "x"], ["last", "all"], body=body, num_scan_inputs=1, scan_input_axes=[1],
                scan_input_directions=[1], scan_output_axes=[1], scan_output_directions=[1])  # fmt: skip
    module = build([scan], [info("s0", F, [2]), info("x", F, [2, "t"])], ["last", "all"])
    traced = trace(module, [spec(torch.zeros(2)), spec(torch.zeros(2, 3), 1)])
    assert controls(traced) == ["scan"]
    for length in (3, 6):
        x = torch.randn(2, length)
        agree(module, traced, torch.zeros(2), x)
        torch.testing.assert_close(module(torch.zeros(2), x)[1], x.flip(1).cumsum(1).flip(1))


def test_sizes_that_are_data_keep_the_operator_whole() -> None:
    nodes = [node("Reshape", ["x", "shape"], ["z"]), node("Relu", ["z"], ["y"])]
    module = build(nodes, [info("x", F, [6]), info("shape", I64, [2])], ["y"])
    traced = trace(module, [spec(torch.zeros(6)), spec(torch.zeros(2, dtype=torch.int64))])
    assert set(traced.leaves) == {"Reshape"}
    (leaf,) = [n for n in traced.gm.graph.nodes if isinstance(n.target, Leaf)]
    assert leaf.target.op == "onnx.Reshape.ai_onnx.17.1"
    for shape in ((2, 3), (6, 1), (3, 2)):
        agree(module, traced, torch.randn(6), torch.tensor(shape))


def test_constants_fold_and_unused_ones_vanish() -> None:
    nodes = [const("a", np.float32(2)), const("b", np.float32(3)), node("Mul", ["a", "b"], ["c"]), node("Add", ["x", "c"], ["y"])]
    module = build(nodes, [info("x", F, [2])], ["y"])
    traced = trace(module, [spec(torch.zeros(2))])
    assert len(traced.keys) == 1
    assert float(traced.constants[traced.keys[0]]) == 6.0
    agree(module, traced, torch.randn(2))


def test_leaf_names_lead_both_ways() -> None:
    for op, domain in (("NonZero", ""), ("Gelu", "com.microsoft"), ("My_Op", "a_b.c-d")):
        assert parse_name(leaf_name(op, domain, 13, 2)) == (op, domain, 13, 2)
    with pytest.raises(InternalError, match="no operator"):
        parse_name("onnx.NonZero")


def test_meaning_of_loops() -> None:
    def body(i: torch.Tensor, go: Any, acc: Any, limit: Any) -> tuple[Any, ...]:
        return acc + 1 < limit, acc + 1, i * 10

    ten = torch.tensor(10)
    steps = [Stacked(torch.int64, ())]
    assert [v.tolist() for v in run_loop(3, None, [torch.tensor(0)], body, [ten], steps)] == [3, [0, 10, 20]]
    assert [v.tolist() for v in run_loop(None, True, [torch.tensor(8)], body, [ten], steps)] == [10, [0, 10]]
    assert [v.tolist() for v in run_loop(5, False, [torch.tensor(8)], body, [ten], steps)] == [8, []]
    axes = ScanAxes((0,), (False,), (1,), (False,))
    empty = run_scan([], [torch.zeros(0, 2)], lambda v: (v,), axes, (), [Stacked(torch.float32, (2,))])
    assert tuple(empty[0].shape) == (2, 0)


def test_a_condition_that_comes_back_as_it_is_is_not_read() -> None:
    """Loops that only count: to read what they were given in every iteration takes as long as a small operator."""
    given: list[torch.Tensor] = []

    def counts(i: torch.Tensor, cond: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given.append(cond)
        return cond, cond & held, cond

    last, seen = run_loop(4, None, [torch.tensor(False)], counts, (), (Stacked(torch.bool, ()),))
    assert len(given) == 4 and all(g is given[0] for g in given)
    assert not last and seen.tolist() == [True] * 4
    stops = run_loop(4, None, [torch.tensor(0)], lambda i, cond, held: (cond & (i < 2), held + 1), (), ())
    assert stops[0] == 3
