"""Malformed ONNX files: each is refused with a ModelError that says what is wrong and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from hotfuse.base.errors import HotfuseError, InputError, ModelError
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load

F = TensorProto.FLOAT


def model(
    nodes: list[onnx.NodeProto] | None = None,
    initializers: list[TensorProto] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
    opsets: dict[str, int] | None = None,
) -> ModelProto:
    nodes = nodes if nodes is not None else [helper.make_node("Relu", ["x"], ["y"], name="act")]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", F, ["n", 2])],
        [helper.make_tensor_value_info("y", F, ["n", 2])],
        initializers or [],
    )
    imports = [helper.make_opsetid(d, v) for d, v in (opsets or {"": 17}).items()]
    return helper.make_model(graph, opset_imports=imports, functions=functions or [])


def refused(proto: ModelProto | bytes, *words: str) -> ModelError:
    data = proto if isinstance(proto, bytes) else proto.SerializeToString()
    with pytest.raises(ModelError) as caught:
        OnnxModule(load(data))
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return caught.value


def test_a_good_model_loads_and_runs() -> None:
    module = OnnxModule(load(model().SerializeToString()))
    assert module(torch.tensor([[-1.0, 2.0]]))[0].tolist() == [[0.0, 2.0]]
    assert module.inputs[0].type.shape == ("n", 2)


@pytest.mark.parametrize("data", [b"", b"\x00", b"not a model at all", b"\xff" * 64, bytes(range(200, 216)) + b"onnx"])
def test_bytes_that_are_no_model(data: bytes) -> None:
    refused(data, "cannot load model")


def test_every_truncation_is_refused_or_loads() -> None:
    weight = numpy_helper.from_array(np.arange(64, dtype=np.float32), "w")
    data = model([helper.make_node("Add", ["x", "w"], ["y"])], [weight]).SerializeToString()
    refused_ = 0
    for end in range(len(data)):
        try:
            OnnxModule(load(data[:end]))
        except HotfuseError:
            refused_ += 1
    assert refused_ > len(data) // 2


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        load(tmp_path / "nothing.onnx")


def test_names_used_before_they_are_computed() -> None:
    refused(model([helper.make_node("Relu", ["z"], ["y"])]), "'z' is used before it is computed", "graph 'main'")
    circle = [helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])]
    refused(model(circle), "'b' is used before it is computed", "in a circle")


def test_nodes_in_another_order_are_sorted() -> None:
    late = [helper.make_node("Neg", ["b"], ["y"], name="last"), helper.make_node("Relu", ["x"], ["b"], name="first")]
    loaded = load(model(late).SerializeToString())
    assert [n.name for n in loaded.graph.nodes] == ["first", "last"]
    assert OnnxModule(loaded)(torch.tensor([[-1.0, 2.0]]))[0].tolist() == [[0.0, -2.0]]


def test_what_graphs_of_a_branch_read_comes_before_it() -> None:
    value = helper.make_tensor_value_info("o", TensorProto.FLOAT, None)
    branches = [helper.make_graph([helper.make_node(op, ["b"], ["o"])], op, [], [value]) for op in ("Neg", "Relu")]
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Mul", ["x", "x"], ["b"]),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    module = OnnxModule(load(model(nodes, [zero]).SerializeToString()))
    assert module(torch.tensor([[-1.0, 2.0]]))[0].tolist() == [[-1.0, -4.0]]


def test_contributed_operators_need_no_import() -> None:
    module = OnnxModule(load(model([helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")]).SerializeToString()))
    assert module(torch.zeros(1, 2))[0].tolist() == [[0.0, 0.0]]


def test_names_computed_twice() -> None:
    refused(
        model([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]), "'y' is computed twice"
    )
    refused(model([helper.make_node("Relu", ["x"], ["x"])]), "'x' is computed twice")


def test_an_output_that_nothing_computes() -> None:
    refused(model([helper.make_node("Relu", ["x"], ["z"])]), "output 'y' is never computed")


def test_domains_and_operators_nobody_knows() -> None:
    refused(model([helper.make_node("Relu", ["x"], ["y"], domain="my.ops")]), "domain 'my.ops'", "not imported")
    unknown = model([helper.make_node("Frobnicate", ["x"], ["y"], name="frob")], opsets={"": 17})
    error = refused(unknown, "Frobnicate")
    assert error.hint
    refused(model(opsets={"": 0}), "opset version 0")


def _tensor(change: Callable[[TensorProto], object]) -> ModelProto:
    weight = numpy_helper.from_array(np.ones((2, 2), dtype=np.float32), "w")
    change(weight)
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [weight])


def test_tensors_whose_data_does_not_match_their_size() -> None:
    refused(_tensor(lambda t: t.dims.append(1 << 50)), "needs", "bytes and 16 are present", "initializer 'w'")
    refused(_tensor(lambda t: t.dims.append(-1)), "negative size")
    refused(_tensor(lambda t: t.dims.extend([1] * 80)), "absurd rank")
    refused(_tensor(lambda t: setattr(t, "raw_data", t.raw_data[:-1])), "15 are present")
    refused(_tensor(lambda t: setattr(t, "data_type", 999)), "unknown element type 999")
    empty = TensorProto(name="w", data_type=F, dims=[1 << 40])
    refused(model([helper.make_node("Add", ["x", "w"], ["y"])], [empty]), "entries in float_data and 0 are present")


def test_sparse_tensors_are_bounded_and_checked() -> None:
    def sparse(dims: list[int], indices: list[int]) -> ModelProto:
        proto = model([helper.make_node("Add", ["x", "s"], ["y"])])
        values = numpy_helper.from_array(np.ones(len(indices), dtype=np.float32), "s")
        where = numpy_helper.from_array(np.array(indices, dtype=np.int64), "i")
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, dims))
        return proto

    module = OnnxModule(load(sparse([1, 2], [1]).SerializeToString()))
    assert module(torch.zeros(1, 2))[0].tolist() == [[0.0, 1.0]]
    refused(sparse([1 << 40, 1 << 20], [0]), "absurd size")
    refused(sparse([1, 2], [7]), "index out of range")


def _nested(depth: int) -> onnx.GraphProto:
    if depth == 0:
        nodes = [helper.make_node("Relu", ["x"], ["out0"])]
    else:
        cond = helper.make_node("Constant", [], [f"c{depth}"], value_ints=[1])
        cast = helper.make_node("Cast", [f"c{depth}"], [f"b{depth}"], to=TensorProto.BOOL)
        branch = _nested(depth - 1)
        nodes = [
            cond,
            cast,
            helper.make_node("If", [f"b{depth}"], [f"out{depth}"], then_branch=branch, else_branch=branch),
        ]
    return helper.make_graph(nodes, f"level{depth}", [], [helper.make_empty_tensor_value_info(f"out{depth}")])


def test_graphs_nested_too_deeply() -> None:
    def build(depth: int) -> ModelProto:
        proto = model()
        del proto.graph.node[:]
        proto.graph.node.extend(_nested(depth).node)
        proto.graph.node.append(helper.make_node("Identity", [f"out{depth}"], ["y"]))
        return proto

    assert OnnxModule(load(build(4).SerializeToString()))(torch.tensor([[-1.0, 3.0]]))[0].tolist() == [[0.0, 3.0]]
    chain = AttributeProto(name="then_branch", type=AttributeProto.GRAPH)
    for _ in range(30):
        outer = AttributeProto(name="then_branch", type=AttributeProto.GRAPH)
        outer.g.node.add(op_type="If").attribute.append(chain)
        chain = outer
    proto = model()
    proto.graph.node.add(op_type="If", input=["x"], output=["q"]).attribute.append(chain)
    refused(proto, "cannot load")


def _function(name: str, calls: str) -> onnx.FunctionProto:
    node = helper.make_node(calls, ["a"], ["b"], domain="f" if calls[0].islower() else "")
    return helper.make_function(
        "f", name, ["a"], ["b"], [node], [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    )


def test_functions_that_call_each_other_in_a_circle() -> None:
    both = {"": 17, "f": 1}
    call = [helper.make_node("one", ["x"], ["y"], domain="f")]
    good = model(call, functions=[_function("one", "two"), _function("two", "Relu")], opsets=both)
    assert OnnxModule(load(good.SerializeToString()))(torch.tensor([[-1.0, 3.0]]))[0].tolist() == [[0.0, 3.0]]
    refused(model(call, functions=[_function("one", "two"), _function("two", "one")], opsets=both), "in a circle")
    refused(model(call, functions=[_function("one", "one")], opsets=both), "in a circle")
    refused(model(call, functions=[_function("one", "Relu")] * 2, opsets=both), "defined twice")


def test_functions_that_would_expand_without_end() -> None:
    functions = [_function("f30", "Relu")]
    for i in range(29, -1, -1):
        nodes = [
            helper.make_node(f"f{i + 1}", ["a"], ["b"], domain="f"),
            helper.make_node(f"f{i + 1}", ["b"], ["c"], domain="f"),
        ]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        functions.append(helper.make_function("f", f"f{i}", ["a"], ["c"], nodes, imports))
    call = [helper.make_node("f0", ["x"], ["y"], domain="f")]
    refused(model(call, functions=functions, opsets={"": 17, "f": 1}), "too many nodes")


def _external(folder: Path, location: str, **entries: str) -> Path:
    weight = TensorProto(name="w", data_type=F, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(model([helper.make_node("Add", ["x", "w"], ["y"])], [weight]).SerializeToString())
    return path


def test_external_data_is_read_from_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 4 + np.array([1, 2], dtype=np.float32).tobytes())
    module = OnnxModule(load(_external(tmp_path, "data/w.bin", offset="4", length="8")))
    assert module(torch.zeros(1, 2))[0].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "location", ["/etc/hostname", "../secret.bin", "data/../../secret.bin", "", ".", "link.bin", "dir/secret.bin"]
)
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 8)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "dir").symlink_to(tmp_path)
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(_external(folder, location))


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"offset": "4"}, "too short"),
        ({"length": "4"}, "wrong length"),
        ({"offset": "-4"}, "malformed offset"),
        ({"offset": "9" * 40}, "malformed offset"),
        ({"length": "x"}, "malformed length"),
    ],
)
def test_external_data_of_the_wrong_extent(tmp_path: Path, entries: dict[str, str], word: str) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 8)
    with pytest.raises(ModelError, match=word):
        load(_external(tmp_path, "w.bin", **entries))


def test_external_data_that_is_missing_or_has_no_folder(tmp_path: Path) -> None:
    path = _external(tmp_path, "w.bin")
    with pytest.raises(ModelError, match="is missing"):
        load(path)
    with pytest.raises(ModelError, match="given as bytes"):
        load(path.read_bytes())


def test_an_operator_that_fails_names_its_node() -> None:
    module = OnnxModule(
        load(model([helper.make_node("MatMul", ["x", "x"], ["y"], name="product")]).SerializeToString())
    )
    with pytest.raises(ModelError, match="MatMul of node 'product' failed") as caught:
        module(torch.zeros(3, 2))
    assert "graph 'main'" in caught.value.where
    assert caught.value.__cause__ is not None


def test_the_wrong_number_of_inputs() -> None:
    with pytest.raises(InputError, match="takes 1 inputs, 2 were given"):
        OnnxModule(load(model().SerializeToString()))(torch.zeros(1, 2), torch.zeros(1, 2))
