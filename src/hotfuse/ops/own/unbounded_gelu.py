"""Gelu of numbers of any size: torch's, mended where its vector code overflows.

    gelu(+inf)       torch of f32 and bf16: nan      here: inf
    gelu(3.4e38)     torch of f32: inf               here: 3.4e38

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

BOUND = 1e30
"""Above it (and far below) gelu is the identity; up to it nothing overflows."""
_MENDED = (torch.float32, torch.bfloat16)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The operator's result; what is not a number stays so."""
    y = F.gelu(x, approximate=approximate)
    if approximate == "none" and x.dtype in _MENDED and x.is_cpu and x.numel() > 0 and not x.amax().item() < BOUND:
        return torch.where(x > BOUND, x, y)
    return y
