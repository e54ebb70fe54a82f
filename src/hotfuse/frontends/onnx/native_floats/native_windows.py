"""A convolution of few pixels in native code that every file shares, as one call with its bias and ReLU.

torch's libraries take 15 to 40 us for the call of a convolution, however small it is. Here windows are copied into rows, a few at a
time, and multiplied with packed weights. Images may lie in any order; results have channels innermost. One thread, a busy
machine, us, the fastest of the libraries' and this:

    places, window, channels     4, 256, 258    12, 256, 258    12, 387, 128    3, 384, 64
    library, or a product                 27              40              36            16
    native                                11              14              11             6
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from hotfuse.frontends.onnx.native_floats.call_scratch import room
from hotfuse.frontends.onnx.packed_weights import MARGIN, PackedWeight, trials, usable
from hotfuse.native.float_layers import panel_products
from hotfuse.native.float_layers.layer_code import CHUNK, WINDOW_FIELDS, FloatLayers, background_layers
from hotfuse.native.float_layers.word_table import WordTable
from hotfuse.native.target import CpuTarget
from hotfuse.ops.folded_conv import FoldedConv

MAX_WORK, SMALL_WORK = 1 << 24, 1 << 21
"""Multiplications up to which it is tried, and where a team of threads is not faster."""
Images = Callable[[Tensor], Tensor]


def _sizes(conv: FoldedConv, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a result."""
    window, kernel = conv.window, conv.weight.shape[2:]
    rows, cols = (
        (size + 2 * window.pads[i] - window.dilation[i] * (kernel[i] - 1) - 1) // window.stride[i] + 1
        for i, size in enumerate((height, width))
    )
    return rows, cols


def takes(conv: FoldedConv, x: Tensor) -> bool:
    """Whether it is made for a convolution of images of such a size. Asks nothing of the numbers."""
    weight = conv.weight
    if x.dim() != conv.dims or not x.numel() or not usable(x) or conv.window.groups != 1 or not weight.numel():
        return False
    rows, cols = _sizes(conv, x.shape[2] if conv.dims == 4 else 1, x.shape[-1])
    if x.shape[1] != weight.shape[1] or min(rows, cols) < 1:
        return False  # the library says what does not fit
    work = x.shape[0] * rows * cols * weight.numel()
    return work <= (MAX_WORK if torch.get_num_threads() == 1 else SMALL_WORK)


class WindowPanels:
    """The weights of a convolution as the native code reads them: one copy for images of all sizes."""

    __slots__ = ("_conv", "_packed")

    def __init__(self, conv: FoldedConv) -> None:
        self._conv = conv
        self._packed: PackedWeight | None = None

    @property
    def bytes(self) -> int:
        """Memory of the packed copy, while there is one."""
        return 0 if self._packed is None else self._packed.bytes

    def packed(self, target: CpuTarget) -> PackedWeight:
        """For the machine's code."""
        if self._packed is None:
            self._packed = _panels_of(self._conv, target)
        return self._packed


def _panels_of(conv: FoldedConv, target: CpuTarget) -> PackedWeight:
    def make() -> Tensor:
        weight = conv.weight
        return panel_products.in_panels(weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1), target)

    columns = panel_products.padded(int(conv.weight.shape[0]), target)
    return PackedWeight(make, 4 * columns * (conv.weight.numel() // max(1, int(conv.weight.shape[0]))))


def window_product(conv: FoldedConv, x: Tensor, packed: PackedWeight, native: FloatLayers, otherwise: Images) -> Images | None:
    """The convolution on images of just these sizes; None where it is not made for them. Those that lie otherwise go to
    `otherwise`."""
    window, weight = conv.window, conv.weight
    if not takes(conv, x):
        return None
    image = x if conv.dims == 4 else x.unsqueeze(2)
    images, channels, height, width = image.shape
    outputs, _, *kernel = weight.shape
    rows, cols = _sizes(conv, height, width)
    pixels, inputs = images * rows * cols, weight.numel() // outputs
    # of zeros around an image the library may read none: times what is not finite they are no zeros
    if max(window.pads) and not bool(torch.isfinite(weight).all()):
        return None
    padded = panel_products.padded(outputs, native.target)
    steps = image.stride()
    relu = conv.activation == "relu"
    bias = weight.new_zeros(outputs) if conv.shift is None else conv.shift
    table = WordTable(
        WINDOW_FIELDS, pixels=pixels, inputs=inputs, columns=outputs, padded=padded, bias=bias.contiguous(), relu=int(relu),
        channels=channels, height=height, width=width, rows=rows, cols=cols, kernel_y=kernel[0], kernel_x=kernel[1],
        stride_y=window.stride[0], stride_x=window.stride[1], pad_y=window.pads[0], pad_x=window.pads[1],
        dilation_y=window.dilation[0], dilation_x=window.dilation[1], image_step=steps[0], channel_step=steps[1],
        line_step=steps[2], pixel_step=steps[3],
    )  # fmt: skip
    size = 4 * CHUNK * (inputs + padded)
    made_sizes, made_strides = (images, outputs, rows, cols), (rows * cols * outputs, 1, cols * outputs, outputs)
    strides, run, behind = x.stride(), native.window_product, conv.behind(activated=relu)
    if conv.dims == 3 and len(behind) == 1:  # what makes a signal of an image: it is one at once
        made_sizes, made_strides, behind = (images, outputs, cols), (cols * outputs, 1, outputs), []

    def call(y: Tensor) -> Tensor:
        if y.stride() != strides or y.requires_grad or torch.is_autocast_enabled("cpu"):
            return otherwise(y)
        if (held := packed.get()) is None:
            return otherwise(y)
        made, scratch = y.new_empty_strided(made_sizes, made_strides), room(size)
        run(y.data_ptr(), made.data_ptr(), scratch.data_ptr(), table.address, held.data_ptr())
        for step in behind:
            made = step(made)
        return made

    return call


class SmallConv:
    """A convolution on images of just these sizes: as it was chosen among the libraries', and natively once that is there and
    faster."""

    __slots__ = ("_alike", "_best", "_conv", "_layer", "_native", "_panels")

    def __init__(self, conv: FoldedConv, best: Images, panels: WindowPanels, layer: Hashable, alike: Hashable) -> None:
        self._conv, self._best, self._panels = conv, best, panels
        self._layer, self._alike = ("native", layer), ("native", alike)
        self._native: Images | None = None
        background_layers.begin()

    def __call__(self, x: Tensor) -> Tensor:
        """The result for an image."""
        run = self._native
        return self._chosen(x)(x) if run is None else run(x)

    def choice(self) -> Images | None:
        """What was found fastest; None before the native code is there and compared."""
        return self._native

    def _chosen(self, x: Tensor) -> Images:
        native, best = background_layers.layers, self._best
        if native is None:
            background_layers.begin()  # a child that was forked while its parent was at it
            return best
        if trials.known(self._layer, self._alike) == 0:
            self._native = best
            return best
        packed = self._panels.packed(native.target)
        if packed.get() is None and packed.later:
            return best  # compared by a later call
        found = best
        if (made := window_product(self._conv, x, packed, native, best)) is not None and packed.get() is not None:
            runs = (functools.partial(best, x), 1.0), (functools.partial(made, x), MARGIN)
            if (place := trials.fastest(self._layer, runs, self._alike)) is None:
                return best
            found = (best, made)[place]
        if found is best:
            packed.let_go()
        self._native = found
        return found

    def __deepcopy__(self, memo: object) -> SmallConv:
        """What it knows holds for a copy of the model, too."""
        return self
