"""Fourier transforms, windows and the mel matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def _as_complex(x: Tensor) -> Tensor:
    """The last axis holds a real number or a (real, imaginary) pair; half types are computed in float32."""
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return work.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(work.contiguous())


def _transform(x: Tensor, length: Any, axis: int, *, inverse: bool, onesided: bool) -> Tensor:
    signal = _as_complex(x)
    if inverse and onesided:
        size = 2 * (signal.shape[axis] - 1) if length is None else length
        return torch.fft.irfft(signal, size, axis).unsqueeze(-1).to(x.dtype)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(signal, length, axis)).to(x.dtype)
    if not onesided:
        return torch.view_as_real(torch.fft.fft(signal, length, axis)).to(x.dtype)
    if not signal.is_complex():
        return torch.view_as_real(torch.fft.rfft(signal, length, axis)).to(x.dtype)
    full = torch.fft.fft(signal, length, axis)
    return torch.view_as_real(full.narrow(axis, 0, full.shape[axis] // 2 + 1)).to(x.dtype)


@onnx_op("DFT", since=17)
def dft_17(
    ctx: Ctx, x: Tensor, dft_length: Tensor | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    length = None if dft_length is None else ctx.ints(dft_length)[0]
    return _transform(x, length, axis % x.dim(), inverse=bool(inverse), onesided=bool(onesided))


@onnx_op("DFT", since=20)
def dft_20(
    ctx: Ctx,
    x: Tensor,
    dft_length: Tensor | None = None,
    axis: Tensor | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    length = None if dft_length is None else ctx.ints(dft_length)[0]
    at = -2 if axis is None else int(ctx.ints(axis)[0])
    return _transform(x, length, at % x.dim(), inverse=bool(inverse), onesided=bool(onesided))


@onnx_op("STFT")
def stft(
    ctx: Ctx,
    signal: Tensor,
    frame_step: Tensor,
    window: Tensor | None = None,
    frame_length: Tensor | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """Frames, weighted by the window, transformed one by one: (batch, frames, bins, 2)."""
    step = ctx.ints(frame_step)[0]
    if frame_length is not None:
        length = ctx.ints(frame_length)[0]
    else:
        length = signal.shape[1] if window is None else window.shape[0]
    data = signal.unsqueeze(-1) if signal.dim() == 2 else signal
    frames = data.unfold(1, length, step).transpose(2, 3)
    if window is not None:
        frames = frames * F.pad(window, [0, length - window.shape[0]]).to(frames.dtype).unsqueeze(1)
    return _transform(frames, None, 2, inverse=False, onesided=bool(onesided))


def _cosine_window(ctx: Ctx, size: Tensor, periodic: int, output_datatype: int, weights: tuple[float, ...]) -> Tensor:
    n = ctx.ints(size)[0]
    span = n if periodic else torch.sym_max(n - 1, 1)
    phase = torch.arange(n, dtype=torch.float64) * (2 * math.pi) / span
    total = torch.full_like(phase, weights[0])
    for i, w in enumerate(weights[1:], 1):
        total = total + w * torch.cos(phase * i)
    return total.to(_DTYPES[output_datatype])


@onnx_op("HannWindow")
def hann_window(ctx: Ctx, size: Tensor, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    return _cosine_window(ctx, size, periodic, output_datatype, (0.5, -0.5))


@onnx_op("HammingWindow")
def hamming_window(ctx: Ctx, size: Tensor, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    return _cosine_window(ctx, size, periodic, output_datatype, (25 / 46, -21 / 46))


@onnx_op("BlackmanWindow")
def blackman_window(ctx: Ctx, size: Tensor, *, output_datatype: int = 1, periodic: int = 1) -> Tensor:
    return _cosine_window(ctx, size, periodic, output_datatype, (0.42, -0.5, 0.08))


@onnx_op("MelWeightMatrix")
def mel_weight_matrix(
    ctx: Ctx,
    num_mel_bins: Tensor,
    dft_length: Tensor,
    sample_rate: Tensor,
    lower_edge_hertz: Tensor,
    upper_edge_hertz: Tensor,
    *,
    output_datatype: int = 1,
) -> Tensor:
    """Triangles between neighbouring mel edges, each edge rounded down to a spectrum bin."""
    bins, length, rate = (int(ctx.ints(t)[0]) for t in (num_mel_bins, dft_length, sample_rate))
    low, high = (2595 * math.log10(1 + float(ctx.ints(t)[0]) / 700) for t in (lower_edge_hertz, upper_edge_hertz))
    step = (high - low) / (bins + 2)
    mel = torch.arange(bins + 2, dtype=torch.float64) * step + low
    edge = torch.floor((length + 1) * (700 * (10 ** (mel / 2595) - 1)) / rate)
    left, center, right = edge[:-2], edge[1:-1], edge[2:]
    at = torch.arange(length // 2 + 1, dtype=torch.float64).unsqueeze(1)
    rise = torch.where(center > left, (at - left) / (center - left).clamp(min=1), (at == center).double())
    fall = (right - at) / (right - center).clamp(min=1)
    up = torch.where((at >= left) & (at <= center), rise, torch.zeros_like(rise))
    return torch.where((at >= center) & (at < right), fall, up).to(_DTYPES[output_datatype])
