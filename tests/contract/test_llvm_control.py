"""Native loops, conditions, parallel loops and scratch memory against the interpreter; calling, releasing, other targets."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.native import assembly_text, compile_kernel, llvm_text, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.llvm.runs.symbols import symbol
from hotfuse.backends.llvm.threads import fork_join, parallel
from hotfuse.base.errors import InputError, InternalError
from hotfuse.ir.dims import expr, sym
from hotfuse.ir.types import DType
from hotfuse.lower.cpu import scratch, thread_work
from hotfuse.machine import openmp
from hotfuse.native.jit import load_object
from hotfuse.native.target import CpuTarget, cross_neon, host_levels, level
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Kernel
from tests.contract.native import check, levels, numbers

F32 = DType.F32


def gemm(known: bool, mr: int = 3, nr: int = 20) -> Kernel:
    """y = relu(x w + b) with carried accumulators, tails everywhere, in parallel over rows."""
    b = KernelBuilder("gemm")
    M, N, K = (7, 45, 11) if known else (b.size("M"), b.size("N"), b.size("K"))
    x, w = b.input("x", F32, (M, K)), b.const("w", F32, (K, N))
    bias, y = b.const("bias", F32, (N,)), b.output("y", F32, (M, N))
    with b.parallel("i", M, mr) as i, b.loop("j", 0, N, nr) as j:
        rows, cols = remaining(M, i.var), remaining(N, j.var)
        start = b.bcast(b.load(bias, (j.var,), (nr,), valid=(cols,)), (mr, nr))
        with b.loop("k", 0, K, 2, carry=[start]) as k:
            left = remaining(K, k.var)
            a = b.load(x, (i.var, k.var), (mr, 2), valid=(rows, left))
            k.yields(b.mma(k.carried[0], a, b.load(w, (k.var, j.var), (2, nr), valid=(left, cols))))
        b.store(y, (i.var, j.var), b.map("max", k.outs[0], 0.0), valid=(rows, cols))
    return b.finish()


@levels
@pytest.mark.parametrize("known", [True, False])
def test_gemm(known: bool, target: CpuTarget) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "x": numbers(rng, F32, (7, 11), True),
        "w": numbers(rng, F32, (11, 45), True),
        "bias": numbers(rng, F32, (45,), True),
    }
    check(gemm(known), arrays, {} if known else {"M": 7, "N": 45, "K": 11}, target, 4096.0)
    if not known:
        empty = {"x": np.zeros((7, 0), np.float32), "w": np.zeros((0, 45), np.float32), "bias": arrays["bias"]}
        check(gemm(known), empty, {"M": 7, "N": 45, "K": 0}, target)


@levels
def test_loops(target: CpuTarget) -> None:
    """Loops that run never, once, often, backwards through memory, nested and written out; carried tiles swap."""
    rng = np.random.default_rng(2)
    b = KernelBuilder("loops")
    n = b.size("n")
    x, y = b.input("x", F32, (30,)), b.output("y", F32, (12,))
    one, two = b.load(x, (0,), (5,)), b.load(x, (5,), (5,))
    with b.loop("i", 0, n, carry=[one, two, b.index(3)]) as i:
        a, c, count = i.carried
        i.yields(
            c,
            b.map("add", a, b.load(x, (expr("+", 20, expr("*", i.var, -1)),), (5,))),
            b.map("add", count, b.index(i.var)),
        )
    b.store(b.output("p", F32, (5,)), (0,), i.outs[0])
    b.store(b.output("q", F32, (5,)), (0,), i.outs[1])
    b.store(b.output("r", DType.I64, ()), (), i.outs[2])
    with b.unroll("u", 3, carry=[one]) as u:
        with b.loop("v", u.var, 4, 2, carry=[u.carried[0]]) as v:
            v.yields(b.map("mul", v.carried[0], b.cast(b.index(expr("+", 1, u.var, v.var)), F32)))
        b.store(y, (expr("*", u.var, 4),), b.load(x, (expr("+", u.var, 1),), (2,)))
        u.yields(v.outs[0])
    b.store(b.output("s", F32, (5,)), (0,), u.outs[0])
    kernel = b.finish()
    for times in (0, 1, 2, 7):
        check(kernel, {"x": numbers(rng, F32, (30,), True)}, {"n": times}, target)


@levels
def test_index_arithmetic(target: CpuTarget) -> None:
    """Every operator of dimensions, also with negative operands and divisors, and under a condition that guards a zero."""
    b = KernelBuilder("indices")
    p, q = b.size("p"), b.size("q")
    y, z = b.output("y", DType.I64, (40,)), b.output("z", DType.I64, (40,))
    terms = [
        expr("+", p, q, 3),
        expr("*", p, q),
        expr("//", p, 7),
        expr("%", p, 7),
        expr("//", p, 8),
        expr("%", p, 8),
        expr("ceildiv", p, 5),
        expr("max", p, q, 2),
        expr("min", p, q),
        expr("==", p, q),
        expr("!=", p, q),
        expr("<", p, q),
        expr("<=", p, q),
        expr("and", p, q),
        expr("or", expr("<", p, 0), expr("<", q, 0)),
        expr("not", p),
        expr("**", p, 3),
        expr("//", p, -3),
        expr("%", p, -3),
    ]
    for k, t in enumerate(terms):
        b.store(y, (k,), b.index(t))
    for k, t in enumerate([expr("//", p, q), expr("%", p, q), expr("ceildiv", p, q)]):
        with b.when(expr("!=", q, 0)):
            b.store(z, (k,), b.index(t))
    with b.when(expr("and", expr("<", 0, p), expr("<", p, 10))):
        b.store(z, (p,), b.index(1))
        with b.when(expr("==", q, 2)):
            b.store(z, (20,), b.index(2))
    kernel = b.finish()
    for values in ((9, 2), (-9, 2), (9, -4), (-9, -4), (8, 0), (0, 5), (-1, 1), (16, 16)):
        check(kernel, {}, dict(zip("pq", values, strict=True)), target)


def scratch_kernel(rows: int) -> Kernel:
    """Row sums through memory of the threads' own, small (on the stack) and large (in the arena)."""
    b = KernelBuilder("scratch")
    M, N = b.size("M"), b.size("N")
    x, y = b.input("x", F32, (M, N)), b.output("y", F32, (M, N))
    small, large = b.scratch("small", F32, (8, 16)), b.scratch("large", DType.F64, (rows, N))
    scale = b.load(x, (0, 0), ())
    with b.parallel("m", M) as m:
        with b.loop("n", 0, N, 16) as n:
            t = b.load(x, (m.var, n.var), (16,), valid=(remaining(N, n.var),))
            b.store(small, (3, 0), t)
            t = b.cast(b.map("mul", b.load(small, (3, 0), (16,)), scale), DType.F64)
            b.store(large, (rows - 1, n.var), t, valid=(remaining(N, n.var),))
        with b.loop("n", 0, N, 16) as n:
            valid = (remaining(N, n.var),)
            t = b.load(large, (rows - 1, n.var), (16,), valid=valid)
            b.store(y, (m.var, n.var), b.cast(t, F32), valid=valid)
    return b.finish()


