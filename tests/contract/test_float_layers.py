"""Small layers of floats in native code: what float64 computes, on every instruction-set level, whatever the sizes; and whom they
serve."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.frontends.onnx.conv_kernels import ConvKernels
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.native_floats import call_scratch, native_gru, native_lstm, native_recurrent, native_windows
from hotfuse.frontends.onnx.native_floats.native_gru import NativeGru
from hotfuse.frontends.onnx.native_floats.native_lstm import LstmWeights, NativeLstm, float_weights
from hotfuse.frontends.onnx.native_floats.native_windows import SmallConv, WindowPanels, window_product
from hotfuse.frontends.onnx.packed_weights import KernelTrials
from hotfuse.machine.probe import usable_features
from hotfuse.native import byte_kernels
from hotfuse.native.float_layers import layer_code
from hotfuse.native.float_layers.layer_code import FloatLayers, background_layers, load_layers
from hotfuse.native.jit import Loaded
from hotfuse.native.target import host, level
from hotfuse.ops.folded_conv import FoldedConv, Window, affine
from hotfuse.session import serving

pytestmark = pytest.mark.skipif(not layer_code.supported(host()), reason="no code for this machine")
LEVELS = ("avx512", "avx2")


@functools.cache
def layers(name: str) -> tuple[FloatLayers, Loaded]:
    usable = set(usable_features())
    if name == "avx512" and "avx512f" not in usable:
        pytest.skip("this machine has no AVX-512")
    return load_layers(level(name, usable))


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FloatLayers:
    found = layers(request.param)[0]
    monkeypatch.setattr(background_layers, "layers", found)
    monkeypatch.setattr(background_layers, "begin", lambda: None)
    return found


def never(*_: Any) -> Any:
    raise AssertionError("the library was asked")


def lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, r: Tensor, b: Tensor, backwards: tuple[bool, ...]) -> list[Tensor]:
    """ONNX's equations in float64; gates are i, o, f, c."""
    ys: list[Tensor] = []
    lasts: list[tuple[Tensor, Tensor]] = []
    for d, back in enumerate(backwards):
        now, cell, out = h[d].double(), c[d].double(), []
        for t in reversed(range(len(x))) if back else range(len(x)):
            gates = x[t].double() @ w[d].double().t() + now @ r[d].double().t() + b[d].double().view(2, -1).sum(0)
            i, o, f, g = gates.chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            now = o.sigmoid() * cell.tanh()
            out.append(now)
        ys.append(torch.stack(out[::-1] if back else out))
        lasts.append((now, cell))
    return [torch.stack(ys, 1), torch.stack([a for a, _ in lasts]), torch.stack([a for _, a in lasts])]


@pytest.mark.parametrize(("steps", "batch", "features", "hidden"), [(1, 1, 1, 1), (5, 2, 7, 13), (30, 1, 64, 33), (3, 26, 5, 20)])
@pytest.mark.parametrize("backwards", [(False,), (True,), (False, True)])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_lstm_layers_are_the_equations(
    native: FloatLayers, steps: int, batch: int, features: int, hidden: int, backwards: tuple[bool, ...], in_bytes: bool
) -> None:
    d = len(backwards)
    x, b = torch.randn(steps, batch, features), torch.randn(d, 8 * hidden)
    h, c = torch.randn(d, batch, hidden), torch.randn(d, batch, hidden)
    if in_bytes:
        bytes_ = [torch.randint(-128, 128, (d, 4 * hidden, n), dtype=torch.int8) for n in (features, hidden)]
        scales = [torch.rand(d, 4 * hidden) * 0.01 for _ in range(2)]
        w, r = (q.double() * s.unsqueeze(2) for q, s in zip(bytes_, scales, strict=True))
        weights = [
            LstmWeights(lambda k=k: bytes_[0][k], lambda k=k: bytes_[1][k], scales[0][k], scales[1][k]) for k in range(d)
        ]
    else:
        w, r = torch.randn(d, 4 * hidden, features) / 3, torch.randn(d, 4 * hidden, hidden) / 3
        weights = float_weights(w, r)
    layer = NativeLstm(weights, b, backwards, never, features, hidden)
    for first, second in ((h, c), (None, c), (h.transpose(1, 2).contiguous().transpose(1, 2), None)):
        zeros = torch.zeros(d, batch, hidden)
        want = lstm(x, zeros if first is None else first, zeros if second is None else second, w, r, b, backwards)
        got = layer(x, w, r, b, None, first, second)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)
    assert layer.bytes > 0


