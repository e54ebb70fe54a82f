"""A native run: kernels in order, with everything between them, as one piece of native code.

    run(inputs) -> outputs          step: call k0 | call k1 | if %c { step... } else { step... } | loop { step... }

What a run is made of is decided in a worker (`compile.run.runs`), where a back end also generates its driver. The process that
serves gets object code and a `RunCode`: how to enter it, and what the words of its table are: addresses of kernels and of
constants, which only that process knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.types import DType, Layout
from hotfuse.lower.run.forks import Fork

THREADS = "@threads"
"""The symbol of the number of threads; no graph has such a name."""
LOOP_VAR = "@loop"
"""What symbols begin with that are the number of a loop's iteration."""
CLOCK, OUTCOMES, COUNTS = 1, 2, 4
"""What a call of a run may be asked to tell, as bits."""


class Base(StrEnum):
    """Whose memory."""

    INPUT = "input"
    OUTPUT = "output"
    ARENA = "arena"
    TABLE = "table"
    """A constant: the table holds its address."""


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """A place: which memory, and how many bytes behind its beginning."""

    base: Base
    index: int
    offset: Dim


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with its buffers and sizes."""

    word: int
    """Where in the table its code's address stands."""
    buffers: tuple[MemoryAddress, ...]
    scratch: bool
    """Whether it takes the arena's end as its own memory."""
    sizes: tuple[Dim, ...]
    made: tuple[str, ...] = ()
    """The values it stores, in the order of its output buffers; empty names for what is inside a branch."""


@dataclass(frozen=True, slots=True)
class BranchStep:
    """One of two lists of steps, by a truth value in memory; None where there is no native code for a side."""

    condition: MemoryAddress
    then: tuple[Step, ...] | None
    other: tuple[Step, ...] | None
    name: str = ""
    """What the condition is called wherever its outcomes are counted."""


@dataclass(frozen=True, slots=True)
class ChoiceStep:
    """One of several kernels of the same group, by a size of the call: the first kernel up to the first end, and so on, the last
    beyond all ends. None stands for the library: a run leaves such a call to its fallback before it computes anything.
    """

    size: Dim
    ends: tuple[int, ...]
    """Rising, each included in the variant before it; one fewer than variants."""
    variants: tuple[Call | None, ...]

    @property
    def general(self) -> Call:
        """The call of the kernel that serves any size, as far as what it stores goes: all store the same."""
        return next(w for w in self.variants if w is not None)


@dataclass(frozen=True, slots=True)
class LoopStep:
    """Steps over and over."""

    var: str
    """The symbol of the iteration's number, in offsets of the steps."""
    trips: Dim | MemoryAddress | None
    """The most iterations: a size, a number in memory, or no limit."""
    condition: MemoryAddress | None
    """The truth value that must hold for the first; None where it does."""
    again: MemoryAddress | None
    """The one that an iteration leaves for the next."""
    iteration: MemoryAddress | None
    """Where the steps read the iteration's number."""
    go: MemoryAddress | None
    """Where the steps read that the condition holds."""
    steps: tuple[Step, ...]
    name: str
    exactly: Dim | None = None
    """How many iterations there is room for, where results of all are kept: a call with another number is the fallback's."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a partition: where a timed call looks at the clock."""

    partition: int


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Bytes copied as they are."""

    source: MemoryAddress
    into: MemoryAddress
    bytes: Dim


Step = Call | BranchStep | ChoiceStep | LoopStep | Mark | MoveStep


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What an input must be for native code to read it; anything else is the fallback's."""

    name: str
    dtype: DType
    rank: int
    """-1: a number, or anything else that only the fallback reads."""
    order: tuple[int, ...] | None
    """Dense with dims in this order, outermost first; None: strides are read."""


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """A symbol of the run is a size or a stride of an input."""

    symbol: str
    input: int
    stride: bool
    dim: int


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor that the run makes."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    grows: tuple[int, int] | None = None
    """It is an input with more behind it, in a dim: (input, dim), the dim being the outermost in memory. The producer puts the
    input there; the run writes what is behind it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the driver is generated from it."""

    inputs: tuple[InputSpec, ...]
    sizes: tuple[SizeSpec, ...]
    outputs: tuple[OutputSpec, ...]
    steps: tuple[Step, ...]
    words: tuple[str, ...]
    """The symbols that stand for words of the table, by place; empty where a word is an address."""
    arena: Dim
    """Bytes of intermediates."""
    scratch: Dim
    """Bytes of the kernels' own memory behind them, in every lane."""
    forks: tuple[Fork, ...] = ()
    """Stretches of steps that may run side by side, in order."""

    @property
    def lanes(self) -> int:
        """How many calls may be in progress at the same time."""
        return max((len(f.lanes) for f in self.forks), default=1)


