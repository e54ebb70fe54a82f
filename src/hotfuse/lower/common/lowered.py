"""A kernel with how it is called, and the memory it is called on.

Dense tensors are flat buffers: their element (i, j, ...) lies at a sum of products that the kernel computes itself. A tensor
with strides known only at run time is a buffer of its own shape whose strides are sizes of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, symbols
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.types import Layout, TensorType, dims_of
from hotfuse.lower.common.algebra import mul, product
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.pack import PackSpec
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import OWN, Buffer, BufferKind, Kernel

if TYPE_CHECKING:
    from hotfuse.tile.build import KernelBuilder


class BufferRole(StrEnum):
    """What a buffer is to the graph."""

    INPUT = "input"
    PARAM = "param"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class BufferArgument:
    """A buffer is the memory of a value; `value` is its name in the graph."""

    buffer: str
    role: BufferRole
    value: str


@dataclass(frozen=True, slots=True)
class SymbolArgument:
    """A size is a symbol of the graph."""

    size: str
    symbol: str


@dataclass(frozen=True, slots=True)
class StrideArgument:
    """A size is a stride, in elements, of an input or param as the call brings it."""

    size: str
    value: str
    dim: int


@dataclass(frozen=True, slots=True)
class PackArgument:
    """A constant buffer is made once from params; the spec's sources are names of values in the graph."""

    buffer: str
    spec: PackSpec


@dataclass(frozen=True, slots=True)
class StateArgument:
    """A buffer is words that outlive calls, and begin as these."""

    buffer: str
    words: tuple[int, ...]


Argument = BufferArgument | PackArgument | SymbolArgument | StrideArgument | StateArgument


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel and what its buffers and sizes are, in the kernel's order: buffers first."""

    kernel: Kernel
    arguments: tuple[Argument, ...]
    strides: tuple[tuple[str, tuple[Dim, ...]], ...] = ()
    """Per output, the strides it is written with."""


def dense_strides(shape: tuple[Dim, ...], layout: Layout) -> tuple[Dim, ...]:
    """The strides of a dense tensor in its dimension order."""
    order = layout.order or tuple(range(len(shape)))
    strides: list[Dim] = [1] * len(shape)
    step: Dim = 1
    for d in reversed(order):
        strides[d] = step
        step = mul(step, shape[d])
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class BufferView:
    """Where a value lies: a flat buffer with the strides to walk it by, or (`flat` false) a buffer of the value's shape."""

    buffer: Buffer
    strides: tuple[Dim, ...]
    flat: bool


@dataclass(slots=True)
class KernelBuffers:
    """The buffers of a kernel under construction."""

    builder: KernelBuilder
    graph: Graph
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Strides that are known although the type does not say them."""
    places: dict[str, BufferView] = field(default_factory=dict[str, BufferView])
    arguments: list[BufferArgument] = field(default_factory=list[BufferArgument])
    runtime: list[StrideArgument] = field(default_factory=list[StrideArgument])
    _params: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._params = frozenset(p.value.name for p in self.graph.params)
        mentioned = [d for v in sources(self.graph) for d in dims_of(v.type)]
        mentioned += [d for n in self.graph.nodes for v in n.outs for d in dims_of(v.type)]
        for name in sorted(frozenset[str]().union(*map(symbols, mentioned))):
            self.builder.size(name)

    def place(self, value: Value) -> BufferView:
        """The memory of an input or param."""
        if value.name not in self.places:
            const = value.name in self._params
            kind = BufferKind.CONST if const else BufferKind.INPUT
            self.places[value.name] = self._made(value, kind, BufferRole.PARAM if const else BufferRole.INPUT)
        return self.places[value.name]

    def output(self, value: Value) -> BufferView:
        """The memory of an output."""
        key = f"{value.name} "
        if key not in self.places:
            self.places[key] = self._made(value, BufferKind.OUTPUT, BufferRole.OUTPUT)
        return self.places[key]

    def aside(self, value: Value) -> None:
        """Memory for a value that one nest of loops stores and later ones read: an output's, else the kernel's own."""
        if any(v.name == value.name for v in output_values(self.graph)):
            self.places[value.name] = self.output(value)
        elif value.name not in self.places:
            t = tensor_type(value)
            buffer = self.builder.shared(value.name, t.dtype, (product(t.shape),), (1,))
            layout = Layout() if t.layout.strided else t.layout
            made = BufferView(buffer, dense_strides(t.shape, layout), flat=True)
            self.places[value.name] = self.places[f"{value.name} "] = made

    def _made(self, value: Value, kind: BufferKind, role: BufferRole) -> BufferView:
        t = tensor_type(value)
        known = self.strides.get(value.name)
        strided = t.layout.strided and role is not BufferRole.OUTPUT
        if strided and known is None:
            strides = tuple(self._stride(value, d, n) for d, n in enumerate(t.shape))
            buffer = self.builder.buffer(value.name, kind, t.dtype, t.shape, strides)
            made = BufferView(buffer, strides, flat=False)
        elif known is not None and role is not BufferRole.OUTPUT:
            made = BufferView(self.builder.buffer(value.name, kind, t.dtype, t.shape, known), known, flat=False)
        else:
            layout = Layout() if t.layout.strided else t.layout
            buffer = self.builder.buffer(value.name, kind, t.dtype, (product(t.shape),), (1,))
            made = BufferView(buffer, dense_strides(t.shape, layout), flat=True)
        self.arguments.append(BufferArgument(made.buffer.name, role, value.name))
        return made

    def _stride(self, value: Value, dim: int, extent: Dim) -> Dim:
        if extent == 1:
            return 0
        name = self.builder.fresh(f"{value.name}.stride{dim}")
        self.builder._taken.discard(name)  # pyright: ignore[reportPrivateUsage]
        self.runtime.append(StrideArgument(name, value.name, dim))
        return self.builder.size(name)

    def finish(self, kernel: Kernel, packs: Mapping[str, PackArgument] | None = None) -> Lowered:
        """The kernel with its call; `packs` are its packed buffers."""
        by_buffer: dict[str, BufferArgument | PackArgument] = {**{a.buffer: a for a in self.arguments}, **(packs or {})}
        by_size = {a.size: a for a in self.runtime}
        buffers = [by_buffer[b.name] for b in kernel.buffers if b.kind not in OWN]
        sizes = [by_size.get(s, SymbolArgument(s, s)) for s in kernel.sizes]
        outs = tuple((v.name, self.output(v).strides) for v in dict.fromkeys(output_values(self.graph)))
        return Lowered(kernel, (*buffers, *sizes), outs)


def tensor_type(value: Value) -> TensorType:
    """The type of a value that must be a tensor of the CPU with elements that tiles can hold."""
    t = value.type
    if not isinstance(t, TensorType):
        raise CannotLower(f"%{value.name} is not a tensor")
    if t.dtype not in NUMPY:
        raise CannotLower(f"%{value.name} holds {t.dtype.value}, which tiles do not")
    if t.device != "cpu":
        raise CannotLower(f"%{value.name} is on {t.device}")
    return t
