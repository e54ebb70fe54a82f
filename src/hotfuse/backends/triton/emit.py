"""A tile program as the text of one Triton kernel.

    parallel loops, outermost    ->  the grid: one program per iteration, the last loop's neighbours next to each other
    several such nests           ->  one grid behind the other (`backends.triton.grid`)
    serial loops                 ->  tl.range, whose loads are fetched ahead by `stages`
    numbers given in memory      ->  loaded, for loops to run to and rows to begin at
    tiles                        ->  variables; extents are powers of 2
    accesses                     ->  base pointer, plus an arange per tile axis; `valid` is a mask
    blocks of matrices           ->  copies by tensor descriptors, where `bulk` is asked for (`backends.triton.bulk`)
    sums over a long loop        ->  shared by `split` programs: each adds up a part of it, stores that and counts itself; the last
                                     one adds the parts in order, so results do not depend on who that is, and goes on alone

What a kernel reads behind its loop is loaded before it, where it is small: nothing waits for it then. A kernel that may begin
before the one in front of it has ended first has its weights fetched into the second-level cache: that reads no value.

All sizes are numbers: a kernel is for the sizes of its calls, which is what a recording (`backends.cuda`) is for too. The text
holds names that are made here and numbers only; nothing of a model is read as code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace

from hotfuse.backends.triton.bulk import ELEMENT_BYTES, MatrixBlock, bulk_load
from hotfuse.backends.triton.grid import GridNest, last_value, nests, turns_range
from hotfuse.backends.triton.instructions import (
    POINTERS,
    PREAMBLE,
    PREFETCH,
    SILENT,
    TYPES,
    cast,
    check,
    computed,
    filled,
    number,
    ranked,
    shape_text,
)
from hotfuse.backends.triton.schedule import loads_first, sums
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, sym
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.tile.isa import attributes
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
    When,
)

NAME = "kernel"
_WIDE_INDEX_ELEMENTS = 1 << 31
"""Elements of a buffer from which on places need 64 bits."""
HALVED_COLUMNS = 128
"""Of a tile from which on it is stored in two halves by the copy engine."""
LINE = 128
"""Bytes that one prefetch asks for."""
PREFETCHED_BYTES = 256 << 10
NEAR_LINES = 64
"""Of a vector that is fetched into a multiprocessor's own cache."""
PREFETCHING_PROGRAMS = 264
"""Programs that all run at once: later ones would ask for their weights too late."""


@dataclass(frozen=True, slots=True)
class TritonSource:
    """The text of a kernel, and how it is launched."""

    text: str
    signature: tuple[str, ...]
    """The types of its arguments, one per buffer, in order."""
    grid: int
    """How many programs there are."""
    blocks: tuple[MatrixBlock, ...] = ()
    """Tensor descriptors that are further arguments."""
    workspace: int = 0
    """Numbers of f32 that programs leave each other; where there are some, they and the counters are arguments in front of
    the descriptors."""
    counters: int = 0
    """Words that are 0 before and after."""


def emit(
    kernel: Kernel, stages: int = 1, *, tf32: bool = False, dependent: bool = False, bulk: bool = False, split: int = 1,
    programs: int = 0,
) -> TritonSource:  # fmt: skip
    """The kernel's text; raises CannotLower where Triton has no such instruction.

    `dependent`: it may be launched while the kernel before it still runs, and waits for that one's results itself. `bulk`: blocks
    of matrices that a loop reads are copied by tensor descriptors; CannotLower where there are none. `split`: so many programs
    share the sums of one; CannotLower where there are no such sums. `programs`: so many make one tile after the other, and the end
    of one overlaps with the beginning of the next; CannotLower where there are not more tiles than that.
    """
    check(kernel)
    if kernel.sizes:
        raise CannotLower(f"the sizes {', '.join(kernel.sizes)} are known only at run time")
    if any(b.kind in OWN for b in kernel.buffers):
        raise CannotLower("the kernel has memory of its own between two stages")
    for b in kernel.buffers:
        if any(not isinstance(n, int) for n in (*b.shape, *b.stride)):
            raise CannotLower(f"the strides of %{b.name} are known only at run time")
    writer = _KernelWriter(kernel, stages, tf32, dependent, bulk, split, programs)
    text = writer.text()
    if bulk and not writer.blocks:
        raise CannotLower("no loop reads blocks of matrices")
    kinds = [POINTERS[b.dtype] for b in kernel.buffers]
    kinds += [POINTERS[DType.F32], POINTERS[DType.I32]] if split > 1 else []
    kinds += [f"tensordesc<{kinds[b.argument][1:]}[{b.block[0]},{b.block[1]}]>" for b in writer.blocks]
    counters = writer.programs // split if split > 1 else 0
    return TritonSource(text, tuple(kinds), writer.programs, tuple(writer.blocks), writer.programs * writer.left, counters)


