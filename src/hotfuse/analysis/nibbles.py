"""Products with weights of four bits that a kernel takes as they are (`lower.cpu.gemm.nibbles`)."""

from __future__ import annotations

from collections.abc import Container

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.nibbles import WORD
from hotfuse.ops.schema import argument

MAX_ROWS = 8
"""Rows up to which weights are made floats in registers; with more, weights that were widened once are read often enough."""


def nibble_product(node: Node, params: Container[str]) -> bool:
    """Whether a product has few rows of floats and constant weights."""
    x, panels, scales, zeros = (argument(node, n) for n in ("x", "panels", "scales", "zeros"))
    rows, words, blocks = _shape(x, DType.F32), _shape(panels, DType.I32), _shape(scales, DType.F32)
    constant = all(isinstance(v, Value) and v.name in params for v in (panels, scales, zeros) if v is not None)
    told = zeros is None or _shape(zeros, DType.U8) == blocks
    if not constant or not told or len(rows) != 2 or len(words) != 3 or len(blocks) != 3:
        return False
    known = all(isinstance(n, int) and n > 0 for n in (*rows, *words, *blocks))
    return known and rows[0] <= MAX_ROWS and words[1] % blocks[1] == 0 and rows[1] == words[1] * WORD  # type: ignore[operator]


def _shape(v: object, dtype: DType) -> tuple[Dim, ...]:
    found = v.type if isinstance(v, Value) else None
    return found.shape if isinstance(found, TensorType) and found.dtype is dtype else ()
