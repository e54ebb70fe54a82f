"""The instructions of a kernel's products are named as they were generated, and explain() shows them."""

from __future__ import annotations

import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.emission.multiplies import multiplies
from hotfuse.backends.llvm.native import compile_kernel, llvm_text
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget, host, level
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Kernel
from tests.races import kernels_win, slow_library

AVX2 = {"sse4.2", "avx", "avx2", "fma"}
WIDE = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def product(left: DType, right: DType, total: DType) -> Kernel:
    b = KernelBuilder("product")
    x, w, y = b.input("x", left, (3, 8)), b.const("w", right, (8, 16)), b.output("y", total, (3, 16))
    acc = b.fill(0, total, (3, 16))
    b.store(y, (0, 0), b.mma(acc, b.load(x, (0, 0), (3, 8)), b.load(w, (0, 0), (8, 16))))
    return b.finish()


REAL = product(DType.F32, DType.F32, DType.F32)
SHORT = product(DType.BF16, DType.BF16, DType.F32)
BYTES = product(DType.U8, DType.I8, DType.I32)


@pytest.mark.parametrize(
    ("kernel", "target", "want"),
    [
        (REAL, level("avx512", WIDE), "avx512 fma f32"),
        (REAL, level("avx2", AVX2), "avx2 fma f32"),
        (REAL, level("generic", set()), "generic multiply and add f32"),
        (SHORT, level("avx512", WIDE | {"avx512bf16"}), "avx512 bf16 dot"),
        (SHORT, level("avx512", WIDE), "avx512 fma f32"),
        (BYTES, level("avx512", WIDE | {"avx512vnni"}), "avx512 int8 dot"),
        (BYTES, level("avx2", AVX2), "avx2 int16 dot"),
    ],
)
def test_products_name_their_instructions(kernel: Kernel, target: CpuTarget, want: str) -> None:
    assert multiplies(kernel, llvm_text(kernel, target), target) == want


def test_a_kernel_without_products_names_none_and_compiling_tells() -> None:
    b = KernelBuilder("twice")
    x, y = b.input("x", DType.F32, (16,)), b.output("y", DType.F32, (16,))
    t = b.load(x, (0,), (16,))
    b.store(y, (0,), b.map("add", t, t))
    assert compile_kernel(b.finish()).multiplies == ""
    assert compile_kernel(REAL).multiplies == multiplies(REAL, llvm_text(REAL), host()) != ""


def test_the_kernel_s_line_in_explain_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval(), torch.randn(16, 64)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2, record=False)) as fast:
        for _ in range(40):
            fast(x)
            assert fast.wait(120)
        assert f"({host().name} " in str(fast.explain(full=True))
