"""Neural-network operators on fresh data against ONNX Runtime, or onnx.reference where that cannot run them.

ONNX's own node cases (tests/conformance) cover the newest opset; here are old opsets, odd and size-1 axes, uneven
padding, empty batches and the recurrent layers' attributes. Every case also runs traced with symbolic sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotfuse.base.errors import ModelError
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.onnx_program import NodeCtx
from hotfuse.frontends.onnx.ops import pool
from hotfuse.frontends.onnx.registry import find
from hotfuse.frontends.onnx.tracing.traced_model import trace
from hotfuse.frontends.onnx.values import from_any, to_numpy
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


def c(op: str, *inputs: Any, at: int = 22, **kw: Any) -> Case:
    return Case(op, inputs, opset=at, **kw)


def rnn(op: str, gates: int, *, at: int = 14, steps: int = 4, rest: tuple[Any, ...] = (), **kw: Any) -> Case:
    attrs = {"hidden_size": 5, **kw.pop("attrs", {})}
    d = 2 if attrs.get("direction") == "bidirectional" else 1
    x = f(3, steps, 4) if attrs.get("layout") else f(steps, 3, 4)
    bias = f(d, 2 * gates * 5, scale=0.3)
    outs = kw.pop("outputs", 3 if op == "LSTM" else 2)
    ins = (x, f(d, gates * 5, 4, scale=0.4), f(d, gates * 5, 5, scale=0.4), bias, *rest)
    return Case(op, ins, attrs, opset=at, outputs=outs, **kw)


def k(*values: Any, dtype: Any = np.int64) -> Const:
    return Const(np.array(values, dtype))


def fl(*values: float) -> Const:
    return Const(np.array(values, np.float32))


LENS = Const(np.array([4, 2, 3], np.int32))

ACTIVATIONS = [
    *[c(op, f(2, 3, 5), at=at) for op in ("Relu", "Sigmoid", "Tanh", "Elu", "Selu", "LeakyRelu") for at in (7, 13)],
    *[c(op, f(1, 7), at=at) for op in ("HardSigmoid", "Softplus", "Softsign") for at in (7, 13)],
    c("Softplus", f(40, scale=30)),
    c("Selu", f(9), attrs={"alpha": 2.0, "gamma": 0.5}, at=7),
    c("Celu", f(3, 4), attrs={"alpha": 0.3}, at=12),
    c("PRelu", f(2, 3, 4, 5), f(3, 1, 1), at=7),
    c("PRelu", f(2, 3, 4), f(4), at=9),
    c("ThresholdedRelu", f(3, 4), attrs={"alpha": 0.2}, at=10),
    c("HardSwish", f(3, 4, scale=4), at=14),
    c("Mish", f(3, 4), at=18),
    c("Gelu", f(3, 4), at=20),
    c("Gelu", f(3, 4), attrs={"approximate": "tanh"}, at=20, tolerance=1e-4),
    c("Swish", f(3, 4), attrs={"alpha": 0.5}, at=24, oracle="reference"),
    c("Shrink", ints(-4, 5, 3, 4, dtype=np.int32), attrs={"lambd": 1.5, "bias": 1.5}, at=9),
    *[
        c(op, f(2, 3, 4), at=at, attrs={"axis": a})
        for op in ("Softmax", "LogSoftmax")
        for at in (7, 11, 13)
        for a in (0, 1, 2)
    ],
    c("Softmax", f(2, 3, 4), at=9),
    c("Softmax", f(0, 4), at=13),
    *[c("Hardmax", f(2, n, 4), at=at, attrs={"axis": 1}) for at in (9, 11, 13) for n in (3, 0)],
    c("Dropout", f(3, 4), at=7),
    c("Dropout", f(3, 4), at=10, outputs=2, compare=(0,)),
    c("Dropout", f(3, 4), Const(np.array(0.3, np.float32)), at=13, outputs=2),
]

NORMS = [
    *[
        c("BatchNormalization", f(2, 3, *s), f(3), f(3), f(3), pos(3), at=at)
        for s in ((), (5,), (4, 5))
        for at in (9, 14, 15)
    ],
    c(
        "BatchNormalization",
        f(1, 3, 4, 5),
        f(3),
        f(3),
        f(3),
        pos(3),
        at=15,
        attrs={"training_mode": 1},
        outputs=3,
        tolerance=1e-4,
    ),
    c("BatchNormalization", f(2, 3, 1, 1), f(3), f(3), f(3), pos(3), at=7, attrs={"epsilon": 0.1}),
    c("InstanceNormalization", f(2, 3, 4, 5), f(3), f(3), at=7),
    c("InstanceNormalization", f(2, 3, 1), f(3), f(3), oracle="reference"),
    c("LayerNormalization", f(2, 3, 5), f(5), f(5), at=17),
    c("LayerNormalization", f(2, 3, 5), f(3, 5), None, at=17, attrs={"axis": 1}, outputs=3),
    c("LayerNormalization", f(2, 1, 5), f(5), at=17, attrs={"epsilon": 0.1}),
    c("GroupNormalization", f(2, 6, 4), f(3), f(3), attrs={"num_groups": 3}, at=18, tolerance=1e-4),
    c("GroupNormalization", f(2, 6, 4, 1), f(6), f(6), attrs={"num_groups": 2}, at=21, tolerance=1e-4),
    c("RMSNormalization", f(2, 3, 5), f(5), at=23, oracle="reference"),
    c("RMSNormalization", f(2, 3, 5), f(1), at=23, oracle="reference"),
    *[c("LpNormalization", f(3, 4), attrs={"p": p, "axis": a}, at=7) for p in (1, 2) for a in (0, -1)],
    c("MeanVarianceNormalization", f(2, 3, 4, 5), at=13),
    *[c("LRN", f(2, 7, 3, 3), attrs={"size": n, "alpha": 0.5}, at=13) for n in (3, 5)],
]

CONV = [
    c("Conv", f(2, 3, 9), f(4, 3, 3), f(4), at=7),
    c("Conv", f(1, 4, 7, 6), f(6, 2, 3, 2), f(6), attrs={"group": 2, "pads": [1, 0, 2, 3], "strides": [2, 1]}, at=11),
    c("Conv", f(2, 2, 5, 6, 7), f(3, 2, 2, 1, 3), attrs={"pads": [1, 0, 1, 1, 0, 1], "dilations": [1, 1, 2]}),
    *[
        c("Conv", f(1, 2, h, 6), f(3, 2, 3, 4), attrs={"auto_pad": p, "strides": [2, 2]})
        for p in ("SAME_UPPER", "SAME_LOWER", "VALID")
        for h in (7, 8)
    ],
    c("Conv", f(1, 2, 6, 6), f(3, 2, 2, 2), attrs={"auto_pad": "SAME_UPPER"}),
    c("Conv", f(0, 2, 6, 6), f(3, 2, 3, 3)),
    c("Conv", f(1, 4, 1, 1), f(4, 1, 1, 1), attrs={"group": 4}),
    c("ConvTranspose", f(1, 3, 5), f(3, 2, 4), f(2), attrs={"strides": [2], "pads": [1, 1]}, at=7),
    c("ConvTranspose", f(1, 4, 4, 5), f(4, 2, 3, 3), f(4), attrs={"group": 2, "strides": [2, 3], "pads": [0, 1, 2, 0]}),
    c("ConvTranspose", f(1, 2, 3, 3), f(2, 2, 3, 3), attrs={"strides": [3, 2], "output_shape": [10, 8]}),
    c(
        "ConvTranspose",
        f(1, 2, 3, 3),
        f(2, 2, 3, 3),
        attrs={"strides": [2, 2], "output_padding": [1, 1], "dilations": [2, 2]},
    ),
    *[
        c(
            "ConvTranspose",
            f(1, 2, 3, 4),
            f(2, 2, 4, 3),
            f(2),
            attrs={"strides": [2, 2], "auto_pad": p},
            oracle="reference",
        )
        for p in ("SAME_UPPER", "SAME_LOWER")
    ],
    c(
        "DeformConv",
        f(1, 4, 6, 7),
        f(4, 2, 3, 2),
        f(1, 24, 6, 5, scale=0.7),
        f(4),
        f(1, 12, 6, 5),
        attrs={"group": 2, "offset_group": 2, "pads": [1, 0, 1, 0], "strides": [1, 1], "dilations": [1, 2]},
        oracle="reference",
        tolerance=1e-4,
    ),
    c("Col2Im", f(1, 8, 12), k(5, 4), k(2, 2), attrs={"pads": [0, 0, 0, 0]}, at=18),
    c(
        "Col2Im",
        f(1, 12, 6),
        k(5, 4),
        k(3, 2),
        attrs={"pads": [1, 0, 1, 1], "strides": [2, 2], "dilations": [1, 2]},
        at=18,
        oracle="none",
    ),
]

POOL = [
    *[
        c("MaxPool", f(1, 2, 7, 6), attrs={"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}, at=at)
        for at in (8, 10, 12)
    ],
    *[
        c(
            "MaxPool",
            f(2, 2, 7, 6),
            attrs={"kernel_shape": [3, 3], "strides": [2, 2], "storage_order": o, "ceil_mode": m, "pads": [0, 1, 1, 1]},
            outputs=2,
            at=12,
        )
        for o in (0, 1)
        for m in (0, 1)
    ],
    c("MaxPool", f(1, 2, 9), attrs={"kernel_shape": [3], "dilations": [2], "pads": [1, 1]}, outputs=2),
    c("MaxPool", f(1, 1, 4, 5, 6), attrs={"kernel_shape": [2, 2, 3], "auto_pad": "SAME_LOWER", "strides": [2, 1, 2]}),
    c("MaxPool", ints(0, 256, 1, 2, 5, 5, dtype=np.uint8), attrs={"kernel_shape": [2, 2]}, at=12),
    c("MaxPool", f(0, 2, 5, 5), attrs={"kernel_shape": [2, 2]}),
    *[
        c(
            "AveragePool",
            f(1, 2, 7, 6),
            attrs={"kernel_shape": [3, 2], "strides": [2, 3], "pads": p, "count_include_pad": n},
            at=at,
        )
        for p in ([1, 0, 1, 0], [0, 1, 2, 0])
        for n in (0, 1)
        for at in (7, 11)
    ],
    *[
        c(
            "AveragePool",
            f(1, 2, 7, 8),
            attrs={
                "kernel_shape": [3, 3],
                "strides": [2, 2],
                "ceil_mode": 1,
                "count_include_pad": n,
                "pads": [1, 1, 1, 1],
            },
            at=19,
        )
        for n in (0, 1)
    ],
    c("AveragePool", f(1, 2, 9, 8), attrs={"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 1, 1, 1]}, at=19),
    c("AveragePool", f(1, 2, 9), attrs={"kernel_shape": [4], "auto_pad": "SAME_UPPER"}, at=11),
    *[
        c(
            "LpPool",
            f(1, 2, 7, 6),
            attrs={"kernel_shape": [3, 2], "p": p, "pads": [1, 0, 1, 1], "strides": [2, 1]},
            at=11,
        )
        for p in (1, 2, 3)
    ],
    c("LpPool", f(1, 2, 9), attrs={"kernel_shape": [3], "dilations": [2]}, at=18),
    *[c(op, f(2, 3, 4, 1), at=7) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")],
    c(
        "MaxUnpool",
        f(1, 1, 2, 2),
        Const(np.array([[[[5, 7], [13, 15]]]])),
        attrs={"kernel_shape": [2, 2], "strides": [2, 2]},
        at=9,
    ),
]

RECURRENT = [
    *[
        rnn(
            op,
            gates,
            attrs={"direction": d, **({"linear_before_reset": b} if op == "GRU" else {})},
            at=at,
            leaf=op == "GRU" and not b,
        )
        for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4))
        for d in ("forward", "reverse", "bidirectional")
        for at in (7, 14)
        for b in ((0, 1) if op == "GRU" else (1,))
    ],
    *[
        rnn(op, g, rest=(None, f(1, 3, 5)), attrs={"linear_before_reset": 1} if op == "GRU" else {})
        for op, g in (("RNN", 1), ("GRU", 3))
    ],
    rnn("LSTM", 4, rest=(None, f(1, 3, 5), f(1, 3, 5))),
    rnn("LSTM", 4, rest=(None, None, None, f(1, 15)), leaf=True),
    rnn("LSTM", 4, rest=(LENS,), leaf=True),
    rnn("LSTM", 4, rest=(LENS,), attrs={"direction": "bidirectional"}, outputs=2),
    rnn("GRU", 3, rest=(LENS,), attrs={"direction": "reverse", "linear_before_reset": 1}),
    rnn("RNN", 1, rest=(LENS,), attrs={"direction": "bidirectional"}),
    rnn("LSTM", 4, attrs={"clip": 0.2}, leaf=True, tolerance=1e-3),
    rnn("LSTM", 4, attrs={"input_forget": 1}, leaf=True),
    rnn(
        "LSTM",
        4,
        attrs={
            "activations": ["HardSigmoid", "Softsign", "Affine"],
            "activation_alpha": [0.3, 0.7],
            "activation_beta": [0.4, 0.1],
        },
        leaf=True,
        tolerance=1e-4,
    ),
    rnn("RNN", 1, attrs={"activations": ["Relu"]}, leaf=True),
    rnn(
        "GRU", 3, attrs={"activations": ["Sigmoid", "LeakyRelu"], "activation_alpha": [0.1]}, leaf=True, tolerance=1e-4
    ),
    rnn("LSTM", 4, attrs={"layout": 1}, oracle="reference"),
    rnn("GRU", 3, attrs={"layout": 1, "linear_before_reset": 1}, oracle="reference"),
]

ATTENTION = [
    c("Attention", f(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 6), at=23, oracle="reference"),
    c(
        "Attention",
        f(2, 3, 32),
        f(2, 5, 16),
        f(2, 5, 16),
        attrs={"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1},
        at=23,
        oracle="reference",
    ),
    c(
        "Attention",
        f(1, 2, 3, 4),
        f(1, 2, 5, 4),
        f(1, 2, 5, 4),
        lambda r: r.random((3, 5)) < 0.5,
        attrs={"softcap": 2.0},
        at=23,
        oracle="reference",
    ),
    c(
        "Attention",
        f(1, 2, 3, 4),
        f(1, 2, 3, 4),
        f(1, 2, 3, 4),
        f(1, 1, 3, 7),
        f(1, 2, 4, 4),
        f(1, 2, 4, 4),
        attrs={"is_causal": 1, "qk_matmul_output_mode": 2},
        at=23,
        outputs=4,
        oracle="reference",
    ),
    c(
        "RotaryEmbedding",
        f(2, 3, 24),
        f(9, 2),
        f(9, 2),
        ints(0, 9, 2, 3),
        attrs={"num_heads": 3, "rotary_embedding_dim": 4, "interleaved": 1},
        at=23,
        oracle="reference",
    ),
    c(
        "TensorScatter",
        f(2, 3, 6, 4),
        f(2, 3, 2, 4),
        ints(0, 6, 2),
        attrs={"mode": "circular"},
        at=24,
        oracle="reference",
    ),
]


def resize(x: Any, *, scales: Any = None, sizes: Any = None, at: int = 13, roi: Any = None, **kw: Any) -> Case:
    attrs = kw.pop("attrs", {})
    if at < 13 and roi is None:
        roi = fl()
    given = (roi, fl(*scales) if scales else None, k(*sizes) if sizes else None)
    return Case("Resize", (x, *given[: 3 if sizes else 2]), attrs, opset=at, **kw)


COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
RESIZE = [
    *[
        c("Upsample", f(1, 2, 3, 4), attrs={"scales": [1.0, 1.0, 2.0, 3.0], "mode": m}, at=7, tolerance=1e-4)
        for m in ("nearest", "linear")
    ],
    *[
        c("Upsample", f(1, 2, 3, 4), fl(1, 1, 2, 2), attrs={"mode": m}, at=9, tolerance=1e-4)
        for m in ("nearest", "linear")
    ],
    *[
        c("Resize", f(1, 2, 6, 8), fl(1, 1, *s), attrs={"mode": m}, at=10, tolerance=1e-4)
        for m in ("nearest", "linear")
        for s in ((2, 2), (0.5, 0.75))
    ],
    *[
        resize(
            f(1, 2, 5, 6),
            scales=s,
            attrs={"mode": m, "coordinate_transformation_mode": t},
            at=at,
            tolerance=1e-4,
            # ONNX Runtime rounds the resized length before it aligns corners
            oracle="reference" if t == "align_corners" and s[2] < 1 else "ort",
        )
        for m in ("linear", "cubic")
        for t in COORDINATES
        for s in ((1, 1, 2, 3), (1, 1, 0.6, 1.4))
        for at in (11, 13)
    ],
    *[
        resize(
            f(1, 2, 5, 6),
            sizes=(1, 2, 7, 4),
            attrs={"mode": m, "coordinate_transformation_mode": t},
            at=19,
            tolerance=1e-4,
        )
        for m in ("linear", "cubic")
        for t in COORDINATES
    ],
    *[
        resize(
            f(1, 1, 5, 6),
            sizes=(1, 1, 7, 3),
            attrs={"mode": "nearest", "nearest_mode": n, "coordinate_transformation_mode": t},
            at=13,
        )
        for n in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        for t in ("half_pixel", "asymmetric")
    ],
    resize(
        f(1, 2, 3, 4),
        scales=(1, 1, 4, 2),
        attrs={"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"},
    ),
    resize(ints(0, 255, 1, 2, 3, 4, dtype=np.uint8), scales=(1, 1, 2, 2), attrs={"mode": "nearest"}),
    resize(
        f(1, 2, 5, 6),
        sizes=(1, 2, 7, 4),
        attrs={"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
        tolerance=1e-4,
    ),
    resize(
        f(1, 2, 8, 9),
        sizes=(1, 2, 3, 4),
        attrs={"mode": "linear", "antialias": 1},
        at=18,
        oracle="reference",
        tolerance=1e-4,
    ),
    resize(
        f(1, 2, 5, 6),
        sizes=(1, 2, 4, 4),
        roi=fl(0, 0, 0.2, -0.1, 1, 1, 0.7, 1.2),
        attrs={"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0},
        tolerance=1e-4,
    ),
    *[
        resize(
            f(1, 2, 6, 8),
            sizes=(5, 7),
            attrs={"axes": [2, 3], "mode": "linear", "keep_aspect_ratio_policy": p},
            at=18,
            oracle="reference",
            tolerance=1e-4,
        )
        for p in ("not_larger", "not_smaller")
    ],
    resize(f(2, 3, 7), sizes=(2, 3, 1), attrs={"mode": "linear"}, tolerance=1e-4),
    resize(f(1, 1, 3, 4, 5), scales=(1, 1, 2, 1, 1.5), attrs={"mode": "linear"}, tolerance=1e-4),
]

IMAGE = [
    *[
        c(
            "GridSample",
            f(2, 2, 5, 4),
            f(2, 3, 3, 2),
            attrs={"mode": m, "padding_mode": p, "align_corners": a},
            at=16,
            tolerance=1e-4,
        )
        for m in ("bilinear", "nearest", "bicubic")
        for p in ("zeros", "border", "reflection")
        for a in (0, 1)
    ],
    *[
        c(
            "GridSample",
            f(1, 2, 3, 4, 5),
            f(1, 2, 2, 3, 3, scale=0.8),
            attrs={"mode": m},
            at=20,
            oracle="reference",
            tolerance=1e-4,
        )
        for m in ("linear", "cubic")
    ],
    *[c("AffineGrid", f(2, 2, 3), k(2, 3, 4, 5), attrs={"align_corners": a}, at=20) for a in (0, 1)],
    c(
        "RoiAlign",
        f(2, 3, 9, 8),
        Const(np.array([[0, 0, 5, 6], [1.5, 2, 7, 7.5]], np.float32)),
        k(0, 1),
        attrs={"output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 0.9},
        at=10,
        tolerance=1e-4,
    ),
    c(
        "RoiAlign",
        f(2, 3, 9, 8),
        Const(np.array([[0, 0, 5, 6], [1.5, 2, 7, 7.5]], np.float32)),
        k(0, 1),
        attrs={"output_height": 3, "output_width": 2, "mode": "max", "sampling_ratio": 3},
        at=16,
        tolerance=1e-4,
    ),
    c(
        "RoiAlign",
        f(2, 3, 9, 8),
        lambda r: np.array([[0, 0, 5, 6], [1.5, 2, 7, 7.5]], np.float32),
        k(0, 1),
        attrs={"output_height": 2, "output_width": 2},
        at=16,
        leaf=True,
        tolerance=1e-4,
    ),
    *[
        c(
            "RoiAlign",
            f(3, 5, 9, 8),
            Const(np.array([[-9, -9, 3, 4], [6, 5, 30, 40], [50, 50, 60, 60], [2, 2, 2, 2]], np.float32)),
            k(2, 0, 1, 0),
            attrs={"output_height": 3, "output_width": 2, "sampling_ratio": r, "mode": "avg"},
            at=at,
            tolerance=1e-4,
        )
        for r, at in ((1, 10), (2, 16), (3, 16))
    ],
    c("RoiAlign", f(3, 5, 9, 8), f(0, 4), k(), attrs={"output_height": 3, "output_width": 2, "sampling_ratio": 2}, at=16),
    c(
        "MaxRoiPool",
        f(2, 3, 9, 8),
        Const(np.array([[0, 0, 0, 5, 6], [1, 2, 2, 7, 7]], np.float32)),
        attrs={"pooled_shape": [3, 2], "spatial_scale": 0.8},
        at=13,
    ),
    c("NonMaxSuppression", pos(2, 12, 4), pos(2, 3, 12), k(4), fl(0.3), fl(0.4), at=11, leaf=True),
    c(
        "NonMaxSuppression",
        pos(1, 12, 4),
        pos(1, 1, 12),
        k(5),
        fl(0.2),
        at=10,
        attrs={"center_point_box": 1},
        leaf=True,
    ),
    c("NonMaxSuppression", pos(1, 12, 4), pos(1, 1, 12), at=11),
]

SIGNAL = [
    *[
        c("DFT", f(2, 10, n), at=17, attrs={"axis": 1, "onesided": o, "inverse": 0}, tolerance=1e-4)
        for n, o in ((1, 0), (1, 1), (2, 0))
    ],
    c("DFT", f(2, 10, 2), None, Const(np.array(1)), at=20, attrs={"inverse": 1}, tolerance=1e-4),
    c("DFT", f(2, 10, 1), Const(np.array(16)), Const(np.array(-2)), at=20, tolerance=1e-4),
    c("STFT", f(2, 32, 1), Const(np.array(4)), pos(8), Const(np.array(8)), at=17, tolerance=1e-4),
    *[
        c(op, Const(np.array(9)), at=17, attrs={"periodic": p})
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
        for p in (0, 1)
    ],
    c(
        "MelWeightMatrix",
        Const(np.array(8)),
        Const(np.array(64)),
        Const(np.array(8000)),
        Const(np.array(0.0, np.float32)),
        Const(np.array(4000.0, np.float32)),
        at=17,
    ),
]

LOSS = [
    *[
        c(
            "NegativeLogLikelihoodLoss",
            f(3, 5, 2),
            ints(0, 5, 3, 2),
            pos(5),
            attrs={"reduction": r},
            at=13,
            oracle="reference",
        )
        for r in ("none", "mean", "sum")
    ],
    c(
        "SoftmaxCrossEntropyLoss",
        f(3, 5),
        ints(0, 5, 3),
        None,
        attrs={"ignore_index": 2},
        at=13,
        outputs=2,
        oracle="reference",
    ),
]

TREES: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0, 1, 1, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 0, 1, 2, 3, 4],
    "nodes_featureids": [0, 0, 0, 1, 0, 0, 0, 0],
    "nodes_values": [0.1, 0.0, 0.0, -0.2, 0.3, 0.0, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0, 1, 3, 0, 0, 0],
    "nodes_falsenodeids": [2, 0, 0, 2, 4, 0, 0, 0],
}


def votes(kind: str, ids: list[int], weights: list[float]) -> dict[str, Any]:
    places = {"treeids": [0, 0, 1, 1, 1], "nodeids": [1, 2, 2, 3, 4], "ids": ids, "weights": weights}
    return {**TREES, **{f"{kind}_{k}": v for k, v in places.items()}}


def ml(op: str, x: Any, at: int = 1, **kw: Any) -> Case:
    return Case(op, (x,), opset=at, domain="ai.onnx.ml", **kw)


def machines(seed: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Support vectors of three features and their weights."""
    rng, total = np.random.default_rng(seed), sum(counts)
    far_off = 1000.0 if len(counts) == 1 else 0.0
    return {
        "coefficients": rng.standard_normal(max(1, len(counts) - 1) * total).tolist(),
        "kernel_params": [0.3, 0.2, 3.0],
        "kernel_type": "RBF",
        "rho": [0.25],
        "support_vectors": (far_off + rng.standard_normal(3 * total)).tolist(),
        **({"vectors_per_class": list(counts)} if len(counts) > 1 else {}),
    }


