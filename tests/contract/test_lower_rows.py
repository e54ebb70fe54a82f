"""Reductions, softmax, norms and what is fused around them, against torch in float64.

Bounds: f32 within 1e-5 of the exact result, relative to the row's largest element; f16 and bf16 two units in the last place;
integers, indices and truth values exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.primitives.rules import expansions
from hotfuse.tile.program import BufferKind, Loop, LoopKind
from tests.contract.lowering import group_of, interpret, run_native

R = torch.randn
Tensor = torch.Tensor
Case = tuple[Callable[..., Any], list[Tensor]]
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

FLOAT: dict[str, Case] = {
    "softmax": (lambda x: torch.softmax(x, -1), [R(3, 5, 70)]),
    "softmax of a middle dim": (lambda x: torch.softmax(x, 1), [R(3, 5, 70)]),
    "softmax of the first dim": (lambda x: torch.softmax(x, 0), [R(5, 37)]),
    "softmax of one element": (lambda x: torch.softmax(x, -1), [R(5, 1)]),
    "masked softmax": (
        lambda x, m: torch.softmax((x * 0.5).masked_fill(m > 0, -1e4), -1), [R(2, 3, 5, 17), R(2, 1, 1, 17)]
    ),
    "log_softmax, turned": (lambda x: torch.log_softmax(x, -1).transpose(0, 1), [R(6, 17)]),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), [R(6, 17)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (70,), w, b), [R(3, 5, 70), R(70), R(70)]),
    "layer norm of two dims": (lambda x, w, b: F.layer_norm(x, (5, 7), w, b), [R(3, 5, 7), R(5, 7), R(5, 7)]),
    "residual and layer norm": (
        lambda x, r, w, b: ((h := x + r), F.layer_norm(h, (70,), w, b)), [R(3, 5, 70), R(3, 5, 70), R(70), R(70)]
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (70,), w), [R(3, 5, 70), R(70)]),
    "rms norm by hand": (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), [R(6, 70), R(70)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [R(3, 4, 5, 7), R(4), R(4)]),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [R(3, 4, 5, 7), R(4), R(4)]),
    "batch norm": (lambda x, m, v, w: F.batch_norm(x, m, v, w), [R(3, 4, 5, 7), R(4), R(4).abs() + 0.5, R(4)]),
    "mean of planes": (lambda x: x.mean((2, 3)), [R(3, 4, 5, 7)]),
    "mean of channels": (lambda x: x.mean(1, keepdim=True), [R(3, 4, 5, 7)]),
    "mean of outer": (lambda x: x.mean(0), [R(30, 40)]),
    "sum of outer and inner": (lambda x: x.sum((0, 2)), [R(6, 5, 40)]),
    "sum of all": (lambda x: x.sum(), [R(30, 40)]),
    "sum of squares": (lambda x, y: ((x - y) ** 2).sum(-1), [R(30, 40), R(40)]),
    "prod": (lambda x: x.prod(-1), [R(6, 9)]),
    "var": (lambda x: x.var(-1), [R(30, 40)]),
    "var without correction": (lambda x: x.var(-1, correction=0), [R(30, 40)]),
    "std": (lambda x: x.std(0), [R(30, 40)]),
    "var_mean": (lambda x: torch.var_mean(x, -1), [R(30, 40)]),
    "far from zero": (lambda x: (x + 1000).var(-1), [R(3, 40)]),
    "amax": (lambda x: x.amax((0, 2)), [R(6, 5, 40)]),
    "amin": (lambda x: x.amin(-1), [R(6, 5, 40)]),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), [R(6, 17)]),
    "sum and its parts": (lambda x, y: ((h := x + y), h.mean(-1)), [R(6, 17), R(6, 17)]),
    "sum of a cat": (lambda x, y: torch.cat([x, y], 1).sum(1), [R(4, 7), R(4, 20)]),
    "softmax of a pad": (lambda x: torch.softmax(F.pad(x, (2, 3)), -1), [R(4, 19)]),
    "pad of a softmax": (lambda x: F.pad(torch.softmax(x, -1), (2, 3, 1, 0)), [R(4, 19)]),
    "rows that do not matter": (lambda x: torch.cat([x.softmax(-1), x * 2], 0), [R(4, 19)]),
    "mean of a product": (lambda x, y: (x * y).mean(), [R(30, 40), R(40)]),
    "two reductions": (lambda x: (x.sum(-1), x.amax(-1), (x * x).sum(-1)), [R(6, 50)]),
    "reductions of different dims": (lambda x: (x.sum(0), x.sum(1)), [R(6, 50)]),
    "a result beside what is kept in another": (
        lambda x: (torch.log_softmax(x * x, 0), torch.maximum(x * x, x)), [R(16)]
    ),
    "results in each other's way": (lambda x: (x * 0.5 + 1, torch.softmax(x * 0.5 + 1, -1), x.abs()), [R(5, 33)]),
    "gate by mean": (lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)), [R(2, 3, 5, 7)]),
    "cumsum": (lambda x: x.cumsum(-1), [R(5, 70)]),
    "cumsum of the first dim": (lambda x: (x * 2).cumsum(0) + 1, [R(9, 40)]),
    "cumsum of a middle dim": (lambda x: x.cumsum(1), [R(3, 9, 7)]),
    "cumsum, centered": (lambda x: (x - x.mean(-1, keepdim=True)).cumsum(-1), [R(5, 70)]),
    "cumprod": (lambda x: (x * 0.1 + 1).cumprod(-1), [R(5, 33)]),
    "cumsum of one": (lambda x: x.cumsum(-1), [R(5, 1)]),
    "sum of a cumsum": (lambda x: x.cumsum(-1).sum(-1), [R(5, 33)]),
    "cumsum of a cat": (lambda x, y: torch.cat([x, y], 1).cumsum(1), [R(4, 7), R(4, 20)]),
    "strided rows": (lambda x: torch.softmax(x, -1), [R(6, 40)[:, ::2]]),
    "turned rows": (lambda x: torch.softmax(x, -1), [R(40, 6).t()]),
    "repeated rows": (lambda x: torch.softmax(x.expand(4, 20), -1), [R(20)]),
    "normalized heads": (lambda x: F.layer_norm(x.view(3, 5, 4, 8), (8,)).transpose(1, 2), [R(3, 5, 32)]),
}
EXACT: dict[str, Case] = {
    "argmax": (lambda x: x.argmax(-1), [R(30, 40)]),
    "argmax of the first dim": (lambda x: x.argmax(0), [R(30, 40)]),
    "argmin": (lambda x: x.argmin(-1, keepdim=True), [R(30, 40)]),
    "argmax of all": (lambda x: x.argmax(), [R(30, 40)]),
    "argmax of ties": (lambda x: x.argmax(-1), [torch.ones(5, 40)]),
    "argmax of -inf": (lambda x: x.argmax(-1), [torch.full((5, 40), -torch.inf)]),
    "argmax of NaN": (lambda x: x.argmax(-1), [torch.tensor([[1.0, torch.nan, 3, torch.nan], [5, 1, 2, 5]])]),
    "max of a dim": (lambda x: x.max(1), [R(30, 40)]),
    "min of a dim": (lambda x: x.min(0), [R(30, 40)]),
    "max of all": (lambda x: x.max(), [R(30, 40)]),
    "any": (lambda x: (x > 2).any(-1), [R(30, 40)]),
    "all": (lambda x: (x > -2).all(0), [R(30, 40)]),
    "any of all": (lambda x: (x > 3).any(), [R(30, 40)]),
    "sum of integers": (lambda x: x.sum(-1), [torch.randint(-9, 9, (5, 40))]),
    "positions of a mask": (lambda m: (m.cumsum(-1) - 1) * m, [torch.randint(0, 2, (3, 50))]),
    "cummax": (lambda x: x.cummax(-1), [R(5, 70)]),
    "cummin of the first dim": (lambda x: (x * 2).cummin(0), [R(40, 9)]),
    "cummax of a middle dim": (lambda x: torch.cummax(x, 1)[1], [R(3, 9, 7)]),
    "cummax, newest of ties": (lambda x: x.cummax(-1), [torch.randint(0, 3, (5, 70)).float()]),
    "cummin of NaN": (lambda x: x.cummin(1), [torch.tensor([[2.0, 1, torch.nan, 0, torch.nan, -1], [1, 1, 2, 0, 0, 5]])]),
    "cummax of infinities": (lambda x: x.cummax(-1), [torch.tensor([[-torch.inf, -torch.inf, 1, torch.inf, 2, torch.inf]])]),
    "cummax of integers": (lambda x: x.cummax(-1), [torch.randint(-9, 9, (5, 33))]),
    "cummin of bools": (lambda x: x.cummin(-1), [torch.randint(0, 8, (5, 33)) > 0]),
    "cummax of half precision": (lambda x: x.cummax(-1), [R(5, 33).half()]),
    "cummax of one": (lambda x: x.cummax(-1), [R(5, 1)]),
    "cummax of nothing": (lambda x: x.cummax(-1)[0], [R(5, 0)]),
    "running maximum, used on": (lambda x: x.relu().cummax(-1)[0].flip(-1), [R(5, 33)]),
    "sum of bools": (lambda x: (x > 0).sum(-1), [R(5, 40)]),
    "sum of i32": (lambda x: x.sum(-1), [torch.randint(-9, 9, (5, 40), dtype=torch.int32)]),
    "prod of integers": (lambda x: x.prod(-1), [torch.randint(1, 3, (5, 9))]),
    "amax of integers": (lambda x: x.amax(-1), [torch.randint(-9, 9, (5, 40))]),
    "amax of bools": (lambda x: x.amax(-1), [torch.randint(0, 2, (5, 40)).bool()]),
    "count_nonzero": (lambda x: torch.count_nonzero(x, -1), [torch.randint(-1, 2, (5, 40))]),
    "amax of NaN": (lambda x: x.amax(-1), [torch.tensor([[1.0, torch.nan, 3], [5, 1, 2]])]),
    "sum of nothing": (lambda x: x.sum(-1), [R(3, 0)]),
    "rows of nothing": (lambda x: x.sum(-1), [R(0, 3)]),
    "mean of nothing": (lambda x: x.mean(-1), [R(3, 0)]),
    "softmax of -inf": (lambda x: torch.softmax(x, -1), [torch.full((3, 20), -torch.inf)]),
}
NOT_SYMBOLIC = {"group norm", "normalized heads"}
"""The number of groups divides a size, which its symbol does not show."""


def listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def near(got: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for g, e, x in zip(got, expected, exact, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        bound = BOUNDS[e.dtype]
        scale = max(1.0, float(x.abs().max())) if x.numel() else 1.0
        torch.testing.assert_close(g.double(), x.double(), rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", FLOAT)
def test_floats(name: str, symbolic: bool) -> None:
    fn, tensors = FLOAT[name]
    group = group_of(fn, tensors, symbolic)
    if symbolic and name in NOT_SYMBOLIC:
        with pytest.raises(CannotLower):
            lower_group(group.graph)
        return
    lowered = lower_group(group.graph)
    expected, exact = listed(fn(*tensors)), listed(fn(*(t.double() for t in tensors)))
    near(interpret(lowered, group, tensors), expected, exact)
    near(run_native(lowered, group, tensors), expected, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=["f64", "f16", "bf16"])
@pytest.mark.parametrize(
    "name", ["softmax", "softmax of a middle dim", "layer norm", "rms norm", "group norm", "mean of planes", "sum of all", "var",
             "amax", "log_softmax, turned", "batch norm"],
)  # fmt: skip
def test_other_floats(name: str, dtype: torch.dtype) -> None:
    fn, tensors = FLOAT[name]
    tensors = [t.to(dtype) for t in tensors]
    group = group_of(fn, tensors)
    lowered = lower_group(group.graph)
    expected, exact = listed(fn(*tensors)), listed(fn(*(t.double() for t in tensors)))
    near(interpret(lowered, group, tensors), expected, exact)
    near(run_native(lowered, group, tensors), expected, exact)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, symbolic: bool) -> None:
    fn, tensors = EXACT[name]
    group = group_of(fn, tensors, symbolic)
    lowered = lower_group(group.graph)
    for got in (interpret(lowered, group, tensors), run_native(lowered, group, tensors)):
        for g, e in zip(got, listed(fn(*tensors)), strict=True):
            assert g.dtype == e.dtype
            torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 257])
def test_tails_do_not_count(columns: int) -> None:
    """A lane that does not exist must change no sum, maximum or index."""
    x = -R(3, columns).abs() - 1
    fn = lambda t: (t.sum(-1), t.amax(-1), t.argmax(-1), t.softmax(-1), (t < 0).all(-1))  # noqa: E731
    group = group_of(fn, [x])
    lowered = lower_group(group.graph)
    for got in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        for g, e in zip(got, fn(x), strict=True):
            torch.testing.assert_close(g, e)


def test_one_kernel_serves_other_sizes() -> None:
    fn = lambda x, r: (x + r, F.layer_norm(x + r, (x.shape[-1],)), (x + r).argmax(-1))  # noqa: E731
    group = group_of(fn, [R(4, 5, 20), R(4, 5, 20)], symbolic=True)
    lowered = lower_group(group.graph)
    for shape in ((1, 1, 1), (2, 3, 16), (5, 1, 300), (2, 2, 65)):
        tensors = [R(shape), R(shape)]
        for got in (interpret(lowered, group, tensors), run_native(lowered, group, tensors)):
            for g, e in zip(got, fn(*tensors), strict=True):
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


# --- how it is written ------------------------------------------------------------------------------------------------


def loops(body: Sequence[Any]) -> list[Loop]:
    return [x for s in body if isinstance(s, Loop) for x in (s, *loops(s.body))]


def test_residual_and_norm_are_one_nest_that_reads_each_input_once() -> None:
    fn, tensors = FLOAT["residual and layer norm"]
    kernel = lower_group(group_of(fn, tensors).graph).kernel
    assert len([s for s in kernel.body if isinstance(s, Loop)]) == 1
    reading = [lp for lp in loops(kernel.body) if any("arg0" in str(s) for s in lp.body if not isinstance(s, Loop))]
    every = [lp for lp in loops(kernel.body) if lp.kind is LoopKind.SERIAL]
    assert reading and len(reading) < len(every) / 2, "later phases read the sum that the first one stored"


def test_softmax_keeps_its_exponentials_where_its_result_goes() -> None:
    kernel = lower_group(group_of(lambda x: torch.softmax(x, -1), [R(3, 5, 64)]).graph).kernel
    assert not [b for b in kernel.buffers if b.kind is BufferKind.SCRATCH]
    assert str(kernel.body).count("map.decay") == 1


def test_exponentials_that_the_result_has_no_room_for_are_kept_aside() -> None:
    kernel = lower_group(group_of(lambda x: torch.softmax(x, -1).half(), [R(3, 5, 64)]).graph).kernel
    assert [b for b in kernel.buffers if b.kind is BufferKind.SCRATCH]
    assert str(kernel.body).count("map.decay") == 1


def test_rules_are_of_ops_that_torch_knows() -> None:
    for name in expansions():
        assert hasattr(torch.ops.aten, name.removeprefix("aten.")), name
