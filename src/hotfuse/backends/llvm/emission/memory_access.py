"""Tiles and memory: loads, stores, gathers, scatters, prefetches, counters.

Addresses are split by the loops they depend on, so that each part is computed in the loop where it changes. Along the last
tile axis memory is contiguous (one vector access), repeated (one number, spread) or strided (a gather). Elements that do not
exist are masked off; what is known to exist needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.backends.llvm.emission.code import (
    CodeScope,
    Fn,
    Val,
    iota,
    is_constant,
    lane_mask,
    number,
    stored,
    suffix,
    vec,
)
from hotfuse.backends.llvm.emission.convert import half_bits
from hotfuse.backends.llvm.emission.state import FunctionState, access_of, attr, indices
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.types import DType, size_of
from hotfuse.tile.program import Buffer, BufferKind, Instr, TileAccess, TileType

Monomials = dict[tuple[Sym, ...], int]


def linear(d: Dim) -> Monomials:
    """A sum of products, with everything that is neither kept whole; the empty product is the constant."""
    if isinstance(d, int):
        return {(): d} if d else {}
    parts = [linear(a) for a in d.args if not isinstance(a, str)] if d.op in ("+", "*") else []
    if d.op == "+":
        total: Monomials = {}
        for p in parts:
            for k, v in p.items():
                total[k] = total.get(k, 0) + v
        return {k: v for k, v in total.items() if v}
    if d.op == "*":
        product: Monomials = {(): 1}
        for p in parts:
            if len(product) * len(p) > 32:
                return {(d,): 1}
            crossed: Monomials = {}
            for k1, v1 in product.items():
                for k2, v2 in p.items():
                    key = tuple(sorted((*k1, *k2), key=str)) if k1 and k2 else k1 or k2
                    crossed[key] = crossed.get(key, 0) + v1 * v2
            product = crossed
        return product
    return {(d,): 1}


def _sum(terms: Sequence[tuple[tuple[Sym, ...], int]]) -> Dim:
    return expr("+", *(expr("*", *factors, n) for factors, n in terms))


def address(s: FunctionState, buffer: Buffer, index: tuple[Dim, ...]) -> tuple[str, int]:
    """A pointer to an element and a constant number of bytes behind it; outer loops compute what only they change."""
    fn, size = s.fn, size_of(buffer.dtype)
    total = fn.fold(expr("+", 0, *(expr("*", i, st) for i, st in zip(index, buffer.stride, strict=True))))
    terms = linear(total)
    constant = terms.pop((), 0) * size
    by_depth: dict[int, list[tuple[tuple[Sym, ...], int]]] = {}
    for factors, n in terms.items():
        depth = max(fn.scope_of(f).depth for f in factors)
        by_depth.setdefault(depth, []).append((factors, n * size))
    pointer = s.base(buffer.name)
    for depth in sorted(by_depth):
        pointer = offset(fn, pointer, _sum(by_depth[depth]), fn.scopes[depth])
    return pointer, constant


def offset(fn: Fn, pointer: str, by: Dim, scope: CodeScope) -> str:
    """A pointer moved by an expression in bytes, computed once in a scope where both are known."""
    if by == 0:
        return pointer
    found = scope.memo.get((pointer, by))
    if found is None:
        amount = fn.i64(by)
        with fn.at(scope):
            found = scope.memo[(pointer, by)] = fn.val(f"getelementptr i8, ptr {pointer}, i64 {amount}")
    return found


def moved(fn: Fn, pointer: str, by: int | str) -> str:
    """A pointer moved by bytes, here."""
    return pointer if by in (0, "0") else fn.val(f"getelementptr i8, ptr {pointer}, i64 {by}")


@dataclass(slots=True)
class Walk:
    """An access ready to be walked: where it begins, how far apart elements are, and how many exist."""

    buffer: Buffer
    pointer: str
    constant: int
    steps: tuple[Dim, ...]
    """Bytes from one element to the next along each tile axis."""
    valid: tuple[Dim | None, ...]

    @property
    def last(self) -> Dim:
        """Bytes between neighbours in a row."""
        return self.steps[-1] if self.steps else 0


def walk(s: FunctionState, access: TileAccess, shape: tuple[int, ...]) -> Walk:
    """Prepare an access of a tile's extents."""
    fn, buffer = s.fn, s.kernel.buffer(access.buffer)
    rank = len(shape)
    axes = access.axes
    if len(axes) != rank:
        raise InternalError(
            f"access of {buffer.name} has {len(axes)} axes for a tile of rank {rank}", where=s.kernel.name
        )
    step = access.step or (1,) * rank
    valid = access.valid or (None,) * rank
    size = size_of(buffer.dtype)
    steps = tuple(
        0 if a < 0 else fn.fold(expr("*", fn.fold(buffer.stride[a]), fn.fold(st), size))
        for a, st in zip(axes, step, strict=True)
    )
    pointer, constant = address(s, buffer, access.index)
    bounds: list[Dim | None] = []
    for v, extent in zip(valid, shape, strict=True):
        v = None if v is None else fn.fold(v)
        bounds.append(None if v is None or (isinstance(v, int) and v >= extent) else v)
    return Walk(buffer, pointer, constant, steps, tuple(bounds))