def far(rows: int) -> Maker:
    """Rows whose differences are small beside themselves."""
    return lambda rng: (1000 + rng.standard_normal((rows, 3))).astype(np.float32)


ML = [
    ml(
        "Imputer",
        lambda rng: np.array([[1, np.nan, 3], [np.nan, 2, 0]], np.float32),
        attrs={"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": float("nan")},
    ),
    ml("Imputer", ints(0, 3, 3, 4), attrs={"imputed_value_int64s": [7], "replaced_value_int64": 1}),
    Case("FeatureVectorizer", (f(3, 2), f(3, 4)), {"inputdimensions": [2, 4]}, opset=1, domain="ai.onnx.ml"),
    ml("OneHotEncoder", ints(0, 5, 2, 3), attrs={"cats_int64s": [1, 2, 4], "zeros": 1}),
    *[
        ml(
            "SVMRegressor",
            f(4, 3),
            attrs={
                "coefficients": [0.5, -1.0],
                "kernel_params": [0.3, 0.2, 3.0],
                "kernel_type": kernel,
                "n_supports": 2,
                "rho": [0.25],
                "support_vectors": [0.1, 0.5, -0.3, 1.0, -1.0, 0.2],
            },
            tolerance=1e-4,
        )
        for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID")
    ],
    ml("SVMRegressor", far(40), attrs={**machines(30, (30,)), "n_supports": 30}, tolerance=1e-4),
    *[
        ml(
            "SVMClassifier",
            f(9, 3),
            attrs={
                **machines(len(rho), counts),
                "classlabels_ints": [5, 2, 7, 4][: len(counts)],
                "kernel_type": kernel,
                "post_transform": p,
                "rho": rho,
            },
            outputs=2,
            tolerance=1e-4,
        )
        for kernel, p, counts, rho in (
            ("RBF", "NONE", (2, 3), [0.1]),
            ("POLY", "LOGISTIC", (2, 3), [-0.1]),
            ("SIGMOID", "NONE", (2, 3, 1), [0.1, -0.2, 0.3]),
            ("LINEAR", "SOFTMAX", (1, 2, 3, 2), [0.1, -0.2, 0.3, 0.0, -0.1, 0.2]),
        )
    ],
    *[
        ml(
            "SVMClassifier",
            f(30, 3),
            attrs={**machines(len(rho), counts), **labels, "rho": rho, "prob_a": [-1.5] * len(rho), "prob_b": [0.2] * len(rho)},
            outputs=2,
            tolerance=1e-4,
            leaf=True,
        )
        for labels, counts, rho in (
            ({"classlabels_ints": [5, 2]}, (2, 3), [0.1]),
            ({"classlabels_ints": [5, 2, 7]}, (2, 3, 1), [0.1, -0.2, 0.3]),
            ({"classlabels_strings": ["a", "b", "c"]}, (2, 3, 1), [0.1, -0.2, 0.3]),
        )
    ],
    *[
        ml(
            "SVMClassifier",
            f(9, 3),
            attrs={**machines(31, (2, 3)), "coefficients": [0.5, 1.0, 0.25, 2.0, 0.5], "rho": [rho], "classlabels_ints": [5, 2]},
            outputs=2,
        )
        for rho in (-2.0, -1.0, 0.5)
    ],
    ml(
        "SVMClassifier",
        f(9, 3),
        attrs={
            "classlabels_ints": [5, 2, 7],
            "coefficients": [0.5, 1, -1, 2, 0.2, 0.3, -0.4, 1, 0],
            "kernel_type": "LINEAR",
            "rho": [0.1],
        },
        outputs=2,
        oracle="reference",
    ),
    *[
        ml(
            "TreeEnsembleClassifier",
            f(9, 2),
            3,
            attrs={
                "classlabels_int64s": [4, 5, 6],
                "post_transform": p,
                **votes("class", [0, 1, 2, 1, 0], [1.0, 2.0, 3.0, 4.0, 5.0]),
            },
            outputs=2,
        )
        for p in ("NONE", "SOFTMAX", "LOGISTIC")
    ],
    *[
        ml(
            "TreeEnsembleClassifier",
            f(9, 2),
            3,
            attrs={"classlabels_int64s": [0, 1], "post_transform": p, **votes("class", [0] * 5, w)},
            outputs=2,
        )
        for p, w in (("NONE", [0.1, 0.3, 0.2, 0.4, 0.5]), ("LOGISTIC", [0.1, -0.3, 0.2, -0.4, 0.5]))
    ],
    ml(
        "TreeEnsembleClassifier",
        f(9, 2),
        3,
        attrs={"classlabels_strings": ["a", "b", "c"], **votes("class", [0, 1, 2, 1, 0], [1.0, 2.0, 3.0, 4.0, 5.0])},
        outputs=2,
        leaf=True,
    ),
    *[
        ml(
            "LinearClassifier",
            f(5, 2),
            attrs={
                "classlabels_ints": [3, 4, 5],
                "coefficients": [0.5, 1, -1, 2, 0.2, 0.3],
                "intercepts": [0.1, 0.2, 0.3],
                "post_transform": p,
            },
            outputs=2,
        )
        for p in ("NONE", "SOFTMAX", "LOGISTIC")
    ],
    ml(
        "LinearClassifier",
        f(5, 2),
        attrs={
            "classlabels_ints": [0, 1],
            "coefficients": [0.5, 1.0, -0.5, -1.0],
            "intercepts": [0.1, -0.1],
            "post_transform": "LOGISTIC",
            "multi_class": 1,
        },
        outputs=2,
    ),
    ml(  # more coefficients than intercepts have rows, as one of ONNX Runtime's own examples has
        "LinearClassifier",
        f(5, 2),
        attrs={"classlabels_ints": [3, 4], "coefficients": [0.5, 1, -1, 2, 0.2, 0.3], "intercepts": [0.1, 0.2]},
        outputs=2,
    ),
    Case(
        "Scaler",
        (f(3, 4),),
        {"offset": [1.0, 2.0, 3.0, 4.0], "scale": [2.0, 1.0, 0.5, 3.0]},
        opset=1,
        domain="ai.onnx.ml",
    ),
    *[Case("Normalizer", (pos(3, 4),), {"norm": n}, opset=1, domain="ai.onnx.ml") for n in ("MAX", "L1", "L2")],
    Case(
        "LinearRegressor",
        (f(3, 2),),
        {"coefficients": [0.5, 1.0, -1.0, 2.0], "intercepts": [0.1, 0.2], "targets": 2},
        opset=1,
        domain="ai.onnx.ml",
    ),
    Case("Binarizer", (f(3, 4),), {"threshold": 0.2}, opset=1, domain="ai.onnx.ml"),
    Case(
        "LabelEncoder",
        (ints(0, 6, 3, 4),),
        {"keys_int64s": [1, 2, 5], "values_floats": [0.5, 1.5, 2.5], "default_float": 9.0},
        opset=2,
        domain="ai.onnx.ml",
    ),
    *[
        Case(
            "TreeEnsembleRegressor",
            (f(6, 2),),
            {
                "n_targets": 2,
                "aggregate_function": a,
                **({"base_values": [0.5, -0.5]} if a in ("SUM", "AVERAGE") else {}),
                **votes("target", [0, 1, 0, 1, 0], [1.0, 2.0, 3.0, 4.0, 5.0]),
            },
            opset=3,
            domain="ai.onnx.ml",
            # ONNX Runtime leaves the base value out where no tree votes
            oracle="reference" if a in ("SUM", "AVERAGE") else "ort",
        )
        for a in ("SUM", "AVERAGE", "MIN", "MAX")
    ],
]

