"""Core ONNX operators against `onnx.reference` on fresh data: old opsets, empty and size-1 axes, NaN, integers, text.

ONNX's own node cases (tests/conformance) cover the newest opset; this table covers what they leave out. Every case also
runs traced: the operator's function under `make_fx` with symbolic sizes must give a graph that computes the same.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.fx.experimental.proxy_tensor import make_fx

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.registry import find
from hotfuse.frontends.onnx.values import from_numpy, to_numpy
from tests.contract.onnx_core_cases import CASES, UNSIGNED, Case, Const


def _name(at: int) -> str:
    return f"{CASES[at].op}-{CASES[at].opset}-{at}"


def _model(case: Case, arrays: list[np.ndarray | None], opset: int = 0) -> onnx.ModelProto:
    names = ["" if a is None else f"x{n}" for n, a in enumerate(arrays)]
    node = helper.make_node(case.op, names, [f"y{n}" for n in range(case.outputs)], **case.attrs)
    ports = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(names, arrays, strict=True)
        if a is not None
    ]
    outs = [onnx.ValueInfoProto(name=f"y{n}") for n in range(case.outputs)]
    graph = helper.make_graph([node], "one", ports, outs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset or case.opset)], ir_version=10)


def _expected(case: Case, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
    feeds = {f"x{n}": a for n, a in enumerate(arrays) if a is not None}
    with np.errstate(all="ignore"):
        return [np.asarray(y) for y in ReferenceEvaluator(_model(case, arrays, case.oracle)).run(None, feeds)]


def _agree(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    assert got.shape == want.shape
    if want.dtype.kind in "OU":
        assert got.dtype == object
        assert got.tolist() == want.tolist()
        return
    assert got.dtype == want.dtype
    if got.dtype.kind not in "biufc":
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("at", range(len(CASES)), ids=_name)
def test_agrees_with_reference(at: int) -> None:
    case = CASES[at]
    arrays = case.arrays()
    module = OnnxModule(load(_model(case, arrays).SerializeToString()))
    got = module(*[a for a in arrays if a is not None])
    assert not module.fallbacks, "the operator has a row"
    for g, w in zip(got, _expected(case, arrays), strict=True):
        _agree(to_numpy(g), w, case.tolerance)


@dataclass
class TracingCtx:
    """What the tracer's context promises: constants are known, everything else is not."""

    opset: int
    n_outputs: int
    numbers: dict[int, list[Any]]
    traced: bool = True

    def ints(self, t: torch.Tensor) -> list[Any]:
        return list(self.numbers[id(t)])

    def known(self, t: torch.Tensor) -> bool:
        return id(t) in self.numbers

    def tensor(self, numbers: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype)


def _traced() -> list[int]:
    """One case for each operator, row, ranks and attributes: element types and sizes trace the same code."""
    found: dict[Any, int] = {}
    for at, case in enumerate(CASES):
        if case.traced:
            kinds = tuple(None if a is None else (a.ndim, a.dtype in UNSIGNED) for a in case.arrays())
            found.setdefault((case.op, find("", case.op, case.opset), kinds, repr(case.attrs)), at)
    return sorted(found.values())


@pytest.mark.parametrize("at", _traced(), ids=_name)
def test_traces_with_symbolic_sizes(at: int) -> None:
    """The graph must be made of torch operators only: no number may be read from the data."""
    case = CASES[at]
    row = find("", case.op, case.opset)
    assert row is not None
    values = [None if a is None else from_numpy(a) for a in case.arrays()]
    data = [v for v, m in zip(values, case.inputs, strict=True) if v is not None and not isinstance(m, Const)]
    attrs = {
        n: from_numpy(numpy_helper.to_array(a)) if isinstance(a, TensorProto) else a for n, a in case.attrs.items()
    }
    numbers = {id(v): v.reshape(-1).tolist() for v in (*values, *attrs.values()) if isinstance(v, torch.Tensor)}
    for v in data:
        numbers.pop(id(v))
    ctx = TracingCtx(case.opset, case.outputs, numbers)
    fn = row.fn

    def run(*given: torch.Tensor) -> Any:
        rest = iter(given)
        args = [
            v if v is None or isinstance(m, Const) else next(rest) for v, m in zip(values, case.inputs, strict=True)
        ]
        return fn(ctx, *args, **attrs)

    traced = make_fx(run, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*data)
    want, got = run(*data), traced(*data)
    for g, w in zip(*((x if isinstance(x, (tuple, list)) else [x]) for x in (got, want)), strict=True):
        _agree(to_numpy(g), to_numpy(w), 0.0)