@pytest.mark.parametrize(("steps", "batch", "features", "hidden"), [(1, 1, 1, 1), (5, 2, 7, 13), (30, 1, 64, 33), (3, 26, 5, 20)])
@pytest.mark.parametrize("backwards", [(False,), (True,), (False, True)])
@pytest.mark.parametrize("before_reset", [False, True])
def test_gru_layers_are_the_equations(
    native: FloatLayers, steps: int, batch: int, features: int, hidden: int, backwards: tuple[bool, ...], before_reset: bool
) -> None:
    d = len(backwards)
    x, h, b = torch.randn(steps, batch, features), torch.randn(d, batch, hidden), torch.randn(d, 6 * hidden)
    w, r = torch.randn(d, 3 * hidden, features) / 3, torch.randn(d, 3 * hidden, hidden) / 3
    layer = NativeGru(w, r, b, backwards, never, before_reset=before_reset)
    for first in (h, None):
        ys: list[Tensor] = []
        lasts: list[Tensor] = []
        for k, back in enumerate(backwards):
            now, out = torch.zeros(batch, hidden).double() if first is None else first[k].double(), []
            r_z, r_r, r_h = r[k].double().chunk(3)
            b_w, b_r = b[k].double().chunk(2)
            for t in reversed(range(steps)) if back else range(steps):
                x_z, x_r, x_h = (x[t].double() @ w[k].double().t() + b_w).chunk(3, 1)
                z = (x_z + now @ r_z.t() + b_r[:hidden]).sigmoid()
                reset = (x_r + now @ r_r.t() + b_r[hidden : 2 * hidden]).sigmoid()
                last = b_r[2 * hidden :]
                inner = reset * (now @ r_h.t() + last) if before_reset else (reset * now) @ r_h.t() + last
                now = (1 - z) * (x_h + inner).tanh() + z * now
                out.append(now)
            ys.append(torch.stack(out[::-1] if back else out))
            lasts.append(now)
        for mine, theirs in zip(layer(x, w, r, b, None, first), (torch.stack(ys, 1), torch.stack(lasts)), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)


def test_gates_of_odd_numbers(native: FloatLayers) -> None:
    """Inputs as a gate's sum: huge, tiny and infinite ones have the limits, NaN stays NaN, and small ones keep their digits."""
    values = torch.tensor([0.0, -0.0, 1e-30, 1e-4, -1e-4, 0.6, 0.63, -0.63, 9.1, 88.0, -88.0, 100.0, -100.0, 1e30, -1e30,
                           float("inf"), float("-inf"), float("nan")])  # fmt: skip
    n = len(values)
    w = torch.zeros(1, 4 * n, 1)
    layer = NativeLstm(float_weights(w, torch.zeros(1, 4 * n, n)), None, (False,), never, 1, n)
    wide, zeros, ones = torch.full((n,), 50.0), torch.zeros(n), torch.ones(1, 1, 1)
    for gates in ((values, wide, -wide, wide), (wide, wide, -wide, values), (wide, values, -wide, wide)):  # i, o, f, c
        bias = torch.cat([*gates, zeros, zeros, zeros, zeros]).unsqueeze(0)
        made = NativeLstm(float_weights(w, torch.zeros(1, 4 * n, n)), bias, (False,), never, 1, n)
        _, h, c = made(ones, None, None)
        i, o, _, g = (v.double() for v in gates)
        cell = i.sigmoid() * g.tanh()
        torch.testing.assert_close(c[0, 0].double(), cell, rtol=1e-6, atol=1e-37, equal_nan=True)
        torch.testing.assert_close(h[0, 0].double(), o.sigmoid() * cell.tanh(), rtol=1e-6, atol=1e-37, equal_nan=True)
    assert layer(torch.zeros(1, 0, 1).new_ones(2, 1, 1), None, None)[0].abs().sum() == 0


CONVS = [
    (channels, kernel, stride, pads, dilation)
    for channels, kernel, stride, pads, dilation in itertools.product(
        (1, 3, 17), ((3, 3), (1, 5), (2, 1)), ((1, 1), (2, 3)), ((0, 0), (2, 1)), ((1, 1), (2, 2))
    )
]


