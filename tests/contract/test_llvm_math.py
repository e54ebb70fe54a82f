"""The native functions against float64: within 2 units in the last place over the whole range, special values as C has them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.native import NativeKernel, compile_kernel, load_kernel
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from tests.contract.native import levels

Array = np.ndarray[Any, np.dtype[Any]]
LIMIT = 2.0
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        2.0,
        -2.0,
        0.5,
        -0.5,
        3.0,
        -3.0,
        1e-45,
        -1e-45,
        1.1754942e-38,
        1.1754944e-38,
        3.4028235e38,
        -3.4028235e38,
        88.72283,
        88.72284,
        89.0,
        -87.33655,
        -103.97208,
        -103.97209,
        -104.0,
        127.99999,
        128.0,
        -126.0,
        -149.0,
        -149.5,
        -150.0,
        0.70710677,
        0.7071068,
        1.4142135,
        1.4142137,
        0.99999994,
        1.0000001,
        0.625,
        0.92,
        0.925,
        3.9,
        4.0,
        9.01,
        10.0,
        -17.3,
        -25.0,
        1.5707964,
        3.1415927,
        16777216.0,
        16777217.0,
        2.0**40,
        2.0**41,
        1e30,
    ],
    np.float32,
)


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(x)).numpy()


UNARY: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "recip": np.reciprocal,
    "sqrt": np.sqrt,
}


def points(per_exponent: int, seed: int) -> Array:
    """All exponents and signs with random mantissas, the numbers where things happen denser, and the special ones."""
    rng = np.random.default_rng(seed)
    exponents = np.repeat(np.arange(512, dtype=np.uint32) << 23, per_exponent)
    every = (exponents | rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)).view(np.float32)
    dense = np.concatenate(
        [rng.uniform(-s, s, 1000 * per_exponent // 10 + 1) for s in (1, 4, 12, 110, 160, 1e4)]
    ).astype(np.float32)
    near_one = (np.float32(1) + rng.uniform(-0.6, 0.6, 100 * per_exponent)).astype(np.float32)
    x = np.concatenate([SPECIAL, every, dense, near_one])
    return np.concatenate([x, np.zeros(-x.size % 16, np.float32)])


def loaded(name: str, target: CpuTarget, operands: int, dtype: DType = DType.F32) -> NativeKernel:
    """A function over whole arrays, ready to be entered."""
    b = KernelBuilder(f"f_{name}")
    n = b.size("n")
    inputs = [b.input(f"x{k}", dtype, (n,)) for k in range(operands)]
    y = b.output("y", dtype, (n,))
    with b.loop("i", 0, n, 16) as i:
        b.store(y, (i.var,), b.map(name, *(b.load(x, (i.var,), (16,)) for x in inputs)))
    return load_kernel(compile_kernel(b.finish(), target))


def run(name: str, target: CpuTarget, *operands: Array, dtype: DType = DType.F32) -> Array:
    """A function's results."""
    out = np.zeros_like(operands[0])
    loaded(name, target, len(operands), dtype).enter(*(x.ctypes.data for x in operands), out.ctypes.data, 0, out.size, 1)
    return out


def ulps(got: Array, want: Array) -> Array:
    """How far fp32 results are from float64 ones, in units of the last place of the true value; infinity counts as 2^128."""
    assert got.dtype == np.float32 and want.dtype == np.float64
    both_nan = np.isnan(got) & np.isnan(want)
    top = 2.0**128
    g, w = (np.clip(v.astype(np.float64), -top, top) for v in (got, want))
    size = np.clip(np.abs(np.where(np.isfinite(w), w, 1.0)), 2.0**-126, 2.0**127)
    off = np.abs(g - w) / 2.0 ** (np.floor(np.log2(size)) - 23)
    off = np.where(both_nan, 0.0, np.where(np.isnan(off), np.inf, off))
    wrong_zero = (want == 0) & (got == 0) & (np.signbit(got) != np.signbit(want))
    return np.where(wrong_zero | (np.isinf(want) & (want != got)), np.inf, off)


@levels
@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name: str, target: CpuTarget) -> None:
    x = points(2000 if target.fma else 100, 7)
    with np.errstate(all="ignore"):
        want = UNARY[name](x.astype(np.float64))
    off = ulps(run(name, target, x), want)
    worst = int(off.argmax())
    print(f"{name} on {target.name}: {off.max():.3f} ulp at {x[worst]!r}, {x.size} points")
    assert off.max() <= LIMIT, (
        f"{name}({x[worst]!r}) = {run(name, target, x)[worst]!r}, wanted {want[worst]!r}: {off.max()} ulp"
    )


@levels
def test_decay(target: CpuTarget) -> None:
    """e^x of what is not positive: an error that grows with |x|, as that of an x which was rounded does."""
    rng = np.random.default_rng(3)
    x = np.concatenate([-rng.uniform(0, 110, 200_000), -(2.0 ** rng.uniform(-40, 7, 50_000)), [0.0, -0.0, -np.inf, np.nan, -3e38]])
    x = np.concatenate([x, np.zeros(-x.size % 16)]).astype(np.float32)
    got, want = run("decay", target, x).astype(np.float64), np.exp(x.astype(np.float64))
    assert np.array_equal(np.isnan(got), np.isnan(x)) and got[np.isneginf(x)] == 0
    allowed = want * (3e-7 + 4e-9 * np.minimum(np.abs(x.astype(np.float64)), 1e3)) + 2.0**-148
    assert (np.abs(got - want)[~np.isnan(x)] <= allowed[~np.isnan(x)]).all()