@pytest.mark.parametrize(
    ("op", "arrays", "attrs", "text"),
    [
        ("Concat", [np.ones((2, 2), np.float32)], {"axis": 5}, "Concat"),
        ("Cast", [np.ones(2, np.float32)], {"to": 99}, "element type 99"),
        ("Cast", [np.array(["x"], dtype=object)], {"to": TensorProto.FLOAT}, "read as a number"),
        ("BitCast", [np.ones(2, np.float32)], {"to": TensorProto.INT64}, "sizes differ"),
        ("Expand", [np.ones((2, 3), np.float32), np.array([2, 2])], {}, "cannot broadcast"),
        ("Pad", [np.ones((2, 3), np.float32), np.array([1, 1])], {}, "for 2 axes"),
        ("ReduceSum", [np.ones((2, 3), np.float32), np.array([7])], {}, "axis 7"),
        ("Squeeze", [np.ones((2, 3), np.float32), np.array([1])], {}, "Squeeze"),
        ("EyeLike", [np.ones((2, 3, 1), np.float32)], {}, "EyeLike"),
        ("RegexFullMatch", [np.array(["x"], dtype=object)], {"pattern": "("}, "pattern"),
        ("BitShift", [np.ones(2, np.uint8), np.ones(2, np.uint8)], {"direction": "UP"}, "direction"),
    ],
)
def test_bad_arguments_are_model_errors(op: str, arrays: list[np.ndarray], attrs: dict[str, Any], text: str) -> None:
    model = _model(Case(op, 26, (), attrs), arrays)
    with pytest.raises(ModelError, match=text):
        OnnxModule(load(model.SerializeToString()))(*arrays)


def test_unseeded_random_draws_anew_and_in_range() -> None:
    module = OnnxModule(
        load(_model(Case("RandomUniform", 22, (), {"shape": [500], "low": 2.0, "high": 3.0}), []).SerializeToString())
    )
    first, second = (to_numpy(module()[0]) for _ in range(2))
    assert not np.array_equal(first, second)
    assert first.min() >= 2 and first.max() <= 3
    chance = np.array([0.0, 1.0] * 50, np.float32)
    drawn = OnnxModule(load(_model(Case("Bernoulli", 22, ()), [chance]).SerializeToString()))(chance)[0]
    assert np.array_equal(to_numpy(drawn), chance)
    logits = np.log(np.array([[1e-9, 1.0, 1e-9], [1.0, 1e-9, 1e-9]], np.float32))
    picked = OnnxModule(load(_model(Case("Multinomial", 22, (), {"sample_size": 20}), [logits]).SerializeToString()))(
        logits
    )[0]
    assert to_numpy(picked).tolist() == [[1] * 20, [0] * 20]


