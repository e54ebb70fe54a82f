"""Products with weights of four bits, as operators of torch.

    panels = nibble_panels(weight)                  bytes [N, blocks, block / 2], two weights each, the lower bits first
    scales = nibble_columns(scales)                 numbers of blocks, [N, blocks], in the order of the panels' columns
    y = nibble_mm(x, panels, scales, zeros, N)      y[m, n] = sum over k of x[m, k] * (q[n, k] - zero[n, block]) * scale[n, block]

A panel has 64 columns. Eight weights of a column that follow each other along K are one 32-bit word, and the words of the columns
lie side by side: a kernel takes weights out of 16 columns' words with one mask each, and they are never in memory as floats
(`lower.cpu.gemm.nibbles`). The last panel is filled up with weights whose scale is 0. Zeros are bytes, so that what
is taken off a weight is exact; without them it is 8.
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops import costs
from hotfuse.ops.own.operator import own_operator
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, defop

PRODUCT, PANELS, COLUMNS = "hotfuse.nibble_mm", "hotfuse.nibble_panels", "hotfuse.nibble_columns"
PANEL = 64
"""Columns of a panel."""
WORD = 8
"""Weights of a column that are one 32-bit word."""
MIDDLE = 8
"""The zero of weights that are told none."""
MAX_ROWS = 8
"""Rows up to which weights are made floats in registers; with more, weights that were widened once are read often enough."""


def _filled(t: Tensor, value: float = 0) -> Tensor:
    """Rows up to whole panels."""
    beyond = -t.shape[0] % PANEL
    return F.pad(t, [0, 0, 0, beyond], value=value) if beyond else t


def _sizes(n: int, inner: int) -> tuple[int, int, int]:
    return (-(-n // PANEL), inner, PANEL)


@own_operator("hotfuse::nibble_panels", __name__)
def _nibble_panels(weight: Tensor) -> Tensor:
    words = weight.reshape(weight.shape[0], -1).contiguous().view(torch.int32)
    return _filled(words).reshape(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()


@_nibble_panels.register_fake
def _panels_like(weight: Tensor) -> Tensor:
    n, blocks, half = weight.shape
    return weight.new_empty(_sizes(n, blocks * half * 2 // WORD), dtype=torch.int32)


@own_operator("hotfuse::nibble_columns", __name__)
def _nibble_columns(numbers: Tensor) -> Tensor:
    return _filled(numbers).reshape(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()


@_nibble_columns.register_fake
def _columns_like(numbers: Tensor) -> Tensor:
    return numbers.new_empty(_sizes(*numbers.shape))


@own_operator("hotfuse::nibble_mm", __name__)
def _nibble_mm(x: Tensor, panels: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> Tensor:
    words, blocks = panels.shape[1], scales.shape[1]
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32)
    q = (panels.unsqueeze(2) >> shifts.reshape(-1, 1)) & 15  # panel, word, place in the word, column
    real = q.reshape(panels.shape[0], blocks, words * WORD // blocks, PANEL).to(x.dtype)
    real = (real - (MIDDLE if zeros is None else zeros.unsqueeze(2).to(x.dtype))) * scales.unsqueeze(2)
    dense = real.reshape(panels.shape[0], words * WORD, PANEL).transpose(0, 1).reshape(words * WORD, -1)
    return torch.mm(x, dense[:, :columns])


@_nibble_mm.register_fake
def _product_like(x: Tensor, panels: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> Tensor:
    torch._check(x.shape[1] == panels.shape[1] * WORD)  # pyright: ignore[reportPrivateUsage]
    return x.new_empty((x.shape[0], columns))


def packed(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Panels, and scales and zeros in their order; nodes of a graph, where one is traced, which constants are folded out of."""
    own = torch.ops.hotfuse
    return own.nibble_panels(weight), own.nibble_columns(scales), None if zeros is None else own.nibble_columns(zeros)


def nibble_mm(x: Tensor, panels: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> Tensor:
    """Rows times such weights."""
    return torch.ops.hotfuse.nibble_mm(x, panels, scales, zeros, columns)


def nibble_product(node: Node, params: Container[str]) -> bool:
    """Whether a product has few rows of floats and constant weights."""
    x, panels, scales, zeros = (argument(node, n) for n in ("x", "panels", "scales", "zeros"))
    rows, words, blocks = _shape(x, DType.F32), _shape(panels, DType.I32), _shape(scales, DType.F32)
    constant = all(isinstance(v, Value) and v.name in params for v in (panels, scales, zeros) if v is not None)
    told = zeros is None or _shape(zeros, DType.U8) == blocks
    if not constant or not told or len(rows) != 2 or len(words) != 3 or len(blocks) != 3:
        return False
    known = [n for n in (*rows, *words, *blocks) if isinstance(n, int) and n > 0]
    if len(known) != 8:
        return False
    m, k, _, each, _, _, of, _ = known
    return m <= MAX_ROWS and each % of == 0 and k == each * WORD


def _shape(v: object, dtype: DType) -> tuple[Dim, ...]:
    found = v.type if isinstance(v, Value) else None
    return found.shape if isinstance(found, TensorType) and found.dtype is dtype else ()


def _flops(node: costs.Node) -> costs.Dim:
    x, columns = costs.shape(argument(node, "x")), argument(node, "columns")
    return costs.times(*x, columns, 2) if len(x) == 2 and isinstance(columns, int) else 0


defop(PRODUCT, Access.CONTRACTION, _flops)
defop(PANELS, Access.OPAQUE)
defop(COLUMNS, Access.OPAQUE)
