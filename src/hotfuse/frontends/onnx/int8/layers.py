"""Products and convolutions of bytes with constant weights, in the library's integer kernels where their sums are exact.

Products are torch's of signed bytes, where the processor has an instruction for it: they cost little beside the sums, also for
one row. Convolutions that look at one pixel are such products.

FBGEMM's kernels compute what ONNX says: an integer sum, times `x_scale * w_scale / y_scale`, rounded half to even. On processors
without VNNI they add two products of bytes in 16 bits, which saturates; weights of seven bits never do. Others are multiplied as
floats, where floats hold every sum exactly. What fits neither stays with the operator's own function.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.int8.native_layers import NativeConv, NativeProduct, supported
from hotfuse.frontends.onnx.int8.storage import (
    LIMITS,
    QUANTIZED,
    available,
    bytes_of,
    number,
    passes,
    quantized_view,
    stored,
)
from hotfuse.native.byte_kernels import background
from hotfuse.native.byte_products import AS_BYTES, SIGNED, STATIC, UNSIGNED
from hotfuse.native.target import host
from hotfuse.ops.folded_conv import Window

SEVEN_BITS = 64
"""Two products of a byte and such a weight fit 16 bits."""
MAX_PRODUCTS = 1 << 16
"""So many products of signed bytes, with what zero points and a bias add, stay far within 32 bits."""
EXACT = 1 << 24
"""Integers up to here are floats."""
FEW_ROWS = 4
"""Products of fewer rows are faster as floats: the integer kernels take as long for one row as for four."""
WIDENED_BYTES = 64 << 20
"""Most memory of one layer's weights that are made floats once instead of in every call."""

TURN = torch.tensor(128, dtype=torch.uint8)
"""The highest bit of a byte: turned, unsigned bytes are signed ones, 128 less."""

_engine = threading.Lock()
ByteLayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Scales and zero points of what a layer reads, of its weights (one, or one for every output channel) and of what it makes."""

    x: float
    x_zero: int
    x_dtype: torch.dtype
    w: Tensor
    w_zero: Tensor
    y: float
    y_zero: int
    y_dtype: torch.dtype


def layer_scales(x: Sequence[Any], w: Sequence[Any], y: Sequence[Any]) -> LayerScales | None:
    """A layer's scales and zero points; None where one of them is no constant, or not of bytes."""
    (xs, xz), (ws, wz), (ys, yz) = x, w, y
    single = (xs, xz, ys, yz)
    if any(number(t) is None for t in single) or not all(
        isinstance(t, Tensor) and t.dim() <= 1 and t.numel() for t in (ws, wz)
    ):
        return None
    if any(t.dtype is not torch.float32 for t in (xs, ws, ys)) or any(t.dtype not in QUANTIZED for t in (xz, wz, yz)):
        return None
    return LayerScales(
        float(xs), int(xz), xz.dtype, ws.reshape(-1), wz.reshape(-1).to(torch.int64), float(ys), int(yz), yz.dtype
    )


def linear(scales: LayerScales, weight: Tensor, bias: Tensor | None) -> tuple[ByteLayer, int] | None:
    """`y = x @ weight.T + bias` of bytes, and the memory it holds; None where no way is exact."""
    library = library_linear(scales, weight, bias)
    if library is None or (native := native_linear(scales, weight, bias)) is None:
        return library
    otherwise, size = library

    def run(x: Tensor) -> Tensor:
        made = native.run(x, scales.y_dtype)
        return otherwise(x) if made is None else made

    return run, size + native.bytes


