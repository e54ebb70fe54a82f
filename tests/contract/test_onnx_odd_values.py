"""Activations at infinities, nan, zeros, denormals and the ends of a type's range: the interpreter, its graph on torch's kernels
(one call at a time and as a TorchScript region), and compiled code, against ONNX's formula in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from hotfuse.backends.library import LibraryBackend
from hotfuse.frontends.captured import TensorSpec
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.frontends.onnx.interp import OnnxModule
from hotfuse.frontends.onnx.load import load
from hotfuse.frontends.onnx.tracing.traced_model import trace
from hotfuse.lower.cpu.group import lower_group
from tests.contract.lowering import Group, run_native
from tests.contract.onnx_nodes import Case, Const, model_of

ODD = (
    np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 1e-30, 6e-8, -6e-8, 1e-5, 0.5, -0.5, 5.0, -5.0, -9.5, 12.5,
    -13.3, 20.5, -20.5, -30.0, 41.0, -41.0, 87.0, -87.5, 88.8, -104.0, 700.0, -745.0, 1e4, -1e4, 1e20, -1e20, 3e37, -3e37,
)  # fmt: skip
LARGEST = (3.4e38, -3.4e38)
BOUNDS = {np.float32: (3e-6, 3e-6), np.float64: (1e-12, 1e-12), np.float16: (2e-3, 1e-5)}
Formula = Callable[[np.ndarray], Any]


def _gelu(x: np.ndarray) -> Any:
    return x * 0.5 * special.erfc(-x / np.sqrt(2))


def _fast_gelu(x: np.ndarray) -> Any:
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _case(op: str, formula: Formula, *, domain: str = "", largest: bool = True, opset: int = 22, **attrs: Any) -> Any:
    return pytest.param(op, formula, domain, largest, opset, attrs, id=f"{domain}{op}{sorted(attrs.values(), key=str) or ''}")


CASES = [
    _case("Gelu", _gelu),
    _case("Gelu", _fast_gelu, approximate="tanh"),
    _case("Gelu", _gelu, domain="com.microsoft"),
    _case("BiasGelu", _gelu, domain="com.microsoft"),
    _case("FastGelu", _fast_gelu, domain="com.microsoft"),
    _case("QuickGelu", lambda x: x * special.expit(1.702 * x), domain="com.microsoft"),
    _case("Mish", lambda x: x * np.tanh(np.logaddexp(0, x))),
    _case("Softplus", lambda x: np.logaddexp(0, x)),
    _case("HardSwish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1), largest=False),  # torch's multiplies by six first
    _case("HardSigmoid", lambda x: np.clip(x * 0.2 + 0.5, 0, 1)),
    _case("Elu", lambda x: np.where(x < 0, 0.5 * np.expm1(x), x), alpha=0.5),
    _case("Celu", lambda x: np.maximum(0, x) + np.minimum(0, 2 * np.expm1(x / 2)), alpha=2.0),
    _case("Clip", lambda x: np.minimum(x, 1.0), opset=6, min=-np.inf, max=1.0),  # bounds that bound nothing, as in ONNX Runtime
    _case("Clip", lambda x: np.maximum(x, -1.0), opset=6, min=-1.0, max=np.inf),
    _case("Sigmoid", special.expit),
    _case("Tanh", np.tanh),
    _case("Erf", special.erf),
    _case("Softsign", lambda x: x / (1 + abs(x))),
    _case("Swish", lambda x: x * special.expit(x), opset=24),
    _case("Swish", lambda x: x * special.expit(1.5 * x), opset=24, alpha=1.5),
    _case("Sign", np.sign),
]

TORCHS = ("Gelu", "BiasGelu")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("op", "formula", "domain", "largest", "opset", "attrs"), CASES)
def test_odd_values(op: str, formula: Formula, domain: str, largest: bool, opset: int, attrs: dict[str, Any], dtype: Any) -> None:
    with np.errstate(all="ignore"):
        x = np.array((ODD + LARGEST * largest) * 2, dtype)  # whole vectors and a rest
        want = np.asarray(formula(x.astype(np.float64)), np.float64).astype(dtype).astype(np.float64)
    bias = (Const(np.zeros(x.shape[-1], dtype)),) if op == "BiasGelu" else ()
    case = Case(op, (lambda _: x, *bias), attrs=attrs, domain=domain, opset=1 if domain else opset)
    module = OnnxModule(load(model_of(case, case.arrays())))
    given = torch.from_numpy(x)
    _agree(module(given)[0], want, dtype, "interpreted")
    _agree(module(given)[0], want, dtype, "interpreted again")
    traced = trace(module, [TensorSpec(tuple(x.shape), (1,), given.dtype, "cpu", frozenset())])
    made = to_graph(traced.gm, [PlaceholderRole("input"), *(PlaceholderRole("param", k) for k in traced.keys)])
    weights: dict[str, Any] = {**made.constants, **traced.constants}
    if op not in TORCHS or attrs:  # torch's own gelu of +inf is nan, and modules get what torch gives
        _agree(LibraryBackend().compile(made.graph, weights).run(given)[0], want, dtype, "library")
    group = Group(made.graph, weights)
    _agree(run_native(lower_group(group.graph), group, [given])[0], want, dtype, "compiled")


def _agree(got: Any, want: np.ndarray, dtype: Any, who: str) -> None:
    relative, absolute = BOUNDS[dtype]
    np.testing.assert_allclose(got.numpy().astype(np.float64), want, rtol=relative, atol=absolute, err_msg=who)
