"""Values and shapes at the edge, through the captured graph: empty and size-1 dims, NaN and Inf, strides, aliases, ints.

Each op is captured for every kind of input, and must then give what eager gives on that kind: values, dtype, shape,
and the error where eager has one. Ops that eager takes are captured some at a time: a capture costs far more than an op.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hotfuse
from hotfuse.base.settings import Settings

INLINE = Settings(capture="inline")
Fn = Callable[..., Any]

UNARY: dict[str, Fn] = {
    **{n: getattr(torch, n) for n in (
        "abs", "neg", "sign", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh",
        "sigmoid", "erf", "floor", "ceil", "round", "trunc", "square", "isnan", "isinf", "isfinite", "nan_to_num",
        "logical_not", "relu", "positive",
    )},
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish,
    "softplus": F.softplus, "elu": F.elu, "leaky_relu": F.leaky_relu, "hardswish": F.hardswish, "hardtanh": F.hardtanh,
    "clamp": lambda x: torch.clamp(x, -1, 1), "clamp_min": lambda x: x.clamp(min=0),
    "pow": lambda x: x**2, "rpow": lambda x: 2.0**x, "scalars": lambda x: (x + 1) * 2 - 3 / (x.abs() + 1),
    "floordiv": lambda x: x // 2, "remainder": lambda x: x % 3, "compare": lambda x: (x > 0) & (x <= 2),
    "where": lambda x: torch.where(x > 0, x, -x), "masked_fill": lambda x: x.masked_fill(x != x, 0),
    "to_int": lambda x: x.nan_to_num(0, 0, 0).to(torch.int32), "to_double": lambda x: x.double(),
    "to_bool": lambda x: x.bool(), "to_same": lambda x: x.to(x.dtype) + 0,
    "sum": torch.sum, "mean": lambda x: x.float().mean(), "prod": torch.prod, "any": torch.any, "all": torch.all,
    "flatten": torch.flatten, "reshape": lambda x: x.reshape(-1), "clone": torch.clone, "contiguous": lambda x: x.contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(0), "expand": lambda x: x.expand(3, *x.shape),
    "repeat": lambda x: x.repeat(2, *[1] * x.dim()),
    "stack": lambda x: torch.stack([x, x]), "zeros_like": torch.zeros_like, "full_like": lambda x: torch.full_like(x, 3),
    "inplace": lambda x: x.clone().add_(1).mul_(2), "numel": lambda x: x + x.numel(),
}  # fmt: skip

ROWS: dict[str, Fn] = {  # need at least one dimension
    "softmax": lambda x: F.softmax(x.float(), -1), "log_softmax": lambda x: F.log_softmax(x.float(), -1),
    "cumsum": lambda x: x.cumsum(-1), "cummax": lambda x: x.cummax(-1), "sum_last": lambda x: x.sum(-1),
    "mean_keep": lambda x: x.float().mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1), "max_pair": lambda x: x.max(-1), "argmax": lambda x: x.argmax(-1),
    "var": lambda x: x.float().var(-1, correction=0), "logsumexp": lambda x: torch.logsumexp(x.float(), -1),
    "sort": lambda x: x.sort(dim=-1, stable=True), "topk": lambda x: x.topk(min(1, x.shape[-1]), -1), "flip": lambda x: x.flip(-1),
    "layer_norm": lambda x: F.layer_norm(x.float(), x.shape[-1:]), "rms_norm": lambda x: F.rms_norm(x.float(), x.shape[-1:]),
    "norm": lambda x: torch.linalg.vector_norm(x.float(), dim=-1), "transpose": lambda x: x.transpose(0, -1),
    "cat": lambda x: torch.cat([x, x], -1), "chunk": lambda x: x.chunk(2, -1), "slice": lambda x: x[..., 1:],
    "step": lambda x: x[..., ::2], "select": lambda x: x[..., -1], "pad": lambda x: F.pad(x, (1, 2)),
    "roll": lambda x: x.roll(1, -1), "gather": lambda x: x.gather(-1, torch.zeros_like(x, dtype=torch.int64)),
    "tril": lambda x: x.expand(2, *x.shape).tril(), "unbind": lambda x: x.unbind(0), "setitem": lambda x: _set_first(x),
    "matmul": lambda x: x.float() @ x.float().transpose(-1, -2) if x.dim() > 1 else x.float() @ x.float(),
    "linear": lambda x: F.linear(x.float(), torch.ones(3, x.shape[-1])), "diff": lambda x: x.float().diff(dim=-1),
    "index": lambda x: x[..., torch.arange(x.shape[-1] - 1, -1, -1)], "squeeze": lambda x: x.squeeze(-1),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x.float().nan_to_num().contiguous()),
}  # fmt: skip


def _set_first(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., 0] = 1
    return y


nan, inf = math.nan, math.inf
_base = torch.tensor([[0.5, -1.5, 2.0, 3.25], [-0.25, 0.0, 1.0, -4.0], [7.0, 1e-3, -1e3, 2.5]])
INPUTS: dict[str, torch.Tensor] = {
    "plain": _base,
    "empty": torch.empty(0, 4),
    "empty_last": torch.empty(3, 0),
    "size_1": torch.tensor([[1.5]]),
    "row": _base[:1],
    "column": _base[:, :1],
    "nan_inf": torch.tensor([[nan, inf, -inf, 0.0], [-0.0, 1.0, nan, 2.0], [inf, inf, -inf, -inf]]),
    "denormal_huge": torch.tensor([[1e-40, -1e-40, 3e38, -3e38], [1e30, 1e-30, 88.0, -104.0], [0.0, 1.0, -1.0, 0.5]]),
    "transposed": _base.t(),
    "strided": torch.arange(48.0).reshape(3, 16)[:, ::4] - 20,
    "expanded": torch.tensor([[1.0, -2.0, 3.0, 0.5]]).expand(3, 4),
    "offset": torch.cat([torch.zeros(2), _base.flatten()])[2:].reshape(3, 4),
    "four_dims": torch.linspace(-2, 2, 24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "int64": torch.tensor([[5, -3, 0, 2], [1, 7, -9, 4], [2**40, -(2**40), 1, 1]]),
    "int32_extremes": torch.tensor([[2**31 - 1, -(2**31), 0, 1]], dtype=torch.int32),
    "uint8": torch.tensor([[0, 1, 254, 255]], dtype=torch.uint8),
    "bool": torch.tensor([[True, False, False, True], [False, False, True, True]]),
    "float64": _base.double(),
    "bfloat16": _base.bfloat16(),
    "scalar": torch.tensor(1.5),
    "scalar_int": torch.tensor(3),
    "scalar_nan": torch.tensor(nan),
    "vector_1": torch.tensor([2.0]),
}


def _same(got: Any, want: Any) -> None:
    if isinstance(want, tuple | list):
        assert type(got) is type(want) and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            _same(g, w)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            try:
                _same(got[name], want[name])
            except AssertionError as e:
                e.add_note(f"in {name}")
                raise
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)
    else:
        assert type(got) is type(want) and (got == want or got != got)


def _check(fn: Fn, *inputs: torch.Tensor) -> bool:
    """Serve and compare; whether the second call ran in the captured graph. Where eager refuses, so must we."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = hotfuse.jit(fn, settings=INLINE)
        try:
            want = fn(*inputs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError) as e:
            with pytest.raises(type(e)):
                fast(*inputs)
            return True
        before = [t.clone() for t in inputs]
        _same(fast(*inputs), want)
        _same(fast(*inputs), want)
        _same(list(inputs), before)
        return fast.stats()["graph_calls"] == 1


