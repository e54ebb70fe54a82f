"""Convolutions of bytes: the interpreter and native code against exact integers; then whole ONNX models beside ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import hotfuse
from hotfuse import Settings
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered, PackArgument
from hotfuse.lower.cpu.conv.conv_group import lower_convolution
from hotfuse.native.target import CpuTarget
from hotfuse.tile.program import instructions
from tests.contract.test_lower_contract import CORES, core_of
from tests.contract.test_lower_contract_types import EVERYWHERE, data, meaning, run
from tests.races import kernels_win, slow_library

INTEGER = """graph g(%x: {x}[s0, {ic}, {h}, {w}], %zx: {x}[]) {{
  param %w: {kind}[{oc}, {ic}, {r}, {s}] = "w"
  %xf: f64[s0, {ic}, {h}, {w}] = aten.to.dtype(%x, f64)
  %zf: f32[] = aten.to.dtype(%zx, f32)
  %zd: f64[] = aten.to.dtype(%zf, f64)
  %xs: f64[s0, {ic}, {h}, {w}] = aten.sub.Tensor(%xf, %zd)
  %wf: f64[{oc}, {ic}, {r}, {s}] = aten.to.dtype(%w, f64)
  %ws: f64[{oc}, {ic}, {r}, {s}] = aten.sub.Tensor(%wf, {zw})
  %h: f64[s0, {oc}, {oh}, {ow}] = aten.conv2d.default(%xs, %ws, None, [{stride}, {stride}], [{p}, {p}], [{d}, {d}], 1)
  %y: i32[s0, {oc}, {oh}, {ow}] = aten.to.dtype(%h, i32)
  return %y }}"""
"""ConvInteger as the front end writes it, with a zero point that is known at run time."""
SHAPES = {
    "3x3": {"ic": 8, "oc": 20, "h": 7, "w": 9, "r": 3, "s": 3, "p": 1},
    "picture": {"ic": 3, "oc": 5, "h": 11, "w": 10, "r": 5, "s": 5, "p": 2, "stride": 2},
    "1x1": {"ic": 33, "oc": 40, "h": 3, "w": 5, "r": 1, "s": 1},
    "dilated": {"ic": 5, "oc": 16, "h": 9, "w": 9, "r": 3, "s": 2, "p": 2, "d": 2},
    "one channel": {"ic": 1, "oc": 2, "h": 4, "w": 4, "r": 3, "s": 3, "p": 1},
}


def filled(shape: str, **more: Any) -> str:
    v: dict[str, Any] = {"stride": 1, "p": 0, "d": 1, "x": "u8", "kind": "i8", "zw": 0.0, **SHAPES[shape], **more}
    for out, size, window in (("oh", v["h"], v["r"]), ("ow", v["w"], v["s"])):
        v[out] = (size + 2 * v["p"] - v["d"] * (window - 1) - 1) // v["stride"] + 1
    return INTEGER.format(**v)


def assert_exact(lowered: Lowered, graph: Graph, target: CpuTarget | None) -> None:
    """Every bit, on one image and on three, and the kernel travels whole."""
    assert from_json(to_json(lowered)) == lowered
    for s0 in (1, 3):
        values = data(graph, {"s0": s0})
        (got,) = run(lowered, graph, values, {"s0": s0}, target)
        (want,) = meaning(graph, values, wide=False)
        assert torch.equal(got, want)


@EVERYWHERE
@pytest.mark.parametrize(("x", "kind", "zw"), [
    ("u8", "i8", 0.0), ("u8", "u8", 128.0), ("i8", "i8", 0.0), ("u8", "u8", 0.0), ("u8", "u8", 255.0), ("u8", "u8", 131.0),
    ("i8", "i8", -128.0), ("i8", "u8", 77.0),
])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact(target: CpuTarget | None, shape: str, x: str, kind: str, zw: float) -> None:
    graph = parse(filled(shape, x=x, kind=kind, zw=zw))
    lowered = lower_convolution(graph, CORES["avx2"] if target is None else core_of(target))
    assert any(isinstance(a, PackArgument) and a.spec.dtype.value == "i8" for a in lowered.arguments)
    assert_exact(lowered, graph, target)


@EVERYWHERE
@pytest.mark.parametrize(("x", "kind", "zw"), [("u8", "i8", 0.0), ("i8", "i8", -128.0), ("i8", "u8", 77.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_as_16_bit_numbers(target: CpuTarget | None, shape: str, x: str, kind: str, zw: float) -> None:
    """What is multiplied where four products of bytes are no instruction; not where little memory is asked for."""
    graph = parse(filled(shape, x=x, kind=kind, zw=zw))
    core = replace(CORES["avx2"] if target is None else core_of(target), dots_bytes=False)
    lowered = lower_convolution(graph, core)
    assert {a.spec.dtype.value for a in lowered.arguments if isinstance(a, PackArgument)} == {"i16", "i32"}
    lean = lower_convolution(graph, replace(core, lean=True))
    assert {a.spec.dtype.value for a in lean.arguments if isinstance(a, PackArgument)} == {"i8", "i32"}
    assert_exact(lowered, graph, target)


@EVERYWHERE
@pytest.mark.parametrize(
    ("ic", "p", "stride", "copied"), [(16, 0, 1, False), (16, 0, 2, False), (16, 1, 1, True), (18, 0, 1, True)]
)
def test_an_image_without_borders_is_read_where_it_lies(
    target: CpuTarget | None, ic: int, p: int, stride: int, copied: bool
) -> None:
    text = filled("1x1", ic=ic, p=p, stride=stride, r=2, s=2, h=6)
    graph = parse(text.replace(f"%x: u8[s0, {ic}, 6, 5]", f"%x: u8[s0, {ic}, 6, 5]{{0, 2, 3, 1}}"))
    lowered = lower_convolution(graph, CORES["avx2"] if target is None else core_of(target))
    assert any(b.name == "padded" for b in lowered.kernel.buffers) == copied
    for s0 in (1, 3):
        values = data(graph, {"s0": s0})
        (want,) = meaning(graph, values, wide=False)
        values["x"] = values["x"].permute(0, 2, 3, 1).contiguous()
        (got,) = run(lowered, graph, values, {"s0": s0}, target)
        assert torch.equal(got, want)


@EVERYWHERE
@pytest.mark.parametrize("w", [3, 16, 21, 37, 300])
def test_planes_are_written_by_squares(target: CpuTarget | None, w: int) -> None:
    """Results that lie plane by plane are turned by squares of pixels and channels: of whole rows, and of blocks of long ones."""
    core = CORES["avx2"] if target is None else core_of(target)
    source = filled("3x3", w=w, oc=37)
    graph = parse(source)
    lowered = lower_convolution(graph, core)
    assert {(core.lanes, core.lanes)} == {i.outs[0].type.shape for i in instructions(lowered.kernel.body) if i.op == "transpose"}
    assert_exact(lowered, graph, target)
    last = source.replace(f"f64[s0, 37, 7, {w}]", f"f64[s0, 37, 7, {w}]{{0, 2, 3, 1}}").replace(
        f"i32[s0, 37, 7, {w}]", f"i32[s0, 37, 7, {w}]{{0, 2, 3, 1}}")  # fmt: skip
    assert not any(i.op == "transpose" for i in instructions(lower_convolution(parse(last), core).kernel.body))


@EVERYWHERE
@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize(("x", "w"), [(255, -128), (255, 127), (0, -128)])
def test_the_largest_bytes_do_not_saturate(target: CpuTarget | None, x: int, w: int, dots: bool) -> None:
    """Sums of two products of bytes do not fit 16 bits, which is where instructions without VNNI would add them."""
    graph = parse(filled("3x3"))
    core = replace(CORES["avx2"] if target is None else core_of(target), dots_bytes=dots)
    lowered = lower_convolution(graph, core)
    values = data(graph, {"s0": 1})
    values["x"].fill_(x)
    values["w"].fill_(w)
    (got,) = run(lowered, graph, values, {"s0": 1}, target)
    (want,) = meaning(graph, values, wide=False)
    assert torch.equal(got, want)


def test_what_is_refused() -> None:
    with pytest.raises(CannotLower, match="products of bytes"):
        SHAPES["long"] = {"ic": 4000, "oc": 2, "h": 4, "w": 4, "r": 3, "s": 3}
        lower_convolution(parse(filled("long")), CORES["avx512"])


# --- models


def model(kind: str, *, inputs: int = 8, outputs: int = 24, window: int = 3, pads: tuple[int, ...] = (1, 1, 1, 1), stride: int = 1,
          each: bool = True, unsigned: bool = False) -> bytes:  # fmt: skip
    """A quantized convolution between float ends: QDQ, QLinearConv, or ConvInteger behind dynamic quantization."""
    rng = np.random.default_rng(5)
    weight = rng.integers(-127, 128, (outputs, inputs, window, window)).astype(np.int8)
    scale = (rng.random(outputs) * 0.003 + 0.001).astype(np.float32) if each else np.float32(0.002)
    zero = np.zeros(outputs if each else (), np.int8)
    if unsigned:
        weight, zero = ((a.astype(np.int32) + 128).astype(np.uint8) for a in (weight, zero))
    constants: dict[str, Any] = {"w": weight, "ws": scale, "wz": zero, "xs": np.float32(0.03), "xz": np.uint8(117),
                                 "ys": np.float32(0.11), "yz": np.uint8(99),
                                 "b": rng.integers(-500, 500, outputs).astype(np.int32)}  # fmt: skip
    attributes: dict[str, Any] = {"kernel_shape": [window] * 2, "pads": list(pads), "strides": [stride] * 2}
    quantize = helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"])
    real = helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"])
    if kind == "qdq":
        constants |= {"bs": np.float32(0.03) * scale, "bz": np.zeros(outputs if each else (), np.int32)}
        nodes = [
            quantize, helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
            helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
            helper.make_node("DequantizeLinear", ["b", "bs", "bz"], ["bd"], axis=0),
            helper.make_node("Conv", ["xd", "wd", "bd"], ["c"], **attributes), helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("QuantizeLinear", ["r", "ys", "yz"], ["yq"]), real,
        ]  # fmt: skip
    elif kind == "qlinear":
        read = ["xq", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"]
        nodes = [quantize, helper.make_node("QLinearConv", read, ["yq"], **attributes), real]
    else:
        constants["wz"] = zero.reshape(-1)[0]
        nodes = [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "s", "z"]),
            helper.make_node("ConvInteger", ["xq", "w", "z", "wz"], ["i"], **attributes),
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), helper.make_node("Mul", ["f", "s"], ["y"]),
        ]  # fmt: skip
    used = {name for n in nodes for name in n.input}
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, inputs, 9, 11]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, outputs, None, None])]  # fmt: skip
    kept = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if k in used]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], kept)
    return onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()


@pytest.mark.parametrize("kind", ["qdq", "qlinear", "integer"])
@pytest.mark.parametrize(
    "how",
    [{}, {"inputs": 3, "outputs": 10, "stride": 2, "pads": (0, 0, 1, 1)},
     {"inputs": 16, "window": 1, "pads": (0, 0, 0, 0), "each": False, "unsigned": True}],
    ids=["3x3", "picture", "1x1"],
)  # fmt: skip
def test_models(kind: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is native, bytes are multiplied as such, and at most one quantum differs from what ONNX's own meaning answers.

    ONNX Runtime is no judge: without dot products of bytes it sums pairs of them in 16 bits, which saturate.
    """
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    made = model(kind, **how)
    x = np.random.default_rng(1).standard_normal((1, how.get("inputs", 8), 9, 11)).astype(np.float32)
    (want,) = ReferenceEvaluator(onnx.load_from_string(made)).run(None, {"x": x})
    session = hotfuse.InferenceSession(made, settings=Settings(capture="inline", hot_calls=1))
    (got,) = session.run(None, {"x": x})
    for _ in range(4):
        (got,) = session.run(None, {"x": x})
    plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    assert plans and {part["backend"] for part in plans[0]["partitions"]} == {"llvm"}, str(session.explain(full=True))
    quantum = 0.11 if kind != "integer" else 1e-5 * float(np.abs(want).max())
    assert np.abs(got - want).max() <= quantum * 1.001 and (np.abs(got - want) > quantum / 2).mean() <= 0.01


