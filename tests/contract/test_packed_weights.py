"""Packed copies of weights make products and convolutions faster, change no answer, and go when nobody uses them."""

from __future__ import annotations

import copy
import time
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.frontends.onnx import constant_products, conv_kernels, packed_lstm, packed_weights
from hotfuse.frontends.onnx.constant_products import ConstantProduct
from hotfuse.frontends.onnx.conv_kernels import ConvKernels
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.packed_weights import MARGIN, KernelTrials, PackedWeight, fastest
from hotfuse.machine.heap import heap
from hotfuse.ops.folded_conv import FoldedConv, Window, affine

SLOW_S = 0.02
needs_products = pytest.mark.skipif(not constant_products.available(), reason="this torch has no packed products")
needs_convs = pytest.mark.skipif(not conv_kernels.available(), reason="this torch has no packed convolutions")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests measured says nothing here, and what is slow is so by construction."""
    packed_weights.trials.forget()
    monkeypatch.setattr(packed_weights, "REST", 0.0)  # what is slow here would keep others from being compared
    monkeypatch.setattr(constant_products, "MIN_MULTIPLIES", 1 << 20)  # so that small tests meet it


def burn() -> None:
    """Take long, by the clock and by the processor's."""
    begin = time.thread_time()
    while time.thread_time() - begin < SLOW_S:
        pass


class Slow:
    """A function that takes longer than any other here, and how often it was called."""

    def __init__(self, run: Any) -> None:
        self._run, self.calls = run, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        burn()
        return self._run(*args)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(("module", "pack", "available"), [
    (constant_products, "_pack", "available"), (conv_kernels, "_pointwise", "available"), (packed_lstm, "_pack", "_available"),
])  # fmt: skip
def test_operators_that_torch_lacks_are_told(
    module: ModuleType, pack: str, available: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_given: Any) -> Any:
        raise AttributeError("no such operator")

    monkeypatch.setattr(module, pack, missing)
    assert not getattr(module, available).__wrapped__()
    assert [n for said, n in faults.counts().items() if "packed" in said and "no such operator" in said] == [1]


@needs_products
@pytest.mark.parametrize("shape", [(40, 131), (2, 33, 131), (3, 2, 17, 131), (4096, 131)])
def test_a_packed_product_is_the_product(shape: tuple[int, ...]) -> None:
    rows, bias = torch.randn(517, 131), torch.randn(517)
    plain = Slow(lambda x: torch.nn.functional.linear(x, rows, bias))
    product = ConstantProduct(rows, bias, plain)
    for call in range(4):
        x = torch.randn(shape) if call < 3 else torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        before = plain.calls
        with torch.no_grad():
            got = product(x)
        assert (plain.calls == before) == (call > 1), "torch's own is called until it is compared"
        close(got, x.double() @ rows.double().t() + bias.double())
        assert (product.bytes > 0) == (call > 0), "packed when its size comes the second time, and not before"


@needs_products
def test_a_packed_product_of_what_is_not_finite() -> None:
    rows, x = torch.randn(300, 77), torch.randn(70, 77)
    rows[0, 76], rows[5, 0], x[3, 76], x[7, 1], x[9, 0] = float("inf"), float("nan"), float("-inf"), float("nan"), 0.0
    product = ConstantProduct(rows, None, Slow(lambda x: x @ rows.t()))
    with torch.no_grad():
        got = [product(x) for _ in range(3)][-1]
    assert product.bytes
    close(got, x.double() @ rows.double().t())


@needs_products
@pytest.mark.parametrize(
    "x", [torch.randn(0, 131), torch.randn(131), torch.randn(1, 131), torch.randn(2, 4, 131)], ids=lambda x: str(tuple(x.shape))
)
def test_what_is_small_stays_with_torch(x: Tensor) -> None:
    rows = torch.randn(151, 131)
    product = ConstantProduct(rows, None, lambda x: x @ rows.t())
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(product(x), x @ rows.t())
    assert not product.bytes


@needs_products
def test_a_product_that_needs_gradients_stays_with_torch() -> None:
    rows, x = torch.randn(300, 131), torch.randn(70, 131, requires_grad=True)
    product = ConstantProduct(rows, None, Slow(lambda x: x @ rows.t()))
    for _ in range(3):
        assert product(x).requires_grad
    assert not product.bytes


@needs_products
def test_the_faster_one_of_two_is_kept() -> None:
    rows, x = torch.randn(300, 131), torch.randn(70, 131)
    product = ConstantProduct(rows, None, lambda x: x.new_zeros(70, 300))  # nothing to do: no library is faster
    with torch.no_grad():
        for _ in range(3):
            assert not product(x).any()
    assert not product.bytes


def file(weight: np.ndarray[Any, Any]) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["r"]),
         helper.make_node("Gemm", ["r", "v", "b"], ["y"], transB=1)],
        "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 131])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight, "v"),
         numpy_helper.from_array(np.arange(131, dtype=np.float32), "b")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


