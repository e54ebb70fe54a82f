"""The table behind test_onnx_ops_core: operators, opsets, makers of inputs, attributes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper, numpy_helper

Maker = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Const:
    """An input that says how, not what: axes, shapes, pads. Known when the operator is traced."""

    array: np.ndarray


@dataclass(frozen=True)
class Case:
    op: str
    opset: int
    inputs: tuple[Maker | Const | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    traced: bool = True
    tolerance: float = 1e-5
    oracle: int = 0
    """The opset to ask the reference for, where it lacks an older one that means the same."""

    def arrays(self) -> list[np.ndarray | None]:
        rng = np.random.default_rng(zlib.crc32(repr((self.op, self.opset, sorted(self.attrs))).encode()))
        return [None if m is None else m.array if isinstance(m, Const) else m(rng) for m in self.inputs]


def f(*shape: int, dtype: Any = np.float32) -> Maker:
    return lambda rng: rng.standard_normal(shape).astype(dtype)


def pos(*shape: int, dtype: Any = np.float32) -> Maker:
    return lambda rng: (rng.random(shape) + 0.1).astype(dtype)


def unit(*shape: int) -> Maker:
    return lambda rng: (rng.random(shape) * 1.8 - 0.9).astype(np.float32)


def odd(*shape: int) -> Maker:
    """Floats with NaN, both infinities, both zeros and halves among them."""
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)

    def make(rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(shape) < 0.5, rng.choice(special, shape), rng.standard_normal(shape)).astype(
            np.float32
        )

    return make


def i(*shape: int, dtype: Any = np.int64, low: int = -9, high: int = 10) -> Maker:
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def u(*shape: int, dtype: Any, low: int = 1) -> Maker:
    """The whole range of an unsigned type, from `low`."""
    return lambda rng: rng.integers(low, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def b(*shape: int) -> Maker:
    return lambda rng: rng.random(shape) < 0.5


def words(*shape: int) -> Maker:
    pool = np.array(["a", "bc", "", "d e f", "g", "Ä", "bc"], dtype=object)
    return lambda rng: rng.choice(pool, shape)


def texts(*items: str) -> Maker:
    return lambda rng: np.array(items, dtype=object)


def wide(n: int) -> Maker:
    """Floats of very different sizes."""
    return lambda rng: (rng.standard_normal(n) * np.exp(rng.standard_normal(n) * 6)).astype(np.float32)


def k(*numbers: Any, dtype: Any = np.int64) -> Const:
    return Const(np.array(numbers, dtype=dtype))


def k0(number: Any, dtype: Any = np.int64) -> Const:
    return Const(np.array(number, dtype=dtype))


UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
SIGNED = (np.int8, np.int16, np.int32, np.int64)


def _elementwise() -> list[Case]:
    cases: list[Case] = []
    for op in ("Ceil", "Floor", "Abs", "Neg", "Sqrt", "Exp", "Log", "Reciprocal"):
        for opset in (7, 13):
            cases += [Case(op, opset, (m,)) for m in (odd(3, 4), f(0, 2), f(), f(2, 1, 3, dtype=np.float64))]
    for op, since in (("Sin", 7), ("Tan", 7), ("Asin", 7), ("Acos", 7), ("Atan", 7), ("Sinh", 9), ("Cosh", 9),
                      ("Asinh", 9), ("Atanh", 9), ("Erf", 9)):  # fmt: skip
        cases += [Case(op, opset, (unit(2, 5),)) for opset in (since, 22)]
    cases += [
        Case("Round", 11, (odd(5, 5),)),
        Case("Acosh", 9, (lambda rng: (rng.random((3, 3)) + 1.5).astype(np.float32),)),
        Case("IsNaN", 9, (odd(4, 4),)),
        Case("IsInf", 10, (odd(4, 4),)),
        Case("IsInf", 10, (odd(4, 4),), {"detect_negative": 0}),
        Case("IsInf", 10, (odd(4, 4),), {"detect_positive": 0}),
        Case("Sign", 9, (f(3, 3),)),
        Case("Sign", 13, (odd(4, 4),)),
        *[Case("Sign", 13, (u(3, dtype=t, low=0),)) for t in UNSIGNED],
        *[Case("Abs", 13, (i(3, 3, dtype=t),)) for t in SIGNED],
        *[Case("Abs", 13, (u(3, dtype=t),)) for t in UNSIGNED],
        Case("Clip", 7, (f(4, 4),), {"min": -0.5, "max": 0.25}),
        Case("Clip", 7, (odd(4, 4),), {"max": 0.25}),
        Case("Clip", 7, (f(2),)),
        Case("Clip", 11, (f(4, 4), k0(-0.5, np.float32), k0(0.25, np.float32))),
        Case("Clip", 12, (i(4, 4), None, k0(2))),
        Case("Clip", 13, (f(0, 4), k0(0.0, np.float32))),
        Case("Clip", 13, (f(3), k0(1.0, np.float32), k0(-1.0, np.float32))),
        *[Case("Clip", 13, (u(9, dtype=t), k0(100, t), k0(200, t))) for t in UNSIGNED],
    ]
    for opset in (7, 13, 14):
        for op in ("Add", "Sub", "Mul", "Div"):
            cases += [
                Case(op, opset, (odd(3, 1, 4), f(2, 1))),
                Case(op, opset, (f(0, 4), f(1))),
                Case(op, opset, (f(), f(2, 2, dtype=np.float32))),
                Case(op, opset, (i(3, 4, dtype=np.int32), i(4, dtype=np.int32, low=1))),
                Case(op, opset, (i(3, 4), i(3, 1, low=-5, high=0))),
            ]
    for t in UNSIGNED:
        for op in ("Add", "Sub", "Mul", "Div", "Mod"):
            cases.append(Case(op, 14, (u(40, dtype=t), u(40, dtype=t))))
            cases.append(Case(op, 14, (u(40, dtype=t), i(40, dtype=t, low=1))))
        cases += [Case(op, 13, (u(3, 4, dtype=t), u(4, dtype=t), u(1, dtype=t))) for op in ("Max", "Min")]
        cases += [Case(op, 16, (u(20, dtype=t), u(20, dtype=t)))
                  for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")]  # fmt: skip
        cases += [Case("BitShift", 11, (u(30, dtype=t), i(30, dtype=t, low=0, high=8)), {"direction": d})
                  for d in ("LEFT", "RIGHT")]  # fmt: skip
        cases += [Case(op, 18, (u(2, 3, dtype=t), u(3, dtype=t))) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")]
        cases.append(Case("BitwiseNot", 18, (u(3, dtype=t),)))
        cases.append(Case("Pow", 15, (i(3, 3, dtype=t, low=0, high=4), i(3, dtype=t, low=0, high=3))))
    for t in (*SIGNED, np.float32):
        for fmod in (0, 1):
            if t is np.float32 and not fmod:
                continue
            cases.append(Case("Mod", 10, (i(5, 5, dtype=t), i(5, dtype=t, low=1, high=4)), {"fmod": fmod}))
            cases.append(Case("Mod", 13, (i(5, 5, dtype=t), i(5, dtype=t, low=-4, high=0)), {"fmod": fmod}))
    cases += [
        Case("Mod", 28, (i(6, 6, dtype=np.float32), i(6, dtype=np.float32, low=1)), {"fmod": 0}),
        Case("Pow", 7, (pos(3, 4), f(4))),
        Case("Pow", 12, (pos(3, 4), i(4, high=4))),
        Case("Pow", 12, (i(3, 4, low=1, high=9), pos(4))),
        Case("Pow", 13, (i(3, 4, dtype=np.int32), i(4, low=0, high=5))),
        Case("Pow", 15, (f(0, 4), f(4))),
        *[Case(op, opset, (f(3, 1), f(4), f(1, 1))) for op in ("Max", "Min", "Sum") for opset in (8, 13)],
        *[Case("Mean", opset, (f(3, 4), f(4), f(1, 1))) for opset in (8, 13)],
        *[Case(op, 8, (f(2, 2),)) for op in ("Max", "Min", "Sum", "Mean")],
        *[Case(op, 12, (i(3, 4, dtype=t), i(4, dtype=t))) for op in ("Max", "Min") for t in SIGNED],
        Case("Max", 13, (odd(5, 5), odd(5, 5))),
        *[Case(op, opset, (b(3, 1), b(4))) for op in ("And", "Or", "Xor") for opset in (7, 13)],
        Case("Not", 7, (b(0, 3),)),
        *[Case(op, opset, (f(3, 1), f(4))) for op in ("Less", "Greater") for opset in (7, 9, 13)],
        Case("Equal", 7, (b(4), b(4))),
        Case("Equal", 11, (odd(3, 4), odd(3, 4))),
        Case("Equal", 19, (words(3, 4), words(4)), traced=False),
        Case("Where", 9, (b(3, 1), f(4), f(1))),
        Case("Where", 9, (b(3), words(3), words(1)), traced=False),
        *[Case("Where", 16, (b(3), u(3, dtype=t), u(1, dtype=t))) for t in UNSIGNED],
    ]
    for op, since in (("CumSum", 11), ("CumProd", 26)):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                attrs = {"exclusive": exclusive, "reverse": reverse}
                cases += [
                    Case(op, since, (f(3, 4), k0(-1)), attrs),
                    Case(op, since, (i(3, 4, dtype=np.int32), k0(0, np.int32)), attrs),
                    Case(op, since, (f(2, 0), k0(1)), attrs),
                ]
    cases.append(Case("CumSum", 14, (u(4, 3, dtype=np.uint32), k0(0))))
    return cases


def _contractions() -> list[Case]:
    return [
        *[Case("MatMul", opset, (f(2, 3, 4), f(4, 5)), tolerance=1e-4) for opset in (7, 9, 13)],
        Case("MatMul", 13, (f(4), f(4)), tolerance=1e-4),
        Case("MatMul", 13, (f(2, 1, 3, 4), f(5, 4, 1)), tolerance=1e-4),
        Case("MatMul", 13, (f(3, 0), f(0, 2))),
        *[Case("MatMul", 9, (i(3, 4, dtype=t), i(4, 2, dtype=t))) for t in (np.int32, np.int64)],
        *[Case("MatMul", 9, (i(3, 4, dtype=t, low=0), i(4, 2, dtype=t, low=0))) for t in (np.uint32, np.uint64)],
        *[Case("Gemm", opset, (f(3, 4), f(5, 4), f(5)), {"transB": 1}, tolerance=1e-4) for opset in (7, 9, 11, 13)],
        Case("Gemm", 7, (f(4, 3), f(4, 5), f(3, 1)), {"transA": 1, "alpha": 0.5, "beta": 2.0}, tolerance=1e-4),
        Case("Gemm", 11, (f(3, 4), f(4, 5)), {"alpha": 0.5}, tolerance=1e-4),
        Case("Gemm", 11, (f(3, 4), f(5, 4), f()), {"transB": 1}, tolerance=1e-4),
        Case("Gemm", 11, (f(3, 4), f(5, 4), f(1)), {"transB": 1}, tolerance=1e-4),
        Case("Gemm", 11, (i(3, 4, dtype=np.int32), i(4, 5, dtype=np.int32), i(5, dtype=np.int32))),
        Case("Einsum", 12, (f(2, 3, 4), f(2, 4, 5)), {"equation": "bij, bjk -> bik"}, tolerance=1e-4),
        Case("Einsum", 12, (f(2, 3, 3),), {"equation": "...ii->...i"}),
        Case("Einsum", 12, (i(3, 4), i(4)), {"equation": "ij,j"}),
        Case("Det", 11, (f(2, 3, 3),), tolerance=1e-4),
        Case("MatMulInteger", 10, (u(3, 4, dtype=np.uint8), i(4, 5, dtype=np.int8), k0(7, np.uint8), k0(-1, np.int8))),
        Case("MatMulInteger", 10, (u(3, 4, dtype=np.uint8), u(4, 5, dtype=np.uint8))),
    ]  # fmt: skip


def _reductions() -> list[Case]:
    cases: list[Case] = []
    plain = (
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
    )
    for op in (*plain, "ReduceLogSum", "ReduceLogSumExp"):
        positive = pos if op == "ReduceLogSum" else f
        for opset in (7, 11) if op == "ReduceSum" else (7, 11, 13):
            cases += [
                Case(op, opset, (positive(3, 2, 4),), {"axes": [0, -1]} if opset >= 11 else {"axes": [0, 2]}),
                Case(op, opset, (positive(3, 2, 4),), {"axes": [1], "keepdims": 0}),
                Case(op, opset, (positive(3, 2),)),
                Case(op, opset, (positive(3, 1),), {"keepdims": 0}),
            ]
        since = 13 if op == "ReduceSum" else 18
        cases += [
            Case(op, since, (positive(3, 2, 4), k(1, -1)), {"keepdims": 0}),
            Case(op, since, (positive(3, 2, 4),)),
            *([] if op == "ReduceLogSumExp" else [Case(op, since, (positive(),))]),  # the reference fails on scalars
            Case(op, since, (positive(2, 3), k(1))),
        ]  # fmt: skip
    for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"):
        # the reference widens the sum of squares
        for t in (np.int64, np.uint64) if op == "ReduceSumSquare" else (np.int32, np.int64, np.uint32, np.uint64):
            low = 0 if t in UNSIGNED else -4
            cases.append(Case(op, 13, (i(3, 4, dtype=t, low=low, high=5),), {} if op == "ReduceSum" else {"axes": [1]}))
    cases += [
        Case("ReduceMax", 20, (b(3, 4), k(1))),
        Case("ReduceMin", 20, (b(3, 4), k(0))),
        Case("ReduceMax", 13, (odd(6, 6),), {"axes": [1]}),
        *[Case(op, 18, (u(3, 9, dtype=np.uint8), k(1))) for op in ("ReduceMax", "ReduceMin")],
        Case("ReduceSum", 13, (f(2, 0, 3), k(1))),
        Case("ReduceProd", 18, (f(2, 0, 3), k(1))),
        Case("ReduceMax", 20, (f(2, 0, 3), k(1))),
        Case("ReduceSum", 13, (f(2, 3), k()), {"noop_with_empty_axes": 1}),
        Case("ReduceSum", 13, (f(2, 3), k())),
    ]
    for op in ("ArgMax", "ArgMin"):
        for opset in (7, 11, 13):
            cases += [
                Case(op, opset, (f(3, 4),), {"axis": 1}),
                Case(op, opset, (f(3, 4, 2),), {"keepdims": 0}),
                Case(op, opset, (i(3, 4, dtype=np.int32, low=0, high=3),), {"axis": 1}),
            ]
        cases += [Case(op, 13, (u(3, 9, dtype=t),), {"axis": -1}) for t in UNSIGNED]
        cases.append(Case(op, 12, (i(3, 9, low=0, high=3),), {"axis": 1, "select_last_index": 1}))
        cases.append(Case(op, 12, (i(3, 9, low=0, high=3),), {"axis": -1, "select_last_index": 1, "keepdims": 0}))
    return cases


def _movement() -> list[Case]:
    big = np.iinfo(np.int64).max
    cases = [
        *[Case("Reshape", opset, (f(2, 3, 4), k(0, -1))) for opset in (7, 13, 14)],
        Case("Reshape", 14, (f(0, 3, 4), k(3, 4, 0)), {"allowzero": 1}),
        Case("Reshape", 13, (f(2, 3), k(6))),
        Case("Reshape", 13, (f(1), k())),
        Case("Reshape", 13, (words(2, 3), k(3, -1)), traced=False),
        *[Case("Flatten", opset, (f(2, 3, 4),), {"axis": a}) for opset in (9, 11, 13) for a in (0, 1, 3)],
        Case("Flatten", 11, (f(2, 3, 4),), {"axis": -1}),
        *[Case("Transpose", opset, (f(2, 3, 4),)) for opset in (7, 13)],
        Case("Transpose", 7, (f(2, 3, 4),), {"perm": [1, 2, 0]}),
        Case("Transpose", 13, (words(2, 3),), traced=False),
        *[Case("Squeeze", opset, (f(1, 3, 1),), {"axes": [0]}) for opset in (7, 11)],
        Case("Squeeze", 11, (f(1, 3, 1),), {"axes": [-1]}),
        Case("Squeeze", 7, (f(1, 3, 1),)),
        Case("Squeeze", 13, (f(1, 3, 1), k(0, -1))),
        Case("Squeeze", 13, (f(1, 3, 1),)),
        *[Case("Unsqueeze", opset, (f(2, 3),), {"axes": [0, 3]}) for opset in (7, 11)],
        Case("Unsqueeze", 11, (f(2, 3),), {"axes": [-1]}),
        Case("Unsqueeze", 13, (f(2, 3), k(2, 0))),
        Case("Unsqueeze", 13, (f(), k(0))),
        *[Case("Concat", opset, (f(2, 3), f(2, 1), f(2, 0)), {"axis": 1}) for opset in (7, 11, 13)],
        Case("Concat", 11, (f(2, 3), f(1, 3)), {"axis": -2}),
        Case("Concat", 13, (words(2), words(1)), {"axis": 0}, traced=False),
        Case("Concat", 13, (u(2, dtype=np.uint16), u(3, dtype=np.uint16)), {"axis": 0}),
        *[Case("Split", opset, (f(6, 2),), {"axis": 0}, outputs=3) for opset in (7, 11, 13)],
        *[Case("Split", opset, (f(2, 6),), {"axis": 1, "split": [1, 0, 5]}, outputs=3) for opset in (7, 11)],
        Case("Split", 13, (f(2, 6), k(4, 2)), {"axis": -1}, outputs=2),
        Case("Split", 18, (f(7, 2),), {"num_outputs": 3}, outputs=3),
        Case("Slice", 7, (f(5, 6),), {"starts": [1, -4], "ends": [4, 1000]}),
        Case("Slice", 9, (f(5, 6),), {"starts": [2], "ends": [-1], "axes": [1]}),
        Case("Slice", 10, (f(5, 6), k(0, 1), k(big, -1), k(0, 1), k(2, 2))),
        Case("Slice", 10, (f(5, 6), k(-1), k(-100), k(1), k(-1))),
        Case("Slice", 11, (f(5, 6), k(100, 4), k(0, -5), k(-1, 0), k(-2, -1))),
        Case("Slice", 13, (f(5, 6), k(3), k(1), k(0))),
        Case("Slice", 13, (f(5, 6), k(3), k(-np.iinfo(np.int64).max - 1), k(0), k(-3))),
        Case("Slice", 13, (words(5), k(-3), k(big), k(0)), traced=False),
        Case("Slice", 13, (f(0, 6), k(0), k(3), k(0))),
        *[Case("Tile", opset, (f(2, 3), k(2, 1))) for opset in (7, 13)],
        Case("Tile", 13, (u(2, dtype=np.uint32), k(3))),
        *[Case("Expand", opset, (f(3, 1), k(2, 1, 4))) for opset in (8, 13)],
        Case("Expand", 8, (f(3, 4), k(1))),
        Case("Expand", 8, (f(1), k(0))),
        *[Case("DepthToSpace", opset, (f(1, 8, 2, 3),), {"blocksize": 2}) for opset in (7, 11)],
        Case("DepthToSpace", 13, (f(2, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}),
        *[Case("SpaceToDepth", opset, (f(1, 2, 4, 6),), {"blocksize": 2}) for opset in (7, 13)],
        Case("ReverseSequence", 10, (f(4, 3), k(4, 2, 1))),
        Case("ReverseSequence", 10, (f(3, 4, 2), k(4, 0, 1)), {"batch_axis": 0, "time_axis": 1}),
        *[Case("Trilu", 14, (f(3, 4), k0(n)), {"upper": up}) for n in (-1, 0, 2, 9) for up in (0, 1)],
        Case("Trilu", 14, (b(2, 3, 3),)),
        Case("Trilu", 14, (u(3, 3, dtype=np.uint16),), {"upper": 0}),
        Case("Pad", 7, (f(2, 3),), {"pads": [1, 0, 0, 2], "value": 1.5}),
        Case("Pad", 10, (f(2, 3),), {"pads": [1, 0, 0, 2]}),
        *[Case("Pad", 7, (f(3, 4),), {"pads": [1, 2, 2, 1], "mode": m}) for m in ("edge", "reflect")],
        *[Case("Pad", opset, (f(2, 3), k(1, 0, 0, 2), k0(-2.0, np.float32))) for opset in (11, 13)],
        Case("Pad", 11, (i(2, 3), k(1, 0, 0, 2), k0(2**60 + 1))),
        Case("Pad", 18, (f(2, 3, 4), k(1, 2), None, k(-1))),
        Case("Pad", 18, (f(3, 1), k(5, 0, 5, 0)), {"mode": "reflect"}),
        Case("Pad", 19, (f(2, 3), k(3, 5, 1, 4)), {"mode": "wrap"}),
        Case("Pad", 13, (f(0, 3), k(1, 0, 1, 0))),
        Case("CenterCropPad", 18, (f(5, 4, 3), k(3, 7, 3))),
        Case("CenterCropPad", 18, (f(5, 4, 3), k(8, 1)), {"axes": [-3, 1]}),
    ]
    return cases


def _indexing() -> list[Case]:
    cases = [
        *[Case("Gather", opset, (f(4, 3, 2), i(2, 2, low=0, high=3)), {"axis": 1}) for opset in (7, 11, 13)],
        Case("Gather", 11, (f(4, 3), i(2, low=-4, high=4))),
        Case("Gather", 13, (f(4, 3), k0(-1, np.int32)), {"axis": -1}),
        Case("Gather", 13, (f(4, 3), i(0, low=0, high=3))),
        Case("Gather", 13, (words(4), i(2, low=-4, high=4)), traced=False),
        *[Case("Gather", 13, (u(4, dtype=t), i(2, low=-4, high=4))) for t in UNSIGNED],
        *[Case("GatherElements", opset, (f(4, 3), i(2, 3, low=-4, high=4)), {"axis": 0}) for opset in (11, 13)],
        Case("GatherElements", 13, (u(3, dtype=np.uint64), i(5, low=-3, high=3))),
        Case("GatherND", 11, (f(3, 4, 5), i(2, 2, low=0, high=3))),
        Case("GatherND", 12, (f(3, 4, 5), i(3, 2, 1, low=0, high=4)), {"batch_dims": 1}),
        Case("GatherND", 13, (f(2, 3, 4), i(2, 3, 1, low=0, high=4)), {"batch_dims": 2}),
        Case("GatherND", 13, (words(3, 4), i(2, 2, low=0, high=3)), traced=False),
        *[Case(op, 9 if op == "Scatter" else 11, (f(3, 4), k([2, 0, -1, 1]), f(1, 4)), {"axis": 0})
          for op in ("Scatter", "ScatterElements") if op != "Scatter"],
        *[Case("ScatterElements", 18, (f(3, 4), i(3, 4, low=-4, high=4), f(3, 4)), {"axis": 1, "reduction": r})
          for r in ("add", "mul", "max", "min")],
        Case("ScatterElements", 18, (i(3, 4, dtype=np.int32), i(3, 2, low=0, high=4), i(3, 2, dtype=np.int32)),
             {"axis": -1, "reduction": "add"}),
        *[Case("ScatterElements", 18, (u(4, dtype=t), i(9, low=0, high=4), u(9, dtype=t)), {"reduction": r})
          for t in (np.uint16, np.uint64) for r in ("add", "max", "min")],
        *[Case("ScatterND", opset, (f(4, 3), k([1], [3]), f(2, 3))) for opset in (11, 13)],
        *[Case("ScatterND", 18, (f(4, 3), i(6, 1, low=0, high=4), f(6, 3)), {"reduction": r})
          for r in ("add", "mul", "max", "min")],
        Case("ScatterND", 16, (f(4, 3, 2), i(5, 2, low=0, high=3), f(5, 2)), {"reduction": "add"}),
        *[Case("NonZero", opset, (i(3, 4, low=0, high=2),), traced=False) for opset in (9, 13)],
        Case("NonZero", 13, (b(0, 4),), traced=False),
        Case("Compress", 9, (f(3, 4), k(True, False, True, dtype=np.bool_)), {"axis": 1}, traced=False),
        Case("Compress", 11, (f(3, 4), k(True, False, True, False, True, dtype=np.bool_)), traced=False),
        Case("Compress", 11, (words(3), k(False, True, dtype=np.bool_)), {"axis": -1}, traced=False),
        Case("Unique", 11, (i(20, low=0, high=5),), outputs=4, traced=False),
        Case("Unique", 11, (i(20, low=0, high=5),), {"sorted": 0}, outputs=4, traced=False),
        Case("Unique", 11, (i(9, 2, low=0, high=2),), {"axis": 0}, outputs=4, traced=False),
        Case("Unique", 11, (u(9, dtype=np.uint16),), outputs=4, traced=False),
        *[Case("TopK", 10, (f(3, 6), k(n)), {"axis": -1}, outputs=2) for n in (1, 4)],
        Case("TopK", 11, (i(3, 8, low=0, high=3), k(5)), {"largest": 0}, outputs=2),
        Case("TopK", 11, (i(8, 3, low=0, high=3), k(8)), {"axis": 0}, outputs=2),
        *[Case("TopK", 24, (u(3, 8, dtype=t), k(5)), outputs=2) for t in (np.uint8, np.uint16, np.uint64)],
        *[Case("OneHot", opset, (i(3, low=-5, high=6), k0(4), k(-1.0, 2.0, dtype=np.float32))) for opset in (9, 11)],
        Case("OneHot", 11, (i(2, 3, low=0, high=4), k0(4), k(0, 1)), {"axis": 1}),
    ]  # fmt: skip
    return cases


def _generators() -> list[Case]:
    return [
        *[Case("Shape", opset, (f(2, 0, 3),), traced=False) for opset in (7, 13)],
        Case("Shape", 15, (f(2, 4, 3),), {"start": -2, "end": 9}, traced=False),
        Case("Shape", 13, (words(2, 4),), traced=False),
        *[Case("Size", opset, (f(2, 4, 3),), traced=False) for opset in (7, 13)],
        Case("ConstantOfShape", 9, (k(2, 0, 3),)),
        Case("ConstantOfShape", 9, (k(),)),
        *[Case("ConstantOfShape", 9, (k(2, 3),), {"value": numpy_helper.from_array(np.array([5], t))})
          for t in (np.float32, np.float16, np.int64, np.int8, np.uint64, np.bool_)],
        Case("EyeLike", 9, (f(3, 4),), {"k": 1}),
        Case("EyeLike", 9, (f(4, 3),), {"k": -2, "dtype": TensorProto.INT64}),
        Case("Range", 11, (k0(3), k0(-8), k0(-3))),
        Case("Range", 11, (k0(3), k0(3), k0(1))),
        Case("Range", 11, (k0(5), k0(3), k0(1))),
        Case("Range", 11, (k0(0.5, np.float32), k0(3, np.float32), k0(0.25, np.float32))),
        Case("Range", 11, (k0(1, np.int16), k0(9, np.int16), k0(2, np.int16))),
        Case("RandomUniform", 7, (), {"shape": [3, 4], "seed": 3.0, "low": -2.0, "high": 3.0}),
        Case("RandomNormal", 7, (), {"shape": [3, 4], "seed": 3.0, "mean": 1.0, "scale": 2.0}),
        Case("RandomUniformLike", 7, (f(3, 4),), {"seed": 3.0}, traced=False),
        Case("RandomNormalLike", 7, (f(3, 4),), {"seed": 3.0, "dtype": TensorProto.DOUBLE}, traced=False),
    ]  # fmt: skip


def _conversions() -> list[Case]:
    types = (np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, *UNSIGNED, np.bool_)
    cases: list[Case] = []
    for src in types:
        for dst in types:
            to = helper.np_dtype_to_tensor_dtype(np.dtype(dst))
            cases.append(Case("Cast", 9, (i(5, 5, dtype=src, low=0, high=100),), {"to": to}))
    for to in (
        TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E4M3FNUZ,
        TensorProto.FLOAT8E5M2,
        TensorProto.FLOAT8E5M2FNUZ,
    ):
        for saturate in (0, 1):
            cases.append(Case("Cast", 19, (wide(200),), {"to": to, "saturate": saturate}))
    for mode in ("up", "down", "nearest"):
        cases.append(Case("Cast", 24, (pos(50),), {"to": TensorProto.FLOAT8E8M0, "round_mode": mode}))
    for t in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn):
        to = helper.np_dtype_to_tensor_dtype(np.dtype(t))
        cases.append(Case("Cast", 23, (i(9, dtype=np.float32, low=0, high=8),), {"to": to}, traced=False))
        cases.append(Case("Cast", 23, (i(9, dtype=t, low=0, high=7),), {"to": TensorProto.INT32}, traced=False))
        cases.append(Case("Transpose", 23, (i(3, 4, dtype=t, low=0, high=7),), traced=False))
    cases += [
        Case("Cast", 9, (texts("3", "-7", "12", "0"),), {"to": TensorProto.INT64}, traced=False),
        Case("Cast", 9, (texts("3.5", "-1e-3", "INF", "-INF", "NaN"),), {"to": TensorProto.FLOAT}, traced=False),
        Case("Cast", 9, (f(3, 2),), {"to": TensorProto.STRING}, traced=False),
        Case("Cast", 13, (i(3),), {"to": TensorProto.STRING}, traced=False),
        Case("CastLike", 15, (f(3), i(1, dtype=np.int32))),
        Case("BitCast", 26, (f(3, 2),), {"to": TensorProto.INT32}),
    ]
    return cases


def _quantization() -> list[Case]:
    s, z = k0(0.25, np.float32), k0(3, np.uint8)
    per_axis = k(0.1, 0.2, 0.5, dtype=np.float32)
    image = u(1, 2, 5, 5, dtype=np.uint8)
    filters = u(3, 2, 3, 3, dtype=np.uint8)
    return [
        *[Case("QuantizeLinear", opset, (f(3, 4), s, z)) for opset in (10, 13, 19, 21)],
        Case("QuantizeLinear", 10, (f(3, 4), s)),
        Case("QuantizeLinear", 13, (f(2, 3, 4), per_axis, k(0, -3, 9, dtype=np.int8)), {"axis": 1}),
        Case("QuantizeLinear", 13, (f(4, 3), per_axis, k(0, 3, 9, dtype=np.uint8)), {"axis": -1}),
        Case("QuantizeLinear", 21, (f(2, 5), Const(np.array([[0.1, 0.2, 0.3]] * 2, np.float32))),
             {"axis": 1, "block_size": 2, "output_dtype": TensorProto.INT16}),
        Case("QuantizeLinear", 21, (f(2, 5), s), {"output_dtype": TensorProto.INT4}, traced=False),
        *[Case("DequantizeLinear", v, (u(3, 4, dtype=np.uint8), s, z), oracle=max(v, 19)) for v in (10, 13, 19, 21)],
        Case("DequantizeLinear", 13, (i(2, 3, 4, dtype=np.int8), per_axis, k(0, -3, 9, dtype=np.int8)), {"axis": 1},
             oracle=19),
        Case("DequantizeLinear", 10, (i(3, 4, dtype=np.int32), s), oracle=19),
        Case("DequantizeLinear", 21, (u(2, 5, dtype=np.uint16), Const(np.array([[0.1, 0.2, 0.3]] * 2, np.float32))),
             {"axis": 1, "block_size": 2}),
        *[Case("DynamicQuantizeLinear", 11, (m,), outputs=3) for m in (f(3, 4), pos(5), f(2, 2))],
        Case("QLinearMatMul", 10,
             (u(3, 4, dtype=np.uint8), s, z, u(4, 5, dtype=np.uint8), s, z, k0(9.0, np.float32), z)),
        Case("ConvInteger", 10, (image, filters, k0(3, np.uint8)), {"pads": [1, 1, 1, 1]}),
        Case("QLinearConv", 10, (image, s, z, filters, s, z, k0(99.0, np.float32), z), {"strides": [2, 2]}),
    ]  # fmt: skip


def _half_precision() -> list[Case]:
    cases: list[Case] = []
    for t, tolerance in ((np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)):
        x, y = f(3, 4, dtype=t), pos(3, 4, dtype=t)
        cases += [Case(op, 14, (x, y), tolerance=tolerance) for op in ("Add", "Sub", "Mul", "Div")]
        cases += [
            Case(op, 13, (y,), tolerance=tolerance) for op in ("Sqrt", "Log", "Exp", "Reciprocal", "Neg", "Floor")
        ]
        cases += [
            Case(op, 13, (x,), {"axes": [1]}, tolerance=tolerance) for op in ("ReduceMean", "ReduceMax", "ReduceL2")
        ]
        cases += [
            Case("Mod", 13, (x, y), {"fmod": 1}, tolerance=tolerance),
            Case("Pow", 15, (y, x), tolerance=tolerance),
            Case("Max", 13, (x, y)),
            Case("Less", 13, (x, y)),
            Case("MatMul", 13, (x, f(4, 2, dtype=t)), tolerance=tolerance),
            Case("Where", 16, (b(3, 4), x, y)),
            Case("Gather", 13, (x, i(2, low=0, high=3))),
            Case("Pad", 13, (x, k(1, 0, 0, 1), k0(1.5, t))),
            Case("Cast", 13, (x,), {"to": TensorProto.FLOAT}),
        ]
    cases += [
        Case("TopK", 11, (f(3, 8, dtype=np.float16), k(3)), outputs=2),
        Case("Clip", 13, (f(3, 4, dtype=np.float16), k0(-0.5, np.float16), k0(0.5, np.float16))),
        Case("Range", 27, (k0(0, np.float16), k0(9, np.float16), k0(1, np.float16))),
        Case(
            "Einsum", 12, (f(3, 4, dtype=np.float16), f(4, 2, dtype=np.float16)), {"equation": "ij,jk"}, tolerance=4e-3
        ),
    ]
    return cases


def _text() -> list[Case]:
    return [
        Case("StringConcat", 20, (words(3, 1), words(4)), traced=False),
        Case("StringSplit", 20, (words(5),), outputs=2, traced=False),
        Case("StringSplit", 20, (words(2, 3),), {"delimiter": " ", "maxsplit": 1}, outputs=2, traced=False),
        Case("RegexFullMatch", 20, (words(6),), {"pattern": "[a-g ]+"}, traced=False),
        Case("TfIdfVectorizer", 9, (i(3, 9, low=0, high=4),), {
            "mode": "TFIDF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 1, "ngram_counts": [0, 3],
            "ngram_indexes": [0, 1, 2, 3, 4], "pool_int64s": [0, 1, 2, 1, 2, 3, 0],
            "weights": [1.0, 2.0, 0.5, 3.0, 4.0],
        }, traced=False),
    ]  # fmt: skip


CASES = [*_elementwise(), *_contractions(), *_reductions(), *_movement(), *_indexing(), *_generators(), *_conversions(),
         *_quantization(), *_half_precision(), *_text()]  # fmt: skip
