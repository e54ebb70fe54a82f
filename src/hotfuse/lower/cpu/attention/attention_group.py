"""`scaled_dot_product_attention`, with the views around it, as one kernel.

    q, k, v = transpose(view(x, [B, S, H, D]), 1, 2) of projections        read in place
    out = reshape(transpose(attention, 1, 2), [B, S, H * D])               written in place

Views before and after are steps through memory (`lower.cpu.attention.operand_views`). A group that does anything else to an operand
cannot be lowered here. Attention that is spelled out as products and a softmax (`analysis.attention`) is the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import mul, same
from hotfuse.lower.common.attention_node import attention_node, four
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.cpu.attention.attention_job import CAUSAL, HALVES, MAX_WIDTH, AffineIndex, Attention, Mask
from hotfuse.lower.cpu.attention.attention_kernel import attend
from hotfuse.lower.cpu.attention.operand_views import Views, one_wide
from hotfuse.lower.cpu.attention.tiling import AttentionTiling, choose, shared
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import shape_of
from hotfuse.tile.build import KernelBuilder


def lower_attention(
    graph: Graph,
    core: Core,
    *,
    name: str = "attention",
    strides: Mapping[str, tuple[int, ...]] | None = None,
    tiling: AttentionTiling | None = None,
) -> Lowered:
    """A kernel for a group around one attention; `strides` are those of inputs whose type does not tell them."""
    return _AttentionGroup(graph, core, name, strides or {}, tiling).lower()


class _AttentionGroup:
    """One group while it is lowered."""

    def __init__(
        self, graph: Graph, core: Core, name: str, strides: Mapping[str, tuple[int, ...]], tiling: AttentionTiling | None
    ) -> None:
        self.graph, self.core, self.tiling = graph, core, tiling
        self.job = attention_node(graph)
        self.where = str(self.job.node.loc)
        self.builder = KernelBuilder(name, self.job.node.loc)
        self.memory = KernelBuffers(self.builder, graph, strides)
        self.views = Views(graph, self.memory, self.job.node, four)

    def lower(self) -> Lowered:
        asked = self.job
        shapes = [four(shape_of(x), 1) for x in (asked.q, asked.k, asked.v)]
        if asked.turned:
            shapes[1] = (*shapes[1][:2], shapes[1][3], shapes[1][2])
        (batch, heads, queries, width), (_, kv_heads, keys, _), (*_, value_width) = shapes
        self.check(shapes, heads, kv_heads)
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        assert isinstance(width, int) and isinstance(value_width, int)
        uses = heads // kv_heads if kv_heads else 1
        k = self.views.walked(asked.k, uses)
        if asked.turned:
            k = replace(k, dims=tuple(AffineIndex(d.offset, (*d.steps[:2], d.steps[3], d.steps[2])) for d in k.dims))
        if width == 1:
            k = one_wide(k)
        job = Attention(
            q=self.views.view(asked.q),
            k=k,
            v=self.views.view(asked.v, uses),
            out=self.views.output(),
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            width=width,
            value_width=value_width,
            scale=1 / math.sqrt(width) if asked.scale is None else asked.scale,
            band=CAUSAL if asked.causal else None,
            mask=self.mask((batch, heads, queries, keys)),
            empty_is_nan=asked.empty_is_nan,
            nan_is_zero=asked.nan_is_zero,
        )
        self.views.neighbours(job.k, asked.k, only=(2,))
        tiling = self.tiling or shared(choose(self.core, width), mul(batch, heads), queries, self.core.threads)
        attend(self.builder, job, tiling)
        return self.memory.finish(self.builder.finish())

    def check(self, shapes: list[tuple[Dim, Dim, Dim, Dim]], heads: Dim, kv_heads: Dim) -> None:
        """Whether the kernel can do what torch would."""
        q, k, v = shapes
        where = self.where
        dtype = tensor_type(self.job.q).dtype
        for x in (self.job.q, self.job.k, self.job.v):
            if tensor_type(x).dtype is not dtype or dtype not in (DType.F32, *HALVES):
                raise CannotLower(f"attention whose operand %{x.name} is {tensor_type(x).dtype.value}", where=where)
        if not all(isinstance(w, int) and 0 < w <= MAX_WIDTH for w in (q[3], v[3])):
            raise CannotLower(f"heads of width {q[3]} and {v[3]}", where=where)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise CannotLower("the number of heads is known only at run time", where=where)
        grouped = self.job.grouped
        if (heads != kv_heads and not (grouped and kv_heads and heads % kv_heads == 0)) or v[1] != kv_heads:
            raise CannotLower(f"{heads} query heads meet {kv_heads} and {v[1]}", where=where)
        agree = same(q[0], k[0]) and same(q[0], v[0]) and same(k[2], v[2]) and same(q[3], k[3])
        if not agree or len({len(shape_of(x)) for x in (self.job.q, self.job.k, self.job.v)}) != 1:
            raise CannotLower("attention whose operands do not have one batch", where=where)

    def mask(self, shape: tuple[Dim, Dim, Dim, Dim]) -> Mask | None:
        value = self.job.mask
        if value is None:
            return None
        where = self.where
        if tensor_type(value).dtype not in (DType.BOOL, DType.F32, *HALVES):
            raise CannotLower(f"attention with a mask of {tensor_type(value).dtype.value}", where=where)
        if self.job.causal:
            raise CannotLower("attention with a mask, and causal as well", where=where)
        given = shape_of(value)
        rank = len(shape_of(self.job.node.outs[0]))
        if len(given) > rank:
            raise CannotLower(f"a mask of {len(given)} dims", where=where)
        full = shape if rank == 4 else (shape[0], *shape[2:])[-rank:]
        for n, whole in zip(reversed(given), reversed(full), strict=False):
            if n != 1 and not same(n, whole):
                raise CannotLower(f"whether a mask's dim of {n} is repeated to {whole} is not known", where=where)
        rows = self.views.walked(value)
        return Mask(rows, per_query=rows.walk(2)[0] >= 0, hides=self.job.hides)
