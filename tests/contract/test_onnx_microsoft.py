"""com.microsoft operators against ONNX Runtime itself, on random data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.values import from_any
from tests.contract.onnx_nodes import (
    Case,
    Const,
    Maker,
    check_direct,
    check_traced,
    f,
    feeds,
    ints,
    model_of,
    name_of,
    pos,
)

MS = "com.microsoft"


def ms(op: str, *inputs: Any, **kw: Any) -> Case:
    return Case(op, inputs, domain=MS, opset=1, **kw)


def u8(*shape: int) -> Maker:
    return ints(0, 256, *shape, dtype=np.uint8)


def i8(*shape: int) -> Maker:
    return ints(-128, 128, *shape, dtype=np.int8)


def weight7(*shape: int) -> Maker:
    """Weights of 7 bits: without dot products of bytes ONNX Runtime sums pairs of products in 16 bits, which saturate."""
    return ints(-64, 64, *shape, dtype=np.int8)


def s(v: float, dtype: Any = np.float32) -> Const:
    return Const(np.array(v, dtype))


def mask(batch: int, total: int) -> Maker:
    """Each row keeps a random number of leading keys, at least one."""

    def make(rng: np.random.Generator) -> np.ndarray:
        return (np.arange(total) < rng.integers(1, total + 1, (batch, 1))).astype(np.int32)

    return make


def lens(*values: int) -> Const:
    return Const(np.array(values, np.int32))


def rope(n: int, half: int) -> tuple[Const, Const]:
    at = np.outer(np.arange(n), 1.0 / 10000 ** (np.arange(half) / half))
    return Const(np.cos(at).astype(np.float32)), Const(np.sin(at).astype(np.float32))


CASES = [
    # products
    ms("FusedMatMul", f(2, 3, 4, 5), f(2, 3, 5, 6), attrs={"alpha": 0.5}),
    ms("FusedMatMul", f(2, 3, 5, 4), f(2, 3, 6, 5), attrs={"transA": 1, "transB": 1}),
    ms("FusedMatMul", f(4, 2, 3, 5), f(2, 3, 5, 6), attrs={"transBatchA": 1}),
    ms("FusedMatMul", f(2, 3, 4, 5), f(6, 2, 3, 5), attrs={"transBatchB": 1, "transB": 1}),
    ms("FusedGemm", f(3, 5), f(5, 4), f(4), attrs={"activation": "Relu", "alpha": 0.5, "beta": 2.0}),
    ms(
        "FusedGemm",
        f(5, 3),
        f(4, 5),
        attrs={"activation": "LeakyRelu", "activation_alpha": 0.3, "transA": 1, "transB": 1},
    ),
    ms("FusedConv", f(1, 4, 7, 5), f(6, 4, 3, 3), f(6), attrs={"activation": "Relu", "pads": [1, 0, 2, 1]}),
    ms(
        "FusedConv",
        f(2, 4, 7, 5),
        f(4, 2, 3, 3),
        None,
        attrs={"activation": "Clip", "activation_params": [-0.5, 0.5], "group": 2, "strides": [2, 1]},
    ),
    ms("FusedConv", f(1, 3, 6, 6), f(4, 3, 1, 1), f(4), f(1, 4, 6, 6), attrs={"activation": "Relu"}),
    ms(
        "ConvTransposeWithDynamicPads",
        f(1, 3, 4, 5),
        f(3, 2, 3, 3),
        Const(np.array([1, 1, 1, 1])),
        f(2),
        attrs={"strides": [2, 2], "output_padding": [1, 1]},
    ),
    # norms
    Case("SimplifiedLayerNormalization", (f(2, 3, 8), f(8)), {"axis": -1, "epsilon": 1e-6}, opset=13),
    Case("SimplifiedLayerNormalization", (f(2, 3, 8), f(8)), {"axis": -1}, opset=13, outputs=2),
    Case("LayerNormalization", (f(2, 3, 8), f(8), f(8)), {"axis": -1}, opset=13),
    ms("SkipLayerNormalization", f(2, 3, 8), f(2, 3, 8), f(8), f(8)),
    ms("SkipLayerNormalization", f(2, 3, 8), f(1, 3, 8), f(8), f(8), f(8), outputs=4, compare=(0, 3)),
    ms("SkipLayerNormalization", f(2, 3, 8), f(3, 8), f(8), attrs={"epsilon": 1e-5}),
    ms("SkipSimplifiedLayerNormalization", f(2, 3, 8), f(2, 3, 8), f(8), f(8), outputs=4, compare=(0, 3)),
    ms("SkipSimplifiedLayerNormalization", f(2, 3, 8), f(2, 3, 8), f(8)),
    ms(
        "EmbedLayerNormalization",
        ints(0, 9, 2, 5, dtype=np.int32),
        ints(0, 2, 2, 5, dtype=np.int32),
        f(9, 8),
        f(7, 8),
        f(2, 8),
        f(8),
        f(8),
        mask(2, 5),
        outputs=3,
    ),
    ms(
        "EmbedLayerNormalization",
        ints(0, 9, 2, 5, dtype=np.int32),
        None,
        f(9, 8),
        f(7, 8),
        None,
        f(8),
        f(8),
        None,
        ints(0, 7, 2, 5, dtype=np.int32),
        outputs=2,
    ),
    # activations
    ms("Gelu", f(3, 7)),
    ms("BiasGelu", f(2, 3, 8), f(8)),
    ms("FastGelu", f(2, 3, 8), tolerance=1e-4),
    ms("FastGelu", f(2, 3, 8), f(8), tolerance=1e-4),
    ms("QuickGelu", f(3, 7)),
    ms("QuickGelu", f(3, 7), attrs={"alpha": 1.0}),
    # attention
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), attrs={"num_heads": 2}),
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), mask(2, 5), attrs={"num_heads": 2}),
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), lens(3, 5), attrs={"num_heads": 4}),
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), lens(4, 5, 1, 2), attrs={"num_heads": 4}),
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), attrs={"num_heads": 2, "unidirectional": 1}),
    ms("Attention", f(2, 5, 8), f(8, 24), f(24), mask(2, 5), attrs={"num_heads": 2, "unidirectional": 1}),
    ms(
        "Attention",
        f(2, 3, 8),
        f(8, 24),
        f(24),
        mask(2, 7),
        f(2, 2, 2, 4, 4),
        attrs={"num_heads": 2, "unidirectional": 1},
        outputs=2,
    ),
    ms(
        "Attention",
        f(2, 5, 8),
        f(8, 20),
        f(20),
        None,
        None,
        f(1, 2, 5, 5),
        attrs={"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]},
    ),
    ms(
        "Attention",
        f(2, 5, 8),
        f(8, 24),
        f(24),
        ints(0, 2, 2, 5, 5, dtype=np.int32),
        attrs={"num_heads": 2, "scale": 0.3},
    ),
    ms("MultiHeadAttention", f(2, 3, 8), f(2, 5, 8), f(2, 5, 8), attrs={"num_heads": 2}),
    ms("MultiHeadAttention", f(2, 3, 8), f(2, 5, 8), f(2, 5, 12), f(28), mask(2, 5), attrs={"num_heads": 2}),
    ms("MultiHeadAttention", f(2, 3, 8), f(2, 2, 5, 4), f(2, 2, 5, 4), attrs={"num_heads": 2}),
    ms(
        "MultiHeadAttention",
        f(2, 3, 8),
        f(2, 3, 8),
        f(2, 3, 8),
        f(24),
        None,
        f(1, 2, 3, 7),
        f(2, 2, 4, 4),
        f(2, 2, 4, 4),
        attrs={"num_heads": 2, "unidirectional": 1, "scale": 0.4},
        outputs=3,
    ),
    ms("RotaryEmbedding", f(2, 3, 16), ints(0, 9, 2, 3), *rope(9, 4), attrs={}),
    ms("RotaryEmbedding", f(2, 2, 3, 8), Const(np.array([2])), *rope(9, 4), attrs={"interleaved": 1}),
    ms(
        "RotaryEmbedding",
        f(2, 3, 16),
        ints(0, 9, 2, 3),
        *rope(9, 2),
        attrs={"num_heads": 2, "rotary_embedding_dim": 4},
    ),
    ms(
        "GroupQueryAttention",
        f(2, 3, 32),
        f(2, 3, 16),
        f(2, 3, 16),
        None,
        None,
        lens(2, 2),
        Const(np.array(3, np.int32)),
        attrs={"num_heads": 4, "kv_num_heads": 2},
        outputs=3,
    ),
    ms(
        "GroupQueryAttention",
        f(2, 1, 64),
        f(2, 1, 32),
        f(2, 1, 32),
        f(2, 2, 4, 16),
        f(2, 2, 4, 16),
        lens(4, 4),
        Const(np.array(5, np.int32)),
        *rope(9, 8),
        attrs={"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        outputs=3,
    ),
    ms(
        "GroupQueryAttention",
        f(2, 1, 64),
        f(2, 1, 32),
        f(2, 1, 32),
        f(2, 2, 8, 16),
        f(2, 2, 8, 16),
        lens(4, 2),
        Const(np.array(5, np.int32)),
        *rope(9, 8),
        attrs={"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1, "scale": 0.3},
        outputs=3,
    ),
    *(
        ms(
            "GroupQueryAttention",
            f(batch, steps, 64),
            f(batch, steps, 32),
            f(batch, steps, 32),
            f(batch, 2, past, 16),
            f(batch, 2, past, 16),
            lens(*told),
            Const(np.array(total, np.int32)),
            *rope(24, 8),
            attrs={"num_heads": 4, "kv_num_heads": 2, **attrs},
            outputs=3,
        )
        for attrs in ({"do_rotary": 1}, {"local_window_size": 3}, {"softcap": 1.5, "local_window_size": 2})
        for batch, steps, past, told, total in (
            (2, 1, 7, (7, 3), 8),  # caches that grow, of sequences that are not equally long
            (2, 1, 12, (7, 0), 8),  # caches with room
            (1, 3, 7, (9,), 10),
            (1, 3, 12, (6,), 7),
            (1, 5, 0, (4,), 5),  # no past
            (2, 5, 9, (4, 4), 5),  # the first prompt, into caches with room
            (1, 1, 0, (0,), 1),
        )
    ),
    ms(
        "GroupQueryAttention",
        f(1, 4, 96),
        None,
        None,
        None,
        None,
        lens(3),
        Const(np.array(4, np.int32)),
        *rope(9, 8),
        attrs={"num_heads": 2, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 2, "softcap": 2.0},
        outputs=3,
    ),
    # quantized
    ms("QLinearAdd", u8(2, 5), s(0.1), s(7, np.uint8), u8(5), s(0.2), s(3, np.uint8), s(0.3), s(9, np.uint8)),
    ms("QLinearAdd", i8(2, 5), s(0.1), s(7, np.int8), i8(2, 5), s(0.2), s(-3, np.int8), s(0.3), s(9, np.int8)),
    ms("QLinearMul", u8(2, 5), s(0.1), s(7, np.uint8), u8(5), s(0.2), s(3, np.uint8), s(2.3), s(9, np.uint8)),
    ms("QLinearSigmoid", u8(3, 5), s(0.03), s(127, np.uint8), s(1 / 256), s(0, np.uint8)),
    ms("QLinearLeakyRelu", i8(3, 5), s(0.03), s(3, np.int8), s(0.02), s(-5, np.int8), attrs={"alpha": 0.1}),
    ms(
        "QLinearSoftmax",
        u8(3, 5),
        s(0.03),
        s(127, np.uint8),
        s(1 / 256),
        s(0, np.uint8),
        attrs={"opset": 13, "axis": -1},
    ),
    ms(
        "QLinearAveragePool",
        u8(1, 3, 7, 6),
        s(0.1),
        s(120, np.uint8),
        s(0.08),
        s(100, np.uint8),
        attrs={"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
        steps=1,
    ),
    *[
        ms(
            "QLinearConv",
            u8(2, 7, 6, 4) if last else u8(2, 4, 7, 6),
            s(0.02),
            s(120, np.uint8),
            weight7(6, 4 // group, 3, 3),
            Const(np.linspace(0.01, 0.03, 6, dtype=np.float32)),
            Const(np.zeros(6, np.int8)),
            s(0.2),
            s(100, np.uint8),
            ints(-300, 300, 6, dtype=np.int32),
            attrs={"channels_last": last, "group": group, "pads": [1, 0, 1, 1], "strides": [1, 2]},
            steps=1,
        )
        for last in (0, 1)
        for group in (1, 2)
    ],
    ms("NhwcMaxPool", u8(2, 7, 6, 3), attrs={"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]}),
    ms("NhwcMaxPool", i8(1, 7, 6, 3), attrs={"kernel_shape": [3, 3], "dilations": [2, 1]}),
    ms("Range", Const(np.array(1)), Const(np.array(9)), Const(np.array(3))),
    ms("QLinearGlobalAveragePool", u8(2, 300, 5, 4), s(0.02, np.float32), s(100, np.uint8), s(0.004, np.float32), s(9, np.uint8)),
    ms("QLinearGlobalAveragePool", u8(2, 3, 5, 4), s(0.1), s(120, np.uint8), s(0.08), s(100, np.uint8)),
    ms(
        "QLinearGlobalAveragePool",
        u8(2, 5, 4, 3),
        s(0.1),
        s(3, np.uint8),
        s(0.08),
        s(1, np.uint8),
        attrs={"channels_last": 1},
    ),
    ms(
        "QLinearConcat",
        s(0.2),
        s(5, np.uint8),
        u8(2, 3),
        s(0.1),
        s(1, np.uint8),
        u8(2, 2),
        s(0.3),
        s(9, np.uint8),
        attrs={"axis": 1},
    ),
    ms(
        "QGemm",
        u8(3, 5),
        s(0.1),
        s(120, np.uint8),
        weight7(5, 4),
        s(0.2),
        s(0, np.int8),
        ints(-99, 99, 4, dtype=np.int32),
        s(1.5),
        s(128, np.uint8),
    ),
    ms(
        "QGemm",
        u8(3, 5),
        s(0.1),
        s(120, np.uint8),
        weight7(4, 5),
        s(0.2),
        s(0, np.int8),
        None,
        attrs={"transB": 1, "alpha": 0.5},
    ),
    ms("MatMulIntegerToFloat", u8(3, 5), weight7(5, 4), s(0.1), s(0.2), s(120, np.uint8), s(3, np.int8), f(4)),
    ms("MatMulIntegerToFloat", u8(2, 3, 5), u8(5, 4), s(0.1), pos(4), s(120, np.uint8), u8(4)),
    ms("DynamicQuantizeMatMul", f(3, 5), weight7(5, 4), s(0.2), s(3, np.int8), f(4)),
    ms("DynamicQuantizeMatMul", f(2, 3, 5), u8(5, 4), pos(4), None, f(4)),
    ms(
        "QAttention",
        u8(2, 5, 8),
        weight7(8, 24),
        f(24),
        s(0.01),
        s(0.02),
        mask(2, 5),
        s(128, np.uint8),
        s(0, np.int8),
        attrs={"num_heads": 2},
        tolerance=1e-4,
    ),
    ms("QuantizeLinear", f(3, 5, scale=9), s(0.2), s(7, np.uint8)),
    ms("DequantizeLinear", u8(3, 5), pos(3), u8(3), attrs={"axis": 0}),
    ms(
        "MatMulNBits",
        f(3, 32),
        u8(6, 2, 8),
        pos(12),
        attrs={"K": 32, "N": 6, "block_size": 16, "bits": 4},
        tolerance=1e-3,
    ),
    ms(
        "MatMulNBits",
        f(2, 3, 40),
        u8(6, 3, 8),
        pos(18),
        u8(12),
        attrs={"K": 40, "N": 6, "block_size": 16, "bits": 4},
        tolerance=1e-3,
    ),
    ms(
        "MatMulNBits",
        f(3, 32),
        u8(6, 2, 16),
        pos(12),
        u8(12),
        None,
        f(6),
        attrs={"K": 32, "N": 6, "block_size": 16, "bits": 8},
        tolerance=1e-2,
    ),
    ms(
        "DynamicQuantizeLSTM",
        f(3, 2, 4, scale=0.5),
        Const(np.random.default_rng(1).integers(-50, 50, (1, 4, 20)).astype(np.int8)),
        Const(np.random.default_rng(2).integers(-50, 50, (1, 5, 20)).astype(np.int8)),
        f(1, 40),
        None,
        None,
        None,
        None,
        Const(np.array([0.01], np.float32)),
        Const(np.array([0], np.int8)),
        Const(np.array([0.01], np.float32)),
        Const(np.array([0], np.int8)),
        attrs={"hidden_size": 5},
        outputs=3,
        tolerance=2e-2,  # ONNX Runtime also quantizes the activations
    ),
    ms(
        "QLinearWhere",
        lambda rng: rng.random((3, 4)) < 0.5,
        u8(3, 4),
        s(0.1),
        s(7, np.uint8),
        u8(4),
        s(0.2),
        s(3, np.uint8),
        s(0.15),
        s(9, np.uint8),
        steps=1,
    ),
    ms(
        "QEmbedLayerNormalization",
        ints(0, 9, 2, 5, dtype=np.int32),
        ints(0, 2, 2, 5, dtype=np.int32),
        *[Const(np.random.default_rng(n).integers(0, 256, (n, 8)).astype(np.uint8)) for n in (9, 7, 2)],
        *[Const(np.random.default_rng(n).integers(0, 256, 8).astype(np.uint8)) for n in (3, 4)],
        mask(2, 5),
        *[s(v) for v in (0.01, 0.02, 0.03, 0.01, 0.02)],
        *[s(v, np.uint8) for v in (128, 120, 100, 90, 128)],
        outputs=2,
        tolerance=1e-4,
    ),
    ms(
        "GatherBlockQuantized",
        Const(np.random.default_rng(3).integers(0, 256, (7, 16)).astype(np.uint8)),
        ints(0, 7, 2, 3),
        pos(7, 2),
        attrs={"block_size": 16, "bits": 4, "gather_axis": 0, "quantize_axis": 1},
    ),
    ms(
        "GatherBlockQuantized",
        Const(np.random.default_rng(3).integers(0, 256, (7, 16)).astype(np.uint8)),
        ints(0, 7, 3),
        pos(7, 2),
        Const(np.random.default_rng(4).integers(0, 256, (7, 1)).astype(np.uint8)),
        attrs={"block_size": 16, "bits": 4, "gather_axis": 0, "quantize_axis": 1},
    ),
    # others
    ms("GatherND", f(3, 4, 5), ints(0, 3, 2, 2)),
    ms("Inverse", f(2, 3, 3), tolerance=1e-3),
    ms("Pad", f(2, 3), Const(np.array([1, 0, 0, 2])), Const(np.array([1.5], np.float32))),
    ms("Pad", f(4, 3), Const(np.array([1, 0, 0, 2])), attrs={"mode": "reflect"}),
    ms("Unique", lambda rng: rng.integers(0, 5, 12).astype(np.float32), outputs=3),
    ms("Trilu", f(2, 4, 5), Const(np.array(1)), attrs={"upper": 0}),
    ms("ExpandDims", f(2, 3), Const(np.array(1, np.int32))),
    ms("CDist", f(4, 5), f(3, 5), attrs={"metric": "euclidean"}),
    ms("CDist", f(4, 5), f(3, 5), tolerance=1e-4),
    ms("GridSample", f(1, 2, 4, 5), f(1, 3, 3, 2, scale=0.7), attrs={"mode": "bilinear", "align_corners": 1}),
    ms(
        "CropAndResize",
        f(2, 3, 6, 7),
        pos(3, 4),
        Const(np.array([0, 1, 1], np.int32)),
        Const(np.array([4, 3], np.int32)),
    ),
    ms(
        "CropAndResize",
        f(2, 3, 6, 7),
        pos(2, 4),
        Const(np.array([0, 1], np.int32)),
        Const(np.array([1, 3], np.int32)),
        attrs={"mode": "nearest", "extrapolation_value": 7.0},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_agrees_with_onnx_runtime(case: Case) -> None:
    check_direct(case)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_traces(case: Case) -> None:
    check_traced(case)


@pytest.mark.parametrize("option", ["do_rotary", "past_present_share_buffer"])
def test_options_that_would_be_left_out_are_refused(option: str) -> None:
    plain = next(c for c in CASES if c.op == "QAttention")
    case = replace(plain, attrs={**plain.attrs, option: 1})
    arrays = case.arrays()
    module = OnnxModule(load(model_of(case, arrays)))
    with pytest.raises(ModelError, match="option that is not supported"):
        module(*[from_any(a) for a in feeds(case, arrays).values()])