def native_linear(
    scales: LayerScales, weight: Tensor, bias: Tensor | None, *, floats: bool = False, result: int = AS_BYTES
) -> NativeProduct | None:
    """The layer in native code, of bytes or of floats that it quantizes; None where the weights do not fit, or the machine."""
    signed = signed_weights(weight, scales.w_zero) if supported() else None
    if signed is None:
        return None
    background.begin()
    turned = scales.x_dtype is torch.int8
    x_zero = scales.x_zero + 128 * turned
    start = signed.sum(1, dtype=torch.int32) * -x_zero
    low, high = (limit - (0 if result == AS_BYTES else scales.y_zero) for limit in LIMITS[scales.y_dtype])
    return NativeProduct(
        signed, _factor(scales), start if bias is None else start + bias.to(torch.int32), result=result,
        source=STATIC if floats else SIGNED if turned else UNSIGNED, x_scale=scales.x, x_zero=x_zero, y_zero=scales.y_zero,
        y_scale=scales.y, low=low, high=high,
    )  # fmt: skip


def _factor(scales: LayerScales) -> Tensor:
    """What one in a sum is in units of the result."""
    x, y = torch.tensor((scales.x, scales.y), dtype=torch.float32, device="cpu").unbind()
    return x * scales.w / y


def library_linear(scales: LayerScales, weight: Tensor, bias: Tensor | None) -> tuple[ByteLayer, int] | None:
    """The same without native code of ours."""
    if (product := signed_product(weight, scales.w_zero)) is not None:
        return _on_signed(scales, product, bias), product.bytes
    w, scales = _signed(weight.contiguous(), scales)
    floats = _floats(scales, w, bias, F.linear, 0)
    if not _integer_kernels(w, 1):
        return floats
    run = _kernel(scales, _packed(torch.ops.quantized.linear_prepack, w, scales, bias), torch.ops.quantized.linear)
    if floats is None:
        return run, w.nbytes
    few, size = floats
    columns = w.shape[1]
    return (lambda x: few(x) if x.numel() < FEW_ROWS * columns else run(x)), size + w.nbytes


def conv(scales: LayerScales, weight: Tensor, bias: Tensor | None, window: Window) -> tuple[ByteLayer, int] | None:
    """A convolution of images of bytes, with channels innermost in the result; None where no way is exact."""
    one_pixel = weight.shape[2:] == (1, 1) and window.groups == 1 and set(window.stride) == {1} and not any(window.pads)
    if one_pixel and (found := linear(scales, weight.flatten(1), bias)) is not None:
        on_rows, size = found
        return (lambda x: on_rows(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)), size
    library = _library_conv(scales, weight, bias, window)
    each = window.groups == 1 or (weight.shape[1] == 1 and window.groups == weight.shape[0])
    signed = signed_weights(weight, scales.w_zero) if each and supported() else None
    if library is None or signed is None:
        return library
    background.begin()
    native = NativeConv(
        signed, window, scales.x_zero, scales.x_dtype, scales.y_zero, scales.y_dtype, _factor(scales), bias
    )
    otherwise, size = library

    def run(x: Tensor) -> Tensor:
        made = native.run(x)
        return otherwise(x) if made is None else made

    return run, size + native.bytes


def _library_conv(scales: LayerScales, weight: Tensor, bias: Tensor | None, window: Window) -> tuple[ByteLayer, int] | None:
    w, scales = _signed(weight, scales)
    exact = _integer_kernels(w, window.groups)
    if not exact or not _made_for(w, window):
        how = (window.stride, window.pads, window.dilation, window.groups)
        order = (
            torch.channels_last
        )  # of weights of one channel the library cannot tell, and takes far longer in the other
        floats = _floats(scales, w, bias, lambda x, w, b: F.conv2d(x.contiguous(memory_format=order), w, b, *how), 2)
        if floats is not None or not exact:
            return floats
    each = (list(window.stride), list(window.pads), list(window.dilation), window.groups)
    packed = _packed(torch.ops.quantized.conv2d_prepack, w, scales, bias, *each)
    return _kernel(scales, packed, torch.ops.quantized.conv2d), w.nbytes


@dataclass(frozen=True, slots=True)
class SignedProduct:
    """Products of rows of signed bytes with constant weights less their zero points, also signed bytes, as 32-bit integers."""

    weight: Tensor
    """Inputs by outputs."""
    sums: Tensor
    """Of each column: what one more in all of a row adds."""
    bytes: int
    """Memory that was not there before."""

    def __call__(self, x: Tensor) -> Tensor:
        """The sums of `x`, two-dimensional."""
        return torch._int_mm(x, self.weight)  # pyright: ignore[reportPrivateUsage]


