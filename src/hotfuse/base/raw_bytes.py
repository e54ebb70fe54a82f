"""What a tensor holds, as bytes."""

from __future__ import annotations

import torch


def raw_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor with elements, in a row, without a copy where they lie so. torch's own view refuses a tensor of one
    element that was cut from a wider one: it counts as contiguous, and its stride is not one."""
    t = t.contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)
