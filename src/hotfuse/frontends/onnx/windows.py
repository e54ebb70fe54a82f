"""The arithmetic of sliding windows: pads, output sizes, and how much padding they ask for.

Sizes may be symbolic, so rules that ONNX states with an `if` are written here with min and max.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.ops.folded_conv import Window

Pads = list[tuple[Any, Any]]


def per_axis(given: Sequence[int] | None, n: int, default: int = 1) -> list[int]:
    """An attribute with one number per spatial axis, or its default."""
    return list(given) if given else [default] * n


def ceil_div(a: Any, b: Any) -> Any:
    """Rounded up, for symbolic numbers too."""
    return -((-a) // b)


def same_pads(total: Any, *, lower: bool) -> tuple[Any, Any]:
    """Split padding in two; the odd one goes to the start for SAME_LOWER, else to the end."""
    small = total // 2
    return (total - small, small) if lower else (small, total - small)


def window_pads(
    auto_pad: str,
    pads: Sequence[int] | None,
    sizes: Sequence[Any],
    kernel: Sequence[Any],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> Pads:
    """Padding before and after each spatial axis, from the attributes of a convolution or a pooling."""
    n = len(sizes)
    if auto_pad == "VALID":
        return [(0, 0)] * n
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        out: Pads = []
        for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            reach = (k - 1) * d + 1
            # with stride 1 the padding does not depend on the size, which keeps it a plain number
            total = reach - 1 if s == 1 else torch.sym_max((ceil_div(size, s) - 1) * s + reach - size, 0)
            out.append(same_pads(total, lower=auto_pad == "SAME_LOWER"))
        return out
    if auto_pad not in ("NOTSET", ""):
        raise ModelError(f"auto_pad is {auto_pad!r}", because="ONNX knows NOTSET, SAME_UPPER, SAME_LOWER and VALID")
    flat = list(pads) if pads else [0] * (2 * n)
    return list(zip(flat[:n], flat[n:], strict=True))


def symmetric(pads: Pads) -> list[int] | None:
    """The padding as torch's operators take it, when both ends are equal plain numbers."""
    even = all(isinstance(a, int) and isinstance(b, int) and a == b and a >= 0 for a, b in pads)
    return [a for a, _ in pads] if even else None


def pad_spatial(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    """Pad (or crop, where negative) the trailing axes."""
    if all(isinstance(p, int) and p == 0 for pair in pads for p in pair):
        return x
    flat = [p for pair in reversed(pads) for p in pair]
    return F.pad(x, flat, value=value)


def pooled_size(size: Any, pads: tuple[Any, Any], k: int, stride: int, dilation: int, *, ceil: bool) -> Any:
    """How many windows fit; rounding up never makes one that starts in the padding at the end."""
    room = size + pads[0] + pads[1] - ((k - 1) * dilation + 1)
    if not ceil:
        return room // stride + 1
    return torch.sym_min(ceil_div(room, stride) + 1, (size + pads[0] - 1) // stride + 1)


def conv_window(weight: Tensor, attrs: Mapping[str, Any]) -> Window | None:
    """How a convolution goes over images, or over signals as images of one row; None where padding is not the same at both ends."""
    n = weight.dim() - 2
    auto_pad = attrs.get("auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "VALID", "") or min(weight.shape) == 0:
        return None
    stride, dilation = per_axis(attrs.get("strides"), n), per_axis(attrs.get("dilations"), n)
    pads = symmetric(window_pads(auto_pad, attrs.get("pads"), [0] * n, weight.shape[2:], stride, dilation))
    groups = int(attrs.get("group", 1))
    if pads is None or min(pads) < 0 or groups < 1 or weight.shape[0] % groups:
        return None
    if n == 1:
        return Window((1, stride[0]), (0, pads[0]), (1, dilation[0]), groups)
    return Window((stride[0], stride[1]), (pads[0], pads[1]), (dilation[0], dilation[1]), groups)
