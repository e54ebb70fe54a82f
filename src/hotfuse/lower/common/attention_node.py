"""The attention of a group, as one operator or spelled out in several: its operands by role."""

from __future__ import annotations

from hotfuse.analysis.attention import FUSED, written
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.lower.common.errors import CannotLower
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


@dataclass(frozen=True, slots=True)
class AttentionNode:
    """An attention of either kind: one node, or spelled out."""

    node: Node
    """The one that gives the result."""
    q: Value
    k: Value
    v: Value
    turned: bool
    """Whether k is [..., element, key]."""
    scale: float | None
    mask: Value | None = None
    hides: bool = False
    causal: bool = False
    grouped: bool = False
    empty_is_nan: bool = False
    nan_is_zero: bool = False


def attention_node(graph: Graph) -> AttentionNode:
    """What a group's attention is to compute."""
    spelled = written(graph)
    whole = [n for n in graph.nodes if packet(n.op) == FUSED]
    if len(spelled) + len(whole) != 1:
        raise CannotLower(f"a group with {len(spelled) + len(whole)} attentions")
    if spelled:
        (w,) = spelled
        last = graph.nodes[w.nodes[-1]]
        return AttentionNode(last, w.q, w.k, w.v, turned=True, scale=w.scale, mask=w.mask, hides=w.hides,
                      empty_is_nan=w.empty_is_nan, nan_is_zero=not w.empty_is_nan)  # fmt: skip
    (node,) = whole
    where = str(node.loc)
    scale = argument(node, "scale")
    if argument(node, "dropout_p", 0.0) not in (0, 0.0):
        raise CannotLower("attention with dropout", where=where)
    if not (scale is None or isinstance(scale, int | float)):
        raise CannotLower("attention whose scale is known only at run time", where=where)
    q, k, v, mask = (argument(node, n) for n in ("query", "key", "value", "attn_mask"))
    if not (isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)):
        raise CannotLower("attention whose operands are not tensors", where=where)
    if not (mask is None or isinstance(mask, Value)):
        raise CannotLower("attention whose mask is not a tensor", where=where)
    causal, grouped = (bool(argument(node, n, default=False)) for n in ("is_causal", "enable_gqa"))
    return AttentionNode(node, q, k, v, turned=False, scale=None if scale is None else float(scale), mask=mask,
                  causal=causal, grouped=grouped)  # fmt: skip


def four(shape: tuple[Dim, ...], absent: Dim) -> tuple[Dim, Dim, Dim, Dim]:
    """[batch, head, row, element]; three dims are a batch of single heads."""
    match shape:
        case (row, element):
            return absent, absent, row, element
        case (batch, row, element):
            return batch, absent, row, element
        case (batch, head, row, element):
            return batch, head, row, element
        case _:
            raise CannotLower(f"attention over {len(shape)} dims")