@pytest.mark.parametrize("activation", ["none", "relu", "hardswish"])
def test_convolutions_are_the_sums_of_their_windows(native: FloatLayers, activation: Any) -> None:
    for channels, kernel, stride, pads, dilation in CONVS:
        w, bias = torch.randn(21, channels, *kernel), torch.randn(21) if kernel != (1, 5) else None
        after = affine(2.0, 0.5) if activation != "relu" else affine()
        conv = FoldedConv(w, bias, Window(stride, pads, dilation, 1), affine(), activation, after, never)
        packed = WindowPanels(conv).packed(native.target)
        planes = torch.randn(2, channels, 9, 11)
        innermost = planes.contiguous(memory_format=torch.channels_last)
        gaps = torch.randn(2, channels, 18, 13)[:, :, ::2, 1:12].copy_(planes)
        wide = None if bias is None else bias.double()
        want = torch.nn.functional.conv2d(planes.double(), w.double(), wide, stride, pads, dilation)
        want = {"none": want, "relu": want.relu(), "hardswish": torch.nn.functional.hardswish(want)}[activation]
        want = want if activation == "relu" else want * 2.0 + 0.5
        for x in (planes, innermost, gaps):
            run = window_product(conv, x, packed, native, never)
            assert run is not None
            torch.testing.assert_close(run(x).double(), want, rtol=1e-5, atol=1e-4)
        run = window_product(conv, planes, packed, native, lambda y: y)
        assert run is not None and run(gaps) is gaps  # images that lie otherwise are not its own


