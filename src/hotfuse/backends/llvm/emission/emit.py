"""A kernel as LLVM IR text: the table of emissions, one per instruction, and the walk over statements.

A kernel becomes `void name(ptr buffers, ptr sizes)`:

    buffers   base pointers in the order of the kernel's buffers without scratch, then the arena (see `scratch`)
    sizes     i64 in the order of the kernel's sizes, then the number of threads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission import matrix_unit, scattered
from hotfuse.backends.llvm.emission.arith import ARITHMETIC, TESTS, emit_map, emit_select, integer_power
from hotfuse.backends.llvm.emission.code import Fn, Module, Val
from hotfuse.backends.llvm.emission.convert import emit_bitcast, emit_cast
from hotfuse.backends.llvm.emission.functions import FUNCTIONS
from hotfuse.backends.llvm.emission.memory_access import emit_load, emit_store
from hotfuse.backends.llvm.emission.reduce import emit_arg, emit_mma, emit_reduce, emit_scan
from hotfuse.backends.llvm.emission.require import emit_require
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.backends.llvm.emission.statements import emit_loop, emit_when, uses
from hotfuse.backends.llvm.emission.tile_shapes import MOVES
from hotfuse.backends.llvm.runs.symbols import symbol
from hotfuse.backends.llvm.threads.team import emit_team, is_for_team
from hotfuse.base.errors import InternalError
from hotfuse.lower.cpu import scratch
from hotfuse.native.target import CpuTarget
from hotfuse.tile.program import OWN, BufferKind, Instr, Kernel, Loop, Stmt, When
from hotfuse.tile.type_rules import BLOCK_OP

Emission = Callable[[FunctionState, Instr], Val | None]


def _power(s: FunctionState, instr: Instr) -> Val:
    real = s.tiles(instr)[0].type.dtype.value[0] in "fb"
    return emit_map(FUNCTIONS["pow"] if real else integer_power)(s, instr)


EMISSIONS: dict[str, Emission] = {
    "load": emit_load,
    "store": emit_store,
    "gather": scattered.emit_gather,
    "scatter": scattered.emit_scatter,
    "prefetch": scattered.emit_prefetch,
    "count": scattered.emit_count,
    "peak": scattered.emit_peak,
    "barrier_spill": scattered.emit_barrier_spill,
    "forget": scattered.emit_forget,
    "require": emit_require,
    **MOVES,
    **{f"map.{name}": emit_map(f) for name, f in ARITHMETIC.items()},
    **{f"map.{name}": emit_map(f, is_test=True) for name, f in TESTS.items()},
    **{f"map.{name}": emit_map(f) for name, f in FUNCTIONS.items()},
    "map.pow": _power,
    "map.select": emit_select,
    "map.cast": emit_cast,
    "map.bitcast": emit_bitcast,
    "mma": emit_mma,
    BLOCK_OP: matrix_unit.emit_mma_memory,
    **{f"reduce.{name}": emit_reduce(name) for name in ("sum", "prod", "max", "min", "any", "all")},
    **{f"reduce.arg{name}": emit_arg(name) for name in ("max", "min")},
    **{f"scan.{name}": emit_scan(name) for name in ("sum", "prod", "max", "min")},
}
"""One emission per instruction of `tile.isa`."""


def emit_kernel(kernel: Kernel, target: CpuTarget) -> str:
    """The text of a module that holds one kernel."""
    return emit_kernels([kernel], target)


def emit_kernels(kernels: Sequence[Kernel], target: CpuTarget) -> str:
    """One module for several kernels; their names must differ."""
    module = Module(target)
    for kernel in kernels:
        if symbol(kernel) in module.defined:
            raise InternalError(f"two kernels of one module are called {symbol(kernel)}")
        s = _function(kernel, module, symbol(kernel), "ptr %buffers, ptr %sizes", number_tiles=_number_tiles(kernel))
        if is_for_team(kernel.body):
            emit_team(s, kernel.body, _block, _outlined)
        else:
            _block(s, kernel.body)
        s.fn.leave()
    return module.text()


def _number_tiles(kernel: Kernel) -> frozenset[str]:
    """Loaded tiles that are used as the left operand of `mma` and nowhere else."""
    left: set[str] = set()
    other: set[str] = set()
    for instr, at, tile in uses(kernel.body):
        (left if instr is not None and instr.op == "mma" and at == 1 else other).add(tile.name)
    return frozenset(left - other)


def _function(kernel: Kernel, module: Module, name: str, params: str, number_tiles: frozenset[str]) -> FunctionState:
    """A function that knows the kernel's sizes and buffers."""
    fn = Fn(module, name, params, kernel)
    s = FunctionState(fn, kernel, number_tiles=number_tiles)
    outlined = "%context" in params
    entry = fn.scopes[0]
    with fn.at(entry):
        buffers, sizes = "%buffers", "%sizes"
        if outlined:
            buffers = fn.val("load ptr, ptr %context")
            sizes = fn.val(f"load ptr, ptr {fn.val('getelementptr i8, ptr %context, i64 8')}")
            s.parallel = False
        for k, size in enumerate(kernel.sizes):
            fn.symbol[size] = fn.val(f"load i64, ptr {fn.val(f'getelementptr i64, ptr {sizes}, i64 {k}')}")
            fn.depth_of[size] = 0
        given = [b for b in kernel.buffers if b.kind not in OWN]
        for k, buffer in enumerate(given):
            s.bases[buffer.name] = fn.val(f"load ptr, ptr {fn.val(f'getelementptr ptr, ptr {buffers}, i64 {k}')}")
        _scratch(s, buffers, len(given), outlined=outlined)
    return s


