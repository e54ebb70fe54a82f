"""`mma.memory`: a block of a product from memory to memory, on a matrix unit (AMX) where the target has one, else by vectors.

    tiles 0 to 3   sums: 2 x 2 tiles of up to 16 rows by 16 columns of fp32
    tiles 4, 5     up to 16 rows by 32 steps of the left operand
    tiles 6, 7     16 pairs of steps by 16 columns of the right one

Every function that multiplies so loads the shape of its tiles when it is entered and gives the unit back when it is left: tiles
are a thread's own, and a thread that holds none costs the system nothing to switch. All blocks of a function have tiles of one
height. The system has to permit a process the use of tiles before any of this runs (`machine.tiles`); the process that links a
kernel asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission.arith import Chunk
from hotfuse.backends.llvm.emission.code import Fn, Lines, vec
from hotfuse.backends.llvm.emission.memory_access import Walk, moved, walk
from hotfuse.backends.llvm.emission.reduce import multiply_add
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.tile.isa import attributes
from hotfuse.tile.program import Instr, Kernel, TileAccess
from hotfuse.tile.type_rules import BLOCK_COLUMNS, BLOCK_OP, BLOCK_STEPS, block_extents

MARK = "llvm.x86.tdpbf16ps"
"""What multiplies tiles, as generated code spells it."""
TILE_ROWS = 16
_LEFT, _RIGHT = 4, 6
_ROW_BYTES = 64
_PAIR = 4
"""Bytes of two steps."""


def multiplies_blocks(kernel: Kernel) -> bool:
    """Whether a kernel has such products."""
    return BLOCK_OP in kernel.ops


def emit_mma_memory(s: FunctionState, instr: Instr) -> None:
    """One block."""
    extents = block_extents(attributes(instr.op, instr.attrs))
    c, a, b = (walk(s, x, e) for x, e in zip(instr.args, extents, strict=True) if isinstance(x, TileAccess))
    if (c.steps[1], a.steps[2], b.steps[1], b.steps[2]) != (4, 2, _PAIR, 2):
        raise InternalError("a block's columns, or the steps of its rows, do not lie side by side", where=s.kernel.name)
    (rows, columns), (blocks, *_), _ = extents
    if s.fn.target.matrix_unit and columns <= 2 * BLOCK_COLUMNS and (rows <= TILE_ROWS or (rows <= 2 * TILE_ROWS and not rows % 2)):
        _tiles(s, c, a, b, rows, columns // BLOCK_COLUMNS, blocks)
    else:
        _vectors(s, c, a, b, rows, columns, blocks)


def _begin(s: FunctionState, w: Walk) -> str:
    return moved(s.fn, w.pointer, w.constant)


# ---- on a matrix unit ----------------------------------------------------------------------------------------------------


def _configured(fn: Fn, high: int) -> None:
    """See to it that the function has tiles of this height."""
    if fn.tile_rows == high:
        return
    if fn.tile_rows:
        raise InternalError(f"one kernel multiplies tiles of {fn.tile_rows} and of {high} rows", where=fn.kernel.name)
    fn.tile_rows = high
    columns = [_ROW_BYTES, 0] * 8 + [0] * 16
    rows = [high] * _RIGHT + [TILE_ROWS] * 2 + [0] * 8
    text = "".join(f"\\{x:02X}" for x in [1, *[0] * 15, *columns, *rows])
    name = f"tiles{high}"
    fn.module.constants[name] = f'@{name} = internal constant [64 x i8] c"{text}", align 64'
    with fn.at(fn.scopes[0]):
        fn.call("llvm.x86.ldtilecfg", "void", ("ptr", f"@{name}"))
    fn.at_exit.append(lambda: fn.call("llvm.x86.tilerelease", "void"))


def _tiles(s: FunctionState, c: Walk, a: Walk, b: Walk, rows: int, across: int, blocks: int) -> None:
    fn = s.fn
    down = -(-rows // TILE_ROWS)
    high = rows // down
    _configured(fn, high)
    sums = [(i, j) for i in range(down) for j in range(across)]

    def tile(intrinsic: str, number: int, pointer: str, by: Dim, step: Dim) -> None:
        at = moved(fn, pointer, fn.i64(by))
        fn.call(f"llvm.x86.{intrinsic}", "void", ("i8", str(number)), ("ptr", at), ("i64", fn.i64(step)))

    def block(at: Sequence[str]) -> list[str]:
        loaded: set[int] = set()
        for i, j in sums:
            if _LEFT + i not in loaded:
                tile("tileloadd64", _LEFT + i, at[0], expr("*", i * high, a.steps[1]), a.steps[1])
            if _RIGHT + j not in loaded:
                tile("tileloadd64", _RIGHT + j, at[1], j * _ROW_BYTES, b.steps[0])
            loaded |= {_LEFT + i, _RIGHT + j}
            fn.call(MARK, "void", *(("i8", str(n)) for n in (2 * i + j, _LEFT + i, _RIGHT + j)))
        by = (a.steps[0], expr("*", b.steps[0], BLOCK_STEPS // 2))
        return [moved(fn, p, fn.i64(d)) for p, d in zip(at, by, strict=True)]

    for i, j in sums:
        fn.call("llvm.x86.tilezero", "void", ("i8", str(2 * i + j)))
    _rounds(fn, blocks, [("ptr", _begin(s, a)), ("ptr", _begin(s, b))], block)
    for i, j in sums:
        by = expr("+", expr("*", i * high, c.steps[0]), j * _ROW_BYTES)
        tile("tilestored64", 2 * i + j, _begin(s, c), by, c.steps[0])


# ---- by vectors ----------------------------------------------------------------------------------------------------------


def _vectors(s: FunctionState, c: Walk, a: Walk, b: Walk, rows: int, columns: int, blocks: int) -> None:
    """Row by row: every pair of steps is spread over the columns; bf16 are the upper halves of fp32."""
    fn, widths = s.fn, s.fn.widths(columns)
    starts = [sum(widths[:k]) for k in range(len(widths))]
    chunks = [Chunk(fn, DType.F32, w) for w in widths]

    def halves(word: str, width: int) -> list[str]:
        """The first and the second of pairs, as fp32."""
        ints, floats = vec("i32", width), vec("float", width)
        low = fn.val(f"shl {ints} {word}, {fn.splat('i32', width, '16')}")
        high = fn.val(f"and {ints} {word}, {fn.splat('i32', width, '-65536')}")
        return [fn.val(f"bitcast {ints} {x} to {floats}") for x in (low, high)]

    def pair(now: Sequence[str]) -> list[str]:
        left, right, *sums = now
        numbers = halves(fn.val(f"load i32, ptr {left}, align 2"), 1)
        found: list[str] = []
        for chunk, first, total in zip(chunks, starts, sums, strict=True):
            word = fn.val(f"load {vec('i32', chunk.width)}, ptr {moved(fn, right, _PAIR * first)}, align 2")
            for x, y in zip(numbers, halves(word, chunk.width), strict=True):
                total = multiply_add(chunk, fn.splat("float", chunk.width, x), y, total)
            found.append(total)
        return [moved(fn, left, _PAIR), moved(fn, right, fn.i64(b.steps[0])), *found]

    def block(now: Sequence[str]) -> list[str]:
        row, right, *sums = now
        _, right, *sums = _rounds(fn, BLOCK_STEPS // 2, _typed(chunks, [row, right, *sums]), pair)
        return [moved(fn, row, fn.i64(a.steps[0])), right, *sums]

    def row(now: Sequence[str]) -> list[str]:
        left, to = now
        zeros = ["zeroinitializer"] * len(chunks)
        _, _, *sums = _rounds(fn, blocks, _typed(chunks, [left, _begin(s, b), *zeros]), block)
        for x, at, total in zip(chunks, starts, sums, strict=True):
            fn.do(f"store {x.ty} {total}, ptr {moved(fn, to, 4 * at)}, align 4")
        return [moved(fn, left, fn.i64(a.steps[1])), moved(fn, to, fn.i64(c.steps[0]))]

    _rounds(fn, rows, [("ptr", _begin(s, a)), ("ptr", _begin(s, c))], row)


def _typed(chunks: Sequence[Chunk], values: Sequence[str]) -> list[tuple[str, str]]:
    """Two pointers and a value for every chunk, with their types."""
    return list(zip(["ptr", "ptr", *(x.ty for x in chunks)], values, strict=True))


def _rounds(fn: Fn, count: int, carried: Sequence[tuple[str, str]], body: Callable[[Sequence[str]], list[str]]) -> list[str]:
    """So many rounds, at least one: types and first values of what goes from one to the next; gives the last values."""
    inside, done = fn.labels("round", "done")
    before = fn.block
    fn.do(f"br label %{inside}")
    fn.label(inside)
    phis: Lines = []
    fn.out.append(phis)
    number, after = fn.fresh("n"), fn.fresh("n")
    now = [fn.fresh("c") for _ in carried]
    then = body(now)
    phis.append(f"  {number} = phi i64 [0, %{before}], [{after}, %{fn.block}]")
    for (ty, first), name, following in zip(carried, now, then, strict=True):
        phis.append(f"  {name} = phi {ty} [{first}, %{before}], [{following}, %{fn.block}]")
    fn.do(f"{after} = add nsw i64 {number}, 1")
    more = fn.val(f"icmp slt i64 {after}, {count}")
    fn.do(f"br i1 {more}, label %{inside}, label %{done}")
    fn.label(done)
    return then
