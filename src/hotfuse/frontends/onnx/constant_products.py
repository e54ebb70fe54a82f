# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
# torch says nothing of these operators' types.
"""Products with a constant matrix: by torch's own kernel, or by oneDNN's over a packed copy, whichever is faster at so many rows.

torch multiplies matrices with MKL, which arranges the matrix anew in every call, and on some processors takes half of the vector
width. oneDNN's product over a weight that was arranged once has neither. It costs some 10 us more around it: small products stay.
One thread of an AMD core with AVX-512, us (ONNX Runtime takes what oneDNN does):

    rows, inputs, outputs    1, 384, 1536    16, 384, 384    40, 120, 6625    128, 384, 1536    512, 384, 1536
    torch                              27              56             700             1,470             8,770
    packed                             50              32             275               640             2,700

Where Intel's library takes the whole width the two are close, so it is measured once in a process for each shape, by powers of two
of its rows, when a layer meets them the second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.frontends.onnx.packed_weights import MARGIN, PackedWeight, trials, usable

MIN_MULTIPLIES = 1 << 22
"""Of a call: between other operators, out of their caches, smaller ones gain nothing (64, 128, 256: 53 us either way)."""


class ConstantProduct:
    """`x @ weight + bias`, called with a node's inputs, of which only the first varies."""

    __slots__ = ("_bias", "_inputs", "_outputs", "_packed", "_seen", "plain", "rows")

    def __init__(self, rows: Tensor, bias: Tensor | None, plain: Callable[..., Any]) -> None:
        """`rows` holds the weights of one output each; `plain` is the node's own function."""
        self.rows = rows
        self._outputs, self._inputs = int(rows.shape[0]), int(rows.shape[1])
        self._bias, self.plain = bias, plain
        self._packed = PackedWeight(lambda: _pack(rows), 4 * rows.numel())
        self._seen: set[int] = set()

    @property
    def constants(self) -> tuple[Tensor, Tensor | None]:
        """What it multiplies with and adds, as `linear` takes them."""
        return self.rows, self._bias

    @property
    def bytes(self) -> int:
        """Memory of the packed copy, while there is one."""
        return self._packed.bytes

    def __call__(self, x: Any, *constants: Any) -> Any:
        """The product."""
        if not isinstance(x, Tensor) or x.numel() * self._outputs < MIN_MULTIPLIES:
            return self.plain(x, *constants)
        if x.dim() < 2 or x.shape[-1] != self._inputs or not usable(x):
            return self.plain(x, *constants)
        rows = x.numel() // self._inputs
        layer = self._layer(rows)
        wins = trials.known(layer)
        if wins is None:
            wins = self._compared(layer, x, constants)
        weight = self._packed.get() if wins else None
        return self.plain(x, *constants) if weight is None else _linear(x, weight, self._bias, "none", [], "")

    def for_sizes(self, x: Tensor) -> Callable[..., Any] | None:
        """What to call for inputs of just these sizes, which have come before; None where that is torch's own kernel."""
        rows = x.numel() // self._inputs if x.dim() > 1 else 0
        if x.numel() * self._outputs < MIN_MULTIPLIES or not rows:
            return None
        wins = trials.known(self._layer(rows))
        return self if wins is None else self._by_packed if wins else None

    def _by_packed(self, x: Tensor, *constants: Any) -> Any:
        weight = self._packed.get() if usable(x) else None
        return self.plain(x, *constants) if weight is None else _linear(x, weight, self._bias, "none", [], "")

    def _layer(self, rows: int) -> tuple[str, int, int, int]:
        return "product", self._inputs, self._outputs, rows.bit_length()

    def _compared(self, layer: tuple[str, int, int, int], x: Tensor, constants: tuple[Any, ...]) -> int:
        """Whether the packed product is faster, if that is to be known by now."""
        if layer[3] not in self._seen:
            self._seen.add(layer[3])
            return False
        if (weight := self._packed.get()) is None:
            return False
        candidates = ((lambda: self.plain(x, *constants), 1.0), (lambda: _linear(x, weight, self._bias, "none", [], ""), MARGIN))
        wins = trials.fastest(layer, candidates)
        if wins == 0:
            self._packed.let_go()
        return wins or 0

    def __deepcopy__(self, memo: object) -> ConstantProduct:
        """What it knows holds for a copy of the model, too."""
        return self


@functools.cache
def available() -> bool:
    """Whether torch has the operators, and they give what a product does, empty ends and all."""
    if not torch.backends.mkldnn.is_available():
        return False
    rows, x = torch.linspace(-1, 1, 19 * 37).reshape(19, 37), torch.linspace(-2, 2, 5 * 37).reshape(5, 37)
    try:
        with torch.no_grad():
            got = _linear(x, _pack(rows), rows[:, 0].contiguous(), "none", [], "")
        return torch.allclose(got, F.linear(x, rows, rows[:, 0]), rtol=1e-5, atol=1e-5)
    except Exception as e:  # another torch, or a build without the library: its own kernels do
        faults.note("oneDNN's products over packed weights", e)
        return False


def _pack(rows: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(rows.contiguous(), None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return _operator()(x, weight, bias, *rest)


@functools.cache
def _operator() -> Callable[..., Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default._op  # without its Python wrapper