def exact_convolution(x: Any, w: Any, zx: int, zw: Any, group: int, pad: int) -> Any:
    """Sums of 64-bit integers, one output at a time."""
    x = np.pad(x.astype(np.int64) - zx, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    w = w.astype(np.int64) - np.asarray(zw, np.int64).reshape(-1, 1, 1, 1)
    outs, each, r, s = w.shape
    high, wide = x.shape[2] - r + 1, x.shape[3] - s + 1
    y = np.zeros((x.shape[0], outs, high, wide), np.int64)
    for o in range(outs):
        part = x[:, o // (outs // group) * each:][:, :each]
        for i in range(high):
            for j in range(wide):
                y[:, o, i, j] = (part[:, :, i:i + r, j:j + s] * w[o]).sum((1, 2, 3))
    return y


@pytest.mark.parametrize("group", [1, 2, 12])
@pytest.mark.parametrize(("xt", "wt"), [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
@pytest.mark.parametrize("extreme", [False, True])
def test_integers_of_models_are_exact(group: int, xt: Any, wt: Any, extreme: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero points that only a call knows, also at the ends of their range, in groups and without: not one integer is off."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    rng = np.random.default_rng(group)
    low, high = np.iinfo(xt), np.iinfo(wt)
    w = rng.integers(high.min, high.max + 1, (12, 12 // group, 3, 3)).astype(wt)
    zw = np.asarray(high.max if extreme else high.min + 100, wt)
    if extreme:
        w[:] = high.min
    node = helper.make_node("ConvInteger", ["x", "w", "z", "wz"], ["y"], pads=[1, 1, 1, 1], group=group)
    kind = TensorProto.UINT8 if xt is np.uint8 else TensorProto.INT8
    ends = [helper.make_tensor_value_info("x", kind, [2, 12, 7, 5]), helper.make_tensor_value_info("z", kind, []),
            helper.make_tensor_value_info("y", TensorProto.INT32, [2, 12, 7, 5])]  # fmt: skip
    graph = helper.make_graph([node], "g", ends[:2], ends[2:], [numpy_helper.from_array(w, "w"), numpy_helper.from_array(zw, "wz")])
    made = onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    session = hotfuse.InferenceSession(made, settings=Settings(capture="inline", hot_calls=1))
    for z in (low.min, low.max, 3, low.max - 7, 0):
        x = np.full((2, 12, 7, 5), low.min if z == low.max else low.max, xt) if extreme else (
            rng.integers(low.min, low.max + 1, (2, 12, 7, 5)).astype(xt))  # fmt: skip
        (got,) = session.run(None, {"x": x, "z": np.asarray(z, xt)})
        assert np.array_equal(got, exact_convolution(x, w, int(z), zw, group, 1))
    plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    assert plans and {part["backend"] for part in plans[0]["partitions"]} == {"llvm"}, str(session.explain(full=True))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_products_whose_weight_lies_either_way_are_exact(turned: bool, each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """QGemm of a layer: bytes are multiplied as they lie, and with one scale and zero point they stay bytes to the end."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    rng = np.random.default_rng(3)
    w, zero = rng.integers(0, 256, (37, 50)).astype(np.uint8), rng.integers(0, 256, 37 if each else ()).astype(np.uint8)
    bias = rng.integers(-(1 << 20), 1 << 20, 37).astype(np.int32)
    constants: dict[str, Any] = {"w": w if turned else w.T.copy(), "ws": np.ones(37 if each else (), np.float32), "wz": zero,
                                 "one": np.float32(1), "xz": np.uint8(200), "b": bias}  # fmt: skip
    node = helper.make_node("QGemm", ["x", "one", "xz", "w", "ws", "wz", "b"], ["y"], domain="com.microsoft", transB=int(turned))
    ends = [helper.make_tensor_value_info("x", TensorProto.UINT8, [9, 50]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [9, 37])]  # fmt: skip
    kept = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], kept)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    session = hotfuse.InferenceSession(made, settings=Settings(capture="inline", hot_calls=1))
    for _ in range(5):
        x = rng.integers(0, 256, (9, 50)).astype(np.uint8)
        (got,) = session.run(None, {"x": x})
        want = (x.astype(np.int64) - 200) @ (w.astype(np.int64) - zero.reshape(-1, 1)).T + bias
        assert np.array_equal(got, want.astype(np.float32))
    plans = [p for s in session.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    told = str(session.explain(full=True))
    assert plans and (each or "int8 dot" in told or "int16 dot" in told or "multiply and add i32" in told), told