def row_pointer(s: FunctionState, w: Walk, index: Sequence[int]) -> str:
    """Where a row begins."""
    fn, pointer, constant = s.fn, w.pointer, w.constant
    for i, step in zip(index, w.steps, strict=False):
        by = expr("*", i, step)
        if isinstance(by, int):
            constant += by
        else:
            pointer = moved(fn, pointer, fn.i64(by))
    return moved(fn, pointer, constant)


def row_exists(s: FunctionState, w: Walk, index: Sequence[int]) -> str:
    """Whether a row exists, as one bit."""
    fn, bit = s.fn, "true"
    for i, v in zip(index, w.valid, strict=False):
        if v is None:
            continue
        if isinstance(v, int):
            if i >= v:
                return "false"
            continue
        scope = fn.scope_of(v)
        here = scope.memo.get(("exists", i, v))
        if here is None:
            count = fn.i64(v)
            with fn.at(scope):
                here = scope.memo[("exists", i, v)] = fn.val(f"icmp sgt i64 {count}, {i}")
        bit = here if bit == "true" else fn.val(f"and i1 {bit}, {here}")
    return bit


def chunk_mask(s: FunctionState, w: Walk, rank: int, cols: int, start: int, width: int, row: str) -> str:
    """Which lanes of a chunk exist; "" when all do, "none" when none does."""
    fn = s.fn
    here = min(width, cols - start)
    bound = w.valid[-1] if rank else None
    if row == "false":
        return "none"
    if isinstance(bound, int):
        here = min(here, bound - start)
        if here <= 0:
            return "none"
    fixed = "" if here == width else lane_mask(width, here)
    mask = fixed
    if bound is not None and not isinstance(bound, int):
        scope = fn.scope_of(bound)
        key = ("mask", bound, cols, start, width)
        mask = scope.memo.get(key, "")
        if not mask:
            lanes = _count_vector(fn, scope, bound, cols, width)
            with fn.at(scope):
                text = f"icmp slt {vec('i32', width)} {iota('i32', width, start)}, {lanes}"
                mask = scope.memo[key] = fn.val(text)
    if row == "true":
        return mask
    rows = fn.splat("i1", width, row)
    return rows if not mask else fn.val(f"and {vec('i1', width)} {rows}, {mask}")


def _count_vector(fn: Fn, scope: CodeScope, bound: Dim, cols: int, width: int) -> str:
    """How many of `cols` elements exist, in every lane; limited first, so that 32 bits hold it."""
    key = ("count", bound, cols, width)
    if key not in scope.memo:
        count = fn.i64(bound)
        with fn.at(scope):
            most = fn.call("llvm.smin.i64", "i64", ("i64", count), ("i64", str(cols)))
            least = fn.call("llvm.smax.i64", "i64", ("i64", most), ("i64", "0"))
            scope.memo[key] = fn.splat("i32", width, fn.val(f"trunc i64 {least} to i32"))
    return scope.memo[key]


