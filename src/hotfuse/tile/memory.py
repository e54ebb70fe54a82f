"""Element types as NumPy has them, and places in memory: an access whose index arithmetic has been done.

A `TileRegion` is what a memory instruction's meaning works on. It refuses any element outside the buffer's own extents, also where
the address would still lie inside the allocation, so running a kernel in NumPy finds the faults that native code would hide.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
"""Every element type a tile may have."""


@dataclass(frozen=True, slots=True, eq=False)
class TileRegion:
    """`extent` elements along each tile axis, of which `present` exist, beginning at element `at` of a buffer."""

    name: str
    view: Array
    """The whole buffer, indexed by its own dimensions."""
    at: tuple[int, ...]
    axes: tuple[int, ...]
    step: tuple[int, ...]
    extent: tuple[int, ...]
    present: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """The part of the tile that exists in memory."""
        return tuple(slice(0, n) for n in self.present)

    @property
    def empty(self) -> bool:
        """Whether no element exists at all."""
        return 0 in self.present

    def window(self, view: Array | None = None) -> Array:
        """The existing elements as an array that shares the memory; `view` may be a shadow of the buffer."""
        view = self.view if view is None else view
        self._inside()
        stride = [0 if a < 0 else s * view.strides[a] for a, s in zip(self.axes, self.step, strict=True)]
        start = view[tuple(slice(i, None) for i in self.at)] if self.at else view
        return np.lib.stride_tricks.as_strided(start, self.present, stride, writeable=bool(view.flags.writeable))

    def read(self, fill: Any) -> Array:
        """The tile, with `fill` where no element exists."""
        out = np.full(self.extent, fill, self.view.dtype)
        if not self.empty:
            out[self.region] = self.window()
        return out

    def write(self, values: Array) -> None:
        """Store the tile's existing elements."""
        if not self.empty:
            self.window()[...] = values[self.region]

    def scattered(self, dim: int, index: Array) -> tuple[Array, ...]:
        """One index array per buffer dimension for the existing elements, with `index` added along `dim`."""
        where: list[Array] = []
        for d, first in enumerate(self.at):
            here: Array = np.full(self.present, first, np.int64)
            for a, (axis, step) in enumerate(zip(self.axes, self.step, strict=True)):
                if axis == d:
                    along = [-1 if i == a else 1 for i in range(len(self.present))]
                    here = here + (np.arange(self.present[a], dtype=np.int64) * step).reshape(along)
            if d == dim:
                here = here + np.broadcast_to(index, self.extent)[self.region].astype(np.int64)
            if here.size:
                self._check(d, int(here.min()), int(here.max()))
            where.append(here)
        return tuple(where)

    def _inside(self) -> None:
        """Tile axes move independently, so the extremes along every buffer dimension are sums over the axes."""
        for d, first in enumerate(self.at):
            low = high = first
            for axis, step, n in zip(self.axes, self.step, self.present, strict=True):
                if axis == d:
                    low += min(0, step * (n - 1))
                    high += max(0, step * (n - 1))
            self._check(d, low, high)

    def _check(self, dim: int, low: int, high: int) -> None:
        if low < 0 or high >= self.view.shape[dim]:
            raise InternalError(
                f"out of bounds in {self.name}: elements {low} to {high} of dim {dim}, which has {self.view.shape[dim]}"
            )


def poison(shape: tuple[int, ...], dtype: DType) -> Array:
    """Memory that nobody has written: NaN, or for integers a number that is hard to miss."""
    kind = NUMPY[dtype]
    if dtype is DType.BOOL:
        return np.ones(shape, kind)
    if dtype.value[0] in "iu":
        return np.full(shape, np.iinfo(kind).max - 3, kind)
    return np.full(shape, math.nan, kind)