class Constant(StrEnum):
    """What a word of the table is."""

    KERNEL = "kernel"
    PARAM = "param"
    STRIDE = "stride"
    PACK = "pack"
    SWITCH = "switch"
    """Whether the run forks (`lower.run.forks`)."""
    STATE = "state"
    """A kernel's words that outlive calls (`lower.run.kernel_state`)."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the table, as plain data: a kernel's number, a param in a layout, a stride of one, or packed params."""

    kind: Constant
    kernel: int = -1
    key: str = ""
    layout: Layout = Layout()
    dim: int = 0
    pack: str = ""
    """The packing, or how a state begins, as JSON text."""


@dataclass(frozen=True, slots=True)
class RunCode:
    """A run as the serving process gets it."""

    first: int
    last: int
    """The partitions it covers."""
    inputs: tuple[InputSpec, ...]
    sizes: tuple[SizeSpec, ...]
    outputs: tuple[OutputSpec, ...]
    words: tuple[Word, ...]
    exits: tuple[int, ...]
    """Nodes that the library computes behind the run: views that are wanted outside."""
    returned: tuple[str, ...]
    """The values that those nodes give to the outside."""
    arena: Dim
    scratch: Dim
    code: bytes
    branches: tuple[str, ...] = ()
    """The conditions and loops in it, in the order in which it writes their outcomes down."""
    loops: frozenset[str] = frozenset()
    """Those of them that are loops."""
    made: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Per call, in order: its kernel's word, and the values it stores."""
    forks: tuple[int, ...] = ()
    """For every stretch that may run side by side, into how many lanes it falls."""


def branches(steps: Sequence[Step]) -> Iterator[BranchStep | LoopStep]:
    """Every branch and loop, an outer one before those in it."""
    for step in steps:
        if isinstance(step, BranchStep | LoopStep):
            yield step
            yield from branches(within(step))


def within(step: Step) -> tuple[Step, ...]:
    """The steps inside one."""
    match step:
        case BranchStep():
            return (*(step.then or ()), *(step.other or ()))
        case LoopStep():
            return step.steps
        case _:
            return ()


def calls(steps: Sequence[Step]) -> Iterator[Call]:
    """Every call, those in branches too; of several variants the first, whose counters the others share."""
    for step in steps:
        if isinstance(step, Call):
            yield step
        elif isinstance(step, ChoiceStep):
            yield step.general
        else:
            yield from calls(within(step))


def entered(steps: Sequence[Step]) -> Iterator[Call]:
    """Every call that a run may make: all variants of choices."""
    yield from calls(steps)
    for choice in choices(steps):
        yield from (w for w in choice.variants if w is not None)


def choices(steps: Sequence[Step]) -> Iterator[ChoiceStep]:
    """Every choice, those in branches too."""
    for step in steps:
        if isinstance(step, ChoiceStep):
            yield step
        else:
            yield from choices(within(step))


def word_to_json(w: Word) -> dict[str, Any]:
    """Plain data."""
    match w.kind:
        case Constant.KERNEL:
            return {"is": "kernel", "kernel": w.kernel}
        case Constant.PARAM:
            return {"is": "param", "key": w.key, "order": w.layout.order, "strided": w.layout.strided}
        case Constant.STRIDE:
            return {"is": "stride", "key": w.key, "dim": w.dim}
        case Constant.PACK:
            return {"is": "pack", "pack": w.pack}
        case Constant.SWITCH:
            return {"is": "switch"}
        case Constant.STATE:
            return {"is": "state", "kernel": w.kernel, "pack": w.pack}


def word_from_json(data: dict[str, Any]) -> Word:
    """The inverse."""
    match data["is"]:
        case "kernel":
            return Word(Constant.KERNEL, kernel=int(data["kernel"]))
        case "param":
            order = None if data["order"] is None else tuple(int(d) for d in data["order"])
            return Word(Constant.PARAM, key=str(data["key"]), layout=Layout(order, bool(data["strided"])))
        case "stride":
            return Word(Constant.STRIDE, key=str(data["key"]), dim=int(data["dim"]))
        case "pack":
            return Word(Constant.PACK, pack=str(data["pack"]))
        case "switch":
            return Word(Constant.SWITCH)
        case "state":
            return Word(Constant.STATE, kernel=int(data["kernel"]), pack=str(data["pack"]))
        case other:
            raise InternalError(f"no word of a table is a {other!r}")
