"""`hotfuse.InferenceSession` beside ONNX Runtime: same models, same calls, same answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, helper

import hotfuse.session as hf
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.values import BY_CODE, ELEMS
from hotfuse.session.options import adopted
from tests.faults import make_models as mk
from tests.faults.make_models import I64, B, F, S, node, raw, typed, value

ort = pytest.importorskip("onnxruntime")
ort.set_default_logger_severity(4)


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that do not ask for a capture stay in the model's own code."""
    monkeypatch.setenv("HOTFUSE_CAPTURE", "off")


X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = np.full((1, 3), 2, dtype=np.float32)
sequence = helper.make_tensor_sequence_value_info
OPTIONAL = helper.make_optional_type_proto(helper.make_tensor_type_proto(F, ["N"]))
OPTIONAL_SEQ = helper.make_optional_type_proto(
    helper.make_sequence_type_proto(helper.make_tensor_type_proto(I64, ["N"]))
)


def affine(ir: int = 9) -> ModelProto:
    """Two required inputs, an initializer that is also an input, and an output without a declared shape."""
    made = mk.model(
        [node("Add", ["x", "y"], ["z"]), node("Mul", ["z", "w"], ["o"])],
        [value("x", F, ["N", 3]), value("y", F, [1, 3]), value("w", F, [3])],
        [value("o", F, ["N", 3]), value("z", F, None)],
        [raw("w", np.float32([1, 2, 3]))],
        ir=ir,
        producer_name="me",
        producer_version="3",
        domain="d",
        doc_string="about",
        model_version=7,
    )
    made.graph.doc_string = "about the graph"
    helper.set_model_props(made, {"key": "text", "other": ""})
    return made


def identity(elem: int, shape: Any = ("N",), opset: int = 17) -> ModelProto:
    return mk.model([node("Identity", ["x"], ["o"])], [value("x", elem, shape)], [value("o", elem, None)], opset=opset)


def sequences() -> ModelProto:
    return mk.model(
        [node("SequenceInsert", ["s", "x"], ["q"]), node("SequenceAt", ["q", "i"], ["o"])],
        [sequence("s", F, ["N", 2]), value("x", F, ["M"]), value("i", I64, [])],
        [sequence("q", F, None), value("o", F, None)],
    )


def has_element(kind: Any = OPTIONAL) -> ModelProto:
    return mk.model(
        [node("OptionalHasElement", ["a"], ["o"])], [helper.make_value_info("a", kind)], [value("o", B, [])], opset=18
    )


def optional_out(empty: bool) -> ModelProto:
    made = (
        node("Optional", [] if empty else ["a"], ["o"], type=helper.make_tensor_type_proto(F, ["N"]))
        if empty
        else node("Optional", ["a"], ["o"])
    )
    return mk.model([made], [] if empty else [value("a", F, ["N"])], [helper.make_value_info("o", OPTIONAL)], opset=18)


def shapes() -> ModelProto:
    """Outputs whose sizes only inference knows."""
    return mk.model(
        [
            node("Reshape", ["x", "to"], ["reshaped"]),
            node("MatMul", ["x", "x"], ["square"]),
            node("Concat", ["n", "n"], ["twice"], axis=0),
            node("NonZero", ["n"], ["where"]),
            node("Relu", ["n"], ["named"]),
        ],
        [value("x", F, [4, 4]), value("n", F, ["N", 4])],
        [
            value("reshaped", F, None),
            value("square", F, ["a", "b"]),
            value("twice", F, None),
            value("where", I64, [None, None]),
            value("named", F, ["M", "K"]),
        ],
        [typed("to", np.int64([2, -1]))],
    )


def constant_out() -> ModelProto:
    return mk.model(
        [
            node("Identity", ["x"], ["same"]),
            node("Identity", ["c"], ["k"]),
            node("Transpose", ["x"], ["turned"]),
            node("Identity", ["x"], ["again"]),
        ],
        [value("x", F, ["N", "M"])],
        [
            value("same", F, None),
            value("k", F, [2]),
            value("turned", F, None),
            value("again", F, None),
            value("c", F, [2]),
        ],
        [raw("c", np.float32([1, 1]))],
    )


