"""Ops that read or write at positions that other data, or a computed coordinate, choose; sorting and sampling too."""

from __future__ import annotations

from hotfuse.ops.costs import per_input, per_output, sorting
from hotfuse.ops.table import Access, defops

_I = Access.INDEXING

defops(
    """gather take take_along_dim index _unsafe_index index_select embedding masked_select nonzero nonzero_numpy
    nonzero_static argwhere one_hot _unsafe_masked_index _unsafe_masked_index_put_accumulate
    scatter index_copy index_fill masked_scatter put index_put _unsafe_index_put _index_put_impl
    max_unpool2d max_unpool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d""",
    _I,
)
defops("scatter_add scatter_reduce index_add index_reduce", _I, per_input(1))
defops("embedding_bag _embedding_bag _embedding_bag_forward_only", _I, per_output(2))
defops("col2im affine_grid_generator", _I, per_output(2))
defops("upsample_linear1d", _I, per_output(4))
defops("upsample_bilinear2d _upsample_bilinear2d_aa grid_sampler grid_sampler_2d", _I, per_output(10))
defops("upsample_trilinear3d grid_sampler_3d", _I, per_output(22))
defops("upsample_bicubic2d _upsample_bicubic2d_aa", _I, per_output(50))
defops("sort argsort msort topk", _I, sorting)
defops("unique_dim unique_consecutive unique_dim_consecutive _unique _unique2", _I, sorting)
