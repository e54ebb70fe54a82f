"""Calls of a run that do not need each other's results, side by side on the threads of the OpenMP runtime.

    fork { lane: call k0, call k2 | lane: call k1, call k3 }

The driver has both ways: one call after the other, each on as many threads as it deserves, or the lanes at the same time, each on
one thread. Which is taken is a word of memory, a `Switch`, that the serving process turns on where that was measured to be
faster; a call that has one thread, or is timed inside, never forks. Native code counts the forks it takes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission.code import Fn, Module
from hotfuse.backends.llvm.threads import fork_join
from hotfuse.lower.run.forks import TAKEN

_POINTER = 8


def emit_fork(
    fn: Fn, lanes: Sequence[str], switch: str, threads: str, sizes: int, may: str, alone: Callable[[], None],
) -> None:
    """Either way; `lanes` are functions of (buffers, sizes), `may` says whether this call may fork at all.

    Each of the threads that take part takes every n-th lane. In a lane kernels are told of one thread.
    """
    ask, fork, one, joined = fn.labels("ask", "fork", "one", "joined")
    many = fn.val(f"icmp sgt i64 {threads}, 1")
    fn.do(f"br i1 {fn.val(f'and i1 {many}, {may}')}, label %{ask}, label %{one}")
    fn.label(ask)
    on = fn.val(f"icmp ne i64 {fn.val(f'load i64, ptr {switch}')}, 0")
    fn.do(f"br i1 {on}, label %{fork}, label %{one}")
    fn.label(fork)
    taken = fn.val(f"getelementptr i64, ptr {switch}, i64 {TAKEN}")
    fn.val(f"atomicrmw add ptr {taken}, i64 1 monotonic")
    own = fn.alloca(f"[{sizes} x i64], align 16")
    fn.call("llvm.memcpy.p0.p0.i64", "void", ("ptr", own), ("ptr", "%sizes"), ("i64", str(_POINTER * sizes)), ("i1", "false"))
    fn.do(f"store i64 1, ptr {fn.val(f'getelementptr i64, ptr {own}, i64 {sizes - 1}')}")
    context = fn.alloca("[2 x ptr], align 16")
    fn.do(f"store ptr %buffers, ptr {context}")
    fn.do(f"store ptr {own}, ptr {fn.val(f'getelementptr ptr, ptr {context}, i64 1')}")
    share = f"{lanes[0]}.share"
    worth = [("i64", str(len(lanes)))] * 2
    fn.call(fork_join.FORK, "void", ("ptr", f"@{share}"), ("ptr", context), *worth, ("i64", threads))
    fn.do(f"br label %{joined}")
    fn.label(one)
    alone()
    fn.do(f"br label %{joined}")
    fn.label(joined)
    _share(fn.module, share, lanes)


def _share(module: Module, name: str, lanes: Sequence[str]) -> None:
    """What each thread of the team does."""
    cases = "\n".join(f"    i64 {k}, label %lane{k}" for k in range(len(lanes)))
    blocks: list[str] = []
    for k, lane in enumerate(lanes):
        blocks += [f"lane{k}:", f"  call void @{lane}(ptr %buffers, ptr %sizes)", "  br label %next"]
    module.defined[name] = [
        f"define internal void @{name}(ptr %context, i64 %thread, i64 %team) #0 {{",
        "entry:",
        "  %buffers = load ptr, ptr %context",
        "  %sizes.at = getelementptr ptr, ptr %context, i64 1",
        "  %sizes = load ptr, ptr %sizes.at",
        "  br label %loop",
        "loop:",
        "  %lane = phi i64 [%thread, %entry], [%following, %next]",
        f"  switch i64 %lane, label %done [\n{cases}\n  ]",
        *blocks,
        "next:",
        "  %following = add i64 %lane, %team",
        "  br label %loop",
        "done:",
        "  ret void",
        "}",
    ]