@needs_products
def test_a_file_multiplies_with_packed_weights_and_lets_them_go() -> None:
    weight = np.random.default_rng(0).standard_normal((131, 517)).astype(np.float32)
    module = OnnxModule(load(file(weight)))
    for calls in module.program.ready().packs:
        if isinstance(calls, ConstantProduct):
            calls.plain = Slow(calls.plain)
    assert len(module.program.ready().packs) == 2
    x = np.zeros((40, 131), np.float32)
    for call in range(5):
        x[:] = np.random.default_rng(call).standard_normal(x.shape)
        want = np.maximum(x.astype(np.float64) @ weight, 0.0) @ weight.T.astype(np.float64) + np.arange(131)
        (got,) = module.forward(torch.from_numpy(x))
        assert isinstance(got, Tensor)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-2)
        if call == 2:
            assert module.prepared_bytes >= 2 * weight.nbytes
            heap.when_idle()
            assert module.prepared_bytes < weight.nbytes
    assert module.prepared_bytes >= 2 * weight.nbytes, "packed again when calls come"
    (got,), (want,) = (m.forward(torch.from_numpy(x)) for m in (copy.deepcopy(module), module))
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    assert torch.equal(got, want)


def test_where_memory_counts_nothing_is_packed() -> None:
    module = OnnxModule(load(file(np.ones((131, 517), np.float32))), pack=False)
    for _ in range(3):
        module.forward(torch.ones(40, 131))
    assert not module.program.ready().packs


def test_weights_given_with_a_call_are_the_ones_multiplied_with() -> None:
    made = onnx.load_from_string(file(np.ones((131, 517), np.float32)))
    made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [131, 517]))
    module, x = OnnxModule(load(made.SerializeToString())), torch.ones(40, 131)
    before = [module.forward(x)[0] for _ in range(3)][-1]
    other = module.run_with([x], {"w": torch.zeros(131, 517)})[0]
    assert isinstance(other, Tensor)
    assert torch.equal(other, torch.arange(131.0).expand(40, 131))
    after = module.forward(x)[0]
    assert isinstance(before, Tensor) and isinstance(after, Tensor)
    assert torch.equal(after, before)


def test_copies_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    heap.when_idle()
    monkeypatch.setattr(packed_weights, "MAX_BYTES", 100)
    fits, other = PackedWeight(lambda: torch.zeros(20), 80), PackedWeight(lambda: torch.zeros(20), 80)
    assert fits.get() is not None
    assert other.get() is None
    fits.let_go()
    assert other.get() is not None


def test_what_nothing_used_goes_when_background_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    held = PackedWeight(lambda: torch.zeros(20), 80)
    held.get()
    heap.after_work()
    assert held.bytes, "it was used just now"
    monkeypatch.setattr(packed_weights, "UNUSED_S", 0.0)
    heap.after_work()
    assert not held.bytes


def test_what_is_clear_is_run_no_more_and_a_busy_core_says_nothing() -> None:
    counts = [0, 0, 0, 0]

    def kernel(place: int, milliseconds: float, waits: float = 0.0) -> Any:
        def run() -> None:
            counts[place] += 1
            time.sleep(waits)
            begin = time.thread_time()
            while time.thread_time() - begin < milliseconds / 1e3:
                pass

        return run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [kernel(0, 2.0), kernel(1, 8.0), kernel(2, 1.0, waits=0.01), kernel(3, 0.9)]
        assert fastest(list(zip(runs, (1.0, 1.0, 1.0, MARGIN), strict=True))) == 2, "a ninth less is not worth a copy"
    finally:
        torch.set_num_threads(threads)
    assert counts == [2, 2, 1, 2], "long ones twice, the winner once"


def test_layers_of_one_shape_are_compared_once_and_those_that_are_alike_until_they_agree() -> None:
    trials, asked = KernelTrials(), list[str]()

    def candidates(name: str, place: int) -> list[tuple[Any, float]]:
        slow, fast = Slow(lambda: None), lambda: asked.append(name)
        return [(fast, 1.0), (slow, 1.0)] if place == 0 else [(slow, 1.0), (fast, 1.0)]

    def outcome(name: str, place: int, alike: str | None = None) -> int | None:
        asked.clear()
        return trials.fastest(name, candidates(name, place), alike)

    assert outcome("a", 1) == 1 and asked
    assert outcome("a", 0) == 1 and not asked
    assert outcome("b", 0) == 0 and trials.known("c") is None
    assert outcome("d", 1, "large") == 1 and trials.known("f", "large") is None
    assert outcome("e", 1, "large") == 1 and trials.known("f", "large") == 1 and trials.known("f", "small") is None
    assert outcome("f", 0, "large") == 1 and not asked
    assert outcome("g", 0, "small") == 0 and outcome("h", 1, "small") == 1
    assert outcome("i", 0, "small") == 0 and asked, "where two differ each is compared"
    trials.forget()
    assert trials.known("a") is None and trials.known("f", "large") is None


