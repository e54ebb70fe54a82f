"""What sizes decide is computed once for each kind of sizes: the same results, nothing kept that data decide."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.recording import conv_product, recorded_runs, size_folding
from hotfuse.frontends.onnx.recording.conv_product import as_product
from hotfuse.frontends.onnx.recording.written_runs import KnownBehind
from hotfuse.native.float_layers.layer_code import background_layers, load_layers, supported
from hotfuse.native.target import host
from hotfuse.ops.folded_conv import FoldedConv, Window, affine

Array = np.ndarray[Any, Any]
F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


@pytest.fixture(autouse=True)
def soon_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that come five times see all three: the program, its recording, and the function that is made of that."""
    monkeypatch.setattr(recorded_runs, "WRITTEN_AT", 2)


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, int], constants: dict[str, Array]
) -> bytes:
    """A file of these nodes."""
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(k, t, shape) for k, (t, shape) in inputs.items()],
        [helper.make_tensor_value_info(k, t, None) for k, t in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def branch(name: str, nodes: list[onnx.NodeProto], out: str, elem: int = F32) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(out, elem, None)])


def run(module: OnnxModule, *arrays: Array) -> list[Array]:
    return [t.numpy() for t in module.forward(*[torch.from_numpy(a) for a in arrays]) if isinstance(t, torch.Tensor)]


def recorded(module: OnnxModule) -> list[list[str]]:
    """The operators of each recording."""
    found = module.program._runs
    return [] if found is None else [[c[-1].op for c in r.calls] for r in found.runs.values()]


def kept(module: OnnxModule) -> list[recorded_runs.ProgramRecording]:
    found = module.program._runs
    return [] if found is None else list(found.runs.values())


def same(data: bytes, *calls: tuple[Array, ...]) -> OnnxModule:
    """Each call six times in turns, each time what ONNX Runtime answers."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    module = OnnxModule(load(data))
    for _ in range(6):
        for arrays in calls:
            feeds = dict(zip([i.name for i in session.get_inputs()], arrays, strict=True))
            for got, want in zip(run(module, *arrays), session.run(None, feeds), strict=True):
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not module.unprepared
    return module


def rows(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


HALVES = [
    node("Shape", ["x"], ["s"]),
    node("Gather", ["s", "zero"], ["n"], axis=0),
    node("Gather", ["s", "one"], ["w"], axis=0),
    node("Div", ["w", "two"], ["half"]),
    node("Concat", ["n", "two", "half"], ["sizes"], axis=0),
    node("Reshape", ["x", "sizes"], ["parts"]),
    node("Transpose", ["parts"], ["turned"], perm=[0, 2, 1]),
    node("Relu", ["turned"], ["y"]),
]
NUMBERS = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}


def test_arithmetic_of_sizes_is_gone_from_recorded_calls() -> None:
    data = model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)
    module = same(data, (rows(3, 8),), (rows(1, 6),), (rows(5, 2),))
    assert recorded(module) == [["Reshape", "Transpose", "Relu"]] * 3
    assert len(module.program.ready().calls) == module.program.prepared_steps == len(HALVES)
    said = "sizes that come again have calls of their own in it: 3 recordings, 3 calls at most instead of 8"
    assert module.notes == (said,)
    assert 0 < module.prepared_bytes <= 3 * size_folding.MAX_FIXED_BYTES


def test_sizes_are_known_behind_operators_of_onnx_runtime() -> None:
    fused = [
        node("BiasGelu", ["x", "bias"], ["g"], domain="com.microsoft"),
        node("SkipLayerNormalization", ["g", "x", "bias"], ["z"], domain="com.microsoft"),
    ]
    sizes = [node("Shape", ["z"], ["s"]), *HALVES[1:5], node("Reshape", ["z", "sizes"], ["parts"]), *HALVES[6:]]
    data = model([*fused, *sizes], {"x": (F32, ["n", 6])}, {"y": F32}, {**NUMBERS, "bias": rows(6)})
    module = same(data, (rows(3, 6),), (rows(1, 6),))
    assert recorded(module) == [["BiasGelu", "SkipLayerNormalization", "Reshape", "Transpose", "Relu"]] * 2


def test_large_values_that_follow_from_sizes_are_computed_in_every_call() -> None:
    """Memory of recordings is bounded; sizes of such a value are known all the same."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Mul", ["s", "many"], ["long"]), node("ConstantOfShape", ["long"], ["zeros"]),
        node("Shape", ["zeros"], ["t"]), node("Reshape", ["zeros", "t"], ["r"]), node("Add", ["x", "t32"], ["u"]),
        node("Sub", ["u", "r"], ["y"]),
    ]  # fmt: skip
    nodes.insert(4, node("Cast", ["t"], ["t32"], to=F32))
    data = model(nodes, {"x": (F32, ["n"])}, {"y": F32}, {"many": np.array([1 << 15])})
    module = same(data, (rows(1),))
    assert recorded(module) == [["ConstantOfShape", "Add", "Sub"]]
    assert module.prepared_bytes < size_folding.MAX_FIXED_BYTES