def dummy(fn: Fn) -> str:
    """Harmless memory for accesses that must not happen."""
    scope = fn.scopes[0]
    found = scope.memo.get("dummy")
    if found is None:
        found = scope.memo["dummy"] = fn.alloca("i64, align 8")
        scope.lines.append(f"  store i64 0, ptr {found}")
    return found


# ---- one chunk ---------------------------------------------------------------------------------------------------------


def from_memory(fn: Fn, dtype: DType, width: int, raw: str) -> str:
    """A chunk as it is held in registers: bool is a byte in memory and a bit here."""
    if dtype is not DType.BOOL:
        return raw
    return fn.val(f"icmp ne {vec('i8', width)} {raw}, {'0' if width == 1 else 'zeroinitializer'}")


def to_memory(fn: Fn, dtype: DType, width: int, value: str) -> str:
    """The reverse of `from_memory`."""
    return fn.val(f"zext {vec('i1', width)} {value} to {vec('i8', width)}") if dtype is DType.BOOL else value


def _fill_operand(fn: Fn, dtype: DType, width: int, fill: float) -> str:
    ty = stored(dtype)
    if dtype in (DType.F16, DType.BF16):
        return fn.splat(ty, width, str(half_bits(dtype, fill)))
    if dtype is DType.BOOL:
        return fn.splat(ty, width, "1" if fill else "0")
    return fn.splat(ty, width, number(ty, fill))


def load_number(fn: Fn, buffer: Buffer, pointer: str, mask: str, fill: float) -> str:
    """One number as stored; where it does not exist, harmless memory is read instead."""
    ty, invariant = stored(buffer.dtype), _invariant(buffer)
    other = _fill_operand(fn, buffer.dtype, 1, fill)
    if mask == "none":
        return other
    if not mask:
        return fn.val(f"load {ty}, ptr {pointer}, align {size_of(buffer.dtype)}{invariant}")
    safe = fn.val(f"select i1 {mask}, ptr {pointer}, ptr {dummy(fn)}")
    got = fn.val(f"load {ty}, ptr {safe}, align {size_of(buffer.dtype)}")
    return fn.val(f"select i1 {mask}, {ty} {got}, {ty} {other}")


def _invariant(buffer: Buffer) -> str:
    return ", !invariant.load !0" if buffer.kind is BufferKind.CONST else ""


def load_vector(fn: Fn, buffer: Buffer, pointer: str, width: int, mask: str, fill: float) -> str:
    """Neighbours in memory."""
    ty, align = stored(buffer.dtype), size_of(buffer.dtype)
    if width == 1:
        return load_number(fn, buffer, pointer, mask, fill)
    other = _fill_operand(fn, buffer.dtype, width, fill)
    if mask == "none":
        return other
    wide = vec(ty, width)
    if not mask:
        return fn.val(f"load {wide}, ptr {pointer}, align {align}{_invariant(buffer)}")
    name = f"llvm.masked.load.{suffix(ty, width)}.p0"
    bits = vec("i1", width)
    fn.module.declared.setdefault(name, f"declare {wide} @{name}(ptr, {bits}, {wide})")
    return fn.val(f"call {wide} @{name}(ptr align {align} {pointer}, {bits} {mask}, {wide} {other})")


