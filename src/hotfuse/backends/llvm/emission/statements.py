"""Statements: loops with carried tiles, conditions, and parallel loops as functions of their own.

Serial loops are written rotated (test, body, test), so that the body is one run of code; carried tiles are phis and stay in
registers. A parallel loop's body becomes a function that runs a share of the iterations; small work calls it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission.code import CodeScope, Fn, Val, vec
from hotfuse.backends.llvm.emission.memory_access import emit_load
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.backends.llvm.threads import fork_join
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu import scratch, thread_work
from hotfuse.lower.cpu.thread_work import loop_work, threads_worth, trips
from hotfuse.tile.program import BufferKind, Instr, Loop, LoopKind, Stmt, Tile, TileType, When

Block = Callable[[FunctionState, Sequence[Stmt]], None]
"""Emits statements one after the other."""
MAX_UNROLL = 4096


def emit_loop(s: FunctionState, loop: Loop, block: Block, enter: Callable[[FunctionState, str, str], FunctionState]) -> None:
    """Any loop; `enter` prepares the state of an outlined function."""
    if loop.kind is LoopKind.UNROLL:
        _unrolled(s, loop, block)
    elif loop.kind is LoopKind.PARALLEL and s.parallel:
        _parallel(s, loop, block, enter)
    else:
        serial(s, loop, *bounds(s, loop), block)


def bounds(s: FunctionState, loop: Loop) -> tuple[str, str]:
    """Where a loop begins and ends, as operands; one over a number in memory has one round."""
    if loop.given is None:
        return s.fn.i64(loop.lo), s.fn.i64(loop.hi)
    read = Tile(f"{loop.var} as it lies", TileType(DType.I64))
    number = emit_load(s, Instr("load", (loop.given,), (read,))).rows[0][0]
    return number, s.fn.val(f"add nsw i64 {number}, 1")


def _unrolled(s: FunctionState, loop: Loop, block: Block) -> None:
    lo, hi = s.fn.fold(loop.lo), s.fn.fold(loop.hi)
    if not isinstance(lo, int) or not isinstance(hi, int) or len(range(lo, hi, loop.step)) > MAX_UNROLL:
        raise InternalError(
            f"loop {loop.var} cannot be written out", where=s.kernel.name, because=f"it runs {lo} to {hi}"
        )
    values = [s.tile(init) for _, init in loop.carried]
    for at in range(lo, hi, loop.step):
        s.fn.known[loop.var] = at
        s.vals.update({inner.name: v for (inner, _), v in zip(loop.carried, values, strict=True)})
        block(s, loop.body)
        values = [s.tile(t) for t in loop.yields]
    s.fn.known.pop(loop.var, None)
    s.vals.update({out.name: v for out, v in zip(loop.outs, values, strict=True)})


def serial(s: FunctionState, loop: Loop, lo: str, hi: str, block: Block) -> None:
    """A loop that counts; bounds are operands."""
    fn = s.fn
    body, done = fn.labels("body", "done")
    guarded = not (lo.lstrip("-").isdigit() and hi.lstrip("-").isdigit() and int(lo) < int(hi))
    first = [s.tile(init) for _, init in loop.carried]
    if guarded:
        some = fn.val(f"icmp slt i64 {lo}, {hi}")
        fn.do(f"br i1 {some}, label %{body}, label %{done}")
    else:
        fn.do(f"br label %{body}")
    before = fn.block
    fn.label(body)
    var, after = fn.fresh(_safe(loop.var)), fn.fresh("next")
    phis: list[str] = []
    fn.out.append(phis)  # type: ignore[arg-type]
    for (inner, _), v in zip(loop.carried, first, strict=True):
        names = [[fn.fresh("c") for _ in v.widths] for _ in v.rows]
        s.vals[inner.name] = Val(inner.type, names, v.widths)
    scope = CodeScope(len(fn.scopes), [])
    fn.out.append(scope.lines)
    fn.scopes.append(scope)
    fn.depth_of[loop.var], fn.symbol[loop.var] = scope.depth, var
    s.around.append(loop)
    block(s, loop.body)
    s.around.pop()
    fn.scopes.pop()
    del fn.depth_of[loop.var], fn.symbol[loop.var]
    latch = fn.block
    fn.out.append(f"  {after} = add nsw i64 {var}, {loop.step}")
    more = fn.val(f"icmp slt i64 {after}, {hi}")
    fn.do(f"br i1 {more}, label %{body}, label %{done}")
    phis.append(f"  {var} = phi i64 [{lo}, %{before}], [{after}, %{latch}]")
    fn.label(done)
    yields = [s.tile(t) for t in loop.yields]
    for k, (inner, _) in enumerate(loop.carried):
        start, inside, end = first[k], s.vals[inner.name], yields[k]
        rows: list[list[str]] = []
        for r, names in enumerate(inside.rows):
            row: list[str] = []
            for c, w in enumerate(inside.widths):
                ty, a, b = vec(inside.ty, w), start.rows[r][c], end.rows[r][c]
                phis.append(f"  {names[c]} = phi {ty} [{a}, %{before}], [{b}, %{latch}]")
                row.append(fn.val(f"phi {ty} [{a}, %{before}], [{b}, %{latch}]") if guarded else b)
            rows.append(row)
        s.vals[loop.outs[k].name] = Val(loop.outs[k].type, rows, inside.widths)


def _safe(name: str) -> str:
    """A stem for a name in LLVM's text."""
    return "".join(ch if ch.isalnum() else "_" for ch in name) + "_"


