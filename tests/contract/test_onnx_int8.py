"""Before compiled code is there, quantized files run in the library's integer kernels: the operators' own bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.int8 import layers, native_layers, storage
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.onnx_program import NodeCtx
from hotfuse.frontends.onnx.registry import VARIES, find
from hotfuse.native import byte_kernels

CTX = NodeCtx(19, 1)
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(not storage.available(), reason="this torch has no quantized tensors")


@pytest.fixture(autouse=True, params=["library", "compiled"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls have the library's passes over memory, later ones compiled ones."""
    monkeypatch.setattr(byte_kernels.background, "kernels", byte_kernels.byte_kernels() if request.param == "compiled" else None)
    monkeypatch.setattr(byte_kernels.background, "begin", lambda: None)


def prepared(op: str, inputs: list[Any], domain: str = "", **attrs: Any) -> Any:
    """The prepared operator and its own function, for a first input that varies."""
    row = find(domain, op, 10)
    assert row is not None and row.prepare is not None
    made = row.prepare(CTX, [VARIES, *inputs[1:]], attrs)
    return None if made is None else (made.call(*inputs), row.fn(CTX, *inputs, **attrs), made)


@pytest.mark.parametrize(
    ("dtype", "zero"), [(torch.uint8, 0), (torch.uint8, 1), (torch.uint8, 128), (torch.int8, -5), (torch.int8, 127)]
)
@pytest.mark.parametrize("scale", [0.02, 0.5, 1e-6])
def test_bytes_are_those_of_the_operators(dtype: torch.dtype, zero: int, scale: float) -> None:
    low, high = storage.LIMITS[dtype]
    s, z = torch.tensor(scale), torch.tensor(zero, dtype=dtype)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30, -1e30])
    x = torch.cat([torch.randn(1003) * 100 * s, torch.arange(-600, 600) / 2 * s, edges])
    got, want, _ = prepared("QuantizeLinear", [x, s, z])
    assert torch.equal(got, want)
    got, want, _ = prepared("DequantizeLinear", [torch.arange(low, high + 1).to(dtype), s, z])
    assert torch.equal(got, want)


def test_what_is_no_number_is_the_lowest() -> None:
    got, _, _ = prepared("QuantizeLinear", [torch.full((9,), torch.nan), torch.tensor(0.1), torch.tensor(3, dtype=torch.int8)])
    assert got.tolist() == [-128] * 9  # ONNX Runtime's


@pytest.mark.parametrize("make", [
    lambda: torch.randn(2, 8, 5, 3).contiguous(memory_format=torch.channels_last), lambda: torch.randn(6, 7).t(),
    lambda: torch.randn(3, 0), lambda: torch.randn(()), lambda: torch.randn(1),
    lambda: torch.randn(5, 9)[:, 2:7], lambda: torch.randn(4, 1).expand(4, 5),
])  # fmt: skip
def test_any_order_of_memory(make: Any) -> None:
    x, s, z = make(), torch.tensor(0.05), torch.tensor(7, dtype=torch.uint8)
    bytes_, want, _ = prepared("QuantizeLinear", [x, s, z])
    assert torch.equal(bytes_, want) and bytes_.shape == x.shape
    view = torch.randint(0, 256, (40, 40), dtype=torch.uint8)[3:9, 1:20:2].t()
    for given in (bytes_, view):
        got, want, _ = prepared("DequantizeLinear", [given, s, z])
        assert torch.equal(got, want) and got.shape == given.shape


