"""What comes and goes again and again takes no more memory than once."""

from __future__ import annotations

import gc
from ctypes import CFUNCTYPE, c_int64
from pathlib import Path

from hotfuse.native import codegen, jit
from hotfuse.native.target import host


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_code_that_was_linked_and_dropped_leaves_nothing() -> None:
    """A piece is a few pages, which are unmapped with it."""
    code = jit.compile_object("define i64 @f(i64 %x) {\n  ret i64 %x\n}\n", host()).code

    def link(times: int) -> None:
        for _ in range(times):
            jit.load_object(code, ["f"], {f"s{i}": 4096 for i in range(20)})

    link(100)
    before = resident()
    link(500)
    assert resident() - before < 1_000_000


def test_code_outlives_the_turn_of_its_linker() -> None:
    """LLVM's linkers (on machines that ours does not know) are exchanged; each goes no sooner than the last code it linked."""
    pieces = range(3 * codegen.EACH)
    codes = [
        jit.compile_object(f"define i64 @f(i64 %x) {{\n  %y = add i64 %x, {n}\n  ret i64 %y\n}}\n", host()).code
        for n in pieces
    ]
    loaded = [jit.Loaded(codegen.link_object(code, ["f"], {}), ["f"]) for code in codes]
    for n in pieces:
        if n % codegen.EACH:
            loaded[n].release()
    call, kept = CFUNCTYPE(c_int64, c_int64), pieces[:: codegen.EACH]
    assert [call(loaded[n].address("f"))(5) for n in kept] == [5 + n for n in kept]
