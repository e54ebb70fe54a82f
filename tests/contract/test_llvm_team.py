"""Kernels run by one team of threads: against the interpreter, with more threads than cores, and how often they fork."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import torch

from hotfuse.backends.llvm.emission import emit
from hotfuse.backends.llvm.native import assembly_text, compile_kernel, llvm_text, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.llvm.runs.symbols import symbol
from hotfuse.backends.llvm.threads import fork_join, parallel, team
from hotfuse.ir.dims import expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu import scratch, thread_work
from hotfuse.native.jit import load_object
from hotfuse.native.target import CpuTarget, cross_neon
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Kernel, Loop
from tests.contract.native import check, levels, numbers

F32 = DType.F32


def mixing(columns: int) -> Kernel:
    """Rounds of parallel loops over shared memory, with parts in between that one thread does, and a loop run on condition."""
    b = KernelBuilder("mixing")
    rounds = b.size("rounds")
    x, y = b.input("x", F32, (columns,)), b.output("y", F32, (columns,))
    own, total = b.shared("own", F32, (2, columns)), b.shared("total", F32, (1,))
    with b.loop("i", 0, columns) as i:
        b.store(own, (0, i.var), b.load(x, (i.var,), ()))
    with b.loop("i", 0, 1) as i:
        b.store(total, (0,), b.fill(0.0, F32))
    with b.loop("round", 0, rounds) as r:
        now = expr("%", r.var, 2)
        then = expr("+", 1, expr("*", now, -1))
        with b.parallel("c", columns) as c:
            far = expr("%", expr("+", c.var, columns // 2), columns)
            mean = b.map("mul", b.map("add", b.load(own, (now, c.var), ()), b.load(own, (now, far), ())), 0.5)
            b.store(own, (then, c.var), mean)
        with b.loop("i", 0, 1) as i:
            last = b.load(own, (then, columns - 1), ())
            b.store(total, (0,), b.map("add", b.load(total, (0,), ()), last))
        with b.when(expr("==", expr("%", r.var, 3), 1)), b.parallel("d", columns, 3) as d:
            b.store(own, (then, d.var), b.map("add", b.load(own, (then, d.var), ()), b.load(total, (0,), ())))
    with b.parallel("i", columns) as i:
        b.store(y, (i.var,), b.load(own, (expr("%", rounds, 2), i.var), ()))
    return b.finish()


@pytest.fixture
def eager_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any work deserves threads."""
    monkeypatch.setattr(thread_work, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(thread_work, "MEETING_WORK", 1)


@levels
@pytest.mark.usefixtures("eager_teams")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("columns", [7, 4100], ids=["on the stack", "in the arena"])
def test_a_team_does_what_the_program_says(
    columns: int, threads: int, target: CpuTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_join, "SPINS", 50)  # whoever has no core of its own gets one soon, as the others sleep
    kernel = mixing(columns)
    assert team.is_for_team(kernel.body) and bool(scratch.plan(kernel).common) == (columns > 100)
    rng = np.random.default_rng(columns + threads)
    for rounds in (0, 1, 5) if columns < 100 else (1,):
        check(kernel, {"x": numbers(rng, F32, (columns,), True)}, {"rounds": rounds}, target, threads=threads)


@pytest.mark.usefixtures("eager_teams")
@pytest.mark.parametrize("spins", [0, 50], ids=["at once", "soon"])
def test_a_team_goes_on_where_others_want_its_cores(spins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores, from two callers at a time: whoever waits sleeps, and every sleeper is woken."""
    monkeypatch.setattr(fork_join, "SPINS", spins)
    kernel = mixing(7)
    native = load_kernel(compile_kernel(kernel))
    x = torch.randn(7)
    alone = torch.zeros(7)
    native([x, alone], (40,), 1)
    results = [torch.zeros(7) for _ in range(2)]
    wrong: list[str] = []

    def call(own: torch.Tensor) -> None:
        for n in range(12):
            own.zero_()
            native([x, own], (40,), 2 + n % 4)
            if not torch.equal(own, alone):
                wrong.append(f"call {n}: {own} for {alone}")

    callers = [threading.Thread(target=call, args=(own,)) for own in results]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong


def order(columns: int, step: int, constants: int = 4) -> Kernel:
    """Every round of a parallel loop notes when its turn came, by a clock that only one thread can keep."""
    b = KernelBuilder("order")
    rounds = b.size("rounds")
    w = b.const("w", F32, (constants,))
    y, clock = b.output("y", F32, (rounds, columns)), b.shared("clock", F32, (1,))
    with b.loop("i", 0, 1):
        b.store(clock, (0,), b.fill(0.0, F32))
    with b.loop("round", 2, expr("+", 2, expr("*", rounds, 3)), 3) as r, b.parallel("c", columns, step) as c:
        now = b.map("add", b.load(clock, (0,), ()), b.load(w, (0,), ()))
        b.store(y, (expr("//", expr("+", r.var, -2), 3), c.var), now)
        b.store(clock, (0,), b.map("add", now, 1.0))
    return b.finish()


@levels
@pytest.mark.parametrize("much", [False, True], ids=["little", "much"])
@pytest.mark.parametrize(("columns", "step"), [(4, 1), (7, 3), (1, 1)])
def test_rounds_go_to_and_fro(columns: int, step: int, much: bool, target: CpuTarget) -> None:
    """A part is gone through forwards and backwards in turns, however the loop around it counts; not where caches keep little."""
    size = team.KEPT_BYTES // 4 + 1 if much else 4
    native = load_kernel(compile_kernel(order(columns, step, size), target))
    y = torch.full((3, columns), -1.0)
    native([torch.zeros(size), y], (3,), 1)
    places = range(0, columns, step)
    want = torch.full((3, columns), -1.0)
    for at, place in enumerate([(r, c) for r in range(3) for c in (places if r % 2 == 0 or much else places[::-1])]):
        want[place] = at
    assert torch.equal(y, want)


def forks(kernel: Kernel, rounds: int, threads: int) -> list[int]:
    """How many threads a call asks the runtime for, each time it asks."""
    asked: list[int] = []
    real = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    own = real(parallel.runtime().symbols[fork_join.FORK])

    @real
    def fork(body: int, data: int, cold: int, awake: int, given: int) -> None:
        asked.append(min(cold, given))
        own(body, data, cold, awake, given)

    symbols = dict(parallel.runtime().symbols) | {fork_join.FORK: ctypes.cast(fork, ctypes.c_void_p).value or 0}
    loaded = load_object(compile_kernel(kernel).code, [symbol(kernel)], symbols)
    native = NativeKernel(loaded, symbol(kernel), kernel, scratch.plan(kernel))
    native([torch.randn(7), torch.zeros(7)], (rounds,), threads)
    return asked


@pytest.mark.usefixtures("eager_teams")
def test_a_team_forks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forks(mixing(7), 6, 3) == [3]
    assert forks(mixing(7), 6, 1) == []
    assert forks(mixing(7), 6, 100) == [7], "no more threads than parts"
    monkeypatch.setattr(thread_work, "AWAKE_WORK", 1)
    monkeypatch.setattr(emit, "is_for_team", lambda _: False)
    assert len(forks(mixing(7), 6, 3)) == 6 + 2 + 1, "without teams, every parallel loop forks"


def test_threads_must_have_enough_to_do_between_meetings() -> None:
    kernel = mixing(7)
    assert forks(kernel, 6, 3) == []
    assert forks(kernel, 100_000, 3) == [], "much work in all, but little between two meetings"


def test_what_no_team_can_run() -> None:
    def kernel(crossing: bool, repeated: bool) -> Kernel:
        b = KernelBuilder("crossing")
        x, y = b.input("x", F32, (8,)), b.output("y", F32, (4, 8))
        one = b.load(x, (0,), ()) if crossing else None
        with b.loop("r", 0, 4 if repeated else 1) as r, b.parallel("i", 8) as i:
            b.store(y, (r.var, i.var), b.load(x, (i.var,), ()) if one is None else one)
        return b.finish()

    assert team.is_for_team(kernel(False, True).body)
    assert not team.is_for_team(kernel(True, True).body), "a tile passes into the parallel loop"
    assert not team.is_for_team(kernel(False, False).body), "one fork is all there is"


def test_waiting_on_other_targets() -> None:
    assert fork_join.WAIT in assembly_text(mixing(7), cross_neon()) and fork_join.WAIT in llvm_text(mixing(7))


def test_work_is_reckoned_in_the_middle_of_a_loop() -> None:
    b = KernelBuilder("edges")
    x, y = b.input("x", F32, (12,)), b.output("y", F32, (12,))
    with b.parallel("row", 10) as row:
        first, last = expr("max", 0, expr("+", row.var, -2)), expr("min", 10, expr("+", row.var, 3))
        with b.loop("tap", first, last) as tap:
            b.store(y, (row.var,), b.load(x, (tap.var,), ()))
    (loop,) = b.finish().body
    assert isinstance(loop, Loop)
    assert thread_work.loop_work(loop, 16) == 10 * 5 * 2, "the first row sees three taps, most see five"
