"""Inputs of a call into the memory that a recording reads: one call of the driver each, where their bytes lie as they have to.

`Tensor.copy_` takes 11 us on the host before it hands the same copy to the driver, and 33 us behind other work (measured beside an
H200). The replay is launched only after that. Tensors with another layout, or on another device than the calling thread's, are
still copied by `Tensor.copy_`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

DriverCopy = Callable[[int, int, int, int], int]
"""To an address, from one, so many bytes, on a stream; 0 where it was queued."""
_own: Any = torch._C  # pyright: ignore[reportPrivateUsage]


@functools.cache
def driver_copy() -> DriverCopy | None:
    """The driver's own; None where there is no driver."""
    try:
        found: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    return found


def bytes_in_a_row(t: torch.Tensor) -> int:
    """How many bytes a tensor is that lies in one piece, in whatever order its dims are; 0 where it does not."""
    step = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1:
            if stride != step:
                return 0
            step *= size
    return t.numel() * t.element_size()


class InputCopies:
    """Copies into a recording's own inputs; a call's have the same sizes and strides."""

    def __init__(
        self, own: Sequence[torch.Tensor], copy: DriverCopy | None, stream: Callable[[], int], device: Callable[[], int]
    ) -> None:
        """`stream` and `device` are the calling thread's, the latter by its number."""
        self._copy, self._stream, self._device = copy, stream, device
        self._own = [(t, t.data_ptr(), bytes_in_a_row(t), t.stride(), t.dtype) for t in own]
        self._index = next((t.device.index for t in own), None)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        """On the calling thread's stream."""
        copy = self._copy
        if copy is None or self._device() != self._index:
            for (mine, *_), given in zip(self._own, inputs, strict=True):
                mine.copy_(given, non_blocking=True)
            return
        stream = self._stream()
        for (mine, address, size, stride, dtype), given in zip(self._own, inputs, strict=True):
            alike = size and given.dtype is dtype and given.stride() == stride
            if not alike or copy(address, given.data_ptr(), size, stream):
                mine.copy_(given, non_blocking=True)  # which tells of what is wrong


def input_copies(own: Sequence[torch.Tensor], stream: Callable[[], int]) -> InputCopies:
    """For inputs on one CUDA device."""
    return InputCopies(own, driver_copy(), stream, _own._cuda_getDevice)
