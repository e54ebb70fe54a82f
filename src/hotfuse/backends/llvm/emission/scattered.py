"""Accesses whose elements are moved by data: gather and scatter; and the hints and counters that touch single elements."""

from __future__ import annotations

from hotfuse.backends.llvm.emission import convert
from hotfuse.backends.llvm.emission.arith import ARITHMETIC, Chunk
from hotfuse.backends.llvm.emission.code import Val, element, lane_mask, vec
from hotfuse.backends.llvm.emission.memory_access import (
    address,
    chunk_mask,
    from_memory,
    load_number,
    load_spread,
    load_vector,
    moved,
    row_exists,
    row_pointer,
    spread_pointers,
    store_spread,
    store_vector,
    to_memory,
    walk,
)
from hotfuse.backends.llvm.emission.state import FunctionState, access_of, attr, indices, int_attr, source_row
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType, size_of
from hotfuse.tile.program import Instr


def _index_bytes(s: FunctionState, index: Val, row: int, chunk: int, width: int, step: Dim) -> str:
    """An index chunk as bytes along the buffer dimension it moves in."""
    fn = s.fn
    wide = convert.to_i64(fn, index.type.dtype, width, fn.chunk(index, row, chunk, width))
    return fn.val(f"mul {vec('i64', width)} {wide}, {fn.splat('i64', width, fn.i64(step))}")


def emit_gather(s: FunctionState, instr: Instr) -> Val:
    """`gather`: a load whose elements are moved by an index tile; an index per row moves whole rows."""
    out, fn = instr.outs[0].type, s.fn
    fill = attr(instr, "fill", 0)
    assert isinstance(fill, int | float)
    w, index = walk(s, access_of(instr), out.shape), s.tiles(instr)[0]
    cols = out.shape[-1] if out.shape else 1
    step = expr("*", w.buffer.stride[int_attr(instr, "dim")], size_of(out.dtype))
    widths, rows = fn.widths(cols), list[list[str]]()
    for at in indices(out.shape):
        pointer, exists = row_pointer(s, w, at), row_exists(s, w, at)
        source = source_row(index.type.shape, at)
        row: list[str] = []
        start = 0
        whole = index.widths == (1,) and w.last == size_of(out.dtype)
        if whole:
            pointer = moved(fn, pointer, _index_bytes(s, index, source, 0, 1, step))
        for c, width in enumerate(widths):
            mask = chunk_mask(s, w, len(out.shape), cols, start, width, exists)
            if whole:
                raw = load_vector(fn, w.buffer, moved(fn, pointer, start * size_of(out.dtype)), width, mask, fill)
            else:
                extra = _index_bytes(s, index, source, c, width, step)
                raw = load_spread(
                    fn, w.buffer, spread_pointers(fn, pointer, w.last, start, width, extra), width, mask, fill
                )
            row.append(from_memory(fn, out.dtype, width, raw))
            start += width
        rows.append(row)
    return Val(out, rows, widths)


def emit_scatter(s: FunctionState, instr: Instr) -> None:
    """`scatter`: the store that mirrors `gather`; the last element in row-major order stays, or all are added."""
    fn, (index, value) = s.fn, s.tiles(instr)
    shape, dtype, cols = value.type.shape, value.type.dtype, value.cols
    w, adds = walk(s, access_of(instr), shape), attr(instr, "reduce") == "add"
    size = size_of(dtype)
    step = expr("*", w.buffer.stride[int_attr(instr, "dim")], size)
    for r, at in enumerate(indices(shape)):
        pointer, exists = row_pointer(s, w, at), row_exists(s, w, at)
        source = source_row(index.type.shape, at)
        # One index for a whole row of distinct places: a vector access, which adding may use as well.
        whole = index.widths == (1,) and w.last == size
        if whole:
            pointer = moved(fn, pointer, _index_bytes(s, index, source, 0, 1, step))
        start = 0
        for c, width in enumerate(value.widths):
            mask = chunk_mask(s, w, len(shape), cols, start, width, exists)
            new = value.rows[r][c]
            if whole:
                place = moved(fn, pointer, start * size)
                if adds:
                    new = _add(s, dtype, width, load_vector(fn, w.buffer, place, width, mask, 0), new)
                store_vector(fn, w.buffer, place, width, mask, to_memory(fn, dtype, width, new))
            else:
                extra = _index_bytes(s, index, source, c, width, step)
                places = spread_pointers(fn, pointer, w.last, start, width, extra)
                if adds:
                    _add_each(s, instr, places, width, mask, new)
                else:
                    store_spread(fn, w.buffer, places, width, mask, to_memory(fn, dtype, width, new))
            start += width


