"""What makes a kernel well formed. Lowerings promise these, and `verify` holds them to it.

 1. Names are not empty, and sizes, buffers and loop variables all have different ones.
 2. A tile is assigned once in the whole kernel.
 3. A tile is defined before it is used, in the same block or in one around it.
 4. A tile has the same type where it is used as where it is defined.
 5. A tile has an element type of the instruction set, at most three axes, and static extents of at least 1.
 6. A buffer has an element type of the instruction set, and one stride per dim.
 7. Integer expressions are well formed, and mention only sizes and, inside loops, the variables of these loops.
 8. An instruction is in the table, and its operands, attributes and outs satisfy its type rule.
 9. Only outputs, scratch, shared memory and state are written.
10. A loop's step is a positive number, and an unrolled loop's trip count is a number.
11. A loop yields a tile and has an out for each one that it carries, all four of one type.
12. A parallel loop carries nothing.
13. Scratch that is used in a parallel loop is used nowhere around that loop: every thread has its own.
14. A condition is a predicate, and statements nest at most 64 deep.
15. Attributes are integers, floats, strings or tuples of integers.
16. A loop over a number in memory is serial, by one, carries nothing, and reads a single i64.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.ir.dims import MAX_DEPTH, Dim, Sym, dims_in, symbols, well_formed
from hotfuse.ir.types import DType
from hotfuse.tile import isa
from hotfuse.tile.affine import trip_count
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import (
    OWN,
    Attr,
    Buffer,
    BufferKind,
    Instr,
    Kernel,
    Loop,
    LoopKind,
    Operand,
    Stmt,
    Tile,
    TileAccess,
    TileType,
    When,
)
from hotfuse.tile.text import show_head
from hotfuse.tile.type_rules import MAX_RANK, show_type

_PREDICATES = {"==", "!=", "<", "<=", "and", "or", "not"}
_WRITERS = {"store", "scatter", "count", "peak", "mma.memory"}


def verify(kernel: Kernel) -> Kernel:
    """The kernel itself, when it is well formed; otherwise an InternalError that shows the faulty place."""
    _KernelVerifier(kernel).run()
    return kernel


def invariants() -> dict[int, str]:
    """The numbered promises above, for messages and tests."""
    found = re.findall(r"^ ?(\d+)\. (.*(?:\n    \S.*)*)", __doc__ or "", re.MULTILINE)
    return {int(number): " ".join(text.split()) for number, text in found}


class _KernelVerifier:
    """Walks one kernel; `blocks` is the way to the statement being looked at: (statements, position) from the outside in."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.buffers: dict[str, Buffer] = {}
        self.names: set[str] = set()
        self.symbols: set[str] = set()
        self.assigned: set[str] = set()
        self.visible: dict[str, Tile] = {}
        self.blocks: list[tuple[Sequence[Stmt], int]] = []
        self.parallel: list[str] = []
        self.scratch: dict[str, set[tuple[str, ...]]] = {}

    def fail(self, invariant: int, because: str, cause: Exception | None = None) -> NoReturn:
        where = f"kernel {self.kernel.name!r}"
        for depth, (stmts, at) in enumerate(self.blocks):
            indent = "    " + "  " * depth
            if depth < len(self.blocks) - 1:
                where += f"\n{indent}   {_head(stmts[at])} {{"
                continue
            for i in range(max(at - 2, 0), min(at + 3, len(stmts))):
                where += f"\n{indent}{'->' if i == at else '  '} {_head(stmts[i])}"
        raise InternalError(
            f"the kernel breaks invariant {invariant}: {invariants()[invariant]}", where=where, because=because
        ) from cause

    def run(self) -> None:
        kernel = self.kernel
        if not kernel.name:
            self.fail(1, "the kernel has no name")
        for size in kernel.sizes:
            self.name(size, "size")
            self.symbols.add(size)
        for buffer in kernel.buffers:
            self.name(buffer.name, "buffer")
            self.buffers[buffer.name] = buffer
            if buffer.dtype not in NUMPY:
                self.fail(6, f"{buffer.name} holds {buffer.dtype}")
            if len(buffer.stride) != len(buffer.shape):
                self.fail(6, f"{buffer.name} has {len(buffer.shape)} dims and {len(buffer.stride)} strides")
            for d in (*buffer.shape, *buffer.stride):
                self.dim(d, f"of buffer {buffer.name}")
        self.block(kernel.body)
        self.thread_private()

    def name(self, name: str, what: str) -> None:
        if not name:
            self.fail(1, f"a {what} has no name")
        if name in self.names:
            self.fail(1, f"{what} {name} has a name that is taken")
        self.names.add(name)

    # -- integer expressions and tiles

    def dim(self, d: Dim | None, what: str) -> None:
        if d is None or type(d) is int:
            return
        if not isinstance(d, Sym):
            self.fail(7, f"{d!r} {what} is not an integer expression")
        self.shape_of(d, 0)
        if unknown := symbols(d) - self.symbols:
            self.fail(7, f"{d} {what} mentions {', '.join(sorted(unknown))}")

    def shape_of(self, d: Sym, depth: int) -> None:
        if d.op == "sym":
            if len(d.args) != 1 or not isinstance(d.args[0], str):
                self.fail(7, f"a symbol has the name {d.args!r}")
            return
        parts = tuple(dims_in(d))
        if depth > MAX_DEPTH or len(parts) != len(d.args) or not well_formed(d.op, len(parts)):
            self.fail(7, f"{d.op!r} of {len(d.args)} operands")
        for part in parts:
            if isinstance(part, Sym):
                self.shape_of(part, depth + 1)
            elif type(part) is not int:
                self.fail(7, f"{part!r} is an operand of {d.op}")

    def define(self, tile: Tile) -> None:
        if not tile.name:
            self.fail(1, "a tile has no name")
        if tile.name in self.assigned:
            self.fail(2, f"%{tile.name} is assigned a second time")
        self.assigned.add(tile.name)
        self.visible[tile.name] = tile
        t = tile.type
        if t.dtype not in NUMPY or len(t.shape) > MAX_RANK or any(type(n) is not int or n < 1 for n in t.shape):
            self.fail(5, f"%{tile.name}: {show_type(t)}")

    def use(self, tile: Tile) -> TileType:
        known = self.visible.get(tile.name)
        if known is None:
            self.fail(3, f"%{tile.name} is not defined here")
        if known.type != tile.type:
            self.fail(4, f"%{tile.name} is used as {show_type(tile.type)}, defined as {show_type(known.type)}")
        return known.type

    # -- statements

    def block(self, stmts: Sequence[Stmt], carried: Iterable[Tile] = (), yields: Sequence[Tile] = ()) -> list[TileType]:
        """Check a body; gives the types of what it yields, while its tiles are still in sight."""
        if len(self.blocks) >= MAX_DEPTH:
            self.fail(14, f"nested more than {MAX_DEPTH} deep")
        outside = dict(self.visible)
        for tile in carried:
            self.define(tile)
        for at, stmt in enumerate(stmts):
            self.blocks.append((stmts, at))
            match stmt:
                case Instr():
                    self.instr(stmt)
                case Loop():
                    self.loop(stmt)
                case When():
                    self.when(stmt)
            self.blocks.pop()
        types = [self.use(t) for t in yields]
        self.visible = outside
        return types

    def instr(self, instr: Instr) -> None:
        for arg in instr.args:
            self.operand(arg)
        for name, value in instr.attrs:
            self.attr(name, value)
        try:
            isa.check(instr, self.buffers)
        except HotfuseError as e:
            self.fail(8, f"{e.what}{': ' if e.because else ''}{e.because}", e)
        if instr.op in _WRITERS:
            buffer = self.buffers[instr.args[0].buffer]  # type: ignore[union-attr]
            if buffer.kind not in (BufferKind.OUTPUT, BufferKind.STATE, *OWN):
                self.fail(9, f"{buffer.name} is {buffer.kind.value}")
        for tile in instr.outs:
            self.define(tile)

    def operand(self, arg: Operand) -> None:
        match arg:
            case Tile():
                self.use(arg)
            case TileAccess():
                buffer = self.buffers.get(arg.buffer)
                if buffer is None:
                    self.fail(8, f"there is no buffer {arg.buffer!r}")
                for d in (*arg.index, *arg.step, *arg.valid):
                    self.dim(d, f"of an access to {arg.buffer}")
                if any(type(a) is not int for a in arg.axes):
                    self.fail(8, f"axes {arg.axes} of an access to {arg.buffer}")
                if buffer.kind is BufferKind.SCRATCH:
                    self.scratch.setdefault(arg.buffer, set()).add(tuple(self.parallel))
            case float():
                pass
            case _:
                self.dim(arg, "of an instruction")

    def attr(self, name: str, value: Attr) -> None:
        plain = type(value) in (int, float, str)
        if not plain and not (isinstance(value, tuple) and all(type(v) is int for v in value)):
            self.fail(15, f"{name} is {value!r}")

    def loop(self, loop: Loop) -> None:
        self.dim(loop.lo, "where the loop begins")
        self.dim(loop.hi, "where the loop ends")
        if type(loop.step) is not int or loop.step < 1:
            self.fail(10, f"step {loop.step}")
        if loop.kind is LoopKind.UNROLL and trip_count(loop) is None:
            self.fail(10, f"{loop.lo} to {loop.hi} is not a fixed distance")
        if loop.kind is LoopKind.PARALLEL and (loop.carried or loop.yields or loop.outs):
            self.fail(12, f"it carries {len(loop.carried)}, yields {len(loop.yields)}, gives {len(loop.outs)} tiles")
        if not len(loop.carried) == len(loop.yields) == len(loop.outs):
            self.fail(11, f"it carries {len(loop.carried)}, yields {len(loop.yields)}, gives {len(loop.outs)} tiles")
        if loop.given is not None:
            self.given(loop, loop.given)
        first = [self.use(init) for _, init in loop.carried]
        self.name(loop.var, "loop variable")
        self.symbols.add(loop.var)
        if loop.kind is LoopKind.PARALLEL:
            self.parallel.append(loop.var)
        yields = self.block(loop.body, [inner for inner, _ in loop.carried], loop.yields)
        if loop.kind is LoopKind.PARALLEL:
            self.parallel.pop()
        self.symbols.discard(loop.var)
        for (inner, _), a, b, out in zip(loop.carried, first, yields, loop.outs, strict=True):
            types = [a, inner.type, b, out.type]
            if len(set(types)) != 1:
                self.fail(11, f"%{inner.name}: first value, inside, yielded and out are {', '.join(map(show_type, types))}")
        for tile in loop.outs:
            self.define(tile)

    def given(self, loop: Loop, place: TileAccess) -> None:
        self.operand(place)
        if loop.kind is not LoopKind.SERIAL or loop.step != 1 or loop.carried:
            self.fail(16, f"it is {loop.kind.value}, by {loop.step}, and carries {len(loop.carried)} tiles")
        dtype = self.buffers[place.buffer].dtype
        if dtype is not DType.I64 or place.axes or len(place.index) != len(self.buffers[place.buffer].shape):
            self.fail(16, f"it reads {dtype.value} of {place.buffer} along {len(place.axes)} axes")

    def when(self, when: When) -> None:
        self.dim(when.pred, "of a condition")
        if isinstance(when.pred, Sym) and when.pred.op not in _PREDICATES:
            self.fail(14, f"{when.pred} is a number")
        self.block(when.body)

    def thread_private(self) -> None:
        for name, uses in self.scratch.items():
            for outer in uses:
                for inner in uses:
                    if len(outer) < len(inner) and inner[: len(outer)] == outer:
                        self.fail(13, f"{name} is used in the parallel loop over {inner[len(outer)]} and around it")


def _head(stmt: Stmt) -> str:
    """The statement's first line; a broken one may not print, and the message must not fail over that."""
    try:
        return show_head(stmt)
    except (HotfuseError, AttributeError, TypeError, ValueError):
        return repr(stmt)[:200]