def extreme(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that are mostly at their limits, where sums are largest."""
    low, high = storage.LIMITS[dtype]
    ends = torch.where(torch.rand(shape) < 0.7, high, low)
    return torch.where(torch.rand(shape) < 0.7, ends, torch.randint(low, high + 1, shape)).to(dtype)


def weights(dtype: torch.dtype, bits: int, *shape: int) -> tuple[torch.Tensor, int]:
    """Mostly the largest ones of so many bits, around a zero point."""
    middle = 128 if dtype is torch.uint8 else 0
    most = 64 if bits == 7 else 127
    w = torch.where(torch.rand(shape) < 0.6, most, torch.randint(-most, most + 1, shape))
    return (w + middle).to(dtype), middle


@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(torch.uint8, torch.int8), (torch.int8, torch.int8), (torch.uint8, torch.uint8)])
@pytest.mark.parametrize(
    "form", [(1, 24, 3, 2), (24, 24, 3, 2), (4, 24, 5, 2), (1, 24, 1, 2), (1, 20, 1, 2), (1, 3, 7, 2), (1, 24, 5, 1), (1, 20, 1, 1)]
)
def test_convolutions(bits: int, x_dtype: torch.dtype, w_dtype: torch.dtype, form: tuple[int, int, int, int]) -> None:
    groups, channels, kernel, rank = form
    x = extreme(x_dtype, 2, channels, *(11, 9)[:rank])
    w, middle = weights(w_dtype, bits, 24, channels // groups, *(kernel,) * rank)
    each = torch.rand(24) * 0.01 + 0.001
    zeros = torch.full((24,), middle, dtype=w_dtype)
    x_zero = 121 if x_dtype is torch.uint8 else -9
    out = w[0].numel() * 60.0 * 100 * 0.006 * 0.02 / 100
    bias = torch.randint(-9000, 9000, (24,), dtype=torch.int32)
    zero = torch.tensor(x_zero, dtype=x_dtype)
    inputs = [x, torch.tensor(0.02), zero, w, each, zeros, torch.tensor(out), zero, bias]
    attrs = {"group": groups, "pads": [kernel // 2] * (2 * rank), "strides": [1, 1 if channels == 20 else 2][-rank:]}
    found = prepared("QLinearConv", inputs, **attrs)
    assert found is not None
    got, want, _ = found
    assert got.shape == want.shape and got.dtype is want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("x_dtype", [torch.uint8, torch.int8])
def test_products(bits: int, rows: int, x_dtype: torch.dtype) -> None:
    w, _ = weights(torch.int8, bits, 70, 33)
    a = extreme(x_dtype, rows, 70)
    scales = [torch.tensor(0.02), torch.tensor(5, dtype=x_dtype)]
    each = [torch.rand(33) * 0.01 + 0.001, torch.zeros(33, dtype=torch.int8)]
    ends = [torch.tensor(2.0), torch.tensor(9, dtype=x_dtype)]
    got, want, _ = prepared("QLinearMatMul", [a, *scales, w, *each, *ends])
    assert torch.equal(got, want)
    bias = torch.randint(-9000, 9000, (33,), dtype=torch.int32)
    got, want, _ = prepared("QGemm", [a, *scales, w.t().contiguous(), *each, bias, *ends], "com.microsoft", transB=1)
    assert int((got.int() - want.int()).abs().max()) <= 1  # its own function divides by the result's scale
    assert float((got != want).float().mean()) < 0.02


def test_sums_that_floats_do_not_hold_stay_with_the_operator() -> None:
    if layers.full_bytes_are_exact():
        pytest.skip("integer kernels are exact here for all weights")
    w = torch.full((2000, 8), 127, dtype=torch.int8)
    s, z = torch.tensor(0.1), torch.tensor(0, dtype=torch.uint8)
    row = find("", "QLinearMatMul", 10)
    assert row is not None and row.prepare is not None
    assert row.prepare(CTX, [VARIES, s, z, w, s, torch.tensor(0, dtype=torch.int8), s, z], {}) is None


def model(nodes: list[onnx.NodeProto], shape: tuple[int, ...], constants: dict[str, Array]) -> bytes:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


class Written:
    """A QDQ file as quantizers write it."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.random = np.random.default_rng(seed)

    def pair(self, name: str, scale: float, zero: int, of: type = np.uint8) -> str:
        """Q and DQ of a value."""
        self.constants |= {f"{name}_s": np.float32(scale), f"{name}_z": of(zero)}
        self.nodes.append(helper.make_node("QuantizeLinear", [name, f"{name}_s", f"{name}_z"], [f"{name}_q"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [f"{name}_d"]))
        return f"{name}_d"

    def weight(self, name: str, shape: tuple[int, ...], channels: int | None, axis: int = 0) -> str:
        """DQ of constant bytes, one scale for each of so many channels."""
        scale = np.float32(0.01) if channels is None else (self.random.random(channels) * 0.01 + 0.005).astype(np.float32)
        self.constants |= {f"{name}_q": self.random.integers(-64, 65, shape).astype(np.int8), f"{name}_s": scale,
                           f"{name}_z": np.zeros(np.shape(scale), np.int8)}  # fmt: skip
        given = {} if channels is None else {"axis": axis}
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [name], **given))
        return name

    def bias(self, name: str, x: str, w: str, n: int) -> str:
        scale = np.atleast_1d(self.constants[f"{x}_s"] * self.constants[f"{w}_s"]).astype(np.float32)
        bias = self.random.integers(-3000, 3000, n).astype(np.int32)
        self.constants |= {f"{name}_q": bias, f"{name}_s": scale, f"{name}_z": np.zeros(scale.shape, np.int32)}
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", f"{name}_s", f"{name}_z"], [name], axis=0))
        return name

    def op(self, op: str, ins: list[str], out: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, ins, [out], **attrs))
        return out