def load_spread(fn: Fn, buffer: Buffer, pointers: str, width: int, mask: str, fill: float) -> str:
    """Numbers at a vector of addresses."""
    ty, align = stored(buffer.dtype), size_of(buffer.dtype)
    if width == 1:
        return load_number(fn, buffer, pointers, mask, fill)
    other = _fill_operand(fn, buffer.dtype, width, fill)
    if mask == "none":
        return other
    wide, bits, where = vec(ty, width), vec("i1", width), vec("ptr", width)
    name = f"llvm.masked.gather.{suffix(ty, width)}.{suffix('ptr', width)}"
    fn.module.declared.setdefault(name, f"declare {wide} @{name}({where}, {bits}, {wide})")
    lanes = mask or lane_mask(width, width)
    return fn.val(f"call {wide} @{name}({where} align {align} {pointers}, {bits} {lanes}, {wide} {other})")


def store_vector(fn: Fn, buffer: Buffer, pointer: str, width: int, mask: str, value: str) -> None:
    """Write neighbours in memory."""
    ty, align = stored(buffer.dtype), size_of(buffer.dtype)
    wide = vec(ty, width)
    if mask == "none":
        return
    if not mask:
        fn.do(f"store {wide} {value}, ptr {pointer}, align {align}")
    elif width == 1:
        safe = fn.val(f"select i1 {mask}, ptr {pointer}, ptr {dummy(fn)}")
        fn.do(f"store {wide} {value}, ptr {safe}, align {align}")
    elif mask == lane_mask(width, 1):  # LLVM 22 writes 32 bits where one narrow lane of a truncated vector is stored
        fn.do(f"store {ty} {fn.lane(ty, width, value, 0)}, ptr {pointer}, align {align}")
    else:
        name = f"llvm.masked.store.{suffix(ty, width)}.p0"
        bits = vec("i1", width)
        fn.module.declared.setdefault(name, f"declare void @{name}({wide}, ptr, {bits})")
        fn.do(f"call void @{name}({wide} {value}, ptr align {align} {pointer}, {bits} {mask})")


def store_spread(fn: Fn, buffer: Buffer, pointers: str, width: int, mask: str, value: str) -> None:
    """Write numbers to a vector of addresses, the first lane first."""
    ty, align = stored(buffer.dtype), size_of(buffer.dtype)
    if width == 1 or mask == "none":
        store_vector(fn, buffer, pointers, 1, mask, value)
        return
    wide, bits, where = vec(ty, width), vec("i1", width), vec("ptr", width)
    name = f"llvm.masked.scatter.{suffix(ty, width)}.{suffix('ptr', width)}"
    fn.module.declared.setdefault(name, f"declare void @{name}({wide}, {where}, {bits})")
    lanes = mask or lane_mask(width, width)
    fn.do(f"call void @{name}({wide} {value}, {where} align {align} {pointers}, {bits} {lanes})")


def spread_pointers(fn: Fn, pointer: str, step: Dim, start: int, width: int, extra: str = "") -> str:
    """A vector of addresses `step` bytes apart from lane `start` on, each moved by its lane of `extra` bytes."""
    by = fn.i64(step)
    if width == 1:
        amount = fn.i64(expr("*", start, step)) if start else "0"
        if extra:
            amount = extra if amount == "0" else fn.val(f"add i64 {amount}, {extra}")
        return moved(fn, pointer, amount)
    wide = vec("i64", width)
    if is_constant(by):
        amounts = "<" + ", ".join(f"i64 {(start + i) * int(by)}" for i in range(width)) + ">"
    else:
        amounts = fn.val(f"mul {wide} {iota('i64', width, start)}, {fn.splat('i64', width, by)}")
    if extra:
        amounts = fn.val(f"add {wide} {amounts}, {extra}")
    return fn.val(f"getelementptr i8, ptr {pointer}, {wide} {amounts}")


# ---- instructions --------------------------------------------------------------------------------------------------------


