"""What a front end hands over, in a form that crosses a pipe: text and plain bytes."""

from __future__ import annotations

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.paths.reads import Path
from hotfuse.frontends.ship import TensorInfo
from hotfuse.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor argument as the calls showed it: shape, which dims varied, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    dynamic: frozenset[int] = frozenset()

    def takes(self, other: TensorSpec) -> bool:
        """Whether a capture for this tensor is one for another: that differs in no more than dims that vary."""
        if (self.dtype, self.device, len(self.shape)) != (other.dtype, other.device, len(other.shape)):
            return False
        if not self.dynamic >= other.dynamic:
            return False
        if self.shape == other.shape:
            return self.stride == other.stride
        # sizes of 0 and 1 mean something else to tracing than others do
        sizes = enumerate(zip(self.shape, other.shape, strict=True))
        return all(a == b or (i in self.dynamic and min(a, b) > 1) for i, (a, b) in sizes) and self._dense() and other._dense()

    def opened_with(self, other: TensorSpec) -> frozenset[int] | None:
        """The dims to leave open for a capture that takes both tensors; None where they differ in more than sizes above 1."""
        if (self.dtype, self.device, len(self.shape)) != (other.dtype, other.device, len(other.shape)):
            return None
        differ = {d for d, (a, b) in enumerate(zip(self.shape, other.shape, strict=True)) if a != b}
        if any(min(self.shape[d], other.shape[d]) <= 1 for d in differ):
            return None
        if not (self._dense() and other._dense()) and (differ or self.stride != other.stride):
            return None
        return frozenset(d for d in differ | other.dynamic if self.shape[d] > 1)

    def _dense(self) -> bool:
        step, found = 1, True
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            found = found and (size == 1 or stride == step)
            step *= size
        return found


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What a capture is for: the tensors of a call, and whether gradients were enabled around it."""

    inputs: tuple[TensorSpec, ...]
    grad_mode: bool = False
    equal: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Dims (input, dim) that are open but have one size in every call."""
    across: bool = False
    """Some dims are open because calls of earlier processes had other sizes there; calls of no one process did."""
    paths: tuple[Path, ...] | None = None
    """What the model's Python read of its tensors in this call and in others that took another one, for tracing to follow (decision
    160); None where nobody looked."""

    same: tuple[int, ...] = ()
    """For each tensor the first one that is the same object, where some are and the model's code compares them by identity."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the call itself."""
        return tuple(t.shape for t in self.inputs)

    def opened_with(self, other: CallSpec) -> tuple[frozenset[int], ...] | None:
        """By input, the dims to leave open for a capture that takes both calls; None where they differ in more than sizes."""
        if self.grad_mode != other.grad_mode or len(self.inputs) != len(other.inputs):
            return None
        dims = [t.opened_with(o) for t, o in zip(self.inputs, other.inputs, strict=True)]
        return None if None in dims else tuple(d for d in dims if d is not None)

    def takes(self, other: CallSpec) -> bool:
        """Whether a capture for this call is one for another."""
        return (
            (self.grad_mode, self.same) == (other.grad_mode, other.same)
            and (other.paths is None or self.paths == other.paths)
            and len(self.inputs) == len(other.inputs)
            and all(t.takes(o) for t, o in zip(self.inputs, other.inputs, strict=True))
        )

    @property
    def open_dims(self) -> int:
        """How many dims may vary."""
        return sum(len(t.dynamic) for t in self.inputs)


@dataclass(frozen=True, slots=True)
class DeadDraw:
    """Random numbers that a call draws from the default generator and does not use, as layers that might be dropped do."""

    op: str
    """`rand` or `randn`."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that the model's code gives in every call: Python's filters and registries decide whether it is shown."""

    text: str
    category: str
    """Its class: `module:name`."""
    filename: str
    lineno: int
    module: str
    """The module whose registry says whether it was shown."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the model's code asks of an argument besides what a graph's guards hold (`frontends.questions`)."""

    what: str
    """`gradients`, `class`, `identity` (and which are one object), `own`, `attribute ` and its name, or `data`."""
    at: int
    """Which argument; -1 for all of them."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph, with where each of its params comes from."""

    graph: Graph
    shared: dict[str, int]
    """Param key -> number of the tensor in the shipment."""
    constants: dict[str, TensorInfo]
    """Param key -> a tensor that capture made, with its data."""
    asks_grad_mode: bool = False
    """Whether the model's code asks whether gradients are enabled, and may do something else where they are not."""
    notes: tuple[str, ...] = ()
    """Fallbacks taken while capturing, for `explain()`."""
    written: tuple[int, ...] = ()
    """Inputs that the model writes in place; their new contents are the graph's last outputs, in this order."""
    returned: tuple[tuple[int, int], ...] = ()
    """Outputs that are such an input itself: (output, input)."""
    draws: tuple[DeadDraw, ...] = ()
    """Random numbers that the model draws and nobody reads: the generator moves on all the same."""
    warned: tuple[Warned, ...] = ()
    """Warnings that every call gives."""
    paths: int = 0
    """Paths through code that reads its data which the graph has; 0 where no data decide."""
    logged: tuple[tuple[str, int], ...] = ()
    """Loggers by name and levels at which the model's code logs: a graph does not, so it serves while they let nothing through."""
    asked: tuple[Asked, ...] = ()
    """What was answered for arguments without gradients or attributes, of the plain class, each of them another object."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