def test_behind_a_long_comparison_calls_run_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "REST", 1e6)
    trials, slow = KernelTrials(), Slow(lambda: None)
    runs: list[tuple[Any, float]] = [(slow, 1.0), (lambda: None, 1.0)]
    assert trials.fastest("a", [(lambda: None, 1.0)] * 2) is not None, "short ones do not count"
    assert trials.fastest("b", runs) == 1
    before = slow.calls
    assert trials.fastest("c", runs) is None and slow.calls == before
    assert trials.fastest("b", runs) == 1
    assert trials.fastest("d", runs, at_once=True) == 1


@needs_convs
def test_convolutions_wait_for_their_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "REST", 1e6)
    window, x = Window((1, 1), (0, 0), (1, 1), 1), torch.randn(1, 19, 6, 7)
    convs = [
        ConvKernels(SlowConv(torch.randn(n, 19, 1, 1), None, window, affine(), "none", affine(), lambda x: x)) for n in (33, 70)
    ]
    with torch.no_grad():
        for _ in range(3):
            for kernels in convs:
                want = torch.conv2d(x.double(), kernels.conv.weight.double())
                close(kernels(x), want)
        assert convs[0].for_sizes(x) is not convs[0], "decided"
        assert convs[1].for_sizes(x) is convs[1] and not convs[1].bytes, "open, and nothing held for it"


class SlowConv(FoldedConv):
    """Torch's own choice, slowed."""

    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        SlowConv.calls += 1
        burn()
        return super().__call__(x)


class SlowLibrary(ConvKernels):
    """The library without packed weights, slowed."""

    def _in_library(self, x: Tensor) -> Tensor:
        burn()
        return super()._in_library(x)


@needs_convs
@pytest.mark.parametrize("made", [ConvKernels, SlowLibrary], ids=["library", "packed"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("shape", "weight", "window"),
    [
        ((1, 19, 6, 7), (33, 19, 1, 1), Window((1, 1), (0, 0), (1, 1), 1)),
        ((2, 19, 6, 7), (33, 19, 3, 3), Window((2, 1), (1, 1), (1, 1), 1)),
        ((1, 19, 9, 7), (5, 19, 3, 2), Window((1, 1), (2, 0), (2, 1), 1)),
        ((3, 19, 21), (33, 19, 3), Window((1, 2), (0, 1), (1, 1), 1)),
    ],
)
def test_every_kernel_gives_the_convolution(
    made: type[ConvKernels], layout: torch.memory_format, shape: tuple[int, ...], weight: tuple[int, ...], window: Window
) -> None:
    w, b = torch.randn(weight), torch.randn(weight[0])
    conv = SlowConv(w, b, window, affine(2.0, 1.0), "relu", affine(0.5, -1.0), lambda x: x)
    kernels = made(conv)
    x, want = torch.empty(0), torch.empty(0)
    for call in range(4):
        x = torch.randn(shape)
        x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
        image = x.double() if x.dim() == 4 else x.double().unsqueeze(2)
        filters = w.double() if x.dim() == 4 else w.double().unsqueeze(2)
        want = torch.conv2d(image, filters, b.double(), window.stride, window.pads, window.dilation)
        want = torch.relu(2.0 * want + 1.0) * 0.5 - 1.0
        before = SlowConv.calls
        with torch.no_grad():
            got = kernels(x)
        assert (SlowConv.calls == before) == (call > 1), "torch's choice is called until it is compared"
        close(got, want if x.dim() == 4 else want.squeeze(2))
    assert kernels.bytes or made is ConvKernels, "nothing but packed weights is fast here"
    if kernels.bytes:
        heap.when_idle()
        assert not kernels.bytes
        close(kernels(x), want if x.dim() == 4 else want.squeeze(2))


@needs_convs
def test_zeros_around_an_image_meet_weights_that_are_not_finite() -> None:
    w = torch.randn(8, 4, 3, 3)
    w[0, 0, 0, 0] = float("inf")
    conv = SlowConv(w, None, Window((1, 1), (1, 1), (1, 1), 1), affine(), "none", affine(), lambda x: x)
    kernels, x = ConvKernels(conv), torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        first = kernels(x)
        for _ in range(3):
            assert torch.equal(kernels(x).isnan(), first.isnan())
    assert not kernels.bytes


@needs_products
def test_four_bit_weights_of_many_rows_are_multiplied_packed() -> None:
    rng, (rows, k, n) = np.random.default_rng(0), (100, 128, 96)
    q, s = rng.integers(0, 256, (n, k // 32, 16)).astype(np.uint8), rng.random(n * k // 32).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=32)],
        "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(q, "q"), numpy_helper.from_array(s, "s")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    module, plain = OnnxModule(load(data)), OnnxModule(load(data), pack=False)
    (product,) = (p for p in module.program.ready().packs if isinstance(p, ConstantProduct))
    product.plain = Slow(product.plain)
    assert not plain.program.ready().packs
    nibbles = np.stack([q & 15, q >> 4], -1).reshape(n, k // 32, 32).astype(np.float64)
    weight = ((nibbles - 8) * s.reshape(n, k // 32, 1)).reshape(n, k)
    for _ in range(3):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        for each in (module, plain):
            (got,) = each.forward(torch.from_numpy(x))
            assert isinstance(got, Tensor)
            np.testing.assert_allclose(got.numpy(), x.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-3)
    assert product.bytes
