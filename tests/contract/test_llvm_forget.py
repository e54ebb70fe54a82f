"""`forget`: constants of functions in front of a product do not push its sums out of the registers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotfuse.backends.llvm.native import assembly_text
from hotfuse.ir.text import parse
from hotfuse.lower import Core, lower
from hotfuse.native.target import cross_neon, level
from hotfuse.tile.program import Kernel, Loop, Stmt, When

_WIDE = level("avx512", {"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})


def _kernel(function: str) -> Kernel:
    text = f"""graph group(%x: f32[n, 256]) {{
  param %w: f32[96, 256] = "w"
  %f: f32[n, 256] = aten.{function}.default(%x)
  %linear: f32[n, 96] = aten.linear.default(%f, %w, None)
  return %linear
}}
"""
    return lower(parse(text), Core(16, 32, 32 << 10, 1 << 20)).kernel


def _without(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    kept: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop | When):
            kept.append(replace(s, body=_without(s.body)))
        elif s.op != "forget":
            kept.append(s)
    return tuple(kept)


def _kept_in_memory(kernel: Kernel) -> int:
    """Vectors that go to the stack and back."""
    lines = assembly_text(kernel, _WIDE).splitlines()
    return sum("(%rsp" in line and "zmm" in line and "vbroadcast" not in line for line in lines)


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_sums_stay_in_registers(function: str) -> None:
    kernel = _kernel(function)
    plain = replace(kernel, body=_without(kernel.body))
    assert plain != kernel
    assert 2 * _kept_in_memory(kernel) < _kept_in_memory(plain)


def test_other_registers_have_names_too() -> None:
    assert "fmla" in assembly_text(_kernel("gelu"), cross_neon())
