"""Attention: two contractions with a softmax between them, kept whole."""

from __future__ import annotations

from hotfuse.ops import costs
from hotfuse.ops.bounded_attention import NAME as BOUNDED
from hotfuse.ops.packed import NAME as PACKED
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, defop, defops

defops(
    """scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable""",
    Access.ATTENTION,
    costs.attention,
)


def _multi_head(node: costs.Node) -> costs.Dim:
    """Projections of queries, keys, values and result: 8·B·S·E², and 4·B·S²·E between them."""
    x = costs.in_shape(node)
    if len(x) != 3:
        return 0
    b, s, e = x
    return costs.plus(costs.times(b, s, e, e, 8), costs.times(b, s, s, e, 4))


defops("_native_multi_head_attention _transformer_encoder_layer_fwd", Access.ATTENTION, _multi_head)


def _packed(node: costs.Node) -> costs.Dim:
    """As if sequences were of one length: how long they are is data, and their squares add up to this at least."""
    q, k, v, offsets = (costs.shape(argument(node, n)) for n in ("query", "key", "value", "offsets"))
    if not (len(q) == len(k) == len(v) == 3 and len(offsets) == 1):
        return 0
    keys = costs.expr("//", k[0], costs.expr("max", 1, costs.plus(offsets[0], -1)))
    scores = costs.times(q[0], q[1], costs.expr("max", 1, keys))
    return costs.times(scores, costs.plus(costs.times(q[2], 2), costs.times(v[2], 2), costs.SOFTMAX))


defop(PACKED, Access.ATTENTION, _packed)
defop(BOUNDED, Access.ATTENTION, _packed)
