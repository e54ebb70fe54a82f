"""Weights laid out once for a kernel: panels of columns, each panel contiguous over the shared dimension.

    W[N, K] or W[K, N]  ->  panels[ceil(N / nr)][K][nr], zero beyond N
    bytes               ->  panels[ceil(N / nr)][K / 4][nr][4]: what one instruction multiplies lies side by side
    bytes as 16 bits    ->  panels[ceil(N / nr)][K / 2][nr][2]

What is to be packed is plain data, so that a worker process decides it and the process that owns the weights carries it out.
Several weights that meet the same input lie behind each other, each beginning with its own panel; or together, when their
products are wanted at the same time: then every panel has as many columns of each, side by side.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.types import DType
from hotfuse.lower.common.winograd import transformed
from hotfuse.machine.huge_pages import SIZE as HUGE_PAGE
from hotfuse.machine.huge_pages import huge_pages
from hotfuse.native.panels import fill_panels
from hotfuse.tile.memory import NUMPY

_NUMPY = {d: NUMPY[d] for d in (DType.F32, DType.F64, DType.F16, DType.BF16, DType.I8, DType.I16, DType.I32)}
BYTE_GROUP = 4
"""Bytes that one instruction multiplies and adds up."""
WORD_GROUP = 2
"""The same of 16-bit numbers."""
_OF_BYTES = frozenset({DType.I8, DType.I16, DType.I32})
"""What is packed of weights that are bytes."""
_PAGE = 4096
_LINE = 64
NATIVE_BYTES = 1 << 20
"""Of a weight that native code packs: what is smaller takes less than asking for that code does."""

Array = npt.NDArray[Any]


class WeightOrder(StrEnum):
    """How a weight lies before packing."""

    NK = "nk"
    """A linear layer's: one row per output."""
    KN = "kn"
    """A matrix product's right operand."""
    ROWS = "rows"
    """Some rows of a linear layer's weight, or of several behind each other: [..., K], rows counted over all dims but the last."""
    COLUMNS = "columns"
    """Some columns of a matrix product's right operand: from `first` on, one of every `taps[0]`."""
    WINDOW = "window"
    """A convolution's, [outputs, inputs, window...]: steps go by place of the window, then input (bytes: whole groups)."""
    TURNED = "turned"
    """A transposed convolution's, [inputs, outputs, window...]: steps go by `taps`, then input."""
    WINOGRAD = "winograd"
    """A convolution's, by Winograd transforms: steps go by point, then input. `taps`: a tile's outputs per dim."""


@dataclass(frozen=True, slots=True)
class PackSource:
    """One weight: the name under which the caller hands it over, and its extents."""

    name: str
    order: WeightOrder
    n: int
    first: int = 0
    """Where the rows of `ROWS` or the columns of `COLUMNS` begin, a group's outputs of `WINDOW`, or its inputs of `TURNED`."""
    taps: tuple[int, ...] = ()
    """The places of a window that are wanted, counted through, in this order (`TURNED`), or what `WINOGRAD` or `COLUMNS` says."""


