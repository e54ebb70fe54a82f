# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
# torch says nothing of these operators' types.
"""A folded convolution by torch's rules, by oneDNN whatever those say, or by oneDNN over packed weights: the fastest by size.

torch gives convolutions of single pixels, and small ones, to a product of its own, as long as one thread calls with one image. On
processors where that product takes half of the vector width oneDNN needs half of the time, weights put in order in every call
included; for few pixels a copy in its order saves as much again. One thread of an AMD core with AVX-512, us:

    image (channels last)       6x80x480 -> 480    24x160x64 -> 128    7x7x512 -> 2048    1x4x129 -> 128 (1x3)
    torch's choice                        2,040                 586              1,064                      10
    oneDNN                                  960                 278                861                      41
    oneDNN, packed                          870                 267                433                      19

What is faster is measured by powers of two of an image's elements, when they come the second time, once for layers of one shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.frontends.onnx.native_floats import native_windows
from hotfuse.frontends.onnx.packed_weights import MARGIN, PackedWeight, trials, usable
from hotfuse.ops.folded_conv import FoldedConv

Images = Callable[[Tensor], Tensor]


class ConvKernels:
    """A folded convolution, called by the kernel that is fastest for images of such a size."""

    __slots__ = ("_chosen", "_packed", "_panels", "_seen", "conv")

    def __init__(self, conv: FoldedConv) -> None:
        self.conv = conv
        self._chosen: dict[tuple[int, int], Images] = {}
        """By bits of the number of elements, and threads."""
        self._seen: set[tuple[int, int]] = set()
        self._packed: PackedWeight | None = None
        self._panels: native_windows.WindowPanels | None = None

    @property
    def bytes(self) -> int:
        """Memory of the packed copies, while there are any."""
        return sum(p.bytes for p in (self._packed, self._panels) if p is not None)

    def panels_for(self, x: Tensor) -> native_windows.WindowPanels | None:
        """The weights for native code; None where that is not made for such images."""
        if not native_windows.takes(self.conv, x):
            return None
        if self._panels is None:
            self._panels = native_windows.WindowPanels(self.conv)
        return self._panels

    def __call__(self, x: Any) -> Any:
        """The result for an image."""
        conv = self.conv
        if x.dim() != conv.dims or conv.window.groups != 1 or not x.numel() or not usable(x):
            return conv(x)
        return self.chosen(x)(x)

    def for_sizes(self, x: Tensor, *, at_once: bool = False) -> Images:
        """What to call for images of just these sizes, which have come before; itself as long as that is open."""
        if x.dim() != self.conv.dims or self.conv.window.groups != 1:
            return self.conv
        key = (x.numel().bit_length(), torch.get_num_threads())
        self._seen.add(key)
        self.chosen(x, at_once=at_once)
        return self._chosen.get(key, self)

    def chosen(self, x: Tensor, *, at_once: bool = False) -> Images:
        """The kernel for images of such a size, measured when they come the second time."""
        key = (x.numel().bit_length(), torch.get_num_threads())
        if (found := self._chosen.get(key)) is not None:
            return found
        if key not in self._seen or not available():
            self._seen.add(key)
            return self.conv
        return self._fastest(key, x, at_once=at_once)

    def _fastest(self, key: tuple[int, int], x: Tensor, *, at_once: bool) -> Images:
        if max(self.conv.window.pads) and not bool(torch.isfinite(self.conv.weight).all()):
            self._chosen[key] = self.conv  # zeros around an image times what is not finite are no zeros: not all kernels read them
            return self.conv
        library, layer, alike = self.conv.with_kernel(self._in_library), self.layer(x), self.alike(x)
        candidates: list[tuple[Images, float]] = [(self.conv, 1.0), (library, 1.0)]
        packed = self._packed or self._to_pack(x)
        best = trials.known((*layer, True), (*alike, True))
        if best is None and trials.rests and not at_once:
            return self.conv
        if best in (None, 2):
            if packed.get() is not None:
                candidates.append((self.conv.with_kernel(functools.partial(self._by_packed, packed)), MARGIN))
            elif packed.later:
                return self.conv  # compared by a later call
            runs = [(functools.partial(run, x), margin) for run, margin in candidates]
            three = len(candidates) == 3
            best = trials.fastest((*layer, three), runs, (*alike, three), at_once=at_once)
        if best == 2:
            self._packed = packed
        elif packed is not self._packed:
            packed.let_go()
        if best is None:
            return self.conv
        self._chosen[key] = candidates[best][0]
        return candidates[best][0]

    def alike(self, x: Tensor) -> tuple[Hashable, ...]:
        """What decides which library is faster: how much there is to multiply, and whether weights are most of it."""
        weight = self.conv.weight
        work = (x.numel() // max(1, x.shape[1]) * weight.numel()).bit_length()
        return "conv", weight[0, 0].numel() == 1, weight.numel() > x.numel(), work // 2, x.stride(1) == 1

    def layer(self, x: Tensor) -> tuple[Hashable, ...]:
        """What it and others are compared as on images like this one."""
        conv, innermost = self.conv, x.stride(1) == 1
        return "conv", conv.weight.shape, conv.window, conv.activation, conv.dims, x.numel().bit_length(), innermost

    def _to_pack(self, x: Tensor) -> PackedWeight:
        window, weight = self.conv.window, self.conv.weight
        image = list(x.shape) if self.conv.dims == 4 else [x.shape[0], x.shape[1], 1, x.shape[2]]

        def make() -> Tensor:
            reorder = torch.ops.mkldnn._reorder_convolution_weight
            return reorder(weight, window.pads, window.stride, window.dilation, window.groups, image)

        return PackedWeight(make, 4 * weight.numel())

    def _in_library(self, x: Tensor) -> Tensor:
        window = self.conv.window
        return _unpacked()(x, self.conv.weight, self.conv.shift, window.pads, window.stride, window.dilation, window.groups)

    def _by_packed(self, packed: PackedWeight, x: Tensor) -> Tensor:
        if (weight := packed.get()) is None:
            return self._in_library(x)
        window = self.conv.window
        given = (self.conv.shift, window.pads, window.stride, window.dilation, window.groups, "none", [], "")
        return _pointwise()(x, weight, *given)

    def __deepcopy__(self, memo: object) -> ConvKernels:
        """What it knows holds for a copy of the model, too."""
        return self


@functools.cache
def available() -> bool:
    """Whether torch has the operators, and they give what its own convolution does."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.linspace(-2, 2, 5 * 49).reshape(1, 5, 7, 7), torch.linspace(-1, 1, 7 * 45).reshape(7, 5, 3, 3)
    try:
        with torch.no_grad():
            want = torch.conv2d(x, weight, padding=1)
            packed = torch.ops.mkldnn._reorder_convolution_weight(weight, [1, 1], [1, 1], [1, 1], 1, [1, 5, 7, 7])
            got = _pointwise()(x, packed, None, [1, 1], [1, 1], [1, 1], 1, "none", [], "")
            plain = _unpacked()(x, weight, None, [1, 1], [1, 1], [1, 1], 1)
        return all(torch.allclose(y, want, rtol=1e-4, atol=1e-4) for y in (got, plain))
    except Exception as e:  # another torch, or a build without the library: its own kernels do
        faults.note("oneDNN's convolutions over packed weights", e)
        return False


@functools.cache
def _unpacked() -> Callable[..., Tensor]:
    return torch.ops.aten.mkldnn_convolution.default._op  # without its Python wrapper


@functools.cache
def _pointwise() -> Callable[..., Tensor]:
    return torch.ops.mkldnn._convolution_pointwise.default._op