@dataclass(slots=True)
class _KernelWriter:
    kernel: Kernel
    stages: int
    tf32: bool
    dependent: bool
    bulk: bool
    split: int = 1
    turns: int = 0
    """Programs that make one tile after the other; 0: one program a tile."""
    programs: int = 0
    left: int = 0
    """Sums that a program leaves to the last of those that share them."""
    shared: Loop | None = None
    """The loop of the nest at hand that programs share."""
    blocks: dict[MatrixBlock, str] = field(default_factory=dict[MatrixBlock, str])
    """Tensor descriptors, by what they are of."""
    most: dict[str, int] = field(default_factory=dict[str, int])
    """The largest values of the loop variables around."""
    looping: int = 0
    """Serial loops around."""
    waited: bool = False
    """Whether the kernel in front has ended."""
    lines: list[str] = field(default_factory=list[str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Loop variables by their names in the program."""
    buffers: dict[str, tuple[Buffer, str]] = field(default_factory=dict[str, tuple[Buffer, str]])
    depth: int = 1
    far: bool = False
    """Whether places need 64 bits."""

    @property
    def rounded(self) -> bool:
        """Whether all results have 16 bits, so that a few digits of what they are made of are enough."""
        made = [b.dtype for b in self.kernel.buffers if b.kind is BufferKind.OUTPUT]
        return bool(made) and all(d in (DType.F16, DType.BF16) for d in made)

    def text(self) -> str:
        args = [f"p{i}" for i in range(len(self.kernel.buffers))]
        self.buffers = {b.name: (b, p) for b, p in zip(self.kernel.buffers, args, strict=True)}
        found = nests(self.kernel.body)
        self.programs = sum(math.prod(n.trips) for n in found) * self.split
        loops = [sums(n.body, self.split) for n in found] if self.split > 1 else [None] * len(found)
        self.left = max((sum(math.prod(t.type.shape) for t in loop.outs) for loop in loops if loop is not None), default=0)
        if not self.programs:
            raise CannotLower("there is nothing to compute")
        sizes = [math.prod(n for n in b.shape if isinstance(n, int)) for b in self.kernel.buffers]
        far = self.far = max(sizes, default=0) >= _WIDE_INDEX_ELEMENTS or self.programs >= _WIDE_INDEX_ELEMENTS
        self.bulk = self.bulk and not far
        if self.turns:
            self.in_turns(far=far)
        else:
            self.line(f"pid = tl.program_id(0){'.to(tl.int64)' if far else ''}")
        begin = 0
        for i, nest in enumerate(found):
            count = math.prod(nest.trips) * self.split
            last = i == len(found) - 1
            self.shared = loops[i]
            if self.turns:
                self.line(f"for pid in {turns_range(begin, count, self.turns)}:")
                self.depth += 1
            elif len(found) > 1:
                self.line("if pid < " + str(begin + count) + ":" if i == 0 else "else:" if last else f"elif pid < {begin + count}:")
                self.depth += 1
            self.nest(nest, f"pid - {begin}" if begin else "pid")
            self.depth = 1
            begin += count
        head = "import triton\nimport triton.language as tl\n"
        head += "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n" if self.dependent else ""
        head += f"\n{PREAMBLE}\n{PREFETCH if self.dependent else ''}"
        args += ["parts", "done"] if self.split > 1 else []
        return f"{head}\n\n@triton.jit\ndef {NAME}({', '.join([*args, *self.blocks.values()])}):\n" + "\n".join(self.lines) + "\n"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    # -- structure

    def in_turns(self, *, far: bool) -> None:
        """What comes before the loops over tiles."""
        if far or self.split > 1 or self.programs <= self.turns:
            raise CannotLower(f"{self.programs} programs are not worth {self.turns} that take turns")
        if self.dependent:
            self.line("gdc_wait()")
            self.line("gdc_launch_dependents()")
            self.waited = True
        self.line("first = tl.program_id(0)")
        self.programs = self.turns

    def nest(self, nest: GridNest, program: str) -> None:
        left = program
        if self.shared is not None:
            self.line(f"part = pid % {self.split}")
            self.line(f"left = ({program}) // {self.split}")
            left = "left"
        for loop, trips in zip(reversed(nest.loops), reversed(nest.trips), strict=True):
            name = self.named(loop.var)
            self.most[loop.var] = last_value(loop)
            at = f"({left}) % {trips}" if loop is not nest.loops[0] else f"{left}"
            self.line(f"{name} = ({at}) * {loop.step} + {loop.lo}")
            if loop is not nest.loops[0]:
                rest = f"r{len(self.lines)}"
                self.line(f"{rest} = ({left}) // {trips}")
                left = rest
        body = loads_first(nest.body)
        if self.dependent and not self.waited:
            self.prefetch(body)
            self.line("gdc_wait()")
            self.line("gdc_launch_dependents()")
        at = body.index(self.shared) + 1 if self.shared is not None else len(body)
        self.block(body[:at])
        if self.shared is None:
            return
        self.gathered(self.shared)
        self.depth += 1
        self.block(body[at:])
        self.line(f"tl.store(done + pid // {self.split}, 0)")
        self.depth -= 1

    def gathered(self, loop: Loop) -> None:
        """Leave a part of the sums; the last program to do so has them all, and goes on."""
        offset = 0
        for out in loop.outs:
            self.line(f"tl.store(parts + pid * {self.left} + {offset} + {_flat(out.type.shape)}, {_tile(out)})")
            offset += math.prod(out.type.shape)
        self.line("tl.debug_barrier()")
        self.line(f'before = tl.atomic_add(done + pid // {self.split}, 1, sem="acq_rel", scope="gpu")')
        self.line(f"if before == {self.split - 1}:")
        self.line("    tl.debug_barrier()")
        offset = 0
        for out in loop.outs:
            where = f"parts + (pid // {self.split} * {self.split}) * {self.left} + {offset} + {_flat(out.type.shape)}"
            parts = [f'tl.load({where} + {i * self.left}, cache_modifier=".cg")' for i in range(self.split)]
            self.line(f"    {_tile(out)} = {parts[0]}")
            for part in parts[1:]:
                self.line(f"    {_tile(out)} += {part}")
            offset += math.prod(out.type.shape)

    def prefetch(self, body: Sequence[Stmt]) -> None:
        """Ask for the weights that the loops of a program are going to read."""
        if self.programs > PREFETCHING_PROGRAMS:
            return
        for loop in body:
            if not isinstance(loop, Loop) or not isinstance(loop.lo, int) or not isinstance(loop.hi, int) or loop.given is not None:
                continue
            for instr in loop.body:
                if isinstance(instr, Instr) and instr.op == "load" and isinstance(instr.args[0], TileAccess):
                    self.prefetch_one(instr.args[0], instr.outs[0].type.shape, loop)

    def prefetch_one(self, access: TileAccess, tile: Sequence[int], loop: Loop) -> None:
        buffer, pointer = self.buffers[access.buffer]
        if buffer.kind is not BufferKind.CONST:
            return
        if len(tile) == 1 and access.index == (sym(loop.var),) and buffer.stride == (1,) and buffer.dtype in ELEMENT_BYTES:
            self.prefetch_vector(buffer, pointer, loop)
            return
        found = bulk_load(buffer, 0, access, tile, 0.0, {**self.most, loop.var: last_value(loop)})
        if found is None or found.column != sym(loop.var) or found.source.shape[0] % found.source.block[0]:
            return
        assert isinstance(loop.lo, int) and isinstance(loop.hi, int)
        size = ELEMENT_BYTES[buffer.dtype]
        steps = (loop.hi - loop.lo) // self.split
        each, lines = LINE // size, steps * size // LINE
        wide = next((n for n in (8, 4, 2, 1) if lines % n == 0), 1)
        if not lines or lines * LINE * found.source.block[0] > PREFETCHED_BYTES:
            return
        stride, rows = found.source.stride, found.source.block[0]
        begin = f"part * {steps} + " if self.shared is loop else ""
        self.line(f"for ahead in tl.static_range({loop.lo}, {loop.lo + lines * each}, {wide * each}):")
        self.line(f"    _prefetch({pointer} + ({self.dim(found.row)} + tl.arange(0, {rows})[:, None]) * {stride}"
                  f" + {begin}ahead + tl.arange(0, {wide})[None, :] * {each})")  # fmt: skip

    def prefetch_vector(self, buffer: Buffer, pointer: str, loop: Loop) -> None:
        """Ask for a vector that the loop reads a piece of in every step: it is too small to be fetched ahead by stages, so every
        step would wait for its piece."""
        assert isinstance(loop.lo, int) and isinstance(loop.hi, int)
        each = LINE // ELEMENT_BYTES[buffer.dtype]
        lines = (loop.hi - loop.lo) // each
        wide = next((n for n in (8, 4, 2, 1) if lines % n == 0), 1)
        if loop.lo == 0 and 0 < lines <= NEAR_LINES:
            self.line(f"for ahead in tl.static_range(0, {lines * each}, {wide * each}):")
            self.line(f"    _prefetch_near({pointer} + ahead + tl.arange(0, {wide}) * {each})")

    def named(self, var: str) -> str:
        return self.names.setdefault(var, f"i{len(self.names)}")

    def block(self, body: Sequence[Stmt]) -> None:
        for stmt in body:
            match stmt:
                case Instr():
                    self.instr(stmt)
                case Loop():
                    self.loop(stmt)
                case When():
                    self.line(f"if {self.dim(stmt.pred)}:")
                    self.depth += 1
                    self.block(stmt.body)
                    self.depth -= 1

    def loop(self, loop: Loop) -> None:
        if loop.kind is LoopKind.PARALLEL:
            raise CannotLower("a loop that only a CPU runs")
        if loop.given is not None:
            self.given(loop, loop.given)
            return
        for inner, first in loop.carried:
            self.line(f"{_tile(inner)} = {_tile(first)}")
        bounds, each = f"{self.dim(loop.lo)}, {self.dim(loop.hi)}, {loop.step}", 0
        if loop is self.shared:
            assert isinstance(loop.lo, int) and isinstance(loop.hi, int)
            each = (loop.hi - loop.lo) // self.split
            bounds = f"{loop.lo}, {loop.lo + each}, {loop.step}"
        counted = f"tl.static_range({bounds})" if loop.kind is LoopKind.UNROLL else f"tl.range({bounds}, num_stages={self.stages})"
        name = self.named(loop.var)
        self.line(f"for {f'{name}p' if loop is self.shared else name} in {counted}:")
        self.depth += 1
        if loop is self.shared:
            self.line(f"{name} = {name}p + part * {each}")
        self.looping += 1
        self.most.pop(loop.var, None)
        if isinstance(loop.lo, int) and isinstance(loop.hi, int):
            self.most[loop.var] = last_value(loop)
        self.block(loop.body)
        self.looping -= 1
        moved = [(inner, out) for (inner, _), out in zip(loop.carried, loop.yields, strict=True) if inner.name != out.name]
        carried = {inner.name for inner, _ in loop.carried}
        for i, (_, out) in enumerate(moved):
            if out.name in carried:
                self.line(f"y{i} = {_tile(out)}")
        for i, (inner, out) in enumerate(moved):
            self.line(f"{_tile(inner)} = {f'y{i}' if out.name in carried else _tile(out)}")
        if not loop.body:
            self.line("pass")
        self.depth -= 1
        for (inner, _), out in zip(loop.carried, loop.outs, strict=True):
            self.line(f"{_tile(out)} = {_tile(inner)}")

    def given(self, loop: Loop, place: TileAccess) -> None:
        """A number that lies in memory, and what is done with it."""
        pointer, _ = self.place(place, ())
        self.most.pop(loop.var, None)
        self.line(f"{self.named(loop.var)} = tl.load({pointer}){'' if self.far else '.to(tl.int32)'}")
        self.block(loop.body)

    # -- instructions

    def instr(self, instr: Instr) -> None:
        if instr.op in SILENT:
            return
        given, args = attributes(instr.op, instr.attrs), instr.args
        out = instr.outs[0] if instr.outs else None
        if out is not None and any(n & (n - 1) for n in out.type.shape):
            raise CannotLower(f"a tile of {out.type.shape} on a GPU")
        match instr.op, args:
            case "load", (TileAccess() as place,):
                assert out is not None
                fill = given["fill"]
                assert isinstance(fill, int | float)
                text = self.copied(place, out.type.shape, fill) if self.bulk and self.looping else ""
                if not text:
                    pointer, mask = self.place(place, out.type.shape)
                    masked = f", mask={mask}, other={number(fill)}" if mask else ""
                    text = f"tl.load({pointer}{masked})"
            case "store", (TileAccess() as place, Tile() as tile):
                if self.bulk and self.turns and self.copied_back(place, tile):
                    return
                pointer, mask = self.place(place, tile.type.shape)
                self.line(f"tl.store({pointer}, {_tile(tile)}{f', mask={mask}' if mask else ''})")
                return
            case "fill", (value,):
                assert out is not None and isinstance(value, int | float)
                text = filled(value, out.type)
            case "index", (value,):
                text = f"tl.full((), 0, tl.int64) + ({self.dim(_dim(value))})"
            case "iota", (start,):
                assert out is not None
                axis = given["axis"]
                assert isinstance(axis, int)
                text = f"({self.dim(_dim(start))} + {_along(out.type.shape, axis)}).to(tl.{TYPES[out.type.dtype]})"
                if any(n > 1 for i, n in enumerate(out.type.shape) if i != axis):
                    text = f"tl.broadcast_to({text}, {shape_text(out.type.shape)})"
            case "bcast", (Tile() as tile,):
                assert out is not None
                text = f"tl.broadcast_to({ranked(tile, _tile(tile), len(out.type.shape))}, {shape_text(out.type.shape)})"
            case "reshape", (Tile() as tile,):
                assert out is not None
                if not out.type.shape:
                    raise CannotLower("a tile of one element as a number")
                text = f"tl.reshape({_tile(tile)}, {shape_text(out.type.shape)})"
            case "transpose", (Tile() as tile,):
                text = f"tl.trans({_tile(tile)}, {given['perm']})"
            case "map.cast", (Tile() as tile,):
                assert out is not None
                text = cast(_tile(tile), tile.type, out.type.dtype)
            case "map.bitcast", (Tile() as tile,):
                assert out is not None
                text = f"{_tile(tile)}.to(tl.{TYPES[out.type.dtype]}, bitcast=True)"
            case "mma", (Tile() as acc, Tile() as a, Tile() as b):
                precision = "tf32" if self.tf32 else "ieee"
                text = f'tl.dot({_tile(a)}, {_tile(b)}, {_tile(acc)}, input_precision="{precision}")'
            case op, _ if op.startswith("reduce."):
                tile = _as_tile(args[0])
                text = computed(op, (_tile(tile), str(given["axis"])), (tile.type.dtype,))
            case "map.normal", (Tile() as tile,) if self.rounded and tile.type.dtype is DType.F32:
                text = f"_normal_of_16_bits({_tile(tile)})"
            case op, _:
                tiles = [_as_tile(a) for a in args]
                types = [t.type.dtype for t in tiles]
                text = computed(op, [_tile(t) for t in tiles], types[1:] if op == "map.select" else types)
        assert out is not None
        self.line(f"{_tile(out)} = {text}")

    def copied(self, access: TileAccess, shape: Sequence[int], fill: float) -> str:
        """A load by a tensor descriptor; empty where it cannot be one."""
        buffer, pointer = self.buffers[access.buffer]
        found = bulk_load(buffer, int(pointer[1:]), access, shape, fill, self.most)
        if found is None:
            return ""
        name = self.blocks.setdefault(found.source, f"d{len(self.blocks)}")
        return f"{name}.load([{self.dim(found.row)}, {self.dim(found.column)}])" + (".T" if found.turned else "")

    def copied_back(self, access: TileAccess, tile: Tile) -> bool:
        """A store by tensor descriptors, in two halves of the columns where these are many, so that the next tile's operands keep
        most of the shared memory; whether it can be one."""
        rows, columns = tile.type.shape if len(tile.type.shape) == 2 else (0, 0)
        buffer, pointer = self.buffers[access.buffer]
        found = bulk_load(buffer, int(pointer[1:]), access, tile.type.shape, 0.0, self.most)
        if found is None or found.turned:
            return False
        parts = 2 if columns >= HALVED_COLUMNS else 1
        source = replace(found.source, block=(rows, columns // parts))
        name = self.blocks.setdefault(source, f"d{len(self.blocks)}")
        row, column, halves = self.dim(found.row), self.dim(found.column), [_tile(tile)]
        if parts == 2:
            halves = [f"h{tile.name}", f"g{tile.name}"]
            turned = f"tl.permute(tl.reshape({_tile(tile)}, ({rows}, 2, {columns // 2})), (0, 2, 1))"
            self.line(f"{', '.join(halves)} = tl.split({turned})")
        for i, half in enumerate(halves):
            self.line(f"{name}.store([{row}, {column} + {i * columns // parts}], {half})")
        return True

    def place(self, access: TileAccess, shape: Sequence[int]) -> tuple[str, str]:
        """Pointers to the elements of a tile, and which of them exist (empty: all)."""
        buffer, pointer = self.buffers[access.buffer]
        base = [f"({self.dim(i)}) * {s}" for i, s in zip(access.index, buffer.stride, strict=True) if s != 0 and i != 0]
        steps = access.step or (1,) * len(shape)
        where = " + ".join([pointer, *base])
        masks: list[str] = []
        for a, (extent, dim, step) in enumerate(zip(shape, access.axes, steps, strict=True)):
            along = _along(shape, a)
            stride = 0 if dim < 0 else buffer.stride[dim]
            if extent > 1 or len(shape) > 0:
                where += f" + {along} * ({self.dim(step)} * {stride})"
            valid = access.valid[a] if access.valid else None
            if valid is not None and not (isinstance(valid, int) and valid >= extent):
                masks.append(f"({along} < {self.dim(valid)})")
        mask = " & ".join(masks)
        if mask and len(masks) < len(shape):
            mask = f"tl.broadcast_to({mask}, {shape_text(shape)})"
        return where, mask

    def dim(self, d: Dim) -> str:
        """An integer expression."""
        if isinstance(d, int):
            return str(d)
        if d.op == "sym":
            return self.names[str(d.args[0])]
        args: list[str] = []
        for a in d.args:
            if isinstance(a, str):
                raise InternalError(f"an index {d} that Triton cannot have")
            args.append(self.dim(a))
        match d.op:
            case "+" | "*" | "//" | "%" | "==" | "!=" | "<" | "<=":
                return "(" + f" {d.op} ".join(args) + ")"
            case "and":
                return "(" + " & ".join(f"({a})" for a in args) + ")"
            case "or":
                return "(" + " | ".join(f"({a})" for a in args) + ")"
            case "not":
                return f"({args[0]} == 0)"
            case "ceildiv":
                return f"(({args[0]} + {args[1]} - 1) // {args[1]})"
            case "min" | "max":
                found = args[0]
                for a in args[1:]:
                    found = f"tl.{d.op}imum({found}, {a})"
                return found
            case _:
                raise CannotLower(f"an index with {d.op}")


def _flat(shape: Sequence[int]) -> str:
    """Places of a tile's elements in a row of memory."""
    rows, columns = shape
    return f"tl.arange(0, {rows})[:, None] * {columns} + tl.arange(0, {columns})[None, :]"


def _tile(tile: Tile) -> str:
    return f"t{tile.name}"


def _as_tile(operand: Operand) -> Tile:
    if not isinstance(operand, Tile):
        raise InternalError(f"{operand} is not a tile")
    return operand


def _dim(operand: Operand) -> Dim:
    if isinstance(operand, Tile | TileAccess | float):
        raise InternalError(f"{operand} is no integer expression")
    return operand


def _along(shape: Sequence[int], axis: int) -> str:
    """0, 1, … along an axis of a tile."""
    if len(shape) <= 1:
        return f"tl.arange(0, {shape[axis]})" if shape else "0"
    marks = ", ".join(":" if i == axis else "None" for i in range(len(shape)))
    return f"tl.arange(0, {shape[axis]})[{marks}]"