def _takes(fn: Any, schema: Any) -> list[str]:
    """What a version's schema has and a function does not take."""
    given = list(inspect.signature(fn).parameters.values())[1:]
    kinds = {p.kind for p in given}
    names = {p.name for p in given if p.kind is inspect.Parameter.KEYWORD_ONLY}
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    positions = [p for p in given if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    missing = [name for name in schema.attributes if name not in names and not any_name and name != "consumed_inputs"]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(positions) < schema.max_input:
        missing.append(f"{schema.max_input} inputs")
    if sum(p.default is inspect.Parameter.empty for p in positions) > schema.min_input:
        missing.append(f"as few as {schema.min_input} inputs")
    return missing


def test_rows_take_all_that_versions_of_their_operator_have() -> None:
    """Attributes became inputs, and others went, in the course of versions: none may meet a function that does not know them."""
    odd = {
        f"{schema.name}-{schema.since_version}": missing
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain in ("", "ai.onnx.ml")
        and (row := find(schema.domain, schema.name, schema.since_version)) is not None
        and (missing := _takes(row.fn, schema))
    }
    assert not odd


X234 = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
OLDER = [
    (Case("Add", 6, (), {"axis": 1, "broadcast": 1}), (X234, np.float32([1, 2, 3])), X234 + np.float32([[1], [2], [3]])),
    (Case("Sub", 1, (), {"axis": 0, "broadcast": 1, "consumed_inputs": [0, 0]}), (X234, np.float32([1, 2])),
     X234 - np.float32([1, 2]).reshape(2, 1, 1)),
    (Case("Mul", 6, (), {"axis": -1, "broadcast": 1}), (X234, np.float32([1, 2, 3, 4])), X234 * np.float32([1, 2, 3, 4])),
    (Case("Div", 6, (), {"broadcast": 1}), (X234, np.full((3, 4), 2, np.float32)), X234 / 2),
    (Case("Pow", 1, (), {"axis": 1, "broadcast": 1}), (X234, np.full((3, 4), 2, np.float32)), X234**2),
    (Case("Less", 1, (), {"axis": 0, "broadcast": 1}), (X234, np.float32([0, 9])), np.float32([0, 9]).reshape(2, 1, 1) > X234),
    (Case("And", 1, ()), (X234 > 0, X234 < 3), (X234 > 0) & (X234 < 3)),
    (Case("Exp", 1, (), {"consumed_inputs": [0]}), (X234,), np.exp(X234)),
    (Case("Gemm", 6, (), {"transB": 1, "broadcast": 1}), (X234[0], X234[1], np.float32([1, 2, 3])),
     X234[0] @ X234[1].T + np.float32([1, 2, 3])),
    (Case("Reshape", 1, (), {"shape": [0, -1]}), (X234,), X234.reshape(2, 12)),
    (Case("Pad", 1, (), {"paddings": [0, 0, 1, 0, 0, 2], "value": 5.0}), (X234,),
     np.pad(X234, ((0, 0), (0, 0), (1, 2)), constant_values=5)),
    (Case("Split", 1, (), {"axis": 2}, outputs=2), (X234, np.float32([1, 3])), X234[..., :1]),
    (Case("Tile", 1, ()), (X234, np.float32([2]), np.float32([1])), np.tile(X234, (1, 2, 1))),
    (Case("Upsample", 1, (), {"height_scale": 2.0, "width_scale": 3.0}), (X234[None],),
     X234[None].repeat(2, 2).repeat(3, 3)),
    (Case("BatchNormalization", 6, (), {"is_test": 1}), (X234, *np.float32([[1] * 3, [2] * 3, [3] * 3, [4] * 3])),
     (X234 - 3) / np.sqrt(np.float32(4 + 1e-5)) + 2),
    (Case("MeanVarianceNormalization", 7, (), {"across_channels": 1, "normalize_variance": 0}), (X234[None],),
     X234[None] - X234.mean()),
    (Case("MeanVarianceNormalization", 7, (), {}), (X234[None],),
     (X234 - X234.mean((1, 2), keepdims=True))[None] / X234.std((1, 2), keepdims=True)),
    (Case("Affine", 6, (), {"alpha": 2.0, "beta": 0.5}), (X234,), X234 * 2 + 0.5),
    (Case("ScaledTanh", 6, (), {"alpha": 2.0, "beta": 0.5}), (X234,), np.tanh(X234 * 0.5) * 2),
    (Case("ParametricSoftplus", 6, (), {"alpha": 2.0, "beta": 0.5}), (X234,), np.log1p(np.exp(X234 * 0.5)) * 2),
    (Case("ImageScaler", 6, (), {"bias": [1.0, 2.0], "scale": 0.5}), (X234[None],), X234[None] * 0.5 + np.float32([[[1]], [[2]]])),
    (Case("Crop", 6, (), {"border": [1, 0, 2, 1]}), (X234[None],), X234[None][:, :, :2, 1:2]),
    (Case("Crop", 6, (), {"border": [1, 1, 0, 0], "scale": [2, 2]}), (X234[None],), X234[None][:, :, 1:, 1:3]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "arrays", "want"), OLDER, ids=[f"{c.op}-{c.opset}" for c, _, _ in OLDER])
def test_versions_before_opset_7(case: Case, arrays: tuple[np.ndarray, ...], want: np.ndarray) -> None:
    module = OnnxModule(load(_model(case, list(arrays)).SerializeToString()))
    _agree(to_numpy(module(*arrays)[0]), want.astype(want.dtype if want.dtype == bool else np.float32), 1e-5)
    assert not module.fallbacks


def test_an_axis_before_opset_7_has_to_fit() -> None:
    model = _model(Case("Add", 6, (), {"axis": 2, "broadcast": 1}), [X234, np.ones((3, 4), np.float32)])
    with pytest.raises(ModelError, match="does not fit"):
        OnnxModule(load(model.SerializeToString()))(X234, np.ones((3, 4), np.float32))


def test_first_version_of_topk_and_scatter() -> None:
    x = np.array([[3.0, 1.0, 3.0, 2.0]], np.float32)
    values, indices = OnnxModule(load(_model(Case("TopK", 9, (), {"k": 2}, outputs=2), [x]).SerializeToString()))(x)
    assert to_numpy(values).tolist() == [[3.0, 3.0]] and to_numpy(indices).tolist() == [[0, 2]]
    at, new = np.array([[1, 3]]), np.array([[8.0, 9.0]], np.float32)
    model = _model(Case("Scatter", 9, (), {"axis": 1}), [x, at, new])
    assert to_numpy(OnnxModule(load(model.SerializeToString()))(x, at, new)[0]).tolist() == [[3.0, 8.0, 3.0, 9.0]]


def test_string_normalizer_drops_stop_words_before_changing_case() -> None:
    x = np.array(["Monday", "tuesday", "MONDAY"], dtype=object)
    attrs: dict[str, Any] = {"stopwords": ["monday"], "case_change_action": "UPPER"}
    for sensitive, want in ((0, ["TUESDAY"]), (1, ["MONDAY", "TUESDAY", "MONDAY"])):
        model = _model(Case("StringNormalizer", 10, (), {**attrs, "is_case_sensitive": sensitive}), [x])
        assert to_numpy(OnnxModule(load(model.SerializeToString()))(x)[0]).tolist() == want


def _run(case: Case, *arrays: np.ndarray) -> np.ndarray:
    return to_numpy(OnnxModule(load(_model(case, list(arrays)).SerializeToString()))(*arrays)[0])


def test_empty_tensors_where_the_reference_gives_up() -> None:
    nothing = np.zeros((0, 2, 4), np.float32)
    assert _run(Case("Flatten", 11, (), {"axis": -2}), nothing).shape == (0, 8)
    assert _run(Case("Reshape", 13, ()), nothing, np.array([0, -1])).shape == (0, 8)
    assert _run(Case("Reshape", 13, ()), nothing, np.array([-1, 8])).shape == (0, 8)
    low = _run(Case("ReduceMax", 20, (), {"keepdims": 0}), np.zeros((2, 0), np.int32), np.array([1]))
    assert low.tolist() == [np.iinfo(np.int32).min] * 2
    assert _run(Case("ReduceLogSumExp", 18, ()), np.zeros((), np.float32)).tolist() == 0.0


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_sequence_of_no_parts(keepdims: int) -> None:
    """Parts of one element each: an axis without elements has none. The library's own split makes one empty part of it."""
    for size in (0, 1, 3):
        x = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        model = _model(Case("SplitToSequence", 11, (), {"axis": 1, "keepdims": keepdims}), [x])
        (parts,) = OnnxModule(load(model.SerializeToString()))(x)
        assert [to_numpy(p).shape for p in parts] == [(2, 1) if keepdims else (2,)] * size
