"""Normalizations: a reduction over part of the input, then pointwise work on all of it. They stay whole."""

from __future__ import annotations

from hotfuse.ops.costs import per_input
from hotfuse.ops.own.folded_norm import MEAN, NORMALIZED, SPREAD
from hotfuse.ops.table import Access, defop, defops

_R = Access.REDUCTION

defops("layer_norm native_layer_norm group_norm native_group_norm instance_norm", _R, per_input(8))
defops("rms_norm _fused_rms_norm", _R, per_input(5))
defops(
    """batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional _batch_norm_no_update _batch_norm_with_update_functional
    _batch_norm_impl_index cudnn_batch_norm""",
    _R,
    per_input(4),
)
for _name, _flops in ((MEAN, 1), (SPREAD, 3), (NORMALIZED, 4)):
    defop(_name, _R, per_input(_flops))
