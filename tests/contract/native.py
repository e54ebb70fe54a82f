"""Running kernels natively and by the interpreter, between canary bytes, and comparing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.ir.dims import evaluate
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget, host_levels
from hotfuse.tile import interpreter
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import OWN, BufferKind, Kernel

LEVELS = host_levels()
FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
CANARY = 0xA5
PAD = 128
Array = np.ndarray[Any, np.dtype[Any]]
levels = pytest.mark.parametrize("target", LEVELS, ids=[t.name for t in LEVELS])


def run_native(
    kernel: Kernel, arrays: Mapping[str, Array], sizes: Mapping[str, int], target: CpuTarget, threads: int = 1
) -> None:
    """Run on copies that lie between canary bytes; the outputs' bytes are copied back, and no canary may have changed."""
    native = load_kernel(compile_kernel(kernel, target))
    given = [b for b in kernel.buffers if b.kind not in OWN]
    held: list[Array] = []
    for buffer in given:
        array = arrays[buffer.name]
        held.append(np.full(array.nbytes + 2 * PAD, CANARY, np.uint8))
        held[-1][PAD : PAD + array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    arena = native.arena(sizes, threads)
    base = 0 if arena is None else -(-arena.data_ptr() // 64) * 64
    native.enter(*[h.ctypes.data + PAD for h in held], base, *[sizes[s] for s in kernel.sizes], threads)
    for buffer, h in zip(given, held, strict=True):
        assert (h[:PAD] == CANARY).all() and (h[-PAD:] == CANARY).all(), f"written outside {buffer.name}"
        if buffer.kind is BufferKind.OUTPUT:
            array = arrays[buffer.name]
            array[...] = np.frombuffer(h[PAD : PAD + array.nbytes].tobytes(), array.dtype).reshape(array.shape)
        else:
            assert h[PAD : h.size - PAD].tobytes() == arrays[buffer.name].tobytes(), f"{buffer.name} was written"


def blank(kernel: Kernel, arrays: dict[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The arrays, with an output for every output buffer that has none, each value there hard to mistake for a result."""
    for buffer in kernel.buffers:
        if buffer.kind is BufferKind.OUTPUT and buffer.name not in arrays:
            shape = tuple(evaluate(d, sizes) for d in buffer.shape)
            arrays[buffer.name] = np.full(shape, 77 if buffer.dtype is not DType.BOOL else 1, NUMPY[buffer.dtype])
    return arrays


def compare(got: Array, want: Array, ulps: float, what: str) -> None:
    """Equal, or within so many units in the last place of what is wanted."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    assert (np.isnan(g) == np.isnan(w)).all(), f"{what}: NaN differs\n{g}\n{w}"
    info = ml_dtypes.finfo(got.dtype)
    near = np.maximum(np.abs(np.where(np.isfinite(w), w, float(info.max))), float(info.smallest_normal))
    unit = 2.0 ** (np.floor(np.log2(near)) + math.log2(float(info.eps)))
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0, np.abs(g - w) / unit)
    assert off.size == 0 or off.max() <= ulps, (
        f"{what}: off by {off.max()} ulp: {g.ravel()[off.argmax()]!r} for {w.ravel()[off.argmax()]!r}"
    )


def check(
    kernel: Kernel,
    arrays: dict[str, Array],
    sizes: Mapping[str, int],
    target: CpuTarget,
    ulps: float = 0.0,
    threads: int = 1,
) -> None:
    """The native kernel and the interpreter agree."""
    want = {n: a.copy() for n, a in blank(kernel, arrays, sizes).items()}
    got = {n: a.copy() for n, a in want.items()}
    interpreter.run(kernel, want, sizes)
    run_native(kernel, got, sizes, target, threads)
    for buffer in kernel.buffers:
        if buffer.kind is BufferKind.OUTPUT:
            compare(got[buffer.name], want[buffer.name], ulps, f"{kernel.name} {buffer.name} on {target.name}")


def numbers(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], small: bool = False) -> Array:
    """Random numbers with the awkward ones among them."""
    kind = NUMPY[dtype]
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        x = rng.standard_normal(shape) * (1 if small else 3)
        special = (
            [0.0, -0.0, 1.0, -1.0, 1.5, 2.5]
            if small
            else [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1.5, 2.5]
        )
        return np.where(rng.random(shape) < 0.25, rng.choice(special, shape), x).astype(kind)
    info = np.iinfo(kind)
    x = rng.integers(-9 if info.min < 0 else 0, 10, shape, dtype=np.int64).astype(kind)
    if small:
        return x
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array([info.min, info.max, 0, 1], kind), shape), x).astype(
        kind
    )
