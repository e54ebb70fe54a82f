"""Kernels that count what they store: torch, the tile interpreter and native code tell the same, whatever a kernel is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import output_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.lowered import BufferArgument, BufferRole
from hotfuse.lower.cpu import scratch
from hotfuse.lower.cpu.group import lower_group
from hotfuse.tile import interpreter
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.instrument import BLANK, WIDTH, instrumented, outputs, ranges
from hotfuse.tile.program import OWN, Kernel
from hotfuse.tile.text import parse, show
from tests.contract.lowering import as_numpy, bindings, group_of, outputs_of, sizes_of

Function = Callable[..., Any]
NAN, INF = math.nan, math.inf


def awkward(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape) * 3
    special = torch.tensor([0.0, -0.0, NAN, INF, -INF, 1e-40, -3e38])
    return torch.where(torch.rand(shape) < 0.3, special[torch.randint(0, 7, shape)], x)


def told(t: torch.Tensor) -> tuple[int, int, int, float, float]:
    """Elements, zeros, non-finite ones, least and greatest."""
    finite = t[torch.isfinite(t)].double()
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (INF, -INF)
    return t.numel(), int((t == 0).sum()), int((~torch.isfinite(t)).sum()), low, high


def called(kernel: Kernel, arrays: dict[str, np.ndarray[Any, Any]], sizes: dict[str, int], threads: int) -> np.ndarray[Any, Any]:
    """Run natively, as a run calls it: buffers, the arena, counters, the arena once more."""
    native = load_kernel(compile_kernel(kernel))
    need = scratch.plan(kernel).arena_bytes(sizes, threads) + 64
    arena = np.zeros(need, np.uint8)
    base = -(-arena.ctypes.data // 64) * 64
    counters = np.array(BLANK * len(outputs(kernel)), np.int64)[: kernel.buffer("counters").shape[0]]
    given = [b.name for b in kernel.buffers if b.kind not in OWN]
    at = {**{n: a.ctypes.data for n, a in arrays.items()}, "arena": base, "counters": counters.ctypes.data}
    native.enter(*[at[n] for n in given], base, *[sizes[s] for s in kernel.sizes], threads)
    return counters


def check(fn: Function, tensors: Sequence[torch.Tensor], symbolic: bool = False) -> None:
    group = group_of(fn, tensors, symbolic)
    lowered = lower_group(group.graph)
    kernel = instrumented(lowered.kernel)
    assert parse(show(kernel)) == kernel
    sizes = sizes_of(lowered, group.graph, tensors)
    by_name = {v.name: t for v, t in zip(group.graph.inputs, tensors, strict=True)}
    results: list[dict[str, torch.Tensor]] = []
    for way in ("interpreted", "native", "two threads"):
        made = outputs_of(lowered, group.graph, bindings(group.graph, tensors))
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for a in lowered.arguments:
            if isinstance(a, BufferArgument):
                t = made[a.value] if a.role is BufferRole.OUTPUT else by_name[a.value]
                flat = len(lowered.kernel.buffer(a.buffer).shape) == 1 and t.dim() != 1
                arrays[a.buffer] = as_numpy(torch.as_strided(t, (t.numel(),), (1,)) if flat else t)
        if way == "interpreted":
            counters = np.array(BLANK * len(outputs(lowered.kernel)), np.int64)
            interpreter.run(kernel, {**arrays, "arena": np.zeros(1, np.uint8), "counters": counters}, sizes)
        else:
            counters = called(kernel, arrays, sizes, 1 if way == "native" else 2)
        names = [a.value for a in lowered.arguments if isinstance(a, BufferArgument) and a.role is BufferRole.OUTPUT]
        for i, name in enumerate(names):
            n, zeros, odd, top, bottom = counters[WIDTH * i : WIDTH * (i + 1)].tolist()
            value = next(v for v in output_values(group.graph) if v.name == name)
            assert isinstance(value.type, TensorType)
            assert (n, zeros, odd, *ranges(value.type.dtype, top, bottom)) == told(made[name]), (way, name)
        results.append(made)
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 37), (64, 48), (0, 4)])
def test_pointwise(shape: tuple[int, int], symbolic: bool) -> None:
    check(lambda x, y: (torch.relu(x) + y, x * 2), [awkward(*shape), awkward(*shape)], symbolic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8])
def test_element_types(dtype: torch.dtype) -> None:
    x = awkward(9, 21).to(dtype) if dtype.is_floating_point else torch.randint(0, 4, (9, 21)).to(dtype)
    check(lambda x: x + x, [x])
    check(lambda x: x > 1, [x])


def test_rows() -> None:
    check(lambda x: F.layer_norm(x, (48,)), [torch.randn(11, 48)])
    check(lambda x: x.sum(-1), [torch.randn(11, 48)])


def test_all_alike() -> None:
    for number in (0.0, -0.0, NAN, -INF, -2.5):
        check(lambda x: x * 1.0, [torch.full((5, 3), number)])
    check(lambda x: x + 0, [torch.tensor([[-(2**63), 2**63 - 1]])])


def test_what_is_read_again_is_not_counted() -> None:
    b = KernelBuilder("again")
    n = b.size("n")
    x, y = b.input("x", DType.F32, (n,)), b.output("y", DType.F32, (n,))
    with b.loop("i", 0, n, 16) as i:
        left = [remaining(n, i.var)]
        b.store(y, (i.var,), b.load(x, (i.var,), (16,), valid=left), valid=left)
        b.store(y, (i.var,), b.map("add", b.load(y, (i.var,), (16,), valid=left), 1.0), valid=left)
    with pytest.raises(InternalError, match="can be counted"):
        instrumented(b.finish())


def test_what_is_stored_twice_shows() -> None:
    b = KernelBuilder("twice")
    x, y = b.input("x", DType.F32, (16,)), b.output("y", DType.F32, (16,))
    t = b.load(x, (0,), (16,))
    b.store(y, (0,), t)
    b.store(y, (0,), b.map("neg", t))
    counters = np.array(BLANK, np.int64)
    interpreter.run(instrumented(b.finish()), {"x": np.ones(16, np.float32), "y": np.zeros(16, np.float32),
               "arena": np.zeros(1, np.uint8), "counters": counters}, {})  # fmt: skip
    assert counters[0] == 32