Pair = tuple[Any, Any]
OWN, CAPTURED = Settings(capture="off"), Settings(capture="inline")
"""The model's own code only; and a capture within the first call, so that the second runs in the graph."""


def both(made: ModelProto, **options: Any) -> Pair:
    data = made.SerializeToString()
    pair: list[Any] = []
    for lib in (hf, ort):
        so = lib.SessionOptions()
        so.log_severity_level = 4
        for name, size in options.items():
            so.add_free_dimension_override_by_name(name, size)
        pair.append(lib.InferenceSession(data, so))
    return pair[0], pair[1]


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif want is not None:
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if want.dtype.kind == "O":
            assert got.tolist() == want.tolist()
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def outcome(call: Callable[[], Any]) -> Any:
    """A result, or (exception, text)."""
    try:
        return call()
    except Exception as e:
        return e


FEEDS: dict[str, tuple[Callable[[], ModelProto], Any, Any]] = {
    "plain": (affine, None, {"x": X, "y": Y}),
    "small model": (mk.small, None, mk.small_feed()),
    "small model, one row": (mk.small, ["best", "y"], mk.small_feed(1)),
    "small model, other branch": (mk.small, None, {"x": -np.abs(mk.small_feed()["x"])}),
    "no batch": (mk.small, None, {"x": np.zeros((0, 3, 4, 4), np.float32)}),
    "override": (affine, None, {"x": X, "y": Y, "w": np.float32([5, 5, 5])}),
    "one output": (affine, ["z"], {"x": X, "y": Y}),
    "outputs repeated": (affine, ["z", "o", "z"], {"x": X, "y": Y}),
    "outputs as a tuple": (affine, ("o",), {"x": X, "y": Y}),
    "outputs empty": (affine, [], {"x": X, "y": Y}),
    "list of ints": (affine, None, {"x": [[1, 2, 3]], "y": Y}),
    "list of float64 arrays": (affine, None, {"x": [np.ones(3), np.ones(3)], "y": Y}),
    "not contiguous": (affine, None, {"x": np.arange(6, dtype=np.float32).reshape(3, 2).T, "y": Y}),
    "reversed": (affine, None, {"x": X[::-1], "y": Y}),
    "broadcast view": (affine, None, {"x": np.broadcast_to(np.float32(3), (2, 3)), "y": Y}),
    "masked": (affine, None, {"x": np.ma.masked_array(X), "y": Y}),
    "empty": (affine, None, {"x": np.zeros((0, 3), np.float32), "y": Y}),
    "0-d": (lambda: identity(F, []), None, {"x": np.array(3, np.float32)}),
    "rank not declared": (lambda: identity(F, None), None, {"x": X}),
    "rank zero declared, one fed": (lambda: identity(F, []), None, {"x": X}),
    "strings": (lambda: identity(S), None, {"x": np.array(["a", "über"])}),
    "strings as objects": (lambda: identity(S), None, {"x": np.array(["a", 1, None], dtype=object)}),
    "strings as a list": (lambda: identity(S), None, {"x": ["a", "b"]}),
    "floats listed for ints": (lambda: identity(I64), None, {"x": [1.5, 2]}),
    "sequence": (sequences, None, {"s": [X[0]], "x": X[1], "i": np.array(0)}),
    "sequence empty": (sequences, None, {"s": [], "x": X[1], "i": np.array(0)}),
    "optional given": (has_element, None, {"a": X[0]}),
    "optional None": (has_element, None, {"a": None}),
    "optional absent": (has_element, None, {}),
    "optional out": (lambda: optional_out(False), None, {"a": X[0]}),
    "optional out empty": (lambda: optional_out(True), None, {}),
    "constant and input as outputs": (constant_out, None, {"x": X}),
    "sizes of one name differ but broadcast": (
        lambda: mk.model(
            [node("Add", ["x", "y"], ["o"])], [value("x", F, ["N"]), value("y", F, ["N"])], [value("o", F, ["N"])]
        ),
        None,
        {"x": X[0], "y": X[1, :1]},
    ),
    "declared output rank wrong": (
        lambda: mk.model([node("Identity", ["x"], ["o"])], [value("x", F, ["N"])], [value("o", F, ["N", 4])]),
        None,
        {"x": X[0]},
    ),
    "unused input None": (
        lambda: mk.model(
            [node("Identity", ["c"], ["o"])], [value("x", F, [2])], [value("o", F, [1])], [raw("c", np.float32([1]))]
        ),
        None,
        {"x": None},
    ),
}


