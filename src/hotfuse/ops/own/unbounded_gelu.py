"""Gelu of numbers of any size: torch's, mended where its vector code overflows.

    gelu(+inf)       torch of f32 and bf16: nan, of f16 on some processors      here: inf
    gelu(3.4e38)     torch of f32: inf                                          here: 3.4e38

From some ten on gelu(x) is x to the last bit; torch's own scalar code, float64, ONNX Runtime and compiled kernels say so. The
vector code of processors, which calls with more than one element take, multiplies first. One look at the largest number tells
whether there is anything to mend; it costs about a tenth of the function.

It is for ONNX files before their graph is captured. A captured graph has torch's operator, of a module or of a
file: what torch gives is right for a module, whose own code gives the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BOUNDS = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}
"""Above its type's bound (and far below) gelu is the identity; up to it nothing overflows. A bound is a finite number."""


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The operator's result; what is not a number stays so."""
    y = F.gelu(x, approximate=approximate)
    bound = BOUNDS.get(x.dtype)
    if bound is not None and approximate == "none" and x.is_cpu and x.numel() > 0 and not x.amax().item() < bound:
        return torch.where(x > bound, x, y)
    return y