CASES = [*ACTIVATIONS, *NORMS, *CONV, *POOL, *RECURRENT, *ATTENTION, *RESIZE, *IMAGE, *SIGNAL, *LOSS, *ML]


@pytest.mark.parametrize("case", [x for x in CASES if x.oracle != "none"], ids=name_of)
def test_agrees_with_oracle(case: Case) -> None:
    check_direct(case)


GROWING = [
    *[(x, (0,)) for x in (*ACTIVATIONS, *NORMS, *RECURRENT, *SIGNAL)],
    *[(x, (0, -1)) for x in (*CONV, *POOL, *RESIZE) if x.op not in ("DeformConv", "Col2Im", "MaxUnpool")],
]
"""Which axes of the first input may have another size without changing the other inputs."""


def _traced() -> list[Case]:
    """One case for each row, sizes and attributes: opsets that share a row trace the same code."""
    found: dict[Any, Case] = {}
    for case in CASES:
        shapes = tuple(None if a is None else a.shape for a in case.arrays())
        found.setdefault((find(case.domain, case.op, case.opset), shapes, repr(case.attrs)), case)
    return list(found.values())


@pytest.mark.parametrize("case", _traced(), ids=name_of)
def test_traces_with_symbolic_sizes(case: Case) -> None:
    check_traced(case, next((axes for x, axes in GROWING if x is case), ()))