def _add(s: FunctionState, dtype: DType, width: int, old: str, new: str) -> str:
    fn = s.fn
    wide = [convert.widen(fn, dtype, width, x) for x in (old, new)]
    total = ARITHMETIC["add"](Chunk(fn, convert.compute_type(dtype), width), wide)
    return convert.narrow(fn, dtype, width, total)


def _add_each(s: FunctionState, instr: Instr, places: str, width: int, mask: str, new: str) -> None:
    """Lanes one after the other, because several may meet in one place."""
    fn, buffer = s.fn, s.kernel.buffer(access_of(instr).buffer)
    if mask == "none":
        return
    for k in range(width):
        bit = fn.lane("i1", width, mask, k) if mask else ""
        place = fn.lane("ptr", width, places, k)
        old = load_number(fn, buffer, place, bit, 0)
        total = _add(s, buffer.dtype, 1, old, fn.lane(element(buffer.dtype), width, new, k))
        store_vector(fn, buffer, place, 1, bit, total)


def emit_prefetch(s: FunctionState, instr: Instr) -> None:
    """`prefetch`: level 1 is the nearest cache."""
    access = access_of(instr)
    pointer, constant = address(s, s.kernel.buffer(access.buffer), access.index)
    where = moved(s.fn, pointer, constant)
    write, near = int_attr(instr, "write", 0), 4 - int_attr(instr, "level", 1)
    s.fn.call("llvm.prefetch.p0", "void", ("ptr", where), ("i32", str(write)), ("i32", str(near)), ("i32", "1"))


def emit_count(s: FunctionState, instr: Instr) -> None:
    """`count`: adds the number of non-zero elements to a counter, atomically because other threads may do the same."""
    fn, access, tile = s.fn, access_of(instr), s.tiles(instr)[0]
    total = "0"
    for row in tile.rows:
        left = tile.cols
        for x, width in zip(row, tile.widths, strict=True):
            bits = convert.cast(fn, tile.type.dtype, DType.BOOL, width, x)
            if left < width:
                bits = fn.val(f"and {vec('i1', width)} {bits}, {lane_mask(width, left)}")
            if width > 1:
                packed = fn.val(f"bitcast {vec('i1', width)} {bits} to i{width}")
                some = fn.call(f"llvm.ctpop.i{width}", f"i{width}", (f"i{width}", packed))
                here = fn.val(f"zext i{width} {some} to i64") if width < 64 else some
            else:
                here = fn.val(f"zext i1 {bits} to i64")
            total = here if total == "0" else fn.val(f"add i64 {total}, {here}")
            left -= width
    pointer, constant = address(s, s.kernel.buffer(access.buffer), access.index)
    fn.val(f"atomicrmw add ptr {moved(fn, pointer, constant)}, i64 {total} monotonic")


def emit_peak(s: FunctionState, instr: Instr) -> None:
    """`peak`: raises a counter, atomically because other threads may do the same."""
    fn, access, tile = s.fn, access_of(instr), s.tiles(instr)[0]
    pointer, constant = address(s, s.kernel.buffer(access.buffer), access.index)
    fn.val(f"atomicrmw max ptr {moved(fn, pointer, constant)}, i64 {tile.rows[0][0]} monotonic")


def emit_barrier_spill(s: FunctionState, instr: Instr) -> None:
    """`barrier_spill`: keeps the scheduler from moving loads across, which would fill the registers and spill."""
    s.fn.do('call void asm sideeffect "", "~{memory}"()')


def emit_forget(s: FunctionState, instr: Instr) -> None:
    """`forget`: no vector register keeps its number. Constants of a loop before would otherwise stay in registers throughout the
    next one, whose sums then go to memory and back in every step: LLVM hoists the constants and sees too late what that costs.
    """
    level = s.fn.target.name
    names = [f"{'v' if level == 'neon' else 'xmm'}{i}" for i in range(16 if level not in ("neon", "avx512") else 32)]
    s.fn.do(f'call void asm sideeffect "", "{",".join(f"~{{{n}}}" for n in names)},~{{memory}}"()')
