"""What emission knows while it walks a kernel: tiles in registers, buffers' addresses, and elementwise plumbing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import field

from hotfuse.backends.llvm.emission.code import Fn, Val
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.tile.program import Instr, Kernel, Loop, Operand, Tile, TileAccess, TileType


@dataclass(slots=True)
class FunctionState:
    """One function of a kernel under construction."""

    fn: Fn
    kernel: Kernel
    vals: dict[str, Val] = field(default_factory=dict[str, Val])
    bases: dict[str, str] = field(default_factory=dict[str, str])
    """Where each buffer begins."""
    number_tiles: frozenset[str] = frozenset()
    """Loaded tiles whose only use is to be spread over vectors number by number (the left operand of `mma`)."""
    parallel: bool = True
    """Whether a parallel loop met now may fork; inside one it may not."""
    around: list[Loop] = field(default_factory=list[Loop])
    """The serial loops that are open, outermost first."""

    def tile(self, operand: Operand) -> Val:
        """A tile operand's registers; a literal is a tile of one number once its type is known."""
        if not isinstance(operand, Tile):
            raise InternalError(f"a tile expected, not {operand!r}", where=self.kernel.name)
        if operand.name not in self.vals:
            raise InternalError(f"tile {operand.name} has no value here", where=self.kernel.name)
        return self.vals[operand.name]

    def tiles(self, instr: Instr) -> list[Val]:
        """All tile operands, in order."""
        return [self.tile(a) for a in instr.args if isinstance(a, Tile)]

    def base(self, buffer: str) -> str:
        """Where a buffer begins."""
        return self.bases[buffer]


def access_of(instr: Instr) -> TileAccess:
    """The place an instruction works on."""
    for a in instr.args:
        if isinstance(a, TileAccess):
            return a
    raise InternalError(f"{instr.op} without a place in memory")


def attr(instr: Instr, name: str, default: object = None) -> object:
    """An attribute of an instruction."""
    for key, value in instr.attrs:
        if key == name:
            return value
    return default


def int_attr(instr: Instr, name: str, default: int | None = None) -> int:
    """A whole number among the attributes."""
    value = attr(instr, name, default)
    if not isinstance(value, int):
        raise InternalError(f"{instr.op} needs attribute {name}")
    return value


def ints_attr(instr: Instr, name: str) -> tuple[int, ...]:
    """Whole numbers among the attributes."""
    value = attr(instr, name)
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, tuple):
        raise InternalError(f"{instr.op} needs attribute {name}")
    return value


def source_row(shape: Sequence[int], index: Sequence[int]) -> int:
    """Which row of an operand meets the row `index` of a broadcast result."""
    lead = shape[:-1]
    index = index[len(index) - len(lead) :] if lead else ()
    row = 0
    for extent, i in zip(lead, index, strict=True):
        row = row * extent + (0 if extent == 1 else i)
    return row


def indices(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """All rows of a tile by their coordinates, in order."""
    return list(itertools.product(*(range(e) for e in shape[:-1])))


Lanewise = Callable[[int, list[str]], str]
"""Computes one chunk: its width and the operands' chunks give the result's name."""


def lanewise(fn: Fn, out: TileType, args: Sequence[Val], f: Lanewise) -> Val:
    """Apply a computation chunk by chunk, operands broadcast over extents of 1 and missing leading axes.

    Rows that are equal are computed once: operands that repeat over the leading axes give a result that does, too.
    """
    cols = out.shape[-1] if out.shape else 1
    widths = fn.widths(cols)
    known: dict[tuple[int, ...], list[str]] = {}
    rows: list[list[str]] = []
    for index in indices(out.shape):
        sources = tuple(source_row(a.type.shape, index) for a in args)
        if sources not in known:
            known[sources] = _row(fn, widths, args, sources, f)
        rows.append(known[sources])
    return Val(out, rows, widths)


def _row(fn: Fn, widths: tuple[int, ...], args: Sequence[Val], sources: tuple[int, ...], f: Lanewise) -> list[str]:
    return [f(w, [fn.chunk(a, r, c, w) for a, r in zip(args, sources, strict=True)]) for c, w in enumerate(widths)]
