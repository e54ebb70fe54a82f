"""Layers of bytes through the native code that every file shares (`native.byte_products`), once it is there.

Callers ask it first and go through the library where it declines: while the code is being compiled, for sizes that a team of the
library's threads is faster at, and where a range of floats has no scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.int8.storage import LIMITS
from hotfuse.frontends.onnx.native_floats.call_scratch import room
from hotfuse.native import byte_products
from hotfuse.native.byte_kernels import ByteKernels, background
from hotfuse.native.byte_products import SIGNED, SLACK, UNSIGNED, LayerTable
from hotfuse.native.target import host
from hotfuse.ops.folded_conv import Window

SMALL_WORK = 1 << 21
"""Products of bytes that one thread is through with before a team of them has begun."""
def native_layers(products: int) -> ByteKernels | None:
    """The code, for so many products; None while it is not there, and where a team of threads is faster."""
    found = background.kernels
    return found if products <= SMALL_WORK or torch.get_num_threads() == 1 else None


def supported() -> bool:
    """Whether this machine has such code."""
    return byte_products.supported(host())


def _filled(values: Tensor, size: int) -> Tensor:
    whole = values.new_zeros(size)
    whole[: len(values)] = values
    return whole


class NativeProduct:
    """`y = f(x @ weight.T)` for rows of bytes or floats."""

    def __init__(
        self, weight: Tensor, factor: Tensor, start: Tensor | None = None, bias: Tensor | None = None, **told: Any
    ) -> None:
        """Weights (outputs, inputs) are signed bytes less their zero points; what is told goes into the table."""
        self.columns, self.inputs = weight.shape
        self._products = weight.numel()
        self.padded = -(-self.columns // host().lanes) * host().lanes
        sums = weight.sum(1, dtype=torch.int32)
        self.table = LayerTable(
            inputs=self.inputs, columns=self.columns, padded=self.padded, weights=byte_products.packed(weight, host()),
            start=_filled(sums[:0] if start is None else start.to(torch.int32), self.padded),
            sums=_filled(sums, self.padded), factor=_filled(factor.float().expand(self.columns), self.padded),
            bias=_filled(factor.new_zeros(0, dtype=torch.float32) if bias is None else bias, self.padded),
            **{"floor": float("-inf"), **told},
        )  # fmt: skip
        self._in_place = told["source"] == UNSIGNED
        self.bytes = sum(t.nbytes for t in self.table.kept)

    def run(self, x: Tensor, dtype: torch.dtype, scale: float = 0.0, zero: int = 0) -> Tensor | None:
        """For rows in the last dimension; None where it declines."""
        shape = x.shape
        if shape[-1] != self.inputs:
            return None  # the library says what does not fit
        rows = x.numel() // self.inputs
        native = native_layers(rows * self._products)
        if native is None or native.layer is None or not rows:
            return None
        x = x.contiguous()
        if self._in_place and self.inputs % 4:  # the last row's last four bytes end behind it
            x = _with_slack(x)
        size = 8 * self.padded + (0 if self._in_place else rows * self.inputs + SLACK)
        scratch = room(size)
        y = x.new_empty((*shape[:-1], self.columns), dtype=dtype)
        done = native.layer(x.data_ptr(), y.data_ptr(), rows, scratch.data_ptr(), self.table.address, scale, zero)
        return y if done else None


def _with_slack(x: Tensor) -> Tensor:
    whole = x.new_empty(x.numel() + SLACK)
    return whole[: x.numel()].view(x.shape).copy_(x)


class NativeConv:
    """A convolution of images of bytes, all channels together or one by one; its result has channels innermost."""

    def __init__(self, weight: Tensor, window: Window, x_zero: int, x_dtype: torch.dtype, y_zero: int, y_dtype: torch.dtype,
                 factor: Tensor, bias: Tensor | None) -> None:  # fmt: skip
        """Weights are signed bytes less their zero points."""
        self.outputs, channels, self.ky, self.kx = weight.shape
        self.window, self.y_dtype, self.depthwise = window, y_dtype, window.groups > 1
        self.padded = -(-self.outputs // host().lanes) * host().lanes
        source, low, high = SIGNED if x_dtype is torch.int8 else UNSIGNED, *LIMITS[y_dtype]
        start = weight.new_zeros(self.outputs, dtype=torch.int32) if bias is None else bias.to(torch.int32)
        if self.depthwise:
            lying = byte_products.in_words(weight.permute(2, 3, 1, 0).contiguous())
            self.inputs = self.ky * self.kx
        else:
            rows = weight.permute(0, 2, 3, 1).reshape(self.outputs, -1).contiguous()
            lying, self.inputs = byte_products.packed(rows, host()), rows.shape[1]
            start = start - rows.sum(1, dtype=torch.int32) * (x_zero + 128 * (source == SIGNED))
        self.table = LayerTable(
            inputs=self.inputs, columns=self.outputs, padded=self.padded, weights=lying, start=_filled(start, self.padded),
            factor=_filled(factor.float().expand(self.outputs), self.padded),
            bias=factor.new_zeros(self.padded, dtype=torch.float32), source=source, result=byte_products.AS_BYTES,
            floor=float("-inf"), x_zero=x_zero, y_zero=y_zero, low=low, high=high,
            channels=self.outputs if self.depthwise else channels, kernel_y=self.ky, kernel_x=self.kx,
            stride_y=window.stride[0], stride_x=window.stride[1], pad_y=window.pads[0], pad_x=window.pads[1],
            dilation_y=window.dilation[0], dilation_x=window.dilation[1],
        )  # fmt: skip
        self.bytes = sum(t.nbytes for t in self.table.kept)

    def run(self, x: Tensor) -> Tensor | None:
        """None where it declines."""
        images, channels, height, width = x.shape
        kernel, window = (self.ky, self.kx), self.window
        rows, columns = (
            (size + 2 * window.pads[i] - window.dilation[i] * (kernel[i] - 1) - 1) // window.stride[i] + 1
            for i, size in enumerate((height, width))
        )
        if channels * (1 if self.depthwise else self.ky * self.kx) != (self.outputs if self.depthwise else self.inputs):
            return None  # the library says what does not fit
        pixels = images * rows * columns
        native = native_layers(pixels * self.inputs * self.outputs)
        if native is None or native.conv is None or native.depthwise is None or rows < 1 or columns < 1 or not pixels:
            return None
        x = x.contiguous(memory_format=torch.channels_last)
        sizes = (images, self.outputs, rows, columns)
        y = torch.empty(sizes, dtype=self.y_dtype, device=x.device, memory_format=torch.channels_last)
        if self.depthwise:
            scratch, call = room(4 * self.padded), native.depthwise
        else:
            most = max(byte_products.CHUNK_BYTES, 24 * self.inputs)
            scratch, call = room(min(most, pixels * self.inputs) + SLACK), native.conv
        call(
            x.data_ptr(), y.data_ptr(), pixels, scratch.data_ptr(), self.table.address, height, width, rows, columns
        )
        return y