def test_signals_and_what_is_no_number(native: FloatLayers) -> None:
    w = torch.randn(5, 3, 4)
    conv = FoldedConv(w, None, Window((1, 1), (0, 1), (1, 1), 1), affine(), "relu", affine(), never)
    x = torch.randn(2, 3, 7)
    x[0, 1, 3], x[1, 2, 6] = float("nan"), float("inf")
    run = window_product(conv, x, WindowPanels(conv).packed(native.target), native, never)
    want = torch.nn.functional.conv1d(x.double(), w.double(), padding=1).relu()
    assert run is not None
    torch.testing.assert_close(run(x).double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    w[0, 0, 0] = float("inf")  # times zeros around the signal it is no number, which the library may not read
    odd = FoldedConv(w, None, Window((1, 1), (0, 1), (1, 1), 1), affine(), "none", affine(), never)
    assert window_product(odd, x, WindowPanels(odd).packed(native.target), native, never) is None


class Decided(KernelTrials):
    """One outcome of every comparison."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def fastest(self, layer: object, candidates: object, alike: object = None, *, at_once: bool = False) -> int:
        return self.place


def test_a_small_convolution_waits_for_the_code_and_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_layers, "layers", None)
    monkeypatch.setattr(background_layers, "begin", lambda: None)
    conv = FoldedConv(torch.randn(8, 3, 3, 3), None, Window((1, 1), (1, 1), (1, 1), 1), affine(), "none", affine(), never)
    kernels, x = ConvKernels(conv), torch.randn(1, 3, 6, 6)
    panels = kernels.panels_for(x)
    assert panels is not None and kernels.bytes == 0
    asked: list[int] = []
    want = torch.nn.functional.conv2d(x, conv.weight, padding=1)

    def library(y: Tensor) -> Tensor:
        asked.append(1)
        return want

    call = SmallConv(conv, library, panels, "layer", "alike")
    assert call(x) is want and len(asked) == 1
    monkeypatch.setattr(background_layers, "layers", layers(host().name)[0])
    for wins, name in ((1, "native"), (0, "library")):
        monkeypatch.setattr(native_windows, "trials", Decided(wins))
        call = SmallConv(conv, library, panels, "layer", "alike")
        asked.clear()
        torch.testing.assert_close(call(x), want, rtol=1e-5, atol=1e-5)
        assert (len(asked) == 0) is (name == "native") and (kernels.bytes > 0) is (name == "native")


def module_of(made: onnx.NodeProto, constants: dict[str, Any], features: int) -> OnnxModule:
    """A file of one layer over sequences of any length."""
    graph = helper.make_graph(
        [made], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None, features])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in made.output],
        [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return OnnxModule(load(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_files_with_lstm_layers_are_served_natively(monkeypatch: pytest.MonkeyPatch, direction: str, quantized: bool) -> None:
    monkeypatch.setattr(background_layers, "layers", None)
    monkeypatch.setattr(background_layers, "begin", lambda: None)
    rng, d, features, hidden = np.random.default_rng(3), 2 if direction == "bidirectional" else 1, 6, 9
    b = rng.standard_normal((d, 8 * hidden), np.float32)
    told: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    outs = ["y", "h", "c"]
    if quantized:
        w, r = (rng.integers(0, 256, (d, n, 4 * hidden), np.uint8) for n in (features, hidden))
        scale, zero = np.full(d, 0.01, np.float32), np.full(d, 128, np.uint8)
        names = {"w_scale": scale, "w_zero": zero, "r_scale": scale, "r_zero": zero}
        given = ["x", "w", "r", "b", "", "", "", "", *names]
        made = helper.make_node("DynamicQuantizeLSTM", given, outs, domain="com.microsoft", **told)
        module = module_of(made, {"w": w, "r": r, "b": b, **names}, features)
    else:
        w, r = (rng.standard_normal((d, 4 * hidden, n)).astype(np.float32) for n in (features, hidden))
        module = module_of(helper.make_node("LSTM", ["x", "w", "r", "b"], outs, **told), {"w": w, "r": r, "b": b}, features)
    calls: list[int] = []
    real = layers(host().name)[0]

    def counted(*args: Any) -> None:
        calls.append(1)
        real.lstm(*args)

    for steps, batch in ((4, 1), (1, 3)):
        x = torch.randn(steps, batch, features)
        background_layers.layers = None
        before = module(x)
        module(x)  # recorded
        background_layers.layers = replace(real, lstm=counted)
        calls.clear()
        for after in (module(x), module(x)):
            for mine, theirs in zip(after, before, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert len(calls) == 2 * d
    assert module.prepared_bytes > 0


def test_weights_that_were_let_go_are_packed_again(native: FloatLayers) -> None:
    w, r = torch.randn(1, 20, 4), torch.randn(1, 20, 5)
    layer = NativeLstm(float_weights(w, r), None, (False,), never, 4, 5)
    x = torch.randn(3, 2, 4)
    first = layer(x, w, r)
    held = layer.bytes
    (direction,) = layer._ready  # pyright: ignore[reportPrivateUsage]
    assert held > 0 and direction.weights.let_go() == held and layer.bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(layer(x, w, r), first, strict=True)) and layer.bytes == held


def test_memory_of_a_call_is_held_while_native_code_is_in_it(native: FloatLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread does not keep is the caller's alone: freed before the call, another thread's results would lie there."""
    given: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def room(size: int) -> Tensor:
        assert size > call_scratch.KEPT_BYTES
        made = call_scratch.room(size)
        given.append(weakref.ref(made))
        return made

    def looked(run: Any) -> Any:
        def call(*args: Any) -> None:
            alive.append(given[-1]() is not None)
            if alive[-1]:
                run(*args)

        return call

    for module in (native_gru, native_lstm, native_windows):
        monkeypatch.setattr(module, "room", room)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    watched = replace(native, window_product=looked(native.window_product), lstm=looked(native.lstm), gru=looked(native.gru))
    monkeypatch.setattr(background_layers, "layers", watched)
    x, hidden = torch.randn(1, 300, 3), 128
    w, r = torch.randn(2, 4 * hidden, 3), torch.randn(2, 4 * hidden, hidden)
    NativeLstm(float_weights(w, r), None, (False, True), never, 3, hidden)(x, w, r)
    w, r = w[:, : 3 * hidden], r[:, : 3 * hidden]
    NativeGru(w, r, None, (False, True), never, before_reset=True)(x, w, r)
    conv = FoldedConv(torch.randn(4, 512, 5, 5), None, Window((1, 1), (0, 0), (1, 1), 1), affine(), "none", affine(), never)
    image = torch.randn(1, 512, 5, 5)
    run = window_product(conv, image, WindowPanels(conv).packed(native.target), watched, never)
    assert run is not None and run(image).shape == (1, 4, 1, 1)
    assert alive == [True] * 5


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_memory_of_layers_is_not_of_torchs_default_type_or_device(native: FloatLayers, default: torch.dtype | str) -> None:
    """Code writes 4 bytes for each number: of torch's default type it would be other numbers, or memory of somebody else."""
    x, image, hidden = torch.randn(5, 2, 4), torch.randn(1, 3, 6, 6), 9
    w, r = torch.randn(1, 4 * hidden, 4), torch.randn(1, 4 * hidden, hidden)
    bytes_ = [torch.randint(-128, 128, (4 * hidden, n), dtype=torch.int8) for n in (4, hidden)]
    scale = torch.rand(4 * hidden) * 0.01
    conv = FoldedConv(torch.randn(7, 3, 3, 3), None, Window((1, 1), (1, 1), (1, 1), 1), affine(), "relu", affine(), never)

    def made() -> list[Tensor]:
        quantized = [LstmWeights(lambda: bytes_[0], lambda: bytes_[1], scale, scale)]
        run = window_product(conv, image, WindowPanels(conv).packed(native.target), native, never)
        assert run is not None
        return [
            *NativeLstm(float_weights(w, r), None, (False,), never, 4, hidden)(x),
            *NativeLstm(quantized, None, (True,), never, 4, hidden)(x),
            *NativeGru(w[:, : 3 * hidden], r[:, : 3 * hidden], None, (False,), never, before_reset=False)(x), run(image),
        ]  # fmt: skip

    want = made()
    with torch.device(default) if isinstance(default, str) else contextlib.nullcontext():
        torch.set_default_dtype(torch.float32 if isinstance(default, str) else default)
        try:
            got = made()
        finally:
            torch.set_default_dtype(torch.float32)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs)


