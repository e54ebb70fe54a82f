"""Every row of the pointwise expansions, in every dtype torch has it for, against torch; views, broadcasts, tails, odd values.

Bounds: the reference is torch in float64 on the same numbers. f32 within 2e-6 relative and absolute, f64 1e-12, f16 and bf16 two
units in the last place; integers and truth values exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import StrideArgument
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.ops import expand, views
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile.program import Loop, LoopKind
from tests.contract.lowering import Group, group_of, interpret, run_native

DTYPES = [DType.F32, DType.F64, DType.F16, DType.BF16, DType.I64, DType.I32, DType.U8, DType.BOOL]
BOUNDS = {
    torch.float32: (2e-6, 2e-6), torch.float64: (1e-12, 1e-12), torch.float16: (2e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-4),
}  # fmt: skip
ODD = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 100.0, -100.0, 3e-5, torch.inf, -torch.inf, torch.nan, 20.5, 1e30, -1e30]
Tensor = torch.Tensor


def sample(dtype: DType, shape: Sequence[int], seed: int) -> Tensor:
    """Numbers of every kind; the first ones are odd."""
    g = torch.Generator().manual_seed(seed)
    t = torch_dtype(dtype)
    if dtype is DType.BOOL:
        return torch.randint(0, 2, shape, generator=g).bool()
    if not t.is_floating_point:
        return torch.randint(0 if dtype is DType.U8 else -6, 7, shape, generator=g).to(t)
    x = (torch.randn(shape, generator=g) * 3).to(t)
    flat = x.view(-1)
    odd = torch.tensor(ODD, dtype=t)[torch.randperm(len(ODD), generator=g)][: flat.numel()]
    flat[: len(odd)] = odd
    return x


def check(
    fn: Callable[..., Any], tensors: Sequence[Tensor], *, symbolic: bool = False, native: bool = False,
    group: Group | None = None,
) -> Group:  # fmt: skip
    """Lower and compare with torch, in double precision where the elements are floats."""
    group = group or group_of(fn, tensors, symbolic)
    lowered = lower_group(group.graph)
    expected = _listed(fn(*tensors))
    try:
        exact = _listed(fn(*(t.double() if t.is_floating_point() else t for t in tensors)))
    except (RuntimeError, NotImplementedError):
        exact = expected
    compare(interpret(lowered, group, tensors), expected, exact)
    if native:
        compare(run_native(lowered, group, tensors), expected, exact)
    return group


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def compare(got: Sequence[Tensor], expected: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for g, e, x in zip(got, expected, exact, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        if e.dtype not in BOUNDS:
            torch.testing.assert_close(g, e, rtol=0, atol=0)
            continue
        rtol, atol = BOUNDS[e.dtype]
        reference = x.to(e.dtype) if x.dtype.is_floating_point else e
        # Where torch itself is further from the truth than the bound (overflow on the way), being like torch is right too.
        near = torch.isclose(g, reference, rtol=rtol, atol=atol, equal_nan=True)
        like = torch.isclose(g, e, rtol=rtol, atol=atol, equal_nan=True)
        assert (near | like).all(), f"{g[~(near | like)][:4]} instead of {reference[~(near | like)][:4]}"


# --- every row --------------------------------------------------------------------------------------------------------

SPECIAL: dict[str, list[Callable[..., Any]]] = {
    "aten.add": [torch.add, lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a + 2, lambda a, b: a + b * 0.5],
    "aten.sub": [torch.sub, lambda a, b: torch.sub(a, b, alpha=2), lambda a, b: a - 1],
    "aten.rsub": [lambda a, b: torch.ops.aten.rsub(a, b), lambda a, b: 1 - a],
    "aten.div": [torch.div, lambda a, b: a / 3, lambda a, b: torch.div(a, b.clamp(1, 4), rounding_mode="floor"),
                 lambda a, b: torch.div(a, b.clamp(1, 4), rounding_mode="trunc")],
    "aten.floor_divide": [lambda a, b: torch.floor_divide(a, b.clamp(1, 4))],
    "aten.remainder": [lambda a, b: torch.remainder(a, b.clamp(1, 4)), lambda a, b: torch.remainder(a, -3)],
    "aten.fmod": [lambda a, b: torch.fmod(a, b.clamp(1, 4)), lambda a, b: torch.fmod(a, 3)],
    "aten.pow": [lambda a, b: a**2, lambda a, b: a**3, lambda a, b: a**0.5, lambda a, b: a**-1.0, lambda a, b: a**2.5,
                 lambda a, b: a ** b.clamp(0, 3), lambda a, b: 2**b.clamp(0, 5)],
    "aten.clamp": [lambda a, b: a.clamp(-1, 2), lambda a, b: a.clamp(min=b), lambda a, b: a.clamp(max=1)],
    "aten.clip": [lambda a, b: torch.ops.aten.clip(a, -1, 2)],
    "aten.clamp_min": [lambda a, b: torch.clamp_min(a, 1)],
    "aten.clamp_max": [lambda a, b: torch.clamp_max(a, 1)],
    "aten.where": [lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.where(a > 0, a, 0),
                   lambda a, b: torch.where(b > 0, 1.5, b)],
    "aten.masked_fill": [lambda a, b: a.masked_fill(b > 0, 1)],
    "aten.lerp": [lambda a, b: torch.lerp(a, b, 0.25), lambda a, b: torch.lerp(a, b, 0.75)],
    "aten.addcmul": [lambda a, b: torch.addcmul(a, a, b), lambda a, b: torch.addcmul(a, a, b, value=2)],
    "aten.addcdiv": [lambda a, b: torch.addcdiv(a, a, b, value=2)],
    "aten.gelu": [F.gelu, lambda a: F.gelu(a, approximate="tanh")],
    "aten.elu": [F.elu, lambda a: F.elu(a, alpha=0.7)],
    "aten.celu": [lambda a: F.celu(a, 0.7)],
    "aten.leaky_relu": [F.leaky_relu, lambda a: F.leaky_relu(a, 0.2)],
    "aten.softplus": [F.softplus, lambda a: F.softplus(a, beta=2, threshold=5)],
    "aten.hardtanh": [F.hardtanh, lambda a: F.hardtanh(a, 0, 6)],
    "aten.threshold": [lambda a: F.threshold(a, 0.5, 2)],
    "aten._prelu_kernel": [lambda a, b: torch.ops.aten._prelu_kernel(a, b)],
    "aten.round": [torch.round, lambda a: torch.round(a, decimals=1)],
    "aten.logit": [lambda a: torch.logit(a, 0.1)],
    "aten.special_logit": [lambda a: torch.special.logit(a, 0.1)],
    "aten.dropout": [lambda a: F.dropout(a, 0.5, training=False)],
    "aten.feature_dropout": [lambda a: torch.ops.aten.feature_dropout(a, 0.5, False)],
    "aten.alpha_dropout": [lambda a: torch.ops.aten.alpha_dropout(a, 0.5, False)],
    "aten.native_dropout": [lambda a: torch.ops.aten.native_dropout(a, 0.0, False)[0]],
    "aten.to": [lambda a: a.to(torch.float32), lambda a: a.to(torch.int32), lambda a: a.to(torch.bool),
                lambda a: a.to(torch.float16)],
    "aten._to_copy": [lambda a: torch.ops.aten._to_copy(a, dtype=torch.float64)],
    "aten.type_as": [lambda a: a.type_as(torch.ones(2, dtype=torch.int64))],
    "aten.copy": [lambda a, b: torch.ops.aten.copy(a, b)],
    "aten.full": [lambda a: a + torch.full((37,), 2, dtype=a.dtype)],
    "aten.full_like": [lambda a: torch.full_like(a, 2)],
    "aten.new_full": [lambda a: a.new_full((3, 5), 2)],
    "aten.zeros": [lambda a: torch.zeros(3, 5, dtype=a.dtype)],
    "aten.ones": [lambda a: torch.ones(3, 5, dtype=a.dtype)],
    "aten.new_zeros": [lambda a: a.new_zeros((3, 5))],
    "aten.new_ones": [lambda a: a.new_ones((3, 5))],
    "aten.zero": [lambda a: torch.ops.aten.zero(a)],
    "aten.fill": [lambda a: torch.ops.aten.fill(a, 2), lambda a: torch.ops.aten.fill(a, a[0, 0])],
    "aten.scalar_tensor": [lambda a: a * torch.ops.aten.scalar_tensor(2)],
    "aten.arange": [lambda a: a * torch.arange(37), lambda a: torch.arange(1, 20, 3), lambda a: torch.arange(0.5, 3, 0.25)],
    "aten.tril": [lambda a: a.tril(), lambda a: a.tril(2)],
    "aten.triu": [lambda a: a.triu(), lambda a: a.triu(-1)],
    "aten.eye": [lambda a: torch.eye(7) + a[0, 0]],
    "aten.bitwise_left_shift": [lambda a, b: a << b.clamp(0, 3)],
    "aten.__lshift__": [lambda a, b: torch.ops.aten.__lshift__(a, b.clamp(0, 3))],
    "aten.bitwise_right_shift": [lambda a, b: a >> b.clamp(0, 3)],
    "aten.__rshift__": [lambda a, b: torch.ops.aten.__rshift__(a, b.clamp(0, 3))],
}  # fmt: skip
CONVERSIONS = {"float", "double", "half", "bfloat16", "int", "long", "bool"}
NATIVE = {DType.F32, DType.I64}


def variants(name: str) -> list[tuple[Callable[..., Any], int]]:
    """Calls that bring the op into a graph, with how many tensors they take."""
    row = expand.rows()[name]
    two = name in ("aten.copy", "aten.lerp", "aten.addcmul", "aten.addcdiv", "aten.where", "aten.masked_fill", "aten.clamp",
                   "aten.clip", "aten.clamp_min", "aten.clamp_max", "aten._prelu_kernel") or len(row.operands) == 2  # fmt: skip
    if name in SPECIAL:
        return [(fn, 2 if two else 1) for fn in SPECIAL[name]]
    short = name.removeprefix("aten.")
    if short in CONVERSIONS:
        return [(lambda a: getattr(a, short)(), 1)]
    op = getattr(torch.ops.aten, short)
    return [(op, 2 if two else 1)]


@pytest.mark.parametrize("name", sorted(n for n in expand.rows() if n.startswith("aten.")))  # others are steps of lowering
def test_row(name: str) -> None:
    done = 0
    for fn, count in variants(name):
        for dtype in DTYPES:
            tensors = [sample(dtype, (3, 37), 5 + i) for i in range(count)]
            try:
                fn(*tensors)
                group = group_of(fn, tensors)
            except (RuntimeError, NotImplementedError, TypeError, IndexError):
                continue  # torch has no such op in this dtype
            try:
                check(fn, tensors, native=dtype in NATIVE, group=group)
            except CannotLower as e:
                assert "tiles do not" in e.because or "does not fit" in e.because, (name, dtype, e)
            except AssertionError as e:
                raise AssertionError(f"{name} in {dtype.value}: {e}") from e
            done += 1
    assert done, f"no call of {name} in any dtype"


MIXED = [
    ("int + float tensor", lambda a, b: a + b, (DType.I64, DType.F32)),
    ("bool * float", lambda a, b: a * b, (DType.BOOL, DType.F32)),
    ("half + float", lambda a, b: a + b, (DType.F16, DType.F32)),
    ("i32 + i64", lambda a, b: a + b, (DType.I32, DType.I64)),
    ("int > float number", lambda a, b: (a > 0.5) & (b < 1.5), (DType.I64, DType.F32)),
    ("u8 + bool", lambda a, b: a + b, (DType.U8, DType.BOOL)),
    ("int / int", lambda a, b: a / (b + 10), (DType.I64, DType.I32)),
    ("where mixed", lambda a, b: torch.where(a > 0, a, b), (DType.I64, DType.F32)),
    ("bool sum of compares", lambda a, b: (a > 0) + (b > 0), (DType.F32, DType.F32)),
]


@pytest.mark.parametrize(("name", "fn", "dtypes"), MIXED, ids=[m[0] for m in MIXED])
def test_promotion(name: str, fn: Callable[..., Any], dtypes: tuple[DType, DType]) -> None:
    check(fn, [sample(d, (3, 37), i) for i, d in enumerate(dtypes)], native=True)


def test_zero_dim_tensors_do_not_promote() -> None:
    half, wide = sample(DType.F16, (3, 37), 0), torch.tensor(1.5, dtype=torch.float64)
    group = check(lambda a, b: a * b, [half, wide], native=True)
    assert group.graph.outputs[0].type.dtype is DType.F16  # type: ignore[union-attr]


# --- movement ---------------------------------------------------------------------------------------------------------

R = torch.randn
MOVES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "broadcast": (lambda x, y, z: (x + y) * z, [R(4, 5, 37), R(37), R(5, 1)]),
    "transpose": (lambda x: x.transpose(0, 1) + 1, [R(33, 70)]),
    "transpose both": (lambda x, y: x.t() * y, [R(33, 70), R(70, 33)]),
    "movedim": (lambda x: x.movedim(0, 2) + 1, [R(3, 4, 18)]),
    "heads": (lambda x: x.view(4, 7, 3, 8).permute(0, 2, 1, 3).reshape(4, 3, 56) * 2, [R(4, 7, 24)]),
    "not nested reshape": (lambda x: x.reshape(4, 6) + 1, [R(6, 4)]),
    "reshape of a transpose": (lambda x: x.t().reshape(4, 9) * 2, [R(6, 6)]),
    "cat": (lambda x, y: torch.cat([x, y], 1) * 2, [R(4, 7), R(4, 20)]),
    "cat of outer dim": (lambda x, y: torch.cat([x, y, x], 0) * 2, [R(4, 7), R(3, 7)]),
    "cat with empty": (lambda x, y: torch.cat([x, y], 1) * 2, [R(4, 0), R(4, 20)]),
    "cat then slice": (lambda x, y: torch.cat([x, y], 1)[:, 3:11] * 2, [R(4, 7), R(4, 20)]),
    "cat flipped": (lambda x, y: torch.cat([x, y], 1).flip(1) * 2, [R(4, 7), R(4, 20)]),
    "stack": (lambda x, y: torch.stack([x, y], -1).flatten(-2), [R(5, 16), R(5, 16)]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0), value=1.5) + 1, [R(4, 19)]),
    "crop": (lambda x: F.pad(x, (-1, -2)) + 1, [R(4, 19)]),
    "pad and crop": (lambda x: F.pad(x, (3, -2, -1, 2)) + 1, [R(4, 19)]),
    "flip": (lambda x: x.flip(1) + x, [R(4, 19)]),
    "slice": (lambda x: x[:, 1::2] * x[:, :-1:2], [R(4, 20)]),
    "slice from the end": (lambda x: x[:, -5:] * 2, [R(4, 20)]),
    "select": (lambda x: x[:, -1] + x[0, 2], [R(4, 20)]),
    "roll": (lambda x: x.roll(3, 1) * 2, [R(4, 20)]),
    "repeat": (lambda x: x.repeat(2, 3) * 2, [R(4, 8)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1) * 2, [R(4, 8)]),
    "expand": (lambda x: x.unsqueeze(1).expand(4, 3, 20) * 2, [R(4, 20)]),
    "chunk": (lambda x: tuple(c * 2 for c in x.chunk(3, -1)), [R(5, 48)]),
    "split": (lambda x: [c * 2 for c in x.split([1, 20, 4], 1)], [R(5, 25)]),
    "unbind": (lambda x: [c * 2 for c in x.unbind(1)], [R(5, 3, 7)]),
    "rope": (lambda x, c, s: x * c + torch.cat([-x[..., 8:], x[..., :8]], -1) * s, [R(2, 3, 5, 16), R(5, 16), R(5, 16)]),
    "causal mask": (lambda x: torch.where(torch.ones(9, 9).tril() > 0, x, -1e9), [R(2, 9, 9)]),
    "positions": (lambda x: x + torch.arange(17), [R(9, 17)]),
    "glu": (lambda x: F.glu(x, -1), [R(9, 34)]),
    "prelu": (lambda x, w: F.prelu(x, w), [R(2, 5, 9), R(5)]),
    "scalar": (lambda x: x * 2 + 1, [R(())]),
    "one element": (lambda x: x * 2 + 1, [R(1, 1)]),
    "nothing": (lambda x: x * 2 + 1, [R(3, 0, 5)]),
    "outputs of different shapes": (lambda x, y: (x + y, x * 2, y.t() * 2), [R(4, 5), R(4, 5)]),
    "an input given back": (lambda x: (x, x * 2), [R(4, 5)]),
    "strided": (lambda x, y: x + y, [R(6, 40)[:, ::2], R(20, 6).t()]),
    "overlapping": (lambda x: x + 1, [R(7).expand(5, 7)]),
    "batch norm": (lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), [R(3, 4, 5, 7), R(4), R(4).abs(), R(4), R(4)]),
    "channels last": (lambda x: F.relu(x) * 2, [R(2, 6, 5, 4).to(memory_format=torch.channels_last)]),
    "many elements": (lambda x: torch.exp(x) + 1, [R(20000)]),
}
NOT_SYMBOLIC = {"heads", "not nested reshape", "reshape of a transpose", "glu", "roll"}
"""Their sizes are tied to each other by division, which symbols do not show."""


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", MOVES)
def test_movement(name: str, symbolic: bool) -> None:
    fn, tensors = MOVES[name]
    if symbolic and name in NOT_SYMBOLIC:
        with pytest.raises(CannotLower):
            check(fn, tensors, symbolic=True)
    else:
        check(fn, tensors, symbolic=symbolic, native=True)


def test_every_move_has_a_row_that_torch_knows() -> None:
    for name in views.rows():
        assert name.startswith("lower.") or hasattr(torch.ops.aten, name.removeprefix("aten.")), name


@pytest.mark.parametrize("size", [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300])
def test_tails(size: int) -> None:
    check(lambda x, y: torch.tanh(x) + y, [R(3, size), R(size)], native=True)


def test_one_kernel_serves_other_sizes() -> None:
    fn = lambda x, y: torch.cat([x, y], 1).softmax(-1) * 2  # noqa: E731
    group = group_of(fn, [R(4, 7), R(4, 20)], symbolic=True)
    lowered = lower_group(group.graph)
    for rows, a, b in ((1, 1, 1), (5, 33, 70), (2, 64, 16), (3, 2, 100)):
        tensors = [R(rows, a), R(rows, b)]
        torch.testing.assert_close(interpret(lowered, group, tensors)[0], fn(*tensors))
        torch.testing.assert_close(run_native(lowered, group, tensors)[0], fn(*tensors))


# --- how it is written ------------------------------------------------------------------------------------------------


def loops(body: Sequence[Any]) -> list[Loop]:
    return [x for s in body if isinstance(s, Loop) for x in (s, *loops(s.body))]


def test_dense_dims_become_one_loop() -> None:
    group = group_of(lambda x: x * 2, [R(4, 8, 8)])
    assert len(loops(lower_group(group.graph).kernel.body)) == 1
    group = group_of(lambda x, y: x + y, [R(4, 8, 8), R(4, 1, 1)])
    assert len(loops(lower_group(group.graph).kernel.body)) == 2


def test_outer_loops_are_parallel() -> None:
    kernel = lower_group(group_of(lambda x: x * 2, [R(300, 300)]).graph).kernel
    assert loops(kernel.body)[0].kind is LoopKind.PARALLEL


def test_strides_of_a_strided_input_are_sizes() -> None:
    group = group_of(lambda x: x + 1, [R(6, 40)[:, ::2]])
    lowered = lower_group(group.graph)
    found = [a for a in lowered.arguments if isinstance(a, StrideArgument)]
    assert [a.dim for a in found] == [0, 1]
    known = lower_group(group.graph, strides={group.graph.inputs[0].name: (40, 2)})
    assert not [a for a in known.arguments if isinstance(a, StrideArgument)]


def test_refusals_have_a_reason() -> None:
    for fn, tensors, part in (
        (lambda x: torch.linalg.inv(x), [R(3, 3)], "aten."),
        (lambda x: torch.relu(x).sort()[0], [R(3, 3000)], "aten.sort"),
        (lambda x: x.to(torch.complex64) * 2, [R(3, 3)], "c64"),
    ):
        with pytest.raises(CannotLower, match=part):
            lower_group(group_of(fn, tensors).graph)


@pytest.mark.parametrize(("fn", "dtype"), [(torch.sin, DType.F32), (torch.cos, DType.F32), (torch.exp, DType.F64)])
def test_a_kernel_that_is_called_like_what_it_calls_calls_that(fn: Callable[..., Any], dtype: DType) -> None:
    """Its code asks C for `sin`: under that name it found itself, and called itself until the stack ended."""
    x = sample(dtype, (5, 33), 1)
    group = group_of(fn, [x], False)
    lowered = lower_group(group.graph)
    lowered = replace(lowered, kernel=replace(lowered.kernel, name=fn.__name__))
    expected, exact = [fn(x)], [fn(x.double())]
    compare(run_native(lowered, group, [x]), expected, exact)