def test_a_size_of_zero() -> None:
    data = model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)
    module = OnnxModule(load(data))
    for _ in range(3):
        assert run(module, rows(0, 8))[0].shape == (0, 4, 2)
    assert recorded(module) == [["Reshape", "Transpose", "Relu"]]


def by_rank(out: str = "y") -> list[onnx.NodeProto]:
    """One branch for a single row, another for more."""
    return [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"], axis=0),
        node("Equal", ["n", "one"], ["single"]),
        node("If", ["single"], [out],
             then_branch=branch("a", [node("Squeeze", ["x", "zero"], ["q"]), node("Exp", ["q"], ["r"])], "r"),
             else_branch=branch("b", [node("Neg", ["x"], ["r2"])], "r2")),
    ]  # fmt: skip


def test_a_branch_that_sizes_choose_is_part_of_the_calls() -> None:
    module = same(model(by_rank(), {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS), (rows(1, 4),), (rows(3, 4),))
    assert recorded(module) == [["Squeeze", "Exp"], ["Neg"]]


def test_a_branch_that_data_choose_stays_one() -> None:
    nodes = [
        node("Equal", ["rate", "two"], ["c"]),
        node("If", ["c"], ["y"], then_branch=branch("a", [node("Exp", ["x"], ["r"])], "r"),
             else_branch=branch("b", [node("Neg", ["x"], ["r2"])], "r2")),
    ]  # fmt: skip
    data = model(nodes, {"x": (F32, ["n"]), "rate": (I64, [1])}, {"y": F32}, NUMBERS)
    module = same(data, (rows(3), np.array([2])), (rows(3), np.array([7])))
    assert recorded(module) == [["Equal", "If"]]


def test_sizes_that_data_decide_are_read_in_every_call() -> None:
    nodes = [
        node("NonZero", ["x"], ["at"]),
        node("Shape", ["at"], ["s"]),
        node("Gather", ["s", "one"], ["count"], axis=0),
        node("Expand", ["one", "count"], ["ones"]),
        node("Cast", ["ones"], ["y"], to=F32),
    ]
    data = model(nodes, {"x": (F32, ["n"])}, {"y": F32}, NUMBERS)
    few, many = np.array([0, 1, 0, 0], np.float32), np.array([1, 1, 0, 1], np.float32)
    module = same(data, (few,), (many,))
    assert recorded(module) == [["NonZero", "Shape", "Gather", "Expand", "Cast"]]


def test_numbers_that_calls_bring_are_read_in_every_call() -> None:
    nodes = [node("Reshape", ["x", "to"], ["r"]), node("Shape", ["r"], ["s"]), node("Cast", ["s"], ["y"], to=F32)]
    data = model(nodes, {"x": (F32, [8]), "to": (I64, [2])}, {"y": F32}, {})
    same(data, (rows(8), np.array([2, 4])), (rows(8), np.array([8, 1])))


def test_random_numbers_are_drawn_in_every_call() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("ConstantOfShape", ["s"], ["z"]), node("RandomUniformLike", ["z"], ["y"])]
    module = OnnxModule(load(model(nodes, {"x": (F32, ["n"])}, {"y": F32}, {})))
    assert len({float(run(module, rows(5))[0][0]) for _ in range(9)}) == 9