def emit_load(s: FunctionState, instr: Instr) -> Val:
    """`load`: a tile from memory."""
    out, fn = instr.outs[0].type, s.fn
    fill = attr(instr, "fill", 0)
    assert isinstance(fill, int | float)
    w = walk(s, access_of(instr), out.shape)
    _same(w.buffer.dtype, out.dtype, instr)
    size = size_of(out.dtype)
    beside = out.dtype in (DType.I8, DType.U8, DType.I16, DType.BF16) and len(out.shape) == 2 and out.shape[0] * size == 4
    if beside and w.steps == (size, 4) and w.valid == (None, None):
        return _load_beside(s, w, out)
    cols = out.shape[-1] if out.shape else 1
    apart = instr.outs[0].name in s.number_tiles
    widths = (1,) * cols if apart else fn.widths(cols)
    rows: list[list[str]] = []
    for index in indices(out.shape):
        pointer, exists = row_pointer(s, w, index), row_exists(s, w, index)
        row: list[str] = []
        spread = ""
        start = 0
        for width in widths:
            mask = chunk_mask(s, w, len(out.shape), cols, start, width, exists)
            if w.last == 0 and width > 1 and w.valid[-1] is None:
                if not spread:
                    spread = load_number(fn, w.buffer, pointer, "" if exists == "true" else _whole(exists), fill)
                raw = fn.splat(stored(out.dtype), width, spread)
            elif w.last == size_of(out.dtype) or (width == 1 and start == 0):
                raw = load_vector(fn, w.buffer, moved(fn, pointer, start * size_of(out.dtype)), width, mask, fill)
            else:
                raw = load_spread(fn, w.buffer, spread_pointers(fn, pointer, w.last, start, width), width, mask, fill)
            row.append(from_memory(fn, out.dtype, width, raw))
            start += width
        rows.append(row)
    return Val(out, rows, widths)


def _load_beside(s: FunctionState, w: Walk, out: TileType) -> Val:
    """Four rows of bytes, or two of bf16 or 16-bit integers, whose columns lie one behind the other.

    One load, kept as it is for products, taken apart for others.
    """
    fn, many, ty = s.fn, out.shape[0], stored(out.dtype)
    widths = fn.widths(out.shape[1])
    rows: list[list[str]] = [[] for _ in range(many)]
    quads: list[str] = []
    start = 0
    for width in widths:
        pointer = moved(fn, moved(fn, w.pointer, w.constant), 4 * start)
        raw, whole = load_vector(fn, w.buffer, pointer, many * width, "", 0), vec(ty, many * width)
        quads.append(fn.val(f"bitcast {whole} {raw} to {vec('i32', width)}"))
        for k, row in enumerate(rows):  # what nobody reads is not emitted
            lanes = ", ".join(f"i32 {many * j + k}" for j in range(width))
            text = f"shufflevector {whole} {raw}, {whole} {raw}, <{width} x i32> <{lanes}>"
            row.append(fn.val(text) if width > 1 else fn.val(f"extractelement {whole} {raw}, i32 {k}"))
        start += width
    return Val(out, rows, widths, quads)


def _whole(exists: str) -> str:
    return "none" if exists == "false" else exists


def emit_store(s: FunctionState, instr: Instr) -> None:
    """`store`: a tile to memory."""
    fn, value = s.fn, s.tiles(instr)[0]
    shape = value.type.shape
    w = walk(s, access_of(instr), shape)
    _same(w.buffer.dtype, value.type.dtype, instr)
    cols, size = value.cols, size_of(value.type.dtype)
    for r, index in enumerate(indices(shape)):
        pointer, exists = row_pointer(s, w, index), row_exists(s, w, index)
        start = 0
        for c, width in enumerate(value.widths):
            mask = chunk_mask(s, w, len(shape), cols, start, width, exists)
            raw = to_memory(fn, value.type.dtype, width, value.rows[r][c])
            if w.last == size or (width == 1 and start == 0):
                store_vector(fn, w.buffer, moved(fn, pointer, start * size), width, mask, raw)
            else:
                store_spread(fn, w.buffer, spread_pointers(fn, pointer, w.last, start, width), width, mask, raw)
            start += width


def _same(memory: DType, tile: DType, instr: Instr) -> None:
    if memory is not tile:
        raise InternalError(f"{instr.op} between {memory.value} memory and a {tile.value} tile")