@levels
@pytest.mark.parametrize("name", ["exp", "exp2", "decay"])
def test_what_is_zero_does_not_underflow(name: str, target: CpuTarget) -> None:
    """An underflow is handled in microcode by some processors, and what a mask hides is the exponential of -inf."""
    if not target.fma:
        pytest.skip("the C library's function, lane by lane")
    libm, underflow = ctypes.CDLL("libm.so.6"), 0x10
    native = loaded(name, target, 1)

    def underflows(x: float) -> bool:
        inputs, out = np.full(32, x, np.float32), np.full(32, np.nan, np.float32)
        libm.feclearexcept(underflow)
        native.enter(inputs.ctypes.data, out.ctypes.data, 0, out.size, 1)
        return bool(libm.fetestexcept(underflow))

    assert not any(underflows(x) for x in (-np.inf, -3e38, -1e4, -200.0, -152.0, -1.0, 0.0))
    assert underflows(-87.5 if name != "exp2" else -126.5), "denormal results are kept, so the flag is to be seen"


@levels
def test_normal(target: CpuTarget) -> None:
    """The share of a normal distribution below x: an absolute error, nothing that grows, and 0 and 1 far out."""
    rng = np.random.default_rng(5)
    n = 200_000 if target.fma else 20_000
    x = np.concatenate([rng.uniform(-16, 16, n), 2.0 ** rng.uniform(-40, 7, n // 4), -(2.0 ** rng.uniform(-40, 7, n // 4))])
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38]])
    x = np.concatenate([x, np.zeros(-x.size % 16)]).astype(np.float32)
    got = run("normal", target, x).astype(np.float64)
    want = np.array([0.5 * math.erfc(-v * math.sqrt(0.5)) for v in x.astype(np.float64).tolist()])
    there = ~np.isnan(x)
    assert np.array_equal(np.isnan(got), ~there)
    assert (np.abs(got - want)[there] <= 1.5e-7).all() and (got[there] >= 0).all()
    assert (got[x < -15] == 0).all() and (got[x > 6] == 1).all()
    near = there & (x >= -4)
    assert (np.abs(got - want)[near] <= 1e-4 * want[near]).all()


@levels
def test_pow(target: CpuTarget) -> None:
    """All pairs of special values, and random pairs whose power is within range or just outside."""
    rng = np.random.default_rng(9)
    n = 400_000 if target.fma else 20_000
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    base = np.exp(rng.uniform(-88, 88, n)).astype(np.float32)
    exponent = (rng.uniform(-110, 110, n) / np.log(base)).astype(np.float32)
    close = (1 + rng.uniform(-1e-3, 1e-3, n)).astype(np.float32)
    far = rng.uniform(-1e5, 1e5, n).astype(np.float32)
    whole = rng.integers(-40, 40, n).astype(np.float32)
    x = np.concatenate([a.ravel(), base, close, rng.uniform(-10, 10, n).astype(np.float32)])
    y = np.concatenate([b.ravel(), exponent, far, whole])
    pad = -x.size % 16
    x, y = (np.concatenate([v, np.ones(pad, np.float32)]) for v in (x, y))
    with np.errstate(all="ignore"):
        want = np.array([_pow(p, q) for p, q in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)])
        rest = np.power(x[want.size :].astype(np.float64), y[want.size :].astype(np.float64))
    want = np.concatenate([want, rest])
    off = ulps(run("pow", target, x, y), want)
    worst = int(off.argmax())
    print(f"pow on {target.name}: {off.max():.3f} ulp")
    assert off.max() <= LIMIT, (
        f"pow({x[worst]!r}, {y[worst]!r}) = {run('pow', target, x, y)[worst]!r}, wanted {want[worst]!r}"
    )


def _pow(x: float, y: float) -> float:
    """C's pow: Python's own raises where C gives infinity or NaN."""
    try:
        return math.pow(x, y)
    except OverflowError:
        odd = y == int(y) and int(y) % 2 == 1 and abs(y) < 2**53
        return -math.inf if x < 0 and odd else math.inf
    except ValueError:
        if x == 0 and y < 0:
            odd = not math.isinf(y) and y == int(y) and int(y) % 2 == 1
            return math.copysign(math.inf, x) if odd else math.inf
        return math.nan


@levels
@pytest.mark.parametrize("dtype", [DType.F64, DType.F16, DType.BF16])
def test_other_types(dtype: DType, target: CpuTarget) -> None:
    """fp64 is the C library's; half precision is right to one unit."""
    rng = np.random.default_rng(3)
    x = np.concatenate([SPECIAL[:18], rng.uniform(-12, 12, 990).astype(np.float32)]).astype(np.float64)
    x = np.concatenate([x, np.zeros(-x.size % 16)]).astype(NUMPY[dtype])
    for name, reference in UNARY.items():
        with np.errstate(all="ignore"):
            want = reference(x.astype(np.float64)).astype(NUMPY[dtype]).astype(np.float64)
        got = run(name, target, x, dtype=dtype).astype(np.float64)
        unit = {DType.F64: 2.0**-51, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}[dtype]
        np.testing.assert_allclose(got, want, rtol=unit, atol=1e-7 if dtype is not DType.F64 else 1e-300, err_msg=name)
