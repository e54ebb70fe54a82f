"""A convolution at few places as one matrix product over its windows.

torch gives signals in batches, and those with long windows, to a library whose calls cost some 100 us however small they are; a
product over a copy of the windows takes a third of that. Other small convolutions torch computes just so by itself, with less to do
around it, and large ones the library is better at. Which of the two it is depends on torch's own rules, so it is measured where
sizes are known to come again. One thread, us, library and product:

    places, window, channels    4, 256, 258    12, 256, 258    12, 387, 128    6, 384, 64    4, 387, 128
    library                             118             146             102           104             31
    product                              40              54              57            41             44
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hotfuse.frontends.onnx.conv_kernels import ConvKernels
from hotfuse.frontends.onnx.native_floats.native_windows import SmallConv
from hotfuse.frontends.onnx.packed_weights import MARGIN, trials, usable
from hotfuse.ops.folded_conv import FoldedConv

MAX_PLACES = 64
"""Of a result, over the batch: beyond it the copy of the windows costs what the library's call does."""

Images = Callable[[Tensor], Tensor]


def faster_of(kernels: ConvKernels, x: Tensor) -> Images:
    """The convolution itself, or the product that takes less time on images like this one."""
    if not x.numel() or not usable(x):
        return kernels
    product = as_product(kernels.conv, x)
    best = kernels.for_sizes(x, at_once=product is not None)
    runs = () if product is None else ((lambda: best(x), 1.0), (lambda: product(x), MARGIN))
    if product is not None and trials.fastest(("product", *kernels.layer(x)), runs, at_once=True):
        best = product
    panels = kernels.panels_for(x)
    return best if panels is None else SmallConv(kernels.conv, best, panels, kernels.layer(x), kernels.alike(x))


def as_product(conv: FoldedConv, x: Tensor) -> Images | None:
    """The convolution on images of just these sizes as a product; None where it has too many places, or is none."""
    window, weight, shift = conv.window, conv.weight, conv.shift
    if x.dim() != conv.dims or x.dtype is not torch.float32 or not x.numel() or window.groups != 1 or window.dilation != (1, 1):
        return None
    images, rows, columns = x.shape[0], x.shape[2] if conv.dims == 4 else 1, x.shape[-1]
    (down, right), (above, beside) = window.stride, window.pads
    channels, _, high, wide = weight.shape
    tall, broad = (rows + 2 * above - high) // down + 1, (columns + 2 * beside - wide) // right + 1
    if not 0 < images * tall * broad <= MAX_PLACES or min(tall, broad) < 1:
        return None
    # of zeros around an image the library may read none: times what is not finite they are no zeros
    if (above or beside) and not bool(torch.isfinite(weight).all()):
        return None
    matrix = weight.permute(0, 2, 3, 1).reshape(channels, -1).t()
    places = images * tall * broad

    def product(y: Tensor) -> Tensor:
        if above or beside:
            y = torch.constant_pad_nd(y, (beside, beside, above, above))
        windows = y.unfold(2, high, down).unfold(3, wide, right).permute(0, 2, 3, 4, 5, 1).reshape(places, -1)
        made = torch.mm(windows, matrix) if shift is None else torch.addmm(shift, windows, matrix)
        return made.view(images, tall, broad, channels).permute(0, 3, 1, 2)

    return conv.with_kernel(product)