def network(of: type, channels: bool) -> bytes:
    """Convolution, hardswish spelled out, a residual, moves, and two products."""
    w = Written()
    low = 0 if of is np.uint8 else -128
    x = w.pair("x", 0.03, low + 120, of)
    weight = w.weight("w1", (8, 4, 3, 3), 8 if channels else None)
    w.op("Conv", [x, weight, w.bias("b1", "x", "w1", 8)], "c1", pads=[1, 1, 1, 1])
    c1 = w.pair("c1", 0.05, low + 100, of)
    w.op("HardSigmoid", [c1], "h", alpha=1 / 6, beta=0.5)
    w.op("Mul", [c1, w.pair("h", 1 / 255, low, of)], "s")
    s = w.pair("s", 0.04, low + 10, of)
    w.op("Conv", [s, w.weight("w2", (8, 8, 1, 1), 8 if channels else None), w.bias("b2", "s", "w2", 8)], "c2")
    w.op("Relu", ["c2"], "r2")
    w.op("Add", [w.pair("r2", 0.05, low, of), s], "a")
    a = w.pair("a", 0.06, low + 3, of)
    w.constants |= {"flat": np.array([0, -1], np.int64)}
    w.op("Transpose", [a], "t", perm=[0, 2, 3, 1])
    w.op("Reshape", ["t", "flat"], "f")
    w.constants |= {"f_s": w.constants["a_s"], "f_z": w.constants["a_z"]}
    f = w.pair("f", 0.06, low + 3, of)
    w.op("Gemm", [f, w.weight("w3", (16, 8 * 30), 16 if channels else None), w.bias("b3", "f", "w3", 16)], "g", transB=1)
    g = w.pair("g", 0.2, low + 128, of)
    w.op("MatMul", [g, w.weight("w4", (16, 5), 5 if channels else None, axis=1)], "m")
    w.op("Identity", [w.pair("m", 0.1, low + 128, of)], "y")
    return model(w.nodes, (2, 4, 6, 5), w.constants)


@pytest.mark.parametrize("of", [np.uint8, np.int8])
@pytest.mark.parametrize("channels", [False, True])
def test_a_qdq_network_runs_on_bytes(of: type, channels: bool) -> None:
    data = network(of, channels)
    fast, plain = OnnxModule(load(data)), OnnxModule(load(data), pack=False)
    for seed in range(4):
        x = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(seed))
        (got,), (want,) = fast.forward(x), plain.forward(x)
        assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
        assert float((got - want).abs().max()) <= 0.1001 and float((got != want).float().mean()) <= 0.2  # one step
    ran = [c[-1].op for c in fast.program.ready().calls]
    assert not fast.unprepared
    assert [ran.count(op) for op in ("QLinearConv", "QGemm", "QLinearMatMul")] == [2, 1, 1]
    assert not {"HardSigmoid", "Mul", "Conv", "Gemm", "MatMul"} & set(ran)
    assert len(ran) < len(plain.program.ready().calls) * 0.6


def test_a_session_serves_it() -> None:
    ort = pytest.importorskip("onnxruntime")
    data = network(np.uint8, True)
    x = np.random.default_rng(3).normal(size=(2, 4, 6, 5)).astype(np.float32)
    options = ort.SessionOptions()  # as the file says: its optimizer's own operators round otherwise
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    want = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    with hotfuse.InferenceSession(data, settings=Settings(tiers=0, record=False)) as session:
        got = session.run(None, {"x": x})[0]
    assert np.abs(got - want).max() <= 0.1001


