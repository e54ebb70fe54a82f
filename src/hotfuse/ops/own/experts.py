"""Rows that go to experts, as operators of torch: their order by expert, and a product with the weights of each row's expert.

    order, rank, ends = expert_order(ids, 4)      the rows of expert e are order[ends[e - 1] : ends[e]], and order[rank[i]] == i
    y = grouped_mm(x, weight, ends)               y[ends[e - 1] : ends[e]] = x[ends[e - 1] : ends[e]] @ weight[e]

Models spell the first as a sort with a histogram of what was sorted, the second as an operator of their library's
(`simplify.experts`); generated code has a kernel for each (`lower.cpu.expert_order`, `lower.cpu.gemm.grouped`), which does nothing
for an expert without rows. Rows behind the last end are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotfuse.ops import costs
from hotfuse.ops.own.operator import own_operator
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, defop

ORDER, PRODUCT = "hotfuse.expert_order", "hotfuse.grouped_mm"
EXPERT_OPS = frozenset({ORDER, PRODUCT})


@own_operator("hotfuse::expert_order", __name__)
def _expert_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.sort(ids, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    counts = torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
    return order, rank, torch.cumsum(counts, 0, dtype=torch.int32)


@_expert_order.register_fake
def _order_like(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids), ids.new_empty((experts,), dtype=torch.int32)


@own_operator("hotfuse::grouped_mm", __name__)
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start != end:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
            start = end
    return out


@_grouped_mm.register_fake
def _product_like(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1] and weight.shape[0] == ends.shape[0])  # pyright: ignore[reportPrivateUsage]
    return x.new_empty((x.shape[0], weight.shape[2]))


def _flops(node: costs.Node) -> costs.Dim:
    """Every row meets one expert."""
    x, weight = (costs.shape(argument(node, n)) for n in ("x", "weight"))
    return costs.times(*x, weight[2], 2) if len(x) == 2 and len(weight) == 3 else 0


defop(ORDER, Access.INDEXING, costs.per_input(4))
defop(PRODUCT, Access.CONTRACTION, _flops)