def _scratch(s: FunctionState, buffers: str, given: int, *, outlined: bool) -> None:
    """Bind the kernel's own buffers: stack memory, or a slice of the arena, this thread's or the kernel's."""
    fn, own = s.fn, scratch.plan(s.kernel)
    for name, size in own.stack.items():
        if outlined and s.kernel.buffer(name).kind is BufferKind.SHARED:
            continue  # on the stack of the thread that forked, which passes its address
        s.bases[name] = fn.alloca(f"[{size} x i8], align {scratch.LINE}")
    if not own.needs_arena:
        return
    arena = fn.val(f"load ptr, ptr {fn.val(f'getelementptr ptr, ptr {buffers}, i64 {given}')}")
    for name, offset in own.common.items():
        s.bases[name] = fn.val(f"getelementptr i8, ptr {arena}, i64 {fn.i64(offset)}")
    if own.common:
        arena = fn.val(f"getelementptr i8, ptr {arena}, i64 {fn.i64(own.shared)}")
    if outlined:
        at = fn.val("add i64 %thread, 1")
        arena = fn.val(f"getelementptr i8, ptr {arena}, i64 {fn.val(f'mul i64 {at}, {fn.i64(own.slice)}')}")
    for name, offset in own.arena.items():
        s.bases[name] = fn.val(f"getelementptr i8, ptr {arena}, i64 {fn.i64(offset)}")


def _block(s: FunctionState, stmts: Sequence[Stmt]) -> None:
    """Emit statements one after the other."""
    for stmt in stmts:
        match stmt:
            case Instr():
                _instr(s, stmt)
            case Loop():
                emit_loop(s, stmt, _block, _outlined)
            case When():
                emit_when(s, stmt, _block)


def _outlined(s: FunctionState, name: str, params: str) -> FunctionState:
    return _function(s.kernel, s.fn.module, name, params, s.number_tiles)


def _instr(s: FunctionState, instr: Instr) -> None:
    emission = EMISSIONS.get(instr.op)
    if emission is None:
        raise InternalError(f"instruction {instr.op} has no LLVM emission", where=s.kernel.name)
    result = emission(s, instr)
    if result is not None:
        s.vals[instr.outs[0].name] = result