@dataclass(frozen=True, slots=True)
class PackSpec:
    """A packed buffer, as data."""

    sources: tuple[PackSource, ...]
    k: int
    nr: int
    dtype: DType = DType.F32
    """I8 is for weights of bytes, I16 for bytes that are widened; those without a sign are stored less 128. I32 is for the sums of
    their columns, as stored."""
    together: bool = False
    paired: bool = False
    """fp32 weights rounded to bf16, two steps of K side by side: [panels][K / 2][nr][2], what one instruction multiplies."""
    whole: int = 1
    """Groups of steps are filled up with zeros to a multiple of so many: what a matrix unit takes at once."""
    experts: int = 0
    """Weights have a first dim of so many matrices, and the panels of each lie behind those of the one before; 0: no such dim."""

    @property
    def group(self) -> int:
        """Steps of K that lie side by side."""
        return BYTE_GROUP if self.dtype is DType.I8 else WORD_GROUP if self.paired or self.dtype is DType.I16 else 1

    @property
    def steps(self) -> int:
        """Groups of steps along K."""
        return 1 if self.dtype is DType.I32 else -(-self.k // (self.group * self.whole)) * self.whole

    @property
    def width(self) -> int:
        """Columns of one weight in a panel."""
        return self.nr // len(self.sources) if self.together else self.nr

    def panels_of(self, source: PackSource) -> int:
        """Panels that hold one weight; the last may be partly zero."""
        return -(-source.n // self.width)

    @property
    def panels(self) -> int:
        """Panels of all weights."""
        each = [self.panels_of(s) for s in self.sources]
        return (max(each) if self.together else sum(each)) * max(1, self.experts)

    @property
    def panel_stride(self) -> int:
        """Elements from one panel to the next: a line more where panels would begin at the same place of every page."""
        size = _NUMPY[self.dtype].itemsize
        used = self.steps * self.nr * self.group
        return used + (_LINE // size if used * size % _PAGE == 0 else 0)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Panels, steps of K, columns of a panel; bytes have a fourth dim, of the steps in a group."""
        inner = (self.group,) if self.group > 1 else ()
        return (self.panels, self.steps, self.nr, *inner)

    @property
    def stride(self) -> tuple[Dim, ...]:
        """Elements between panels, steps and columns."""
        inner = (self.group,) if self.group > 1 else ()
        return (self.panel_stride, self.nr * self.group, *inner, 1)

    @property
    def bytes(self) -> int:
        """What the packed buffer takes."""
        return self.panels * self.panel_stride * _NUMPY[self.dtype].itemsize


def pack(spec: PackSpec, weights: Mapping[str, Array]) -> Array:
    """Carry a spec out: the packed buffer as one flat array."""
    flat = aligned(spec.panels * spec.panel_stride, _NUMPY[spec.dtype])
    if spec.dtype in _OF_BYTES:
        _pack_bytes(spec, weights, flat)
        return flat
    if spec.paired:
        _pack_pairs(spec, weights, flat)
        return flat
    size = flat.itemsize
    strides = (spec.panel_stride * size, spec.nr * size, size)
    panels = np.lib.stride_tricks.as_strided(flat, (spec.panels, spec.k, spec.nr), strides)
    if not spec.experts:
        _fill(spec, weights, panels)
        return flat
    each = spec.panels // spec.experts
    for expert in range(spec.experts):
        own = {s.name: weights[s.name][expert] for s in spec.sources if s.name in weights}
        _fill(spec, own, panels[expert * each : (expert + 1) * each])
    return flat


def _pack_bytes(spec: PackSpec, weights: Mapping[str, Array], flat: Array) -> None:
    """Panels of bytes in groups along K, or the sums of their columns."""
    panels = np.zeros((spec.panels, max(spec.k, spec.steps * spec.group), spec.nr), np.int8)
    _fill(spec, weights, panels[:, : spec.k])
    view = np.lib.stride_tricks.as_strided(
        flat, (spec.panels, spec.panel_stride), (spec.panel_stride * flat.itemsize, flat.itemsize)
    )
    if spec.dtype is DType.I32:
        view[:, : spec.nr] = panels.sum(1, dtype=np.int32)
    else:
        grouped = panels.reshape(spec.panels, spec.steps, spec.group, spec.nr).transpose(0, 1, 3, 2)
        view[:, : spec.steps * spec.nr * spec.group] = grouped.reshape(spec.panels, -1)


def _pack_pairs(spec: PackSpec, weights: Mapping[str, Array], flat: Array) -> None:
    """Panels of fp32 weights as pairs of bf16; an odd last step has a zero beside it."""
    panels = np.zeros((spec.panels, spec.steps * spec.group, spec.nr), np.float32)
    _fill(spec, weights, panels[:, : spec.k])
    paired = panels.astype(flat.dtype).reshape(spec.panels, spec.steps, spec.group, spec.nr).transpose(0, 1, 3, 2)
    view = np.lib.stride_tricks.as_strided(
        flat, (spec.panels, spec.panel_stride), (spec.panel_stride * flat.itemsize, flat.itemsize)
    )
    view[:, : spec.steps * spec.nr * spec.group] = paired.reshape(spec.panels, -1)


def _fill(spec: PackSpec, weights: Mapping[str, Array], panels: Array) -> None:
    """Every weight's columns into its panels."""
    at = left = 0
    for source in spec.sources:
        weight, width = _columns(spec, source, weights), spec.width
        if _turned_natively(weight, panels):
            _, step, size = panels.strides
            to = panels.ctypes.data + at * panels.strides[0] + left * size
            fill_panels((weight.ctypes.data, source.n, spec.k, weight.strides[1]), (to, width, step, panels.strides[0]))
            full = rest = 0
        else:
            full, rest = divmod(source.n, width)
        whole = weight[:, : full * width].reshape(spec.k, full, width)
        panels[at : at + full, :, left : left + width] = whole.transpose(1, 0, 2)
        if rest:
            panels[at + full, :, left : left + rest] = weight[:, full * width :]
        if spec.together:
            left += width
        else:
            at += spec.panels_of(source)


def _turned_natively(weight: Array, panels: Array) -> bool:
    """Whether columns that lie as rows, of four bytes an element, are worth native code."""
    same = weight.dtype == panels.dtype and weight.itemsize == 4 and panels.strides[2] == 4
    return same and weight.strides[0] == 4 and weight.strides[1] % 4 == 0 and weight.nbytes >= NATIVE_BYTES


def _columns(spec: PackSpec, source: PackSource, weights: Mapping[str, Array]) -> Array:
    """A weight as K x N."""
    if source.name not in weights:
        raise InternalError(f"there is no weight {source.name!r} to pack")
    weight = weights[source.name]
    if spec.dtype in _OF_BYTES and weight.dtype == np.uint8:
        weight = (weight ^ np.uint8(128)).view(np.int8)
    if source.order in (WeightOrder.WINDOW, WeightOrder.TURNED, WeightOrder.WINOGRAD):
        return _windows(spec, source, weight)
    if source.order is WeightOrder.ROWS:
        weight = weight.reshape(-1, spec.k)[source.first : source.first + source.n]
    if source.order is WeightOrder.COLUMNS:
        weight = weight[:, source.first :: source.taps[0]][:, : source.n]
    across = source.order in (WeightOrder.KN, WeightOrder.COLUMNS)
    shape = (spec.k, source.n) if across else (source.n, spec.k)
    wanted = _NUMPY[DType.I8 if spec.dtype in _OF_BYTES else DType.F32 if spec.paired else spec.dtype]
    if weight.shape != shape or weight.dtype != wanted:
        raise InternalError(
            f"weight {source.name} is {weight.dtype}{list(weight.shape)}, to be packed as {spec.dtype.value}{list(shape)}"
        )
    return weight if across else weight.T


def _windows(spec: PackSpec, source: PackSource, weight: Array) -> Array:
    """A convolution's weight, or one of its groups, as K x N."""
    wanted = _NUMPY[DType.I8 if spec.dtype in _OF_BYTES else spec.dtype]
    if wanted == np.int8 and weight.ndim > 2:  # every place of the window has whole groups
        beyond = spec.k // math.prod(weight.shape[2:]) - weight.shape[1]
        weight = np.pad(weight, [(0, 0), (0, beyond), *[(0, 0)] * (weight.ndim - 2)]) if 0 < beyond < BYTE_GROUP else weight
    flat = weight.reshape(*weight.shape[:2], -1)
    if source.order in (WeightOrder.WINDOW, WeightOrder.WINOGRAD):
        flat = flat[source.first : source.first + source.n].transpose(2, 1, 0)
        flat = transformed(flat, weight.shape[2:], source.taps) if source.order is WeightOrder.WINOGRAD else flat
    else:
        inputs = spec.k // max(1, len(source.taps))
        flat = flat[source.first : source.first + inputs, :, list(source.taps)].transpose(2, 0, 1)
    if flat.shape[2] != source.n or flat.shape[0] * flat.shape[1] != spec.k or flat.dtype != wanted:
        raise InternalError(
            f"weight {source.name} is {weight.dtype}{list(weight.shape)}, to be packed as {source.n} windows of {spec.k}"
        )
    return flat.reshape(spec.k, source.n)


def aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """Zeros that begin on a cache line; large ones on huge pages, where the system has them to give."""
    size = max(count * dtype.itemsize, 1)
    if size < HUGE_PAGE:
        raw = np.zeros(size + _LINE, np.uint8)
        start = -raw.ctypes.data % _LINE
    else:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(memory, np.uint8)
        start = -raw.ctypes.data % HUGE_PAGE
        huge_pages.prefer(memory, start, size)
    return raw[start : start + count * dtype.itemsize].view(dtype)