def test_what_others_read_too_is_still_computed() -> None:
    w = Written()
    x = w.pair("x", 0.05, 128)
    w.op("Sigmoid", [x], "s")
    w.op("Add", [w.pair("s", 1 / 255, 0), "s"], "a")  # the float between is read, too
    w.op("Identity", [w.pair("a", 1 / 127, 0)], "y")
    data = model(w.nodes, (3, 50), w.constants)
    x = torch.randn(3, 50) * 3
    (got,), (want,) = OnnxModule(load(data)).forward(x), OnnxModule(load(data), pack=False).forward(x)
    assert torch.equal(got, want)


def test_functions_of_a_byte_with_other_scales_and_empty_images() -> None:
    w = Written()
    x = w.pair("x", 0.05, -3, np.int8)
    w.op("Tanh", [x], "t")
    w.op("Identity", [w.pair("t", 1 / 127, 0, np.int8)], "y")
    data = model(w.nodes, ("n", 3, 2, 2), w.constants)  # pyright: ignore[reportArgumentType]
    fast, plain = OnnxModule(load(data)), OnnxModule(load(data), pack=False)
    for x in (torch.randn(0, 3, 2, 2), torch.randn(2, 3, 2, 2) * 4, torch.randn(1, 2, 2, 3).permute(0, 3, 1, 2)):
        (got,), (want,) = fast.forward(x), plain.forward(x)
        assert torch.equal(got, want) and got.shape == want.shape
    assert "Tanh" not in [c[-1].op for c in fast.program.ready().calls]


def test_a_bias_in_other_units_keeps_the_floats() -> None:
    w = Written()
    x = w.pair("x", 0.03, 120)
    weight = w.weight("w", (8, 4, 1, 1), None)
    bias = w.bias("b", "x", "w", 8)
    w.constants["b_s"] = w.constants["b_s"] * 3
    w.op("Conv", [x, weight, bias], "c")
    w.op("Identity", [w.pair("c", 0.05, 100)], "y")
    data = model(w.nodes, (1, 4, 3, 3), w.constants)
    fast, x = OnnxModule(load(data)), torch.randn(1, 4, 3, 3)
    (got,), (want,) = fast.forward(x), OnnxModule(load(data), pack=False).forward(x)
    assert float((got - want).abs().max()) <= 0.0501
    assert "Conv" in [c[-1].op for c in fast.program.ready().calls]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("zero", [None, 3, "each"])
def test_integer_products_with_constant_weights(dtype: torch.dtype, zero: Any) -> None:
    b = extreme(dtype, 100, 7)
    b_zero = None if zero is None else torch.tensor(3, dtype=dtype) if zero == 3 else torch.arange(7).to(dtype)
    for shape in ((1, 100), (2, 3, 100), (5, 100), (0, 100)):
        got, want, _ = prepared("MatMulInteger", [extreme(torch.uint8, *shape), b, torch.tensor(131, dtype=torch.uint8), b_zero])
        assert torch.equal(got, want) and got.dtype is torch.int32
    w = extreme(dtype, 7, 5, 3, 3)
    x = extreme(torch.uint8, 2, 5, 9, 8)
    got, want, _ = prepared("ConvInteger", [x, w, torch.tensor(131, dtype=torch.uint8), b_zero], pads=[1, 0, 1, 0])
    assert torch.equal(got, want) and got.dtype is torch.int32


def test_integer_products_that_floats_do_not_hold_stay_with_the_operator() -> None:
    row = find("", "MatMulInteger", 10)
    assert row is not None and row.prepare is not None
    assert row.prepare(CTX, [VARIES, torch.full((600, 2), 127, dtype=torch.int8)], {}) is None


@pytest.mark.parametrize("x", [
    torch.randn(3, 50), torch.rand(7) + 2, -torch.rand(7), torch.zeros(4), torch.randn(6, 4).t(), torch.tensor([1.0, torch.inf]),
    torch.tensor([1.0, torch.nan]), torch.tensor(3.0), torch.full((3,), 1e-42), torch.tensor([3e38, -3e38]),
])  # fmt: skip
def test_ranges_of_calls(x: torch.Tensor) -> None:
    got, want, _ = prepared("DynamicQuantizeLinear", [x])
    assert all(g.dtype is w.dtype and g.shape == w.shape for g, w in zip(got, want, strict=True))
    assert all(torch.equal(g, w) or not bool(torch.isfinite(want[1])) for g, w in zip(got, want, strict=True))


