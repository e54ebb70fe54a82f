"""Ops that slide a window over space: convolutions and pools."""

from __future__ import annotations

from hotfuse.ops import costs
from hotfuse.ops.table import Access, defops

_W = Access.CONVOLUTION

defops(
    """conv1d conv2d conv3d convolution _convolution _convolution_mode conv_transpose1d conv_transpose2d
    conv_transpose3d mkldnn_convolution cudnn_convolution thnn_conv2d conv_depthwise3d _conv_depthwise2d""",
    _W,
    costs.convolution,
)
defops("conv_tbc", _W, costs.conv_tbc)
defops(
    """max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    avg_pool1d avg_pool2d avg_pool3d fractional_max_pool2d fractional_max_pool3d""",
    _W,
    costs.window,
)
defops(
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d""",
    _W,
    costs.per_input(1),
)
