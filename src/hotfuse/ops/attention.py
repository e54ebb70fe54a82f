"""Attention: two contractions with a softmax between them, kept whole."""

from __future__ import annotations

from hotfuse.ops import costs
from hotfuse.ops.table import Access, defops

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