@pytest.mark.parametrize("case", FEEDS)
def test_outputs_equal(case: str) -> None:
    build, names, feed = FEEDS[case]
    ours, theirs = both(build())
    same(ours.run(names, feed), theirs.run(names, feed))


@pytest.mark.parametrize("case", FEEDS)
def test_outputs_equal_in_the_captured_graph(case: str) -> None:
    build, names, feed = FEEDS[case]
    made = build()
    want = ort.InferenceSession(made.SerializeToString()).run(names, feed)
    with hf.InferenceSession(made.SerializeToString(), settings=CAPTURED) as ours:
        for _ in range(2):
            same(ours.run(names, feed), want)
        stats = ours.stats()
        assert stats["calls"] == 2 and stats["rejected"] == stats["deopts"] == 0, ours.explain(full=True)


def test_the_captured_graph_takes_over() -> None:
    """Shapes that vary, both branches: all in the graph once it is there, and as ONNX Runtime computes them."""
    ours = hf.InferenceSession(mk.small().SerializeToString(), settings=CAPTURED)
    theirs = ort.InferenceSession(mk.small().SerializeToString())
    for n in (2, 3, 1, 5, 4, 7):
        for sign in (1, -1):
            feed = {"x": mk.small_feed(n)["x"] + np.float32(sign)}
            same(ours.run(None, feed), theirs.run(None, feed))
    assert ours.wait(120)
    assert ours.stats()["graph_calls"] >= 6, ours.explain(full=True)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"],
)
def test_element_types(dtype: str) -> None:
    ours, theirs = both(identity(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
    x = np.array([0, 1, 100]).astype(dtype)
    same(ours.run(None, {"x": x}), theirs.run(None, {"x": x}))
    assert ours.get_inputs()[0].type == theirs.get_inputs()[0].type


BAD: dict[str, tuple[Callable[[], ModelProto], Any, Any, str]] = {
    "missing": (affine, None, {"x": X}, "Required inputs (['y']) are missing from input feed (['x'])."),
    "all missing": (affine, None, {}, "Required inputs (['x', 'y']) are missing from input feed ([])."),
    "missing and unknown": (
        affine,
        None,
        {"q": X},
        "Required inputs (['x', 'y']) are missing from input feed (['q']).",
    ),
    "unknown": (affine, None, {"x": X, "y": Y, "q": X}, "Invalid input name: q"),
    "an initializer of old files": (lambda: affine(3), None, {"x": X, "y": Y, "w": Y[0]}, "Invalid input name: w"),
    "rank": (affine, None, {"x": X[0], "y": Y}, "Invalid rank for input: x Got: 1 Expected: 2"),
    "rank zero": (affine, None, {"x": np.array(1, np.float32), "y": Y}, "Invalid rank for input: x Got: 0 Expected: 2"),
    "rank four": (affine, None, {"x": X[None, None], "y": Y}, "Invalid rank for input: x Got: 4 Expected: 2"),
    "size": (
        affine,
        None,
        {"x": X[:, :2], "y": Y},
        "Got invalid dimensions for input: x for the following indices\n index: 1 Got: 2 Expected: 3\n Please fix",
    ),
    "two sizes": (affine, None, {"x": X, "y": X[:, :2]}, "index: 0 Got: 2 Expected: 1\n index: 1 Got: 2 Expected: 3\n"),
    "size of an override": (affine, None, {"x": X, "y": Y, "w": X[0, :2]}, "Got invalid dimensions for input: w"),
    "declared empty": (lambda: identity(F, [0]), None, {"x": X[0]}, "index: 0 Got: 3 Expected: 0"),
    "float64": (
        affine,
        None,
        {"x": X.astype("f8"), "y": Y},
        "Unexpected input data type. Actual: (tensor(double)) , expected: (tensor(float))",
    ),
    "float16": (affine, None, {"x": X.astype("f2"), "y": Y}, "Actual: (tensor(float16)) , expected: (tensor(float))"),
    "int32": (affine, None, {"x": X.astype("i4"), "y": Y}, "Actual: (tensor(int32)) , expected: (tensor(float))"),
    "bool": (affine, None, {"x": X > 1, "y": Y}, "Actual: (tensor(bool)) , expected: (tensor(float))"),
    "strings": (affine, None, {"x": X.astype(str), "y": Y}, "Actual: (tensor(string)) , expected: (tensor(float))"),
    "type before rank": (affine, None, {"x": X[0].astype("f8"), "y": Y}, "Unexpected input data type"),
    "ints for strings": (
        lambda: identity(S),
        None,
        {"x": np.array([1])},
        "Actual: (tensor(int64)) , expected: (tensor(string))",
    ),
    "optional of another type": (
        has_element,
        None,
        {"a": np.array([1])},
        "Actual: (tensor(int64)) , expected: (tensor(float))",
    ),
    "datetime": (affine, None, {"x": np.zeros((2, 3), "M8[s]"), "y": Y}, "can't be converted to"),
    "long double": (affine, None, {"x": X.astype(np.longdouble), "y": Y}, "can't be converted to"),
    "tuple": (affine, None, {"x": ((1.0, 2.0, 3.0),), "y": Y}, "single numpy array for input 'x'."),
    "text": (affine, None, {"x": "abc", "y": Y}, "single numpy array for input 'x'."),
    "number": (affine, None, {"x": 1.0, "y": Y}, "Unable to handle object of type <class 'float'>"),
    "numpy number": (
        affine,
        None,
        {"x": np.float32(1), "y": Y},
        "Unable to handle object of type <class 'numpy.float32'>",
    ),
    "object": (affine, None, {"x": object(), "y": Y}, "Unable to handle object of type <class 'object'>"),
    "dict": (affine, None, {"x": {"a": 1}, "y": Y}, "Unexpected input data type"),
    "ragged": (affine, None, {"x": [[1.0, 2.0, 3.0], [1.0]], "y": Y}, "Could not create tensor from given input list"),
    "text in a list": (affine, None, {"x": [["a", "b", "c"]], "y": Y}, "Could not create tensor from given input list"),
    "empty list": (affine, None, {"x": [], "y": Y}, "Invalid rank for input: x Got: 1 Expected: 2"),
    "None": (affine, None, {"x": None, "y": Y}, "Missing Input: x"),
    "array for a sequence": (
        sequences,
        None,
        {"s": X, "x": X[0], "i": np.array(0)},
        "input with name: 's' expected to be of type: 3 but received a tensor",
    ),
    "tuple for a sequence": (sequences, None, {"s": (X,), "x": X[0], "i": np.array(0)}, "for input 's'."),
    "sequence of another type": (
        sequences,
        None,
        {"s": [X.astype(int)], "x": X[0], "i": np.array(0)},
        "has a different data type",
    ),
    "sequence of lists": (sequences, None, {"s": [[1.0]], "x": X[0], "i": np.array(0)}, "Input is not a tensor"),
    "None for a sequence": (sequences, None, {"s": None, "x": X[0], "i": np.array(0)}, "Missing Input: s"),
    "unknown output": (affine, ["nope"], {"x": X, "y": Y}, "Invalid output name:nope"),
    "an input as output": (affine, ["x"], {"x": X, "y": Y}, "Invalid output name:x"),
    "nameless output": (affine, [""], {"x": X, "y": Y}, "Invalid output name:"),
    "output names as text": (affine, "o", {"x": X, "y": Y}, "run():"),
    "output name not text": (affine, [3], {"x": X, "y": Y}, "run():"),
    "input name not text": (affine, None, {"x": X, "y": Y, 1: X}, "run():"),
    "sizes that do not broadcast": (
        lambda: mk.model(
            [node("Add", ["x", "y"], ["o"])], [value("x", F, ["N"]), value("y", F, ["N"])], [value("o", F, ["N"])]
        ),
        None,
        {"x": X[0], "y": X[1, :2]},
        "Add",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_feeds_end_alike(case: str) -> None:
    build, names, feed, part = BAD[case]
    ours, theirs = both(build())
    got, want = outcome(lambda: ours.run(names, feed)), outcome(lambda: theirs.run(names, feed))
    assert isinstance(want, Exception) and isinstance(got, Exception)
    assert part in str(want) and part in str(got)
    builtin = type(want).__module__ == "builtins"
    assert isinstance(got, type(want)) if builtin else type(got).__name__ == type(want).__name__
    assert isinstance(got, HotfuseError)


def describe(args: Any) -> list[tuple[str, str, list[Any], str]]:
    return [(a.name, a.type, a.shape, str(a)) for a in args]


@pytest.mark.parametrize(
    "build",
    [
        affine,
        lambda: affine(3),
        mk.small,
        sequences,
        has_element,
        lambda: has_element(OPTIONAL_SEQ),
        lambda: optional_out(False),
        shapes,
        constant_out,
        lambda: identity(S),
        lambda: identity(F, []),
        lambda: identity(F, None),
        lambda: identity(F, [0]),
        lambda: identity(F, [-1, "N", None, ""]),
    ],
)
def test_node_args_and_meta_equal(build: Callable[[], ModelProto]) -> None:
    ours, theirs = both(build())
    assert describe(ours.get_inputs()) == describe(theirs.get_inputs())
    assert describe(ours.get_outputs()) == describe(theirs.get_outputs())
    assert describe(ours.get_overridable_initializers()) == describe(theirs.get_overridable_initializers())
    for name in (
        "producer_name",
        "graph_name",
        "domain",
        "description",
        "graph_description",
        "version",
        "custom_metadata_map",
    ):
        assert getattr(ours.get_modelmeta(), name) == getattr(theirs.get_modelmeta(), name), name


def test_free_dimension_override() -> None:
    ours, theirs = both(affine(), N=4)
    assert describe(ours.get_inputs()) == describe(theirs.get_inputs())
    assert describe(ours.get_outputs()) == describe(theirs.get_outputs())
    for session in (ours, theirs):
        with pytest.raises(Exception, match="index: 0 Got: 2 Expected: 4"):
            session.run(None, {"x": X, "y": Y})


def test_option_defaults_equal() -> None:
    for name in ("SessionOptions", "RunOptions"):
        ours, theirs = getattr(hf, name)(), getattr(ort, name)()
        fields = [n for n in dir(theirs) if not n.startswith("_") and not callable(getattr(theirs, n))]
        for field in fields:
            got, want = getattr(ours, field), getattr(theirs, field)
            assert int(got) == int(want) if hasattr(want, "value") else got == want, field
    for enum in ("GraphOptimizationLevel", "ExecutionMode", "ExecutionOrder"):
        ours, theirs = getattr(hf, enum), getattr(ort, enum)
        assert {k: int(v) for k, v in theirs.__members__.items()} == {k: int(v) for k, v in ours.__members__.items()}


def test_one_import_changes() -> None:
    """`import hotfuse as ort`: the names applications use are there."""
    import hotfuse

    names = [
        "InferenceSession", "SessionOptions", "RunOptions", "GraphOptimizationLevel", "ExecutionMode", "OrtValue",
        "IOBinding", "NodeArg", "ModelMetadata", "get_available_providers", "get_device", "set_default_logger_severity",
    ]  # fmt: skip
    for name in names:
        assert hasattr(ort, name) and getattr(hotfuse, name) is getattr(hf, name)
    if not torch.cuda.is_available():  # the peer is a build for CPUs
        assert set(hotfuse.get_available_providers()) <= set(ort.get_available_providers())
        assert hotfuse.get_device() == ort.get_device()


def test_session_surface() -> None:
    """Every public method of ONNX Runtime's session but those for other devices and tuning exists."""
    elsewhere = {
        "get_input_memory_infos",
        "get_output_memory_infos",
        "get_input_epdevices",
        "get_provider_graph_assignment_info",
        "get_profiling_start_time_ns",
        "get_tuning_results",
        "set_tuning_results",
        "run_with_ortvaluevector",
        "set_ep_dynamic_options",
        "release_captured_graph",
        "create_ortvalue_from_shape_and_type",
        "webgpu_context_id",
    }
    theirs = {n for n in dir(ort.InferenceSession) if not n.startswith("_")}
    assert theirs - elsewhere <= set(dir(hf.InferenceSession))


@pytest.mark.parametrize("lib", [hf, ort], ids=["hotfuse", "onnxruntime"])
def test_io_binding(lib: Any) -> None:
    session = lib.InferenceSession(affine().SerializeToString())
    binding = session.io_binding()
    x = X.copy()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_input("y", lib.OrtValue.ortvalue_from_numpy(Y))
    binding.bind_output("z")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], X + Y)
    x += 1
    session.run_with_iobinding(binding)
    first = binding.get_outputs()[0]
    np.testing.assert_array_equal(first.numpy(), X + 1 + Y)
    assert (first.shape(), first.data_type(), first.element_type(), first.device_name()) == (
        [2, 3],
        "tensor(float)",
        1,
        "cpu",
    )
    mine = np.zeros((2, 3), np.float32)
    binding.bind_output("o", "cpu", 0, np.float32, [2, 3], mine.ctypes.data)
    binding.bind_input("x", "cpu", 0, np.float32, [2, 3], X.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(mine, (X + Y) * [1, 2, 3])


@pytest.mark.parametrize("lib", [hf, ort], ids=["hotfuse", "onnxruntime"])
def test_io_binding_errors(lib: Any) -> None:
    session = lib.InferenceSession(affine().SerializeToString())
    binding = session.io_binding()
    with pytest.raises(RuntimeError, match="Failed to find NodeArg with name: nope in the def list"):
        binding.bind_cpu_input("nope", X)
    with pytest.raises(RuntimeError, match="Unable to create OrtValue from the given python object"):
        binding.bind_cpu_input("x", [1.0])
    binding.bind_cpu_input("x", X[0])
    binding.bind_cpu_input("y", Y)
    binding.bind_output("o")
    with pytest.raises(RuntimeError, match="Error in execution: Invalid rank for input: x Got: 1 Expected: 2"):
        session.run_with_iobinding(binding)
    binding.clear_binding_outputs()
    binding.bind_cpu_input("x", X)
    with pytest.raises(RuntimeError, match="At least one output should be requested"):
        session.run_with_iobinding(binding)
    other = lib.InferenceSession(affine().SerializeToString())
    with pytest.raises(ValueError, match="IOBinding must be used with the session that created it"):
        other.run_with_iobinding(binding)


@pytest.mark.parametrize("lib", [hf, ort], ids=["hotfuse", "onnxruntime"])
def test_ort_values(lib: Any) -> None:
    x = X.copy()
    held = lib.OrtValue.ortvalue_from_numpy(x)
    assert (held.shape(), held.data_type(), held.has_value(), held.is_tensor()) == ([2, 3], "tensor(float)", True, True)
    assert held.tensor_size_in_bytes() == 24 and not held.is_tensor_sequence() and np.shares_memory(held.numpy(), x)
    session = lib.InferenceSession(affine().SerializeToString())
    out = session.run_with_ort_values(["z"], {"x": held, "y": lib.OrtValue.ortvalue_from_numpy(Y)})
    np.testing.assert_array_equal(out[0].numpy(), X + Y)
    fresh = lib.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    fresh.update_inplace(X)
    np.testing.assert_array_equal(fresh.numpy(), X)
    same(session.run(["z"], {"x": fresh, "y": Y}), [X + Y])


@pytest.mark.parametrize("lib", [hf, ort], ids=["hotfuse", "onnxruntime"])
def test_run_async(lib: Any) -> None:
    session = lib.InferenceSession(affine().SerializeToString())
    seen: list[tuple[Any, Any, str]] = []
    done = threading.Semaphore(0)

    def callback(results: Any, user_data: Any, error: str) -> None:
        seen.append((results, user_data, error))
        done.release()

    session.run_async(["z"], {"x": X, "y": Y}, callback, "mine")
    assert done.acquire(timeout=120)
    session.run_async(None, {"x": X[0], "y": Y}, callback, "bad")
    assert done.acquire(timeout=120)
    np.testing.assert_array_equal(seen[0][0][0], X + Y)
    assert seen[0][1:] == ("mine", "")
    assert seen[1][0] == [] and seen[1][1] == "bad" and seen[1][2].startswith("Invalid rank for input: x")
    with pytest.raises(ValueError, match="Required inputs"):
        session.run_async(None, {}, callback, None)


@pytest.mark.parametrize("lib", [hf, ort], ids=["hotfuse", "onnxruntime"])
def test_terminate(lib: Any) -> None:
    session = lib.InferenceSession(affine().SerializeToString())
    options = lib.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="Exiting due to terminate flag being set to true") as caught:
        session.run(None, {"x": X, "y": Y}, options)
    assert type(caught.value).__name__ == "Fail"


def test_path_forms_and_external_data(tmp_path: Path) -> None:
    path = mk.save_external(tmp_path)
    assert (tmp_path / "small.bin").stat().st_size > 500
    feed = mk.small_feed()
    want = ort.InferenceSession(path).run(None, feed)
    for form in (path, str(path)):
        same(hf.InferenceSession(form).run(None, feed), want)


@pytest.mark.parametrize("settings", [OWN, CAPTURED], ids=["own code", "captured"])
def test_inputs_are_left_alone_and_outputs_are_ours(settings: Settings) -> None:
    """Nothing a caller does to arrays after a run may change what the session computes, nor the other way round."""
    session = hf.InferenceSession(constant_out().SerializeToString(), settings=settings)
    x = X.copy()
    session.run(None, {"x": x})
    first = session.run(None, {"x": x})
    np.testing.assert_array_equal(x, X)
    for i, out in enumerate(first):
        assert out.flags.writeable and out.flags.c_contiguous
        assert not np.shares_memory(out, x)
        assert not any(np.shares_memory(out, other) for j, other in enumerate(first) if j != i)
    kept = [out.copy() for out in first]
    for out in first:
        out[...] = 77
    second = session.run(None, {"x": x})
    same(second, kept)
    x[...] = -1
    same(second, kept)
    twice = session.run(["k", "k"], {"x": X})
    assert not np.shares_memory(*twice)


def test_small_model_leaves_its_input_alone() -> None:
    session = hf.InferenceSession(mk.small().SerializeToString())
    feed = mk.small_feed()
    before = feed["x"].copy()
    kept = [out.copy() for out in session.run(None, feed)]
    for out in session.run(None, feed):
        out[...] = 1
    same(session.run(None, feed), kept)
    np.testing.assert_array_equal(feed["x"], before)


@pytest.mark.parametrize("elem", [e.code for e in ELEMS if e.code != S], ids=lambda code: BY_CODE[code].name)
@pytest.mark.parametrize("size", [3, 30_000])
def test_every_element_type_passes_through(elem: int, size: int) -> None:
    """Those ONNX Runtime cannot take from NumPy included; small results and large ones leave by different ways."""
    session = hf.InferenceSession(identity(elem, opset=23).SerializeToString())
    x = np.resize(np.array([0, 1, 1]), size).astype(BY_CODE[elem].np)
    kept = x.copy()
    (y,) = session.run(None, {"x": x})
    assert y.dtype == x.dtype and y.shape == x.shape and y.tobytes() == kept.tobytes()
    assert not np.shares_memory(x, y) and session.get_inputs()[0].type == f"tensor({BY_CODE[elem].name})"


def test_foreign_byte_order_is_converted() -> None:
    """ONNX Runtime misreads such arrays; wrong numbers are no behaviour to copy."""
    ours, _ = both(affine())
    same(ours.run(None, {"x": X.astype(">f4"), "y": Y}), ours.run(None, {"x": X, "y": Y}))


def test_many_threads_at_once() -> None:
    ours, theirs = both(mk.small())
    feeds = [{"x": np.random.default_rng(i).standard_normal((1 + i % 3, 3, 4, 4)).astype(np.float32)} for i in range(8)]
    want = [theirs.run(None, f) for f in feeds]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for k in range(10):
                at = (i + k) % len(feeds)
                same(ours.run(None, feeds[at]), want[at])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert ours.stats()["calls"] == 80


def test_another_runtimes_options_are_read() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    theirs = onnxruntime.SessionOptions()
    theirs.intra_op_num_threads = 3
    theirs.enable_cpu_mem_arena = False
    theirs.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    ours = adopted(theirs)
    assert ours.threads == 3 and not ours.enable_cpu_mem_arena
    assert set(ours.ignored()) >= {"enable_cpu_mem_arena", "graph_optimization_level"}
    with pytest.raises(HotfuseError, match="must be a SessionOptions"):
        adopted(object())
