"""A generated kernel as something that takes tensors and gives tensors.

A kernel reads memory by the strides it was made for, from addresses that are multiples of 16. A tensor that lies otherwise is
copied first, and counted: calls of one kind bring the same strides, so that is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from hotfuse.backends.device_protocol import LaunchedKernel
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.types import TensorType
from hotfuse.lower.common.lowered import BufferArgument, BufferRole, Lowered, dense_strides
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile.memory import NUMPY

ALIGNED = 16


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """How a tensor has to lie."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class GeneratedKernel:
    """One group's kernel: called with the group's sources in order, it gives the group's outputs in order."""

    function: LaunchedKernel
    order: tuple[tuple[BufferRole, int], ...]
    """Per buffer of the kernel, which source or output it is."""
    places: tuple[TensorPlace, ...]
    """Of the sources."""
    outputs: tuple[TensorPlace, ...]
    device: torch.device
    copies: int = 0
    """Tensors that lay otherwise."""
    stream: Callable[[], int] = field(default=lambda: 0)

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Launch on the caller's stream."""
        tensors = [self._fitting(t, place) for t, place in zip(given, self.places, strict=True)]
        made = [torch.empty_strided(p.shape, p.strides, dtype=p.dtype, device=self.device) for p in self.outputs]
        pointers = [(made[i] if role is BufferRole.OUTPUT else tensors[i]).data_ptr() for role, i in self.order]
        self.function.launch(pointers, self.stream())
        return tuple(made)

    def _fitting(self, t: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        if t.shape != place.shape or t.dtype is not place.dtype:
            raise InternalError(f"a kernel for {place.shape} got {tuple(t.shape)} of {t.dtype}")
        if same_strides(t, place) and t.data_ptr() % ALIGNED == 0:
            return t
        self.copies += 1
        return torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device=t.device).copy_(t)


def same_strides(t: torch.Tensor, place: TensorPlace) -> bool:
    """Whether a tensor lies as it has to; dims of one element lie anyhow."""
    return all(n == 1 or a == b for n, a, b in zip(place.shape, t.stride(), place.strides, strict=True))


def generated(
    graph: Graph, lowered: Lowered, strides: Mapping[str, tuple[int, ...]], function: LaunchedKernel, device: torch.device
) -> GeneratedKernel:
    """The callable of a group's kernel; `strides` are those that it was lowered with."""
    given = [v.name for v in sources(graph)]
    made = [v.name for v in dict.fromkeys(output_values(graph))]
    order: list[tuple[BufferRole, int]] = []
    for a in lowered.arguments:
        if not isinstance(a, BufferArgument):
            raise InternalError("a kernel for a GPU takes memory only")
        order.append((a.role, made.index(a.value) if a.role is BufferRole.OUTPUT else given.index(a.value)))
    written = dict(lowered.strides)
    places = tuple(_place(v, strides.get(v.name)) for v in sources(graph))
    outputs = tuple(_place(v, tuple(evaluate(d, {}) for d in written[v.name])) for v in dict.fromkeys(output_values(graph)))
    stream: Callable[[], int] = (lambda: int(torch.cuda.current_stream(device).cuda_stream)) if device.type == "cuda" else lambda: 0
    return GeneratedKernel(function, tuple(order), places, outputs, device, stream=stream)


def _place(v: Value, strides: Sequence[int] | None) -> TensorPlace:
    t = v.type
    if not isinstance(t, TensorType) or t.dtype not in NUMPY:
        raise InternalError(f"%{v.name} is no tensor of numbers")
    shape = tuple(evaluate(d, {}) for d in t.shape)
    dense = tuple(evaluate(d, {}) for d in dense_strides(t.shape, t.layout))
    return TensorPlace(shape, dense if strides is None else tuple(strides), torch_dtype(t.dtype))


def observed_strides(values: Sequence[Value], tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Strides of values that lie otherwise than their types say."""
    found: dict[str, tuple[int, ...]] = {}
    for v in values:
        t = tensors.get(v.name)
        if isinstance(t, torch.Tensor) and isinstance(v.type, TensorType) and v.type.dtype in NUMPY:
            plain = not v.type.layout.strided and same_strides(t, _place(v, None))
            repeats = any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))
            if repeats:  # what is copied to fit cannot lie so; a kernel reads it spread out
                found[v.name] = torch.empty(t.shape, device="meta").stride()
            elif not plain:
                found[v.name] = tuple(t.stride())
    return found