@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 2], "strides": [1, 3], "pads": [1, 0, 0, 1], "ceil_mode": 1},
        {"kernel_shape": [1, 3], "strides": [2, 2], "dilations": [1, 4]},
        {"kernel_shape": [4, 1], "strides": [3, 2], "auto_pad": "SAME_UPPER"},
        {"kernel_shape": [1, 1], "strides": [2, 1]},
        {"kernel_shape": [1, 1]},
    ],
    ids=str,
)
def test_maxima_of_planes_are_those_of_windows(attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images that lie plane by plane go along their axes; what is no number stays so."""
    x = torch.randn(2, 3, 41, 37)
    x[0, 0, 5, 7], x[0, 1, :3, :3], x[1, 2, 40, 36] = float("nan"), float("-inf"), float("inf")
    ctx, args = NodeCtx(12, 1), {**attrs}
    whole = pool.max_pool(ctx, x.contiguous(memory_format=torch.channels_last), **args)
    asked = list[int]()
    by_axis = pool._axis_maxima
    monkeypatch.setattr(pool, "_axis_maxima", lambda *given: (asked.append(1), by_axis(*given))[1])
    monkeypatch.setattr(pool, "MIN_PLANES", x.numel())
    got = pool.max_pool(ctx, x, **args)
    assert torch.equal(got.nan_to_num(nan=7.0), whole.nan_to_num(nan=7.0)) and torch.equal(got.isnan(), whole.isnan())
    assert got.is_contiguous() and got.data_ptr() != x.data_ptr()
    assert bool(asked) == (attrs["kernel_shape"] != [1, 1])
    assert pool.max_pool(ctx, x[:0], **args).shape[0] == 0
    with pytest.raises(RuntimeError):
        pool.max_pool(ctx, x, kernel_shape=[50, 2])


def test_lrn_window_reaches_right_when_even() -> None:
    """The oracles refuse an even size, or count channels wrongly."""
    case = c("LRN", f(2, 7, 2, 2), attrs={"size": 4, "alpha": 0.5}, at=13)
    (x,) = case.arrays()
    assert x is not None
    sums = np.stack([np.square(x[:, max(0, i - 1) : i + 3]).sum(1) for i in range(7)], 1)
    got = OnnxModule(load(model_of(case, [x])))(from_any(x))[0]
    np.testing.assert_allclose(to_numpy(got), x / (1 + 0.5 / 4 * sums) ** 0.75, rtol=1e-5)


def test_col2im_with_uneven_padding_undoes_unfold() -> None:
    """Folding the unfolded image counts how often each pixel was read."""
    case = next(x for x in CONV if x.oracle == "none")
    image = torch.arange(40, dtype=torch.float32).reshape(1, 2, 5, 4)
    padded = torch.nn.functional.pad(image, [0, 1, 1, 1])
    columns = torch.nn.functional.unfold(padded, (3, 2), (1, 2), 0, (2, 2))
    ones = torch.nn.functional.unfold(torch.ones_like(padded), (3, 2), (1, 2), 0, (2, 2))
    module = OnnxModule(load(model_of(case, case.arrays())))
    np.testing.assert_allclose(module(columns)[0], image * module(ones)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "op"),
    [
        (c("LayerNormalization", f(2, 3, 8), f(8), f(8), at=17), "layer_norm"),
        (c("RMSNormalization", f(2, 3, 8), f(8), at=23), "rms_norm"),
        (c("Conv", f(1, 2, 5, 5), f(3, 2, 3, 3), f(3), attrs={"pads": [1, 1, 1, 1]}), "conv2d"),
        (c("Attention", f(1, 2, 3, 8), f(1, 2, 3, 8), f(1, 2, 3, 8), at=23), "scaled_dot_product_attention"),
        (c("Gelu", f(3, 4), at=20), "gelu"),
        (c("Softmax", f(3, 4), at=13), "softmax"),
        (c("BatchNormalization", f(2, 3, 4), f(3), f(3), f(3), pos(3), at=15), "batch_norm"),
        (c("MaxPool", f(1, 2, 6, 6), attrs={"kernel_shape": [2, 2], "strides": [2, 2]}), "max_pool2d"),
        (rnn("LSTM", 4, attrs={"direction": "bidirectional"}), "lstm"),
        (rnn("GRU", 3, attrs={"linear_before_reset": 1}), "gru"),
        (resize(f(1, 2, 5, 6), scales=(1, 1, 2, 2), attrs={"mode": "linear"}), "upsample_bilinear2d"),
        (c("GroupNormalization", f(2, 6, 4), f(6), f(6), attrs={"num_groups": 2}, at=21), "group_norm"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_stays_whole_in_the_graph(case: Case, op: str) -> None:
    """Later stages fuse these operators; a front end that took them apart would hide them."""
    arrays = case.arrays()
    values = [from_any(a) for a in feeds(case, arrays).values()]
    specs = [TensorSpec(tuple(v.shape), tuple(v.stride()), v.dtype, "cpu", frozenset({0})) for v in values]
    found = trace(OnnxModule(load(model_of(case, arrays))), specs).gm.graph.nodes
    names = {str(n.target).split(".")[1] for n in found if n.op == "call_function" and "aten." in str(n.target)}
    assert op in names, names


def test_seeded_dropout_repeats_and_unseeded_does_not() -> None:
    for attrs, same in (({"seed": 3}, True), ({}, False)):
        case = c(
            "Dropout", f(40, 40), Const(np.array(0.4, np.float32)), Const(np.array(True)), attrs=attrs, at=13, outputs=2
        )
        (x, *rest) = case.arrays()
        module = OnnxModule(load(model_of(case, [x, *rest])))
        (a, keep), (b, _) = module(from_any(x)), module(from_any(x))
        assert np.array_equal(to_numpy(a), to_numpy(b)) is same
        np.testing.assert_allclose(to_numpy(a), x * to_numpy(keep) / 0.6, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (c("Conv", f(1, 2, 5, 5), f(3, 2, 3, 3), attrs={"auto_pad": "SIDEWAYS"}), "auto_pad is 'SIDEWAYS'"),
        (c("Conv", f(1, 2, 2, 2, 2, 2), f(3, 2, 1, 1, 1, 1)), "4 spatial axes"),
        (rnn("LSTM", 4, attrs={"activations": ["Sine", "Tanh", "Tanh"]}), "activation is 'Sine'"),
        (rnn("LSTM", 4, attrs={"direction": "up"}), "direction is 'up'"),
        (resize(f(1, 1, 2, 2), scales=(1, 1, 2, 2), attrs={"coordinate_transformation_mode": "odd"}), "is 'odd'"),
        (c("GridSample", f(1, 1, 2, 2), f(1, 1, 1, 2), attrs={"mode": "odd"}), "mode is 'odd'"),
        (c("Attention", f(1, 2, 8), f(1, 2, 8), f(1, 2, 8), at=23), "3-d inputs"),
    ],
)
def test_bad_attributes_are_model_errors(case: Case, text: str) -> None:
    arrays = case.arrays()
    with pytest.raises(ModelError, match=text):
        OnnxModule(load(model_of(case, arrays)))(*(from_any(a) for a in feeds(case, arrays).values()))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("given", [False, True])
def test_no_steps_leave_the_states_as_they_were(op: str, gates: int, direction: str, given: bool) -> None:
    d = 2 if direction == "bidirectional" else 1
    state = f(d, 3, 5)
    rest = (None, *[state] * (2 if op == "LSTM" else 1)) if given else ()
    case = rnn(op, gates, steps=0, rest=rest, attrs={"direction": direction})
    arrays = case.arrays()
    module = OnnxModule(load(model_of(case, arrays)))
    y, *states = (to_numpy(v) for v in module(*[from_any(a) for a in feeds(case, arrays).values()]))
    assert y.shape == (0, d, 3, 5)
    for got, want in zip(states, arrays[5:] if given else [np.zeros((d, 3, 5), np.float32)] * len(states), strict=True):
        np.testing.assert_array_equal(got, want)