def _taken(fn: Fn, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether eager takes such inputs."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn(*inputs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return False
    return True


def _missed(ops: dict[str, Fn], *inputs: torch.Tensor) -> list[str]:
    """The ops that no captured graph served."""
    taken = [name for name, fn in ops.items() if _taken(fn, inputs)]
    missed = [name for name, fn in ops.items() if name not in taken and not _check(fn, *inputs)]
    for first in range(0, len(taken), TOGETHER):
        some = taken[first : first + TOGETHER]

        def together(*tensors: torch.Tensor, some: list[str] = some) -> dict[str, Any]:
            return {name: ops[name](*tensors) for name in some}

        if not _check(together, *inputs):
            missed += [name for name in some if not _check(ops[name], *inputs)] or [f"one of {some}"]
    return missed


TOGETHER = 12


@pytest.mark.parametrize("kind", INPUTS)
def test_one_input(kind: str) -> None:
    x = INPUTS[kind]
    missed = _missed(UNARY if x.dim() == 0 else UNARY | ROWS, x)
    assert not missed, f"not served by a captured graph: {missed}"


BINARY: dict[str, Fn] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "fmax": lambda a, b: torch.fmax(a, b), "eq": torch.eq, "lt": torch.lt,
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "remainder": torch.remainder, "pow": lambda a, b: torch.pow(a.float(), b.float()),
    "where": lambda a, b: torch.where(a > b, a, b),
    "atan2": torch.atan2, "lerp": lambda a, b: torch.lerp(a.float(), b.float(), 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "logical_and": torch.logical_and, "chain": lambda a, b: (a + b) * (a - b) + a,
    "broadcast_pair": lambda a, b: torch.broadcast_tensors(a, b),
}  # fmt: skip
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "same_tensor": (_base, _base),
    "overlapping": (_base.flatten()[:8], _base.flatten()[4:]),
    "view_of_other": (_base, _base.t()[:, :1].t()),
    "broadcast": (_base, _base[0]),
    "broadcast_both": (_base[:, :1], _base[:1]),
    "with_scalar": (_base, torch.tensor(2.0)),
    "with_empty": (torch.empty(0, 4), _base[:1]),
    "nan_inf": (INPUTS["nan_inf"], INPUTS["nan_inf"].flip(0)),
    "mixed_strides": (_base.t(), _base.t().contiguous()),
    "int_float": (INPUTS["int64"], _base),
    "int32_int64": (INPUTS["int64"].int().clamp(1, 9), INPUTS["int64"].clamp(1, 9)),
    "bool_int": (INPUTS["bool"], INPUTS["int64"][:2].clamp(1, 9)),
    "uint8_wrap": (INPUTS["uint8"], torch.tensor([[1, 255, 3, 1]], dtype=torch.uint8)),
    "half_float": (_base.half(), _base),
    "zero_dim_int_float": (torch.tensor(3), torch.tensor(0.5)),
    "signed_zero": (torch.tensor([0.0, -0.0, 1.0]), torch.tensor([-0.0, 0.0, -0.0])),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_two_inputs(kind: str) -> None:
    missed = _missed(BINARY, *PAIRS[kind])
    assert not missed, f"not served by a captured graph: {missed}"


def test_integer_division_by_zero_stays_an_error() -> None:
    fast = hotfuse.jit(lambda a, b: a // b, settings=INLINE)
    good, zero = torch.tensor([6, 8]), torch.tensor([0, 2])
    for _ in range(2):
        assert fast(good, torch.tensor([2, 4])).tolist() == [3, 2]
    assert fast.stats()["graph_calls"] == 1
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fast(good, zero)


def test_a_result_that_is_an_input_stays_that_input() -> None:
    """Eager gives the very memory back, and a caller may write into it."""
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.view(-1)

    fast = hotfuse.jit(fn, settings=INLINE)
    x = torch.zeros(2, 3)
    with torch.no_grad():
        fast(x)
        same, flat = fast(x)
    assert fast.stats()["graph_calls"] == 1
    same += 1
    assert x.sum() == 6 and flat.sum() == 6


@pytest.mark.parametrize("dims", [(0, 5), (1, 5), (5, 1), (5, 0), (1, 1), (0, 0)])
def test_a_graph_captured_for_larger_sizes_is_right_at_the_edge(dims: tuple[int, int]) -> None:
    """Dynamic dims: whether a graph or the function itself serves the odd sizes, the result is eager's."""
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.softmax(x, -1) @ x.t()
        return y, torch.cat([x, x]).sum(0), x.reshape(-1), x.mean(0, keepdim=True) * x

    fast = hotfuse.jit(fn, settings=INLINE)
    with torch.no_grad():
        for rows, cols in ((4, 6), (5, 6), (5, 7), (8, 9), (9, 8)):
            x = torch.randn(rows, cols)
            _close(fast(x), fn(x))
        for _ in range(3):
            x = torch.randn(dims)
            _close(fast(x), fn(x))
    assert fast.stats()["graph_calls"] >= 1


def _close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_shape_stays_a_shape() -> None:
    fast = hotfuse.jit(lambda x: (x + 1, x.shape), settings=INLINE)
    with torch.no_grad():
        fast(torch.ones(2, 3))
        _, shape = fast(torch.ones(2, 3))
    assert type(shape) is torch.Size
