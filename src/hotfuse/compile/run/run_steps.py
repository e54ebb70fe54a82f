"""What the plan of a native run is made of, before memory is given out: buffers, places in them, calls, branches, loops.

`run_plan` makes these from a graph that is cut into parts, `run_loops` those of loops, `run_finish` lays them out in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType, Layout, TensorType, size_of
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.run.description import Word
from hotfuse.lower.run.places import Lies
from hotfuse.tile.program import Kernel


@dataclass(slots=True)
class LevelParts:
    """A graph cut into parts: [first node, end, kernel or -1], and the levels of parts that branch."""

    graph: Graph
    parts: list[tuple[int, int, int]]
    branches: dict[int, list[LevelParts]]


class KernelSource(Protocol):
    """Where kernels come from."""

    def lowered(self, kernel: int) -> Lowered:
        """A kernel by its number, speaking of a group in normal form."""
        ...

    def variants(self, kernel: int) -> VariantTable | None:
        """The kernels that serve a group at other sizes, for a kernel that serves it at any."""
        ...

    def copying(self, dtype: DType, shape: tuple[Dim, ...], layout: Layout) -> tuple[int, Graph]:
        """A kernel that copies a tensor into a layout, and the graph it computes."""
        ...


@dataclass(frozen=True, slots=True)
class Root:
    """A buffer: an input of the run, a constant, or memory that a kernel writes."""

    kind: str
    """`input`, `param` or `made`."""
    name: str
    dtype: DType
    elements: Dim
    word: int = -1
    """A constant's place in the table."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in a buffer, in elements; or a constant, by its word."""

    root: int
    offset: Dim = 0
    word: int = -1


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A kernel's call before memory is given out."""

    word: int
    kernel: int
    buffers: tuple[Pointer, ...]
    sizes: tuple[Dim, ...]
    scratch: Dim
    reads: tuple[tuple[int, str], ...]
    """Buffers it reads, with their names in the kernel."""
    writes: tuple[tuple[int, str], ...]
    pointwise: Kernel | None = None
    """The kernel, where all it computes is element by element."""
    made: tuple[str, ...] = ()
    """The values it stores, by output buffer; empty names where they are none of the run's graph."""
    stored: tuple[str, ...] = ()
    """The same values by their names in the group."""


@dataclass(frozen=True, slots=True)
class PlannedBranch:
    """A condition before memory is given out."""

    condition: Pointer
    outs: tuple[int, ...]
    then: tuple[PlannedStep, ...] | None
    other: tuple[PlannedStep, ...] | None
    name: str


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """Calls of several kernels of one group, one of which is made by a size; None for the library."""

    size: Dim
    ends: tuple[int, ...]
    variants: tuple[PlannedCall | None, ...]

    @property
    def calls(self) -> tuple[PlannedCall, ...]:
        """Those that native code makes; none may write over what it reads, as not all would in the same place."""
        return tuple(replace(w, pointwise=None) for w in self.variants if w is not None)


@dataclass(frozen=True, slots=True)
class PlannedMark:
    """The end of a part."""

    part: int


@dataclass(frozen=True, slots=True)
class PlannedLoop:
    """A loop before memory is given out: see `run.Loop`."""

    var: str
    trips: Dim | Pointer | None
    condition: Pointer | None
    again: Pointer | None
    iteration: Pointer | None
    go: Pointer | None
    outs: tuple[int, ...]
    """What it carries, and the stacks of its steps."""
    steps: tuple[PlannedStep, ...]
    name: str
    exactly: Dim | None = None


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """Bytes that are copied as they are."""

    source: Pointer
    into: Pointer
    bytes: Dim


PlannedStep = PlannedCall | PlannedBranch | PlannedChoice | PlannedLoop | PlannedMark | PlannedMove


@dataclass(slots=True)
class GraphScope:
    """One graph: its constants by value's name, and where its values lie."""

    graph: Graph
    keys: Mapping[str, str]
    lies: dict[str, Lies]
    top: bool
    inside: str = ""
    """What the names of control nodes begin with here."""


@dataclass(slots=True)
class RunState:
    """All that grows; copied before every part, so that a part that does not fit leaves no trace."""

    roots: list[Root] = field(default_factory=list[Root])
    inputs: list[Value] = field(default_factory=list[Value])
    words: list[Word] = field(default_factory=list[Word])
    symbols: dict[int, str] = field(default_factory=dict[int, str])
    """Words that are numbers, with the symbol that stands for them."""
    strided: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Symbols that are strides of an input: (input, dim)."""
    steps: list[PlannedStep] = field(default_factory=list[PlannedStep])
    lies: dict[str, Lies] = field(default_factory=dict[str, Lies])
    """Of the graph that the run is part of."""
    into: dict[int, int] = field(default_factory=dict[int, int])
    """Buffers that are another buffer: results of a branch."""
    copied: dict[tuple[Lies, Layout], Lies] = field(default_factory=dict[tuple[Lies, Layout], Lies])
    grown: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Results that are an input with more behind it: the input, and the dim."""

    def copy(self) -> RunState:
        """The same, to go on from."""
        return RunState(
            list(self.roots), list(self.inputs), list(self.words), dict(self.symbols), dict(self.strided),
            list(self.steps), dict(self.lies), dict(self.into), dict(self.copied), dict(self.grown),
        )  # fmt: skip


def written(steps: Sequence[PlannedStep], root: int) -> bool:
    """Whether a buffer is written in these steps, rather than before them."""
    for step in steps:
        match step:
            case PlannedCall():
                if any(r == root for r, _ in step.writes):
                    return True
            case PlannedChoice():
                if any(r == root for call in step.calls for r, _ in call.writes):
                    return True
            case PlannedBranch() | PlannedLoop():
                if root in step.outs:
                    return True
            case PlannedMove():
                if step.into.root == root:
                    return True
            case PlannedMark():
                pass
    return False


def alike(inner: Value, outer: Value) -> None:
    """A value inside a branch and the one outside must have the same sizes under the same names."""
    a, b = inner.type, outer.type
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        if a.dtype is b.dtype and len(a.shape) == len(b.shape) and all(same(m, n) for m, n in zip(a.shape, b.shape, strict=True)):
            return
    elif a == b:
        return
    raise CannotLower(f"%{inner.name} is something else inside the branch")


def tensor_of(v: Value) -> TensorType:
    """The type of a value that is a tensor here."""
    if not isinstance(v.type, TensorType):
        raise CannotLower(f"%{v.name} is not a tensor")
    if v.type.device != "cpu":
        raise CannotLower(f"%{v.name} is on {v.type.device}")
    return v.type


def bytes_of(root: Root) -> Dim:
    """How much memory a buffer takes."""
    return expr("*", root.elements, size_of(root.dtype))