def signed_product(weight: Tensor, zero: Tensor | None) -> SignedProduct | None:
    """A product of weights (outputs, inputs) and their zero points, one or one for each output; None where the differences are no
    signed bytes, or this processor's sums of them not known to be exact."""
    found = signed_weights(weight, zero) if signed_sums_are_exact() else None
    if found is None:
        return None  # output by output: for one row twice as fast
    return SignedProduct(found.t(), found.sum(1, dtype=torch.int32), found.nbytes + 4 * len(found))


def signed_weights(weight: Tensor, zero: Tensor | None) -> Tensor | None:
    """Weights less their zero points (one, or one for each output) as signed bytes; None where they are none, or too many."""
    if weight.dtype not in QUANTIZED or not weight.numel() or weight[0].numel() > MAX_PRODUCTS:
        return None
    if weight.dtype is torch.int8 and (zero is None or not bool(zero.any())):
        return weight.contiguous()
    wide = weight.to(torch.int16)
    if zero is not None:
        wide = wide - zero.to(torch.int16).reshape([-1] + [1] * (weight.dim() - 1))
    return wide.to(torch.int8).contiguous() if int(wide.min()) >= -128 and int(wide.max()) <= 127 else None


@functools.cache
def signed_sums_are_exact() -> bool:
    """Whether the library multiplies signed bytes by an instruction for it, and exactly: believed after it did."""
    if not host().dots_bytes or not available():
        return False
    low, high = torch.full((8, 64), -128, dtype=torch.int8), torch.full((64, 16), 127, dtype=torch.int8)
    pairs = ((low, high, -128 * 127), (low, low.t().contiguous(), 128 * 128), (high.t().contiguous(), high, 127 * 127))
    try:
        return all(bool((torch._int_mm(a, b) == 64 * each).all()) for a, b, each in pairs)  # pyright: ignore[reportPrivateUsage]
    except (AttributeError, NotImplementedError, RuntimeError) as e:
        faults.note("products of signed bytes", e)
        return False


def _on_signed(scales: LayerScales, product: SignedProduct, bias: Tensor | None) -> ByteLayer:
    """Unsigned bytes have their highest bit turned, which moves the zero point along."""
    turned = scales.x_dtype is torch.uint8
    start = product.sums * -(scales.x_zero - 128 * turned)
    if bias is not None:
        start = start + bias.to(torch.int32)
    inputs, columns = product.weight.shape
    factor = _factor(scales).expand(columns).contiguous()
    addresses = start.data_ptr(), factor.data_ptr()
    low, high = LIMITS[scales.y_dtype]
    background.begin()

    def run(x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, inputs)
        total = product((rows ^ TURN).view(torch.int8) if turned else rows)
        shape = (*x.shape[:-1], columns)
        if (native := passes(total.numel())) is None:
            return stored((total + start).float().mul_(factor), scales.y_zero, scales.y_dtype).view(shape)
        y = x.new_empty(shape, dtype=scales.y_dtype)
        native.to_bytes(total.data_ptr(), y.data_ptr(), len(rows), *addresses, scales.y_zero, low, high, columns)
        return y

    return run


def _made_for(w: Tensor, window: Window) -> bool:
    """Whether the integer kernels take this convolution as it is; groups with other windows go one by one, ten to
    fifty times as slow."""
    return window.groups == 1 or (w.shape[2] == w.shape[3] and window.dilation == (1, 1))


def _signed(w: Tensor, scales: LayerScales) -> tuple[Tensor, LayerScales]:
    """Weights and their zero points as signed bytes: the same differences."""
    if w.dtype is torch.int8:
        return w, scales
    return (w.to(torch.int16) - 128).to(torch.int8), replace(scales, w_zero=scales.w_zero - 128)