@levels
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_scratch_and_threads(threads: int, target: CpuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    rng = np.random.default_rng(3)
    check(scratch_kernel(3), {"x": numbers(rng, F32, (9, 37), True)}, {"M": 9, "N": 37}, target, threads=threads)
    check(scratch_kernel(1), {"x": numbers(rng, F32, (1, 5), True)}, {"M": 1, "N": 5}, target, threads=threads)


def shared_kernel(columns: int) -> Kernel:
    """Rounds in which every column becomes the sum of its neighbours: what one parallel loop wrote, the next one reads."""
    b = KernelBuilder("shared")
    rounds = b.size("rounds")
    x, y = b.input("x", F32, (columns,)), b.output("y", F32, (columns,))
    own = b.shared("own", F32, (2, columns + 2))
    with b.parallel("i", columns + 2) as i:
        inside = b.load(x, (expr("max", 0, expr("min", columns - 1, expr("+", i.var, -1))),), ())
        b.store(own, (0, i.var), inside)
        b.store(own, (1, i.var), inside)
    with b.loop("round", 0, rounds) as r:
        now = expr("%", r.var, 2)
        with b.parallel("c", columns) as c:
            left, right = (b.load(own, (now, expr("+", c.var, d)), ()) for d in (0, 2))
            b.store(own, (expr("+", 1, expr("*", now, -1)), expr("+", c.var, 1)), b.map("mul", b.map("add", left, right), 0.5))
    with b.parallel("i", columns) as i:
        b.store(y, (i.var,), b.load(own, (expr("%", rounds, 2), expr("+", i.var, 1)), ()))
    return b.finish()


@levels
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("columns", [7, 150], ids=["on the stack", "in the arena"])
def test_what_threads_share(columns: int, threads: int, target: CpuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(thread_work, "MEETING_WORK", 1)
    monkeypatch.setattr(scratch, "STACK_BYTES", 512)
    kernel = shared_kernel(columns)
    assert bool(scratch.plan(kernel).common) == (columns > 100)
    rng = np.random.default_rng(4)
    for rounds in (0, 1, 4):
        check(kernel, {"x": numbers(rng, F32, (columns,), True)}, {"rounds": rounds}, target, threads=threads)


def test_a_loop_that_forks_often_finds_threads_awake() -> None:
    once = thread_work.WORK_PER_THREAD - 1
    assert thread_work.threads_worth(once, [1]) == 0
    assert thread_work.threads_worth(once, [100]) == once // thread_work.AWAKE_WORK
    assert thread_work.threads_worth(thread_work.AWAKE_WORK * 2, [2]) == 0  # too little in all to wake anybody
    assert thread_work.threads_worth(thread_work.AWAKE_WORK - 1, [10**6]) == 0


def thread_numbers(monkeypatch: pytest.MonkeyPatch, worth: int, threads: int) -> int:
    """How many threads a parallel loop of 64 iterations asks the runtime for; 1 when it does not ask."""
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", worth)
    b = KernelBuilder("count_threads")
    y = b.output("y", DType.I64, (1,))
    with b.parallel("i", 64) as i:
        b.count(y, (0,), b.index(expr("+", i.var, 1)))
    kernel = b.finish()
    compiled = compile_kernel(kernel)
    asked: list[int] = []
    run_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    def fork(body: int, data: int, cold: int, awake: int, given: int) -> None:
        asked.append(max(1, min(cold, given)))
        run_type(body)(data, 0, 1)

    symbols = dict(parallel.runtime().symbols) | {fork_join.FORK: ctypes.cast(fork, ctypes.c_void_p).value or 0}
    loaded = load_object(compiled.code, [symbol(kernel)], symbols)
    out = torch.zeros(1, dtype=torch.int64)
    NativeKernel(loaded, symbol(kernel), kernel, scratch.plan(kernel))([out], (), threads)
    assert out.item() == 64
    return asked[0] if asked else 1


def test_small_work_stays_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_numbers(monkeypatch, 1 << 30, 8) == 1
    assert thread_numbers(monkeypatch, 1, 8) == 8
    assert thread_numbers(monkeypatch, 1, 1) == 1


def test_the_runtime_is_the_one_torch_uses() -> None:
    own = openmp.torchs()
    assert own is not None and parallel.runtime().kind == "gomp" and parallel.runtime().detail == own.where


def test_without_a_runtime_one_thread_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(openmp, "torchs", lambda: None)
    alone = parallel.runtime.__wrapped__()
    assert alone.kind == "serial" and "no OpenMP runtime" in alone.detail
    kernel = gemm(False)
    loaded = load_object(compile_kernel(kernel).code, [symbol(kernel)], alone.symbols)
    native = NativeKernel(loaded, symbol(kernel), kernel, scratch.plan(kernel))
    x, w, bias, y = torch.randn(40, 20), torch.randn(20, 50), torch.randn(50), torch.zeros(40, 50)
    native([x, w, bias, y], (40, 50, 20), 4)
    torch.testing.assert_close(y, torch.relu(x @ w + bias), atol=1e-4, rtol=1e-4)


def test_the_entered_function_keeps_its_code() -> None:
    """The bare function may outlive everything else of the kernel."""
    enter = load_kernel(compile_kernel(gemm(True))).enter
    gc.collect()
    load_kernel(compile_kernel(scratch_kernel(2)))
    x, w, bias, y = torch.randn(7, 11), torch.randn(11, 45), torch.randn(45), torch.zeros(7, 45)
    enter(x.data_ptr(), w.data_ptr(), bias.data_ptr(), y.data_ptr(), 0, 1)
    torch.testing.assert_close(y, torch.relu(x @ w + bias), atol=1e-4, rtol=1e-4)


def test_calls_from_many_threads() -> None:
    """Arguments live on the caller's stack, so calls do not disturb each other."""
    native = load_kernel(compile_kernel(gemm(False)))
    torch.manual_seed(0)
    failures: list[str] = []

    def work(m: int) -> None:
        x, w, bias = torch.randn(m, 64), torch.randn(64, 96), torch.randn(96)
        want = torch.relu(x @ w + bias)
        for _ in range(200):
            y = torch.full((m, 96), 7.0)
            native([x, w, bias, y], (m, 96, 64), 1)
            if not torch.allclose(y, want, atol=1e-3):
                failures.append(f"{m}")

    threads = [threading.Thread(target=work, args=(3 + 5 * k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_wrong_calls_raise() -> None:
    native = load_kernel(compile_kernel(gemm(False)))
    with pytest.raises(InputError, match="takes 4 tensors and 3 sizes"):
        native([], (1,))
    with pytest.raises(TypeError):
        native.enter(1, 2)
    with pytest.raises(TypeError):
        native.enter(*(["x"] * 9))
    native.release()
    with pytest.raises(InternalError, match="released"):
        native.enter(*([0] * 9))


def test_other_targets_compile() -> None:
    """AArch64 code is made on any machine, and every host level leaves its own marks in the text."""
    for kernel in (gemm(False), scratch_kernel(3)):
        compiled = compile_kernel(kernel, cross_neon())
        assert compiled.code[:4] == b"\x7fELF" and compiled.code[18:20] == b"\xb7\x00"
    assert "fmla" in assembly_text(gemm(True), cross_neon())
    assert f"define void @{symbol(gemm(False))}(ptr %buffers, ptr %sizes)" in llvm_text(gemm(False))
    for target in host_levels():
        text = assembly_text(gemm(True), target)
        assert ("zmm" in text) == (target.name == "avx512")
        assert ("vfmadd" in text) == target.fma


def test_byte_products_use_the_instruction_where_it_is() -> None:
    b = KernelBuilder("bytes")
    x, w, y = b.input("x", DType.U8, (3, 8)), b.const("w", DType.I8, (8, 16)), b.output("y", DType.I32, (3, 16))
    acc = b.fill(0, DType.I32, (3, 16))
    b.store(y, (0, 0), b.mma(acc, b.load(x, (0, 0), (3, 8)), b.load(w, (0, 0), (8, 16))))
    kernel = b.finish()
    avx2 = {"sse4.2", "avx", "avx2", "fma"}
    wide = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    for target, there in (
        (level("avx2", avx2), False),
        (level("avx2", avx2 | {"avx-vnni"}), True),
        (level("avx512", wide), False),
        (level("avx512", wide | {"avx512vnni"}), True),
    ):
        text = assembly_text(kernel, target)
        assert ("vpdpbusd" in text, "vpmaddwd" in text) == (there, not there)


def test_levels_need_what_executes() -> None:
    with pytest.raises(InternalError, match="avx512f"):
        level("avx512", {"avx2", "fma"})
    assert level("avx2", {"sse4.2", "avx", "avx2", "fma"}).features == ("sse4.2", "avx", "avx2", "fma")
    assert level("generic", set()).lanes == 4


def test_unknown_symbols_are_told() -> None:
    b = KernelBuilder("ok")
    b.store(b.output("y", F32, (1,)), (0,), b.fill(1.0, F32, (1,)))
    kernel = b.finish()
    wrong = Kernel(
        "wrong",
        (),
        kernel.buffers,
        tuple(
            s
            if not hasattr(s, "args") or s.op != "store"
            else type(s)(s.op, (type(s.args[0])("y", (sym("nowhere"),), (0,)), s.args[1]))
            for s in kernel.body
        ),
    )
    with pytest.raises(InternalError, match="nowhere"):
        compile_kernel(wrong)