def dynamic_layer(outputs: int, *, zero: int | None, each: bool, bias: bool, relu: bool, dtype: str = "int8") -> bytes:
    """As ONNX Runtime's quantizer writes a layer of 24 inputs."""
    rng = np.random.default_rng(outputs)
    middle = 0 if zero is None else zero
    w = (
        (rng.integers(-60, 60, (24, outputs)) + middle)
        .clip(*{"int8": (-128, 127), "uint8": (0, 255)}[dtype])
        .astype(dtype)
    )
    constants: dict[str, Array] = {
        "w": w,
        "ws": (rng.random(outputs if each else ()) * 0.01 + 0.001).astype(np.float32),
    }
    names = ["q", "w", "z"]
    if zero is not None:
        constants["wz"] = np.full(outputs if each else (), zero, dtype)
        names.append("wz")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), helper.make_node("MatMulInteger", names, ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), helper.make_node("Mul", ["s", "ws"], ["u"]),
        helper.make_node("Mul", ["f", "u"], ["y0"]),
    ]  # fmt: skip
    last = "y0"
    if bias:
        constants["b"] = rng.standard_normal(outputs).astype(np.float32)
        nodes.append(helper.make_node("Add", [last, "b"], ["y1"]))
        last = "y1"
    nodes.append(helper.make_node("Relu" if relu else "Identity", [last], ["y"]))
    return model(nodes, ("n", 24), constants)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("zero", [None, 0, 3, -5])
@pytest.mark.parametrize(
    "form", [(33, True, True, True), (16, False, False, False), (1, False, True, False), (40, True, False, True)]
)
def test_dynamic_layers_are_few_steps_with_the_same_numbers(
    zero: int | None, form: tuple[int, bool, bool, bool]
) -> None:
    outputs, each, bias, relu = form
    file = dynamic_layer(outputs, zero=zero, each=each, bias=bias, relu=relu)
    fast, plain = OnnxModule(load(file)), OnnxModule(load(file), pack=False)
    odd = torch.randn(3, 24)
    odd[1, 5] = torch.nan
    far = torch.randn(2, 24)
    far[0, 0] = torch.inf
    for x in (torch.randn(1, 24), torch.randn(7, 24) * 40 + 9, torch.zeros(2, 24), torch.randn(2, 3, 24), torch.randn(24),
              torch.randn(24, 5).t(), torch.full((2, 24), 4.0), torch.randn(5, 24) * 1e-42, odd, far):  # fmt: skip
        (got,), (want,) = fast(x), plain(x)
        assert got.shape == want.shape
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    layer = 1 if native_layers.supported() else 2
    assert fast.program.prepared_steps == layer + (not relu)


