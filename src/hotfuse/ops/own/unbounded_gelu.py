"""Gelu of numbers of any size: torch's, mended where its vector code overflows.

    gelu(+inf)       torch of f32 and bf16: nan      here: inf
    gelu(3.4e38)     torch of f32: inf               here: 3.4e38

From some ten on gelu(x) is x to the last bit; torch's own scalar code, float64, ONNX Runtime and compiled kernels say so. The
vector code of processors, which calls with more than one element take, multiplies first. One look at the largest number tells
whether there is anything to mend; it costs about a tenth of the function.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import cache
from typing import Any

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


@cache
def scripted_gelu() -> Any:
    """The same as a graph of TorchScript, for regions of operators that run without Python: of `x` and `approximate`."""
    return torch._C.parse_ir(_SCRIPTED)


_SCRIPTED = f"""
graph(%x : Tensor, %approximate : str):
  %zero : int = prim::Constant[value=0]()
  %no : bool = prim::Constant[value=0]()
  %every : int[] = prim::ListConstruct()
  %bound : float = prim::Constant[value={BOUND!r}]()
  %y : Tensor = aten::gelu(%x, %approximate)
  %n : int = aten::numel(%x)
  %any : bool = aten::gt(%n, %zero)
  %mended : Tensor = prim::If(%any)
    block0():
      %largest : Tensor = aten::amax(%x, %every, %no)
      %small : Tensor = aten::lt(%largest, %bound)
      %fine : bool = aten::Bool(%small)
      %z : Tensor = prim::If(%fine)
        block0():
          -> (%y)
        block1():
          %high : Tensor = aten::gt(%x, %bound)
          %w : Tensor = aten::where(%high, %x, %y)
          -> (%w)
      -> (%z)
    block1():
      -> (%y)
  return (%mended)
"""
