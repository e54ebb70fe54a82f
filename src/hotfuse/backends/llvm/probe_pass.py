"""Probes in this process: a tensor's two-dimensional view, and the native pass that fills its record.

The kernels (`tile.probe_kernels`) are compiled once, in a worker, for all element types; here their object code is linked and
entered, without the interpreter lock. A tensor is looked at where it lies: rows that are evenly apart need no copy, in any
dimension order. One that does lie otherwise is copied, and counted; one that is too large shows every k-th row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from hotfuse.backends.llvm.native import compile_kernel
from hotfuse.backends.llvm.runs.abi import entry
from hotfuse.backends.llvm.runs.symbols import symbol, symbol_of
from hotfuse.backends.llvm.threads.parallel import runtime
from hotfuse.native import publish
from hotfuse.native.jit import compile_object, load_object
from hotfuse.native.target import CpuTarget, host
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.profile.records import COUNTS_AT, RANGES_AT, Batch, Flag, Subject
from hotfuse.tile.probe_kernels import DTYPES, name, probe

MAX_ELEMENTS_LOOKED_AT = 1 << 18
"""Elements of one value that a sample looks at: about a tenth of a millisecond."""
_NUMBER = {torch_dtype(d): i for i, d in enumerate(DTYPES)}
_EMPTY = np.array([0, 0, 0, 0, 0, 0, 0], np.int64).tobytes() + np.array([np.inf, -np.inf, 0.0]).tobytes()


def compile_all(target: CpuTarget | None = None) -> dict[str, bytes]:
    """Object code of every probe and of the publisher, by symbol: for a worker."""
    target = target or host()
    made: dict[str, bytes] = {}
    for dtype in DTYPES:
        kernel = probe(dtype)
        made[symbol(kernel)] = compile_kernel(kernel, target).code
    made[publish.NAME] = compile_object(publish.TEXT, target).code
    return made


def symbols() -> list[str]:
    """The names of the probes in the order of `DTYPES`, then the publisher's."""
    return [*(symbol_of(name(d)) for d in DTYPES), publish.NAME]


class RowsView(NamedTuple):
    """Rows of a tensor: `rows` of `cols` elements, `pitch` elements apart."""

    tensor: torch.Tensor
    rows: int
    cols: int
    pitch: int
    partial: bool
    copied: bool


def view_of(t: torch.Tensor, keep: int = 1, most: int = MAX_ELEMENTS_LOOKED_AT) -> RowsView:
    """A tensor as rows; the last `keep` dims make a row where it is contiguous, the innermost one where it is not."""
    numel = t.numel()
    copied = False
    if not t.is_contiguous() or t.is_neg():
        found = _rows(t)
        if found is None:
            copied = True
            t = _part(t, most).contiguous().resolve_neg()
            numel = t.numel()
        else:
            return _thinned(t, *found, most, copied=copied)
    cols = 1
    for n in t.shape[max(0, t.dim() - keep) :]:
        cols *= n
    return _thinned(t, numel // cols if cols else 0, cols, cols, most, copied=copied)


def _part(t: torch.Tensor, most: int) -> torch.Tensor:
    """As much of a tensor as may be copied: every k-th of its first dim that is long enough."""
    over = -(-t.numel() // most)
    if over > 1:
        for d, n in enumerate(t.shape):
            if n >= over:
                return t[(*(slice(None),) * d, slice(None, None, over))]
    return t


def _rows(t: torch.Tensor) -> tuple[int, int, int] | None:
    """Rows, columns and pitch of a tensor that is dense in some dimension order but for one step; None if there are none."""
    if t.is_neg() or not t.numel():
        return None
    dims = sorted(((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1), reverse=True)
    if not dims:
        return 1, 1, 1
    step, cols = dims.pop()
    if step != 1:
        return None
    if not dims:
        return 1, cols, cols
    pitch, rows = dims.pop()
    if pitch < cols:
        return None
    while dims:
        step, n = dims.pop()
        if step != pitch * rows:
            return None
        rows *= n
    return rows, cols, pitch


def _thinned(t: torch.Tensor, rows: int, cols: int, pitch: int, most: int, *, copied: bool) -> RowsView:
    if rows * cols <= most:
        return RowsView(t, rows, cols, pitch, partial=False, copied=copied)
    cols = min(cols, most)
    every = -(-rows * cols // most)
    return RowsView(t, -(-rows // every), cols, pitch * every, partial=True, copied=copied)


class Probes:
    """The loaded kernels."""

    def __init__(self, codes: Mapping[str, bytes]) -> None:
        self._enter: list[Callable[..., None]] = []
        *probes, publisher = symbols()
        for probe_symbol in probes:
            self._enter.append(entry(load_object(codes[probe_symbol], [probe_symbol], runtime().symbols), probe_symbol, 5, 4))
        self.publish: Callable[[int, int, int], None] = entry(
            load_object(codes[publisher], [publisher]), publisher, 2, 1
        )
        self._local = threading.local()
        self.copies = 0
        """Values that had to be copied to be looked at."""
        self.refused = 0
        """Values of kinds that have no probe: other devices, sparse ones, complex numbers."""

    def look(self, t: Any, batch: Batch, s: Subject, item: int, flags: int = 0, keep: int = 1) -> bool:
        """Add a value's record to a batch; False for what cannot be looked at."""
        number = _NUMBER.get(t.dtype) if type(t) in (torch.Tensor, torch.nn.Parameter) else None
        if number is None or t.layout is not torch.strided or not t.is_cpu:
            self.refused += 1
            return False
        v = view_of(t, keep)
        if v.copied:
            self.copies += 1
        if v.partial:
            flags |= Flag.PARTIAL
        at = batch.value(s, item, number, t.shape, v.rows, v.cols, flags)
        if not v.rows or not v.cols:
            batch.write(at, _EMPTY)
            return True
        self._enter[number](
            v.tensor.data_ptr(), self._seen(v.cols), at, at + RANGES_AT - COUNTS_AT, 0, v.rows, v.cols, v.pitch, 1
        )
        return True

    def _seen(self, cols: int) -> int:
        """Memory of this thread's own for the columns."""
        local = self._local
        if getattr(local, "room", 0) < cols:
            local.room = max(4096, 1 << cols.bit_length())
            local.memory = np.empty(local.room, np.uint8)
            local.address = int(local.memory.__array_interface__["data"][0])
        return local.address
