"""Loops of a native run as LLVM IR: the steps of a body over and over, as `ops.control` means `loop` and `scan`.

    if trips and condition:  i = 0
    do { the body reads i and true; steps; i += 1 } while i < trips and the condition that the steps left

What a body carries lies in memory of its own, which the steps end by writing. A loop that would run for more iterations than
the reference allows leaves the run: the fallback says what is wrong with it. So does one whose stacks of results have another
length than its type says.
"""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.backends.llvm.emission.code import CodeScope, Fn
from hotfuse.lower.run.description import LoopStep, MemoryAddress
from hotfuse.ops.control import MAX_TRIPS, NO_COUNT


def emit_loop(fn: Fn, loop: LoopStep, address: Callable[[MemoryAddress], str], body: Callable[[], None], control: str) -> str:
    """The loop; gives the operand that holds how many iterations it ran. `body` writes the steps."""
    trips = _trips(fn, loop, address)
    if trips is not None:
        large = fn.val(f"icmp sgt i64 {trips}, {MAX_TRIPS}")
        meant = fn.val(f"icmp slt i64 {trips}, {NO_COUNT}")
        _leave_if(fn, fn.val(f"and i1 {large}, {meant}"), control)
    if loop.exactly is not None and trips is not None:
        _leave_if(fn, fn.val(f"icmp sgt i64 {trips}, {fn.i64(loop.exactly)}"), control)
    start = "true" if trips is None else fn.val(f"icmp sgt i64 {trips}, 0")
    if loop.condition is not None:
        start = fn.val(f"and i1 {start}, {_holds(fn, address(loop.condition))}")
    inside, done = fn.labels("loop", "done")
    before = fn.block
    fn.do(f"br i1 {start}, label %{inside}, label %{done}")
    fn.label(inside)
    at, after = fn.fresh("i"), fn.fresh("next")
    phi: list[str] = []
    fn.out.append(phi)  # type: ignore[arg-type]
    scope = CodeScope(len(fn.scopes), [])
    fn.out.append(scope.lines)
    fn.scopes.append(scope)
    fn.depth_of[loop.var], fn.symbol[loop.var] = scope.depth, at
    if loop.iteration is not None:
        fn.do(f"store i64 {at}, ptr {address(loop.iteration)}")
    if loop.go is not None:
        fn.do(f"store i8 1, ptr {address(loop.go)}")
    body()
    fn.out.append(f"  {after} = add nsw i64 {at}, 1")
    more = "true" if trips is None else fn.val(f"icmp slt i64 {after}, {trips}")
    if loop.again is not None:
        more = fn.val(f"and i1 {more}, {_holds(fn, address(loop.again))}")
    endless = fn.val(f"icmp sge i64 {after}, {MAX_TRIPS}")
    _leave_if(fn, fn.val(f"and i1 {more}, {endless}"), control)
    fn.scopes.pop()
    del fn.depth_of[loop.var], fn.symbol[loop.var]
    latch = fn.block
    fn.do(f"br i1 {more}, label %{inside}, label %{done}")
    phi.append(f"  {at} = phi i64 [0, %{before}], [{after}, %{latch}]")
    fn.label(done)
    ran = fn.val(f"phi i64 [0, %{before}], [{after}, %{latch}]")
    if loop.exactly is not None:
        _leave_if(fn, fn.val(f"icmp ne i64 {ran}, {fn.i64(loop.exactly)}"), control)
    return ran


def _trips(fn: Fn, loop: LoopStep, address: Callable[[MemoryAddress], str]) -> str | None:
    if loop.trips is None:
        return None
    if isinstance(loop.trips, MemoryAddress):
        return fn.val(f"load i64, ptr {address(loop.trips)}")
    return fn.i64(loop.trips)


def _holds(fn: Fn, pointer: str) -> str:
    return fn.val(f"icmp ne i8 {fn.val(f'load i8, ptr {pointer}')}, 0")


def _leave_if(fn: Fn, bit: str, control: str) -> None:
    """Leave the run to its fallback."""
    leave, stay = fn.labels("leave", "stay")
    fn.do(f"br i1 {bit}, label %{leave}, label %{stay}")
    fn.label(leave)
    fn.do(f"store i64 1, ptr {control}")
    fn.do("ret void")
    fn.label(stay)
