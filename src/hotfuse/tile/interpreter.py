"""Runs a kernel on NumPy arrays, statement by statement: the oracle for back ends, and the sanitizer for lowerings.

It refuses what native code would do silently: an element outside a buffer, a write to an input, an iteration of a parallel loop
that touches what another one writes. Iterations of parallel loops run in a shuffled order. Scratch memory begins as NaN, anew in
every iteration of a parallel loop, since there it is a thread's own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim
from hotfuse.ir.types import DType
from hotfuse.tile.isa import compute
from hotfuse.tile.memory import NUMPY, Array, TileRegion, poison
from hotfuse.tile.program import (
    OWN,
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
from hotfuse.tile.type_rules import block_extents

_READS = {"load", "gather"}
_WRITES = {"store", "scatter", "mma.memory"}


def run(kernel: Kernel, buffers: Mapping[str, Array], sizes: Mapping[str, int], *, seed: int = 0) -> None:
    """Run a kernel; outputs are written into the given arrays.

    An array is its buffer's memory: either it has the buffer's shape and strides, or it is a contiguous block over which the
    declared strides run. `seed` decides the order of parallel iterations.
    """
    if set(sizes) != set(kernel.sizes):
        raise InternalError(f"kernel {kernel.name} has sizes {', '.join(kernel.sizes)}; given are {', '.join(sizes)}")
    needed = {b.name for b in kernel.buffers if b.kind not in OWN}
    if set(buffers) != needed:
        raise InternalError(f"kernel {kernel.name} has buffers {', '.join(sorted(needed))}; given are {', '.join(buffers)}")
    _Run(kernel, buffers, dict(sizes), random.Random(seed)).block(kernel.body)


def number(d: Dim, env: Mapping[str, int]) -> int:
    """The value of an integer expression."""
    try:
        return dims.evaluate(d, env)
    except (KeyError, ZeroDivisionError, HotfuseError) as e:
        raise InternalError(f"{dims.show(d)} has no value", because=repr(e)) from e


def bind(buffer: Buffer, array: Array, sizes: Mapping[str, int]) -> Array:
    """A view of the array's memory that has the buffer's shape and strides."""
    shape = tuple(number(d, sizes) for d in buffer.shape)
    stride = tuple(number(d, sizes) for d in buffer.stride)
    what = f"buffer {buffer.name}: {buffer.dtype.value}{list(shape)} with strides {list(stride)}"
    if array.dtype != NUMPY[buffer.dtype]:
        raise InternalError(f"{what} was given an array of {array.dtype}")
    item = array.dtype.itemsize
    same = array.shape == shape and all(
        n <= 1 or s * item == given for n, s, given in zip(shape, stride, array.strides, strict=True)
    )
    reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    if not same and (not array.flags.c_contiguous or min((*shape, *stride, 0)) < 0 or (0 not in shape and reach > array.size)):
        raise InternalError(f"{what} does not fit an array of {array.shape} with strides {array.strides}")
    writeable = bool(array.flags.writeable) and buffer.kind in (BufferKind.OUTPUT, BufferKind.STATE, *OWN)
    if buffer.kind in (BufferKind.OUTPUT, BufferKind.STATE) and not writeable:
        raise InternalError(f"{what} was given an array that cannot be written")
    return np.lib.stride_tricks.as_strided(array, shape, [s * item for s in stride], writeable=writeable)


@dataclass(slots=True)
class _Races:
    """Who wrote an element last, and who reads it: iterations of parallel loops have numbers, 0 being the kernel itself.

    When a parallel loop is through, its iterations count as the one around it, whose later statements may use their results.
    Every parallel loop has one more number for "several of its iterations", for elements that more than one of them reads.
    """

    parent: list[int] = field(default_factory=lambda: [0])
    through: list[bool] = field(default_factory=lambda: [False])
    path: list[int] = field(default_factory=lambda: [0])
    several: list[int] = field(default_factory=list[int])
    """Of the loops around; several[i] stands for iterations inside path[i]."""
    writer: dict[str, Array] = field(default_factory=dict[str, Array])
    reader: dict[str, Array] = field(default_factory=dict[str, Array])

    def number(self) -> int:
        self.parent.append(self.path[-1])
        self.through.append(False)
        return len(self.parent) - 1

    def touch(self, place: TileRegion, spots: tuple[Array, ...] | None, *, writes: bool) -> None:
        if place.name not in self.writer:
            self.writer[place.name] = np.zeros(place.view.shape, np.int64)
            self.reader[place.name] = np.zeros(place.view.shape, np.int64)
        for table in (self.writer, self.reader):
            shadow = table[place.name]
            last = shadow[spots] if spots is not None else place.window(shadow)
            mine = np.full(last.shape, self.path[-1])
            for owner in np.unique(last).tolist():
                other = self.unfinished(owner)
                if other is None:
                    continue
                if writes or table is self.writer:
                    raise InternalError(
                        f"a race in {place.name}: two iterations of a parallel loop use the same element, one writes it"
                    )
                mine[last == owner] = other
            if writes == (table is self.writer):
                if spots is not None:
                    shadow[spots] = mine
                else:
                    last[...] = mine

    def unfinished(self, owner: int) -> int | None:
        """None for this iteration, one around it, or one that is through; otherwise the number for that one and this."""
        while self.through[owner]:
            owner = self.parent[owner]
        if owner in self.path:
            return None
        while owner not in self.path:
            owner = self.parent[owner]
        return self.several[self.path.index(owner)]


class _Run:
    """One run of one kernel."""

    def __init__(self, kernel: Kernel, given: Mapping[str, Array], env: dict[str, int], order: random.Random) -> None:
        self.kernel, self.env, self.order = kernel, env, order
        self.tiles: dict[str, Array] = {}
        self.scratch = tuple(b for b in kernel.buffers if b.kind is BufferKind.SCRATCH)
        self.views = {b.name: bind(b, given[b.name], env) for b in kernel.buffers if b.kind not in OWN}
        self.watched = {b.name for b in kernel.buffers if b.kind in (BufferKind.OUTPUT, BufferKind.SHARED)}
        self.races = _Races()
        self.reach = {
            b.name: sum((number(n, env) - 1) * number(s, env) for n, s in zip(b.shape, b.stride, strict=True)) + 1
            for b in kernel.buffers
            if b.kind in OWN
        }
        self.views.update(self.own(b for b in kernel.buffers if b.kind in OWN))

    def own(self, buffers: Iterable[Buffer]) -> dict[str, Array]:
        return {b.name: bind(b, poison((max(self.reach[b.name], 1),), b.dtype), self.env) for b in buffers}

    def block(self, stmts: Sequence[Stmt]) -> None:
        for stmt in stmts:
            match stmt:
                case Instr():
                    self.instr(stmt)
                case Loop():
                    self.loop(stmt)
                case When():
                    if self.number(stmt.pred):
                        self.block(stmt.body)

    def number(self, d: Dim) -> int:
        return d if isinstance(d, int) else number(d, self.env)

    def loop(self, loop: Loop) -> None:
        values = range(self.number(loop.lo), self.number(loop.hi), loop.step)
        if loop.given is not None:
            values = self.given(loop, loop.given, values)
        if loop.kind is LoopKind.PARALLEL:
            self.parallel(loop, values)
            return
        carried = [self.tiles[init.name] for _, init in loop.carried]
        for self.env[loop.var] in values:
            for (inner, _), value in zip(loop.carried, carried, strict=True):
                self.tiles[inner.name] = value
            self.block(loop.body)
            carried = [self.tiles[t.name] for t in loop.yields]
        self.env.pop(loop.var, None)
        for out, value in zip(loop.outs, carried, strict=True):
            self.tiles[out.name] = value

    def given(self, loop: Loop, place: TileAccess, promised: range) -> range:
        """The number that lies in memory, which must be where it was promised to be."""
        read = Tile(f"{loop.var} as it lies", TileType(DType.I64))
        self.instr(Instr("load", (place,), (read,)))
        value = int(self.tiles.pop(read.name))
        if value not in promised:
            raise InternalError(f"kernel {self.kernel.name} fails: {loop.var} is {value}", where=show_head(loop))
        return range(value, value + 1)

    def parallel(self, loop: Loop, values: range) -> None:
        outer, races = self.views, self.races
        first = races.number()
        races.several.append(first)
        for value in self.order.sample(values, len(values)):
            self.env[loop.var] = value
            if self.scratch:
                self.views = outer | self.own(self.scratch)
            races.path.append(races.number())
            self.block(loop.body)
            races.path.pop()
        self.views = outer
        self.env.pop(loop.var, None)
        races.several.pop()
        for iteration in range(first, len(races.through)):
            races.through[iteration] = True

    def instr(self, instr: Instr) -> None:
        try:
            args = [self.operand(a, shape) for a, shape in zip(instr.args, _regions(instr), strict=True)]
            if isinstance(args[0] if args else None, TileRegion) and len(self.races.path) > 1:
                self.watch(instr, args)
            result = compute(instr.op, args, instr.outs[0].type if instr.outs else None, instr.attrs)
        except (HotfuseError, KeyError, ValueError, IndexError) as e:
            at = ", ".join(f"{name} = {value}" for name, value in self.env.items())
            raise InternalError(
                f"kernel {self.kernel.name} fails: {e.what if isinstance(e, HotfuseError) else e!r}",
                where=f"{show_head(instr)}  where {at}" + (f" at {instr.loc}" if str(instr.loc) else ""),
                because=e.because if isinstance(e, HotfuseError) else "",
            ) from e
        if result is not None:
            self.tiles[instr.outs[0].name] = result

    def watch(self, instr: Instr, args: list[Any]) -> None:
        if instr.op not in _READS | _WRITES:
            return
        for at, place in enumerate(args):
            if not isinstance(place, TileRegion) or place.name not in self.watched or place.empty:
                continue
            spots = None
            if instr.op in ("gather", "scatter"):
                spots = place.scattered(int(dict(instr.attrs)["dim"]), args[1])  # type: ignore[arg-type]
            self.races.touch(place, spots, writes=at == 0 and instr.op in _WRITES)

    def operand(self, arg: Operand, shape: tuple[int, ...]) -> Any:
        match arg:
            case Tile(name=name):
                return self.tiles[name]
            case TileAccess():
                return self.place(arg, shape)
            case float():
                return arg
            case _:
                return self.number(arg)

    def place(self, access: TileAccess, shape: tuple[int, ...]) -> TileRegion:
        valid = access.valid or (None,) * len(shape)
        return TileRegion(
            access.buffer,
            self.views[access.buffer],
            tuple(map(self.number, access.index)),
            access.axes,
            tuple(map(self.number, access.step)) or (1,) * len(access.axes),
            shape,
            tuple(n if v is None else min(max(self.number(v), 0), n) for n, v in zip(shape, valid, strict=True)),
        )


def _regions(instr: Instr) -> Sequence[tuple[int, ...]]:
    """Per operand, the extents of the tile that an access speaks of."""
    if instr.op == "mma.memory":
        return block_extents(dict(instr.attrs))
    if instr.outs:
        return [instr.outs[0].type.shape] * len(instr.args)
    last = instr.args[-1] if instr.args else None
    return [_type(last).shape if instr.op in _WRITES else ()] * len(instr.args)


def _type(arg: Operand | None) -> TileType:
    if not isinstance(arg, Tile):
        raise InternalError("a store needs a tile")
    return arg.type