@pytest.mark.parametrize("zero", [128, 117, 0])
@pytest.mark.parametrize("instruction", [True, False])
def test_dynamic_layers_with_unsigned_weights(zero: int, instruction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no instruction multiplies bytes: as floats, which hold the same sums."""
    if not instruction:
        monkeypatch.setattr(layers, "signed_sums_are_exact", lambda: False)
    file = dynamic_layer(19, zero=zero, each=False, bias=True, relu=False, dtype="uint8")
    fast, plain = OnnxModule(load(file)), OnnxModule(load(file), pack=False)
    x = torch.randn(6, 24)
    assert torch.equal(fast(x)[0], plain(x)[0])


def test_a_scale_that_something_else_reads_stays() -> None:
    proto = onnx.load_from_string(dynamic_layer(8, zero=None, each=False, bias=True, relu=True))
    proto.graph.node.append(helper.make_node("Mul", ["x", "s"], ["other"]))
    proto.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    file = proto.SerializeToString()
    fast, plain, x = OnnxModule(load(file)), OnnxModule(load(file), pack=False), torch.randn(4, 24)
    for got, want in zip(fast(x), plain(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_layers_of_bytes_give_floats_whatever_the_process_has(shared: bool, dtype: torch.dtype) -> None:
    """Passes write 4 bytes for each number; `shared` bytes have a pass of their own."""
    proto = onnx.load_from_string(dynamic_layer(8, zero=None, each=False, bias=False, relu=True))
    if shared:
        proto.graph.node.append(helper.make_node("DequantizeLinear", ["q", "s", "z"], ["other"]))
        proto.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, None))
    file = proto.SerializeToString()
    x = torch.randn(700, 24)
    want = OnnxModule(load(file), pack=False)(x)
    torch.set_default_dtype(dtype)
    try:
        got = OnnxModule(load(file))(x)
    finally:
        torch.set_default_dtype(torch.float32)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_wrong_sizes_are_the_models_error() -> None:
    fast = OnnxModule(load(dynamic_layer(8, zero=None, each=False, bias=False, relu=False)))
    with pytest.raises(hotfuse.ModelError, match="MatMulInteger"):
        fast(torch.randn(2, 23))


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_sums_and_products_of_bytes(op: str, dtype: torch.dtype) -> None:
    row = find("com.microsoft", op, 1)
    assert row is not None and row.prepare is not None
    low = torch.iinfo(dtype).min
    told = [torch.tensor(0.031), torch.tensor(low + 7, dtype=dtype)], [torch.tensor(0.05), torch.tensor(low + 130, dtype=dtype)]
    end = [torch.tensor(0.07), torch.tensor(low + 90, dtype=dtype)]
    made = row.prepare(CTX, [VARIES, *told[0], VARIES, *told[1], *end], {})
    assert made is not None
    whole = torch.randint(-128, 128, (2, 2, 5, 7, 3), dtype=torch.int8).view(dtype)
    for a, b in ((whole[0], whole[1]), (whole[0], whole[1, :, :1]), (whole[0].permute(0, 3, 1, 2), whole[1].permute(0, 3, 1, 2)),
                 (whole[0, 0, 2:], whole[1, 0, 2:]), (whole[0, :0], whole[1, :0]),
                 (whole[0], whole[1].transpose(2, 1).contiguous().transpose(1, 2)),
                 (whole[0, 0, 0, 0, 0], whole[1, 0, 0, 0, 0])):  # fmt: skip
        given = [a, *told[0], b, *told[1], *end]
        assert torch.equal(made.call(*given), row.fn(CTX, *given))


@pytest.mark.parametrize("depth", [1, 32, 258, 259])
@pytest.mark.parametrize("kinds", [(torch.uint8, torch.uint8), (torch.int8, torch.int8), (torch.uint8, torch.int8)], ids=str)
def test_products_of_two_that_vary(depth: int, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """The bytes of the plain function, at the limits of what floats hold, for matrices in any order of memory and for none."""
    row, (a_kind, b_kind) = find("", "QLinearMatMul", 21), kinds
    assert row is not None and row.prepare is not None
    ends = [torch.tensor(s, dtype=torch.float32) for s in (0.031, 0.05, 0.031 * 0.05 * depth * 90)]
    zeros = [torch.tensor(torch.iinfo(k).min + n, dtype=k) for k, n in ((a_kind, 0), (b_kind, 255), (a_kind, 120))]
    made = row.prepare(CTX, [VARIES, ends[0], zeros[0], VARIES, ends[1], zeros[1], ends[2], zeros[2]], {})
    assert made is not None
    for shape, fill in (((2, 3, 5), None), ((2, 3, 5), 0), ((2, 0, 5), None), ((2, 3, 0), None)):
        a, b = (torch.randint(-128, 128, (shape[0], n, depth), dtype=torch.int8) for n in shape[1:])
        if fill is not None:  # the largest differences: 255 and -255
            a, b = a.fill_(-1 if a_kind is torch.uint8 else 127), b.fill_(0 if b_kind is torch.uint8 else -128)
        given = [a.view(a_kind), ends[0], zeros[0], b.view(b_kind).transpose(1, 2), ends[1], zeros[1], ends[2], zeros[2]]
        got = made.call(*given)
        assert torch.equal(got, row.fn(CTX, *given)) and got.dtype is a_kind


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (7,), (5, 1), (4, 5, 7), (1, 1, 1, 1)], ids=str)
def test_sums_with_a_constant(op: str, dtype: torch.dtype, first: bool, shape: tuple[int, ...]) -> None:
    """A bias and a number that a file holds: the same bytes, in one pass or looked up."""
    row = find("com.microsoft", op, 1)
    assert row is not None and row.prepare is not None
    low = torch.iinfo(dtype).min
    told = [torch.tensor(0.031), torch.tensor(low + 7, dtype=dtype)], [torch.tensor(0.05), torch.tensor(low + 130, dtype=dtype)]
    end = [torch.tensor(0.07), torch.tensor(low + 90, dtype=dtype)]
    constant = torch.randint(-128, 128, shape, dtype=torch.int8).view(dtype)

    def given(x: Any) -> list[Any]:
        a, b = (x, constant) if first else (constant, x)
        return [a, *told[0], b, *told[1], *end]

    made = row.prepare(CTX, given(VARIES), {})
    assert made is not None
    whole = torch.randint(-128, 128, (2, 4, 5, 7), dtype=torch.int8).view(dtype)
    for x in (whole, whole[0], whole.transpose(1, 2).contiguous().transpose(1, 2), whole[:0], whole[0, 0], whole[:, :, :1], whole):
        if all(a in (b, 1) or b == 1 for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
            assert torch.equal(made.call(*given(x)), row.fn(CTX, *given(x)))


def test_sums_between_convolutions_are_taken_as_they_lie() -> None:
    """Operators of ONNX Runtime's own domain, too: images were put into another order before each, and back behind it."""
    rng, node = np.random.default_rng(1), helper.make_node
    constants: dict[str, Array] = {
        "s": np.array(0.1, np.float32), "z": np.array(3, np.uint8), "wz": np.array(0, np.int8),
        "w": rng.integers(-127, 127, (8, 8, 3, 3)).astype(np.int8), "ws": np.array(0.01, np.float32),
    }  # fmt: skip
    scale, weight = ["s", "z"], ["w", "ws", "wz"]
    nodes = [
        node("QLinearConv", ["x", *scale, *weight, *scale], ["a"], pads=[1] * 4),
        node("QLinearAdd", ["a", *scale, "a", *scale, *scale], ["b"], domain="com.microsoft"),
        node("QLinearSigmoid", ["b", *scale, *scale], ["c"], domain="com.microsoft"),
        node("QLinearConv", ["c", *scale, *weight, *scale], ["y"], pads=[1] * 4),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 8, 6, 5])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [1, 8, 6, 5])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    module, plain = OnnxModule(load(data)), onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    for k in range(3):
        x = np.random.default_rng(k).integers(0, 255, (1, 8, 6, 5)).astype(np.uint8)
        (got,), (want,) = module.forward(torch.from_numpy(x)), plain.run(None, {"x": x})
        assert isinstance(got, torch.Tensor) and got.is_contiguous()
        difference = np.abs(got.numpy().astype(int) - want.astype(int))
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02
    made = [c[-1].op for c in module.program.ready().calls]
    assert made == [n.op_type for n in nodes] + ["QLinearConv"], "one copy, of the result"