def test_what_a_layer_is_not_made_for_goes_to_the_library(native: FloatLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    w, r, told = torch.randn(1, 20, 4), torch.randn(1, 20, 5), object()
    layer = NativeLstm(float_weights(w, r), None, (False,), lambda *_: told, 4, 5)
    assert layer(torch.randn(3, 2, 6), w, r) is told  # other features
    assert layer(torch.randn(3, 0, 4), w, r) is told
    assert layer(torch.randn(3, 2, 4).double(), w, r) is told
    assert layer(torch.randn(3, 2, 4), w, r, None, torch.tensor([3, 2])) is told  # lengths
    assert layer(torch.randn(3, 2, 4), w, r, None, None, torch.zeros(1, 3, 5)) is told  # states of another batch
    monkeypatch.setattr(native_recurrent, "SMALL_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert layer(torch.randn(3, 2, 4), w, r) is told  # a team is faster
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert layer(torch.randn(3, 2, 4), w, r) is not told


@pytest.mark.parametrize(("op", "begins"), [("LSTM", (True, False)), ("QuantizeLinear", (False, True)), ("Add", (False, False))])
def test_a_session_begins_with_the_code_that_its_file_is_made_for(
    op: str, begins: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for name in ("background_layers", "byte_layers"):
        monkeypatch.setattr(getattr(serving, name), "begin", lambda name=name: begun.append(name))
    given = {"LSTM": [(1, 8, 3), (1, 8, 2)], "QuantizeLinear": [()], "Add": [(3,)]}[op]
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), f"w{i}") for i, shape in enumerate(given)]
    attrs = {"hidden_size": 2} if op == "LSTM" else {}
    node = helper.make_node(op, ["x", *(w.name for w in weights)], ["y"], **attrs)
    out = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 1, 3])], [out], weights)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    with hotfuse.InferenceSession(data, settings=Settings(capture="off", record=False)):
        assert ("background_layers" in begun, "byte_layers" in begun) == begins


@pytest.mark.parametrize("make", [layer_code._BackgroundLayers, byte_kernels._BackgroundKernels])
def test_a_child_that_is_forked_meanwhile_begins_anew(make: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(make, "_make", lambda _: begun.append(1))
    builder = make()
    builder.begin()
    builder.begin()
    wait_until(lambda: len(begun) == 1)
    builder.after_fork()
    builder.begin()
    wait_until(lambda: len(begun) == 2)
    setattr(builder, "layers" if isinstance(builder, layer_code._BackgroundLayers) else "kernels", object())
    builder.after_fork()
    builder.begin()
    time.sleep(0.05)
    assert len(begun) == 2, "what is there is the child's, too"


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_layer_asks_for_the_code_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(background_layers, "layers", None)
    monkeypatch.setattr(background_layers, "begin", lambda: asked.append(1))
    layer = NativeGru(torch.randn(1, 6, 3), torch.randn(1, 6, 2), None, (False,), lambda *_: None, before_reset=False)
    asked.clear()
    layer(torch.randn(4, 1, 3))
    assert asked
