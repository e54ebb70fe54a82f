"""With which instructions a kernel's products are made, in a few words: read off the code that was generated for it."""

from __future__ import annotations

from hotfuse.backends.llvm.emission import matrix_unit
from hotfuse.backends.llvm.emission.statements import uses
from hotfuse.ir.types import DType
from hotfuse.native.target import CpuTarget
from hotfuse.tile.program import Kernel

_DOTS = {DType.F32: {"dpbf16ps": "bf16 dot"}, DType.I32: {"vpdpbusd": "int8 dot", "pmadd": "int16 dot"}}
"""By what is summed: instructions that multiply several numbers at once, and what they are called."""


def multiplies(kernel: Kernel, text: str, target: CpuTarget) -> str:
    """`avx512 fma f32` of a kernel as LLVM IR; empty where it has no products."""
    used = [tile for instr, at, tile in uses(kernel.body) if instr is not None and instr.op == "mma" and at == 0]
    named = [_made(tile.type.dtype, text, target) for tile in used]
    if matrix_unit.multiplies_blocks(kernel):
        vectors = f"{target.name} {'fma' if target.fma else 'multiply and add'} f32"
        named.append("amx bf16 f32" if matrix_unit.MARK in text else vectors)
    return ", ".join(dict.fromkeys(named))


def _made(dtype: DType, text: str, target: CpuTarget) -> str:
    for mark, name in _DOTS.get(dtype, {}).items():
        if mark in text:
            return f"{target.name} {name}"
    fused = "@llvm.fma." in text and dtype in (DType.F32, DType.F64)
    return f"{target.name} {'fma' if fused else 'multiply and add'} {dtype.value}"