def emit_when(s: FunctionState, when: When, block: Block) -> None:
    """A condition; what is known to hold or fail needs no branch."""
    fn = s.fn
    bit = fn.truth(when.pred)
    if bit == "true":
        block(s, when.body)
    if bit in ("true", "false"):
        return
    then, after = fn.labels("then", "after")
    fn.do(f"br i1 {bit}, label %{then}, label %{after}")
    fn.label(then)
    block(s, when.body)
    fn.do(f"br label %{after}")
    fn.label(after)


# ---- parallel loops ------------------------------------------------------------------------------------------------------


def uses(stmts: Sequence[Stmt]) -> list[tuple[Instr | None, int, Tile]]:
    """Every use of a tile: the instruction and the operand's place, or None where a loop carries or yields it."""
    found: list[tuple[Instr | None, int, Tile]] = []
    _collect_uses(stmts, found)
    return found


def _collect_uses(stmts: Sequence[Stmt], found: list[tuple[Instr | None, int, Tile]]) -> None:
    for stmt in stmts:
        match stmt:
            case Instr():
                found += [(stmt, at, a) for at, a in enumerate(stmt.args) if isinstance(a, Tile)]
            case When():
                _collect_uses(stmt.body, found)
            case Loop():
                found += [(None, 0, init) for _, init in stmt.carried]
                _collect_uses(stmt.body, found)
                found += [(None, 0, t) for t in stmt.yields]


def _captured(s: FunctionState, loop: Loop) -> list[Tile]:
    """Tiles from outside that the body uses."""
    found = {t.name: t for _, _, t in uses(loop.body) if t.name in s.vals}
    return list(found.values())


