"""Ops that put elements elsewhere by a rule over positions: views, joins, splits, pads, repeats. No arithmetic.

Rows with `view` may give their input's memory back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotfuse.ops.own.operator import own_operator
from hotfuse.ops.table import Access, defop, defops

_M = Access.MOVEMENT
_RESHAPES = "view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten ravel squeeze unsqueeze"
RESHAPES = frozenset(f"aten.{name}" for name in _RESHAPES.split())
"""Elements in their order, in another shape."""

defops(
    _RESHAPES
    + """
    permute transpose t numpy_T mT mH matrix_H adjoint swapaxes swapdims movedim moveaxis
    expand expand_as broadcast_to broadcast_tensors meshgrid
    slice select narrow diagonal linalg_diagonal as_strided unfold view_as_real view_as_complex
    split split_with_sizes tensor_split hsplit vsplit dsplit chunk unsafe_chunk unsafe_split unsafe_split_with_sizes
    unbind atleast_1d atleast_2d atleast_3d""",
    _M,
    view=True,
)
# These give their input back in special cases: nothing to pad, one tensor to combine.
defops("pad cartesian_prod", _M, view=True)
defops(
    """cat concat concatenate stack _stack hstack vstack dstack column_stack row_stack block_diag
    combinations constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d _pad_circular _pad_enum repeat repeat_interleave tile roll flip fliplr flipud
    rot90 diag diag_embed diagflat pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle im2col
    slice_scatter select_scatter diagonal_scatter as_strided_scatter narrow_copy pad_sequence vander linalg_vander
    view_copy permute_copy expand_copy squeeze_copy unsqueeze_copy transpose_copy t_copy slice_copy select_copy
    diagonal_copy as_strided_copy unfold_copy split_copy split_with_sizes_copy unbind_copy view_as_real_copy
    view_as_complex_copy _reshape_copy _pack_padded_sequence _pad_packed_sequence _chunk_cat
    fft_fftshift fft_ifftshift""",
    _M,
)

# --- a cache with more behind it ---------------------------------------------------------------------------------------
# `cat((past, new), dim)` whose result lies with that dim outermost: what is appended to it needs no byte of it moved. A native run
# appends in place where the past has room behind it (`backends.llvm.runs.growth`); anywhere else this is a `cat`.

APPEND = "hotfuse.append.default"


@own_operator("hotfuse::append", __name__)
def _append(past: Tensor, new: Tensor, dim: int) -> Tensor:
    return torch.cat((past.movedim(dim, 0), new.movedim(dim, 0))).movedim(0, dim)


@_append.register_fake
def _appended(past: Tensor, new: Tensor, dim: int) -> Tensor:
    return torch.cat((past.movedim(dim, 0), new.movedim(dim, 0))).movedim(0, dim)


defop("hotfuse.append", Access.OPAQUE)


def append_order(rank: int, dim: int) -> tuple[int, ...]:
    """The dims of such a result from the outermost in."""
    return (dim, *(d for d in range(rank) if d != dim))