def test_what_a_call_returns_is_its_own() -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Mul", ["s", "two"], ["y"])]
    module = OnnxModule(load(model(nodes, {"x": (F32, ["n"])}, {"y": I64}, NUMBERS)))
    for _ in range(8):
        (got,) = run(module, rows(4))
        assert got.tolist() == [8]
        got[:] = -1


def test_types_have_recordings_of_their_own() -> None:
    graph = model([node("Shape", ["x"], ["s"]), node("Cast", ["x"], ["y"], to=F32)], {"x": (F32, ["n"])}, {"y": F32}, {})
    module = OnnxModule(load(graph))
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64, torch.float64):
        (got,) = module.forward(torch.ones(3, dtype=dtype))
        assert isinstance(got, torch.Tensor) and got.dtype is torch.float32


def test_kinds_of_sizes_are_bounded() -> None:
    module = OnnxModule(load(model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)))
    for _ in range(3):
        for n in range(1, recorded_runs.MAX_SEEN + 40):
            assert run(module, rows(n, 2))[0].shape == (n, 1, 2)
    assert len(recorded(module)) == recorded_runs.MAX_KINDS
    assert module.program._runs is not None and len(module.program._runs._seen) == recorded_runs.MAX_SEEN


def test_an_error_in_recorded_calls_names_its_node() -> None:
    nodes = [node("Gather", ["x", "at"], ["y"], axis=0, name="lookup")]
    module = OnnxModule(load(model(nodes, {"x": (F32, [4]), "at": (I64, ["n"])}, {"y": F32}, {})))
    for _ in range(6):
        run(module, rows(4), np.array([0, 3]))
    assert all(r.function is not None for r in kept(module))
    with pytest.raises(ModelError, match="lookup"):
        run(module, rows(4), np.array([0, 9]))
    assert run(module, rows(4), np.array([2, 2]))[0].shape == (2,)
    assert len(recorded(module)) == 1, "a call is to blame, not the recording"


def test_a_recording_that_fails_where_the_program_does_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = OnnxModule(load(model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)))
    for _ in range(2):
        run(module, rows(3, 8))

    def broken(self: object, args: object) -> None:
        raise RuntimeError("not this one")

    monkeypatch.setattr(recorded_runs.ProgramRecording, "__call__", broken)
    assert run(module, rows(3, 8))[0].shape == (3, 4, 2)
    assert not recorded(module)
    assert any("not this one" in why for why in module.unprepared)


def test_copies_record_their_own() -> None:
    module = OnnxModule(load(model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)))
    for _ in range(3):
        run(module, rows(3, 8))
    assert recorded(module) and not recorded(copy.deepcopy(module))


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [[0, 0, 2, 0, 0, 3], [0, 0, 0, 0, 0, 2], [0, 1, 1, 0, 0, 0], [0, 0, -1, 0, 0, 1]])
def test_padded_ends(mode: str, pads: list[int]) -> None:
    constants = {"pads": np.array(pads)}
    data = model([node("Pad", ["x", "pads"], ["y"], mode=mode)], {"x": (F32, [2, 3, "n"])}, {"y": F32}, constants)
    if mode == "wrap" or min(pads) < 0:  # which ONNX Runtime's release refuses, or reads otherwise
        module = OnnxModule(load(data))
        first, *others = [run(module, rows(2, 3, 6))[0] for _ in range(4)]
        assert all((first == other).all() for other in others)
    else:
        same(data, (rows(2, 3, 6),), (rows(2, 3, 5),))


