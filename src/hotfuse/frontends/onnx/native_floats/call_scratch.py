"""Memory of a calling thread, for one native layer at a time."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

KEPT_BYTES = 1 << 20
"""Memory that a calling thread keeps between layers; for more it asks in each call."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.kept = torch.empty(0, dtype=torch.uint8, device="cpu")


_scratch = _Scratch()


def room(size: int) -> Tensor:
    """At least so many bytes, until this thread asks again, and while the caller holds the tensor: nobody else may."""
    kept = _scratch.kept
    if size <= len(kept):
        return kept
    fresh = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size <= KEPT_BYTES:
        _scratch.kept = fresh
    return fresh
