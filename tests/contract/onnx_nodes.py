"""One-node ONNX models as table rows: built, run by an oracle, run by us at once and through a trace."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from hotfuse.frontends.onnx.values import from_any, to_numpy

Maker = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Const:
    """An input stored in the model: weights' sizes and axes that a trace must know."""

    array: Any


@dataclass(frozen=True)
class Case:
    """One node, its inputs, and what may be said of it."""

    op: str
    inputs: tuple[Maker | Const | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    opset: int = 22
    domain: str = ""
    outputs: int = 1
    tolerance: float = 1e-5
    steps: float = 0.0
    """How far quantized results may lie apart: a tie can fall either way."""
    leaf: bool = False
    """Whether the op stays whole in a trace (its result depends on data)."""
    oracle: str = "ort"
    compare: tuple[int, ...] | None = None
    """Which outputs to compare; all by default."""

    def arrays(self) -> list[np.ndarray | None]:
        seed = zlib.crc32(repr((self.op, self.opset, sorted(self.attrs.items(), key=str))).encode())
        rng = np.random.default_rng(seed)
        return [None if m is None else np.asarray(m.array) if isinstance(m, Const) else m(rng) for m in self.inputs]


def f(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> Maker:
    return lambda rng: (rng.standard_normal(shape) * scale).astype(dtype)


def pos(*shape: int, dtype: Any = np.float32) -> Maker:
    return lambda rng: (rng.random(shape) + 0.1).astype(dtype)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int64) -> Maker:
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def name_of(case: Case) -> str:
    shapes = "-".join("x".join(map(str, a.shape)) or "s" for a in case.arrays() if a is not None)
    attrs = ",".join(f"{k}={v}" for k, v in case.attrs.items() if not isinstance(v, (TensorProto, np.ndarray)))
    return f"{case.op}-{case.opset}-{shapes}-{attrs}"[:120]


def model_of(case: Case, arrays: list[np.ndarray | None]) -> bytes:
    ins, names, stored = [], [], []
    for i, (a, how) in enumerate(zip(arrays, case.inputs, strict=True)):
        names.append("" if a is None else f"x{i}")
        if a is None:
            continue
        if isinstance(how, Const):
            stored.append(numpy_helper.from_array(a, f"x{i}"))
        else:
            ins.append(helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape))
    outs = [f"y{i}" for i in range(case.outputs)]
    wanted = outs if case.compare is None else [outs[i] for i in case.compare]
    attrs = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in case.attrs.items()}
    node = helper.make_node(case.op, names, outs, domain=case.domain, **attrs)
    graph = helper.make_graph([node], "one", ins, [onnx.ValueInfoProto(name=o) for o in wanted], stored)
    imports = [helper.make_opsetid("", case.opset if not case.domain else 17)]
    if case.domain:
        imports.append(helper.make_opsetid(case.domain, case.opset if case.domain.startswith("ai.") else 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


def feeds(case: Case, arrays: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    return {
        f"x{i}": a
        for i, (a, how) in enumerate(zip(arrays, case.inputs, strict=True))
        if a is not None and not isinstance(how, Const)
    }


def expected(case: Case, arrays: list[np.ndarray | None], data: bytes) -> list[np.ndarray]:
    if case.oracle == "reference":
        from onnx.reference import ReferenceEvaluator

        return [np.asarray(v) for v in ReferenceEvaluator(onnx.load_from_string(data)).run(None, feeds(case, arrays))]
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(case, arrays))


def agree(got: Any, want: np.ndarray, case: Case) -> None:
    got = np.asarray(to_numpy(got))
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    if want.dtype.kind in "OUS":
        assert got.tolist() == want.tolist()
    else:
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=case.tolerance, atol=case.tolerance + case.steps
        )


def check_direct(case: Case) -> None:
    """Our interpreter agrees with the oracle, through a row and not through the fallback."""
    arrays = case.arrays()
    data = model_of(case, arrays)
    module = OnnxModule(load(data))
    got = module(*(from_any(a) for a in feeds(case, arrays).values()))
    assert not module.fallbacks, "the operator has a row"
    want = expected(case, arrays, data)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        agree(g, w, case)


def check_traced(case: Case, grow: tuple[int, ...] = ()) -> None:
    """Traced with the first input's sizes symbolic: torch operators only, and the same numbers as run at once.

    The graph must serve other sizes too: axes in `grow` get one element more.
    """
    arrays = case.arrays()
    module = OnnxModule(load(model_of(case, arrays)))
    values = [from_any(a) for a in feeds(case, arrays).values()]
    specs: list[TensorSpec | None] = []
    for i, v in enumerate(values):
        if not isinstance(v, torch.Tensor):
            specs.append(None)
            continue
        moving = frozenset(d for d, n in enumerate(v.shape) if n > 1) if i == 0 else frozenset[int]()
        specs.append(TensorSpec(tuple(v.shape), tuple(v.stride()), v.dtype, "cpu", moving))
    traced = trace(module, specs)
    assert bool(traced.leaves) == case.leaf, traced.leaves
    for g, w in zip(traced(*values), module(*values), strict=True):
        agree(g, np.asarray(to_numpy(w)), case)
    for axis in grow:
        first = values[0] if values else None
        if not isinstance(first, torch.Tensor) or first.dim() < 2 or first.shape[axis] < 2 or case.leaf:
            continue
        if len(case.inputs) == 4 and case.op == "Resize":
            continue  # its sizes are given, and stay
        larger = [torch.cat([first, first.narrow(axis, 0, 1)], axis), *values[1:]]
        for g, w in zip(traced(*larger), module(*larger), strict=True):
            agree(g, np.asarray(to_numpy(w)), case)