CONVS = [((1, 1, 640), (258, 1, 256), 128, 0), ((3, 129, 4), (128, 129, 3), 1, 1), ((1, 64, 1), (128, 64, 3), 1, 1),
         ((2, 8, 5, 4), (6, 8, 3, 2), 2, 1), ((1, 4, 1, 1), (3, 4, 1, 1), 1, 0)]  # fmt: skip


@pytest.mark.parametrize(("image", "weight", "stride", "pad"), CONVS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_a_product_over_windows_is_the_convolution(
    image: tuple[int, ...], weight: tuple[int, ...], stride: int, pad: int, activation: Any
) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(image), torch.randn(weight), torch.randn(weight[0])
    across = (stride, stride) if len(image) == 4 else (1, stride)
    window = Window(across, (pad, pad) if len(image) == 4 else (0, pad), (1, 1), 1)
    scale = torch.rand(weight[0]) + 0.5
    conv = FoldedConv(w, b, window, affine(scale, 0.25), activation, affine(2.0, 0.5), torch.neg)
    product = as_product(conv, x)
    assert product is not None
    library = torch.nn.functional.conv2d if len(image) == 4 else torch.nn.functional.conv1d
    exact = library(x.double(), w.double(), b.double(), stride, pad) * scale.double().reshape(-1, *(1,) * (len(image) - 2)) + 0.25
    exact = (torch.relu(exact) if activation == "relu" else exact) * 2.0 + 0.5
    torch.testing.assert_close(product(x).double(), exact, rtol=1e-4, atol=1e-4)
    for odd in (x, x.clone().index_fill_(1, torch.tensor([0]), float("nan")), x.clone().fill_(float("inf"))):
        got, want = product(odd), conv(odd)
        assert got.shape == want.shape == exact.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_weights_that_are_not_finite_stay_with_the_library() -> None:
    w = torch.randn(4, 3, 3).index_fill_(2, torch.tensor([0]), float("inf"))
    padded, inside = (FoldedConv(w, None, Window((1, 1), (0, p), (1, 1), 1), affine(), "none", affine(), torch.neg) for p in (1, 0))
    assert as_product(padded, torch.randn(1, 3, 5)) is None
    assert as_product(inside, torch.randn(1, 3, 5)) is not None


def test_large_and_grouped_convolutions_stay_with_the_library() -> None:
    grouped = FoldedConv(torch.randn(4, 1, 3), None, Window((1, 1), (0, 1), (1, 1), 4), affine(), "none", affine(), torch.neg)
    plain = FoldedConv(torch.randn(4, 4, 3), None, Window((1, 1), (0, 1), (1, 1), 1), affine(), "none", affine(), torch.neg)
    assert as_product(grouped, torch.randn(1, 4, 5)) is None
    assert as_product(plain, torch.randn(1, 4, conv_product.MAX_PLACES)) is not None
    assert as_product(plain, torch.randn(1, 4, conv_product.MAX_PLACES + 1)) is None
    assert as_product(plain, torch.randn(0, 4, 5)) is None


def test_slices_of_everything_and_reshapes_of_reshapes_take_no_calls() -> None:
    data = model(
        [node("Slice", ["x", "zero", "end", "axis"], ["all"]), node("Slice", ["x", "zero", "two", "axis"], ["some"]),
         node("Slice", ["x", "last", "before", "axis", "back"], ["turned"]),
         node("Unsqueeze", ["all", "zero"], ["a"]), node("Squeeze", ["a", "zero"], ["b"]), node("Unsqueeze", ["b", "one"], ["c"]),
         node("Reshape", ["c", "flat"], ["d"]), node("Neg", ["c"], ["e"]), node("Neg", ["d"], ["f"])],
        {"x": (F32, ["n", "m"])}, {"some": F32, "turned": F32, "b": F32, "d": F32, "e": F32, "f": F32},
        {"zero": np.array([0]), "end": np.array([2**31]), "two": np.array([2]), "axis": np.array([1]), "one": np.array([1]),
         "last": np.array([-1]), "before": np.array([-(2**31)]), "back": np.array([-1]), "flat": np.array([-1])},
    )  # fmt: skip
    module = same(data, (rows(3, 5),), (rows(2, 2),), (rows(1, 1),), (rows(0, 3),))
    assert sorted(recorded(module)[0]) == ["Neg", "Neg", "Reshape", "Slice", "Slice", "Unsqueeze"]


def test_a_recording_that_comes_often_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    data = model(HALVES, {"x": (F32, ["n", "w"])}, {"y": F32}, NUMBERS)
    module = same(data, (rows(3, 8),), (rows(1, 6),))
    assert [r.function is not None for r in kept(module)] == [True, True]
    assert recorded(copy.deepcopy(module)) == []
    monkeypatch.setattr(recorded_runs, "MAX_WRITTEN", 2)
    assert [r.function for r in kept(same(data, (rows(3, 8),)))] == [None], "writing long ones takes too long"


def test_what_a_call_settled_on_is_called_by_itself() -> None:
    class Choosing:
        best: Any = None
        asked = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.asked += 1
            return x + 1

        def choice(self) -> Any:
            return self.best

    open_still, chosen = Choosing(), Choosing()
    chosen.best = lambda x: x + 1
    for call, asked in ((open_still, 5), (chosen, 2)):
        recording = recorded_runs.ProgramRecording([None, None], (0,), ((call, (0,), (1,), (), None),), (1,))  # type: ignore[arg-type]
        assert [float(recording([torch.zeros(())])[0]) for _ in range(5)] == [1.0] * 5
        assert call.asked == asked


def test_a_function_of_calls_with_several_results() -> None:
    """Results nobody declared, absent inputs, constants, and values that are let go when nobody reads them any more."""
    gone: list[bool] = []
    alive: list[weakref.ref[Any]] = []

    def halves(x: torch.Tensor, _absent: None, by: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x / by, x * by
        alive.append(weakref.ref(first))
        return first, second, x

    def last(y: torch.Tensor) -> torch.Tensor:
        gone.append(alive[-1]() is None)
        return y + 1

    template = [None, None, torch.tensor(2.0), None, None, None, None]
    calls = [
        (halves, (0, 1, 2), (3, 4), (), None), (torch.neg, (3,), (5,), (3,), None), (last, (4,), (6,), (4,), None),
    ]  # fmt: skip
    recording = recorded_runs.ProgramRecording(list(template), (0,), tuple(calls), (6, 5, 0, 2))  # type: ignore[arg-type]
    for k in range(4):
        assert (recording.function is not None) == (k >= 2)
        found = recording([torch.tensor([4.0])])
        assert [v.tolist() for v in found] == [[9.0], [-2.0], [4.0], 2.0]
    assert gone == [True] * 4


def _layer(op: str, gates: int, ins: list[str], outs: list[str]) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    weights = {"w": rows(1, gates * 5, 4, seed=1), "r": rows(1, gates * 5, 5, seed=2)}
    return [node(op, ["x3", "w", "r", "", "", *ins], outs, hidden_size=5)], {**weights, "first": np.array([0])}


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_reshapes_before_recurrent_layers_take_no_calls(op: str, natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code reads elements in their order, also of what lies otherwise in memory; where it declines, the library is given
    the shapes that it knows."""
    native, _ = load_layers(host()) if natively and supported(host()) else (None, None)
    monkeypatch.setattr(background_layers, "layers", native)
    states = ["h3", "c3"] if op == "LSTM" else ["h3"]
    layer, constants = _layer(op, 4 if op == "LSTM" else 3, states, ["y", "last"])
    views = [node("Transpose", ["x"], ["xt"], perm=[1, 0]), node("Unsqueeze", ["xt", "first"], ["x3"])]
    views += [node("Unsqueeze", [name[0], "first"], [name]) for name in states]
    inputs = {"x": (F32, [4, "b"]), **{name[0]: (F32, ["b", 5]) for name in states}}
    data = model([*views, *layer], inputs, {"y": F32, "last": F32}, constants)
    calls = [(rows(4, b, seed=b), *[rows(b, 5, seed=b + k) for k in range(len(states))]) for b in (3, 1)]
    found = recorded(same(data, *calls))
    assert found and all(made == ["Transpose", op] for made in found)


def test_a_product_and_its_bias_are_one_call() -> None:
    """Only where nobody else reads the product, and the row has its width; whatever stands first."""
    nodes = [
        node("MatMul", ["x", "w"], ["p"]), node("Add", ["b", "p"], ["q"]), node("MatMul", ["q", "w2"], ["r"]),
        node("Add", ["r", "one"], ["s"]), node("MatMul", ["s", "w2"], ["t"]), node("Add", ["t", "b"], ["u"]),
        node("Add", ["t", "u"], ["y"]),
    ]  # fmt: skip
    constants = {"w": rows(4, 6, seed=1), "w2": rows(6, 6, seed=2), "b": rows(6, seed=3), "one": rows(1, seed=4)}
    data = model(nodes, {"x": (F32, ["a", "b", 4])}, {"y": F32}, constants)
    module = same(data, (rows(2, 3, 4),), (rows(1, 5, 4, seed=5),), (np.zeros((2, 0, 4), np.float32),))
    assert all(made == ["MatMul", "MatMul", "Add", "MatMul", "Add", "Add"] for made in recorded(module))
    odd = np.array([[[np.inf, 1, 2, 3], [np.nan, 0, 0, 0]]], np.float32)
    single = same(model(nodes[:2], {"x": (F32, ["a", "b", 4])}, {"q": F32}, {k: constants[k] for k in "wb"}), (odd,))
    assert recorded(single) == [["MatMul"]]
    both = same(model(nodes[:2], {"x": (F32, [2, 4])}, {"q": F32, "p": F32}, {k: constants[k] for k in "wb"}), (rows(2, 4),))
    assert recorded(both) == [["MatMul", "Add"]]


def test_layers_of_which_all_is_known_are_calls_of_torch() -> None:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["g"], transB=1), node("LayerNormalization", ["g", "s", "b"], ["n"], epsilon=1e-2),
        node("Gemm", ["n", "w2", "b2"], ["h"]), node("Softmax", ["h"], ["p"], axis=0),
        node("LayerNormalization", ["p", "one"], ["m"]), node("Reshape", ["m", "to"], ["i"]),
        node("GlobalAveragePool", ["i"], ["y"]),
    ]  # fmt: skip
    constants = {
        "w": rows(6, 4, seed=1), "b": rows(6, seed=2), "s": rows(6, seed=3), "w2": rows(6, 8, seed=4), "b2": rows(8, seed=5),
        "one": rows(1, seed=6), "to": np.array([-1, 2, 2, 2]),
    }  # fmt: skip
    module = same(model(nodes, {"x": (F32, ["a", 4])}, {"y": F32}, constants), (rows(3, 4),), (rows(1, 4, seed=7),))
    assert kept(module)
    for made in kept(module):
        calls = [c[0] for c in made.calls]
        direct = [c.call if isinstance(c, KnownBehind) else None for c in calls]
        assert direct[:4] == [F.linear, torch.layer_norm, F.linear, torch.softmax]
        assert direct[4] is None, "a scale that is broadcast"
        assert direct[-1] is torch.mean


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_over_axes_of_one_element_are_reshapes(op: str, keepdims: int) -> None:
    back = node("Identity", ["b"], ["c"]) if keepdims else node("Unsqueeze", ["b", "axis"], ["c"])
    nodes = [node("Relu", ["x"], ["a"]), node(op, ["a", "axis"], ["b"], keepdims=keepdims), back, node("Neg", ["c"], ["y"])]
    data = model(nodes, {"x": (F32, ["n", "k", "m"])}, {"y": F32}, {"axis": np.array([1])})
    odd = np.array([[[np.nan, np.inf, -0.0]], [[1.0, -np.inf, 3.0]]], np.float32)
    module = same(data, (odd,), (rows(6, 4).reshape(3, 2, 4),))
    one, two = recorded(module)
    assert one == ["Relu", "Neg"]
    assert op in two