def _integer_kernels(w: Tensor, groups: int) -> bool:
    """Whether the library's integer kernels add products of these signed weights exactly."""
    if not available() or "fbgemm" not in torch.backends.quantized.supported_engines or not w.numel():
        return False
    return int(w.to(torch.int16).abs().max()) <= SEVEN_BITS or (groups == 1 and full_bytes_are_exact())


@functools.cache
def full_bytes_are_exact() -> bool:
    """Whether the integer kernels add products of weights of eight bits exactly on this processor: believed after they did."""
    one, zero = torch.ones(1, dtype=torch.float32, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    scales = LayerScales(1.0, 0, torch.uint8, one, zero, 255.0 * 127.0 * 64.0 / 200.0, 0, torch.uint8)
    packed = _packed(torch.ops.quantized.linear_prepack, torch.full((16, 64), 127, dtype=torch.int8), scales, None)
    made = _kernel(scales, packed, torch.ops.quantized.linear)(torch.full((8, 64), 255, dtype=torch.uint8))
    return bool((made == 200).all())


def _packed(prepack: Callable[..., Any], w: Tensor, scales: LayerScales, bias: Tensor | None, *window: Any) -> Any:
    """Weights in the order of FBGEMM's kernels; other engines round by reciprocals. The choice is the process's: it is put back."""
    each = w.shape[0]
    unit = scales.w.expand(each)
    whole = torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateUsage]
        w.contiguous(), unit.double().contiguous(), scales.w_zero.expand(each).contiguous(), 0
    )
    start = None if bias is None else bias.float() * (torch.tensor(scales.x, dtype=torch.float32, device="cpu") * unit)
    with _engine:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            return prepack(whole, start, *window)
        finally:
            torch.backends.quantized.engine = before


def _kernel(scales: LayerScales, packed: Any, kernel: Callable[..., Tensor]) -> ByteLayer:
    """Integer kernels read and make unsigned bytes: signed ones have their highest bit turned."""
    reads, makes = scales.x_dtype is torch.int8, scales.y_dtype is torch.int8
    x_scale, x_zero = scales.x, scales.x_zero + 128 * reads
    y_scale, y_zero = scales.y, scales.y_zero + 128 * makes

    def run(x: Tensor) -> Tensor:
        if reads:
            x = x.view(torch.uint8) ^ 128
        y = bytes_of(kernel(quantized_view(x, x_scale, x_zero), packed, y_scale, y_zero))
        return y.bitwise_xor_(128).view(torch.int8) if makes else y

    return run


def _floats(
    scales: LayerScales, w: Tensor, bias: Tensor | None, product: Callable[..., Tensor], trailing: int
) -> tuple[ByteLayer, int] | None:  # fmt: skip
    """The same integers as floats; None where a sum could leave what floats hold exactly."""
    low, high = LIMITS[scales.x_dtype]
    if not available():
        return None
    start = None if bias is None else bias.float()
    wide = exact_weights(w, scales.w_zero, max(high - scales.x_zero, scales.x_zero - low), start)
    if wide is None:
        return None
    if trailing:
        wide = wide.contiguous(memory_format=torch.channels_last)
    factor = _factor(scales)
    factor = factor.reshape([-1] + [1] * trailing) if factor.numel() > 1 else factor.reshape(())

    def run(x: Tensor) -> Tensor:
        y = product(quantized_view(x, 1.0, scales.x_zero).dequantize(), wide, start)
        return stored(y.mul_(factor), scales.y_zero, scales.y_dtype)

    return run, wide.nbytes


def exact_weights(w: Tensor, zero: Tensor | None, most: int, bias: Tensor | None = None) -> Tensor | None:
    """Weights less their zero points (one, or one for each output channel) as floats, where every sum of products with integers up
    to `most` is exact in whatever order it is added; None for others, and for those that take too much memory."""
    if w.numel() * 4 > WIDENED_BYTES or not w.numel():
        return None
    wide = w.float() if zero is None else w.float() - zero.float().reshape([-1] + [1] * (w.dim() - 1))
    total = wide.abs().flatten(1).double().sum(1) * most
    if bias is not None:
        total = total + bias.abs().double()
    return wide if bool((total < EXACT).all()) else None