@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("first", [True, False])
def test_a_number_beside_bytes(op: str, dtype: type, first: bool) -> None:
    """What quantization tools make of a gelu's half: a tensor without dims, quantized in the graph like any other."""
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]), node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("QuantizeLinear", ["half", "s", "z"], ["hq"]), node("DequantizeLinear", ["hq", "s", "z"], ["hd"]),
        node(op, ["hd", "xd"] if first else ["xd", "hd"], ["a"]),
        node("QuantizeLinear", ["a", "s", "z"], ["aq"]), node("DequantizeLinear", ["aq", "s", "z"], ["y"]),
    ]  # fmt: skip
    constants = {"s": np.array(0.03, np.float32), "z": np.array(7, dtype), "half": np.array(0.5, np.float32)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    peer = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    session = hotfuse.InferenceSession(data, settings=Settings(capture="off"))
    for shape in ((3, 70), (1,), (), (0, 4)):
        x = np.asarray(np.random.default_rng(1).standard_normal(shape) * 2, np.float32)
        for _ in range(3):
            apart = np.abs(session.run(None, {"x": x})[0] - peer.run(None, {"x": x})[0])
            assert apart.max(initial=0) <= 0.0301  # one step of the scale, where the exact result lies between two
            assert (apart > 1e-6).sum() <= max(1, x.size // 100)
