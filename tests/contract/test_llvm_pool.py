"""The pool's threads: every part is done exactly once, whoever takes it, and nobody waits for threads that are not there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from hotfuse.backends.llvm import parallel, pool
from hotfuse.backends.llvm.jit import compile_object, load_object
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.target import host
from hotfuse.ir.dims import expr
from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder

Parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
COUNT = """
define void @count(ptr %data, i64 %thread, i64 %part, i64 %parts) {
  %at = getelementptr i64, ptr %data, i64 %part
  %x = atomicrmw add ptr %at, i64 1 monotonic
  %by = getelementptr i64, ptr %data, i64 4096
  %slot = getelementptr i64, ptr %by, i64 %thread
  %y = atomicrmw add ptr %slot, i64 1 monotonic
  ret void
}
"""
pytestmark = pytest.mark.skipif(bool(pool.unavailable()), reason=pool.unavailable() or "there is a pool")


@pytest.fixture(scope="module")
def counted() -> tuple[object, int]:
    loaded = load_object(compile_object(COUNT, host()).code, ["count"])
    return loaded, loaded.address("count")


def run(body: int, threads: int, per: int) -> torch.Tensor:
    """How often each part was done (4096 places), then how many parts each thread did."""
    seen = torch.zeros(4096 + pool.MOST, dtype=torch.int64)
    Parallel(parallel.runtime().symbols["hf_parallel"])(body, seen.data_ptr(), threads, per)
    return seen


def whole(seen: torch.Tensor, threads: int, per: int) -> bool:
    """Whether every part was done once, by threads that were asked, or all at once by the caller alone."""
    done, by = seen[:4096], seen[4096:]
    alone = int(done[0]) == 1 and int(done[1:].sum()) == 0 and int(by[0]) == 1
    shared = bool((done[: threads * per] == 1).all()) and int(done[threads * per :].sum()) == 0
    return alone or (shared and int(by[threads:].sum()) == 0 and int(by.sum()) == threads * per)


@pytest.mark.parametrize(("threads", "per"), [(1, 1), (2, 1), (2, 4), (3, 2), (5, 3), (16, 4)])
def test_every_part_is_done_once(counted: tuple[object, int], threads: int, per: int) -> None:
    for _ in range(300):
        seen = run(counted[1], threads, per)
        assert int(seen[: threads * per].sum()) == threads * per and whole(seen, threads, per)


def test_callers_do_not_disturb_each_other(counted: tuple[object, int]) -> None:
    wrong: list[torch.Tensor] = []

    def caller(threads: int) -> None:
        for _ in range(400):
            seen = run(counted[1], threads, 3)
            if not whole(seen, threads, 3):
                wrong.append(seen)

    callers = [threading.Thread(target=caller, args=(n,)) for n in (2, 3, 4, 2)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
import test_llvm_pool as t
loaded = t.load_object(t.compile_object(t.COUNT, t.host()).code, ["count"])
assert t.whole(t.run(loaded.address("count"), 4, 4), 4, 4)
child = os.fork()
fine = all(t.whole(t.run(loaded.address("count"), 4, 4), 4, 4) for _ in range(50))
if child == 0:
    os._exit(0 if fine else 1)
assert fine and os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loops_are_cut_into_parts_that_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes around multiples of threads and parts: every iteration once."""
    monkeypatch.setattr(parallel, "WORK_PER_THREAD", 1)
    b = KernelBuilder("marks")
    n = b.size("n")
    y = b.output("y", DType.I64, (n,))
    with b.parallel("i", n) as i:
        b.count(y, (i.var,), b.index(expr("+", i.var, 1)))
    kernel = load_kernel(compile_kernel(b.finish()))
    for size in (0, 1, 2, 3, 4, 5, 7, 8, 9, 23, 64, 65):
        for threads in (1, 2, 3, 4, 7):
            out = torch.zeros(size, dtype=torch.int64)
            kernel([out], (size,), threads)
            assert torch.equal(out, torch.ones(size, dtype=torch.int64)), (size, threads)
