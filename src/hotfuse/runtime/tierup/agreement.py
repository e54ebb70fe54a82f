"""Judging a plan's outputs against the model's own.

Integers, booleans and strings must be equal. Floats may differ by a relative error. It is measured against the largest magnitude
in the reference, so that a sum near zero is not judged by its cancellation (`analysis.closeness` has the exceptions). NaN and
infinities must stand in the same places. Half precisions get the tolerance their format allows.

Results on a device that are not equal bit by bit are compared on the host. Comparing on the device takes kernels that nothing else
uses, and loading one for the first time holds up calls for longer than they take (seen: 120 ms, at batch 64). Small results are
copied at once: even the kernels that tell whether bits are equal took 28 ms to load in the call that recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hotfuse.analysis.closeness import relative_error, same_specials

COPIED_BYTES = 1 << 22
"""Of a result that is copied from a device to be compared, whatever it holds."""
_HALF_RTOL = {torch.float16: 5e-3, torch.bfloat16: 2e-2}


def disagreement(got: Sequence[Any], want: Sequence[Any], rtol: float) -> str:
    """Empty when the outputs agree; else the first difference, in words."""
    if len(got) != len(want):
        return f"{len(got)} outputs instead of {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if text := _one(g, w, rtol):
            return f"output {i}: {text}"
    return ""


def _one(got: Any, want: Any, rtol: float) -> str:
    if isinstance(want, torch.Tensor):
        return _tensor(got, want, rtol) if isinstance(got, torch.Tensor) else f"{type(got).__name__}, not a tensor"
    if isinstance(want, np.ndarray):
        same = isinstance(got, np.ndarray) and got.dtype == want.dtype and np.array_equal(got, want)
        return "" if same else "arrays differ"
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{type(got).__name__}, not a sequence"
        return disagreement(got, want, rtol)
    if isinstance(want, float):
        return "" if got == want or (want != want and got != got) or abs(got - want) <= rtol * abs(want) else "numbers"
    return "" if type(got) is type(want) and got == want else f"{got!r} instead of {want!r}"


def _tensor(got: torch.Tensor, want: torch.Tensor, rtol: float) -> str:
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.device != want.device:
        return f"device {got.device} instead of {want.device}"
    got, want = got.detach(), want.detach()
    if want.is_cuda:
        if want.numel() * want.element_size() > COPIED_BYTES and _equal(got, want):
            return ""
        got, want = got.cpu(), want.cpu()
    if got.numel() <= COPIED_BYTES and _equal(got, want):
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(got, want) else "integer values differ"
    wide = torch.complex128 if want.is_complex() else torch.float64
    g, w = got.to(wide), want.to(wide)
    if not same_specials(g, w):
        return "NaN or infinity in other places"
    finite = torch.isfinite(w)
    error = relative_error(g[finite], w[finite])
    return "" if error <= max(rtol, _HALF_RTOL.get(want.dtype, 0.0)) else f"relative error {error:.2e}"


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether they are known to be the same; torch compares no complex numbers of 16-bit parts."""
    return want.dtype is not torch.complex32 and torch.equal(got, want)