def _parallel(s: FunctionState, loop: Loop, block: Block, enter: Callable[[FunctionState, str, str], FunctionState]) -> None:
    """Outlines the body into `share(context, thread, threads)` and runs it on as many threads as the work deserves."""
    fn, module = s.fn, s.fn.module
    name = f"{_safe(s.kernel.name)}par{len(module.defined)}"
    outer = [v for v in fn.depth_of if v not in s.kernel.sizes]
    tiles = _captured(s, loop)
    slots = [("ptr", "%buffers"), ("ptr", "%sizes"), ("i64", fn.i64(loop.lo)), ("i64", fn.i64(trips(loop)))]
    slots += [("i64", fn.symbol[v]) for v in outer]
    common = on_stack(s)
    slots += [("ptr", s.bases[name]) for name in common]
    chunks = [(vec(s.tile(t).ty, w), x) for t in tiles for row in s.tile(t).rows
              for w, x in zip(s.tile(t).widths, row, strict=True)]  # fmt: skip
    context = fn.alloca(f"[{8 * len(slots) + 128 * len(chunks) + 128} x i8], align 128")
    first = -(-8 * len(slots) // 128) * 128
    for k, (ty, x) in enumerate(slots):
        fn.do(f"store {ty} {x}, ptr {slot(fn, context, 8 * k)}")
    for k, (ty, x) in enumerate(chunks):
        fn.do(f"store {ty} {x}, ptr {slot(fn, context, first + 128 * k)}, align 128")
    work, count = loop_work(loop, fn.target.lanes), trips(loop)
    cold = threads_worth(work, [trips(around) for around in s.around])
    launch(s, name, context, expr("min", count, cold), expr("min", count, expr("//", work, thread_work.AWAKE_WORK)))
    inner = enter(s, name, "ptr %context, i64 %thread, i64 %threads")
    for k, name in enumerate(common, 4 + len(outer)):
        with inner.fn.at(inner.fn.scopes[0]):
            inner.bases[name] = inner.fn.val(f"load ptr, ptr {slot(inner.fn, '%context', 8 * k)}")
    _share(inner, s, loop, block, outer, tiles, first)


def on_stack(s: FunctionState) -> list[str]:
    """Buffers on this function's stack that the threads it forks have in common."""
    return [n for n in scratch.plan(s.kernel).stack if s.kernel.buffer(n).kind is BufferKind.SHARED]


def slot(fn: Fn, base: str, at: int) -> str:
    """The address some bytes into a context."""
    return fn.val(f"getelementptr i8, ptr {base}, i64 {at}")


def launch(s: FunctionState, name: str, context: str, cold: Dim, awake: Dim) -> None:
    """Call a share, `name(context, thread, threads)`, on as many threads as the call may have and the work is worth: where they
    have to be woken, and where a run's team is awake."""
    fn = s.fn
    given = fn.val(f"load i64, ptr {slot(fn, '%sizes', 8 * len(s.kernel.sizes))}")
    several = fn.truth(expr("<", 1, expr("max", cold, awake)))
    many = fn.val(f"and i1 {several}, {fn.val(f'icmp sgt i64 {given}, 1')}")
    fork, alone, joined = fn.labels("fork", "alone", "joined")
    fn.do(f"br i1 {many}, label %{fork}, label %{alone}")
    fn.label(fork)
    worth = [("i64", fn.i64(cold)), ("i64", fn.i64(awake))]
    fn.call(fork_join.FORK, "void", ("ptr", f"@{name}"), ("ptr", context), *worth, ("i64", given))
    fn.do(f"br label %{joined}")
    fn.label(alone)
    fn.do(f"call void @{name}(ptr {context}, i64 0, i64 1)")
    fn.do(f"br label %{joined}")
    fn.label(joined)


def _share(
    inner: FunctionState, s: FunctionState, loop: Loop, block: Block, outer: list[str], tiles: list[Tile], first: int
) -> None:
    """The outlined function: unpack the context, then the thread's part of the iterations as a serial loop."""
    fn = inner.fn
    fn.known = dict(s.fn.known)
    with fn.at(fn.scopes[0]):
        lo = fn.val(f"load i64, ptr {slot(fn, '%context', 16)}")
        count = fn.val(f"load i64, ptr {slot(fn, '%context', 24)}")
        for k, v in enumerate(outer):
            fn.symbol[v] = fn.val(f"load i64, ptr {slot(fn, '%context', 32 + 8 * k)}")
            fn.depth_of[v] = 0
        at = first
        for t in tiles:
            outside = s.tile(t)
            rows: list[list[str]] = []
            for _ in outside.rows:
                row: list[str] = []
                for w in outside.widths:
                    row.append(fn.val(f"load {vec(outside.ty, w)}, ptr {slot(fn, '%context', at)}, align 128"))
                    at += 128
                rows.append(row)
            inner.vals[t.name] = Val(outside.type, rows, outside.widths)
        low, high = part(fn, loop, lo, count)
    serial(inner, loop, low, high, block)
    fn.leave()


def part(fn: Fn, loop: Loop, lo: str, count: str) -> tuple[str, str]:
    """This thread's bounds of a loop that begins at `lo` and runs `count` times, shared evenly."""
    following = fn.val("add i64 %thread, 1")
    bounds = [fn.val(f"udiv i64 {fn.val(f'mul i64 {t}, {count}')}, %threads") for t in ("%thread", following)]
    low, high = (fn.val(f"add i64 {lo}, {fn.val(f'mul i64 {b}, {loop.step}')}") for b in bounds)
    return low, high
