"""One served model under many threads, an event loop, forks and the end of the process."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.api import Jit
from hotfuse.runtime.samples import CallSamples
from tests.races import new_plans_win

SETTINGS = Settings(hot_calls=2, race_s=0.05)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8)).eval()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[nn.Module, Jit]]:
    """A model that has reached native code; whether it is faster does not matter here."""
    patch = pytest.MonkeyPatch()
    new_plans_win(patch)
    model = mlp()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        for n in range(40):
            with torch.no_grad():
                fast(torch.randn(2 + n % 5, 24))
            assert fast.wait(120)
        assert fast.stats()["calls_per_tier"]["1"] + fast.stats()["calls_per_tier"]["2"] > 0, str(fast.explain(full=True))
        yield model, fast
    patch.undo()


def right(model: nn.Module, fast: Any, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_many_threads_on_one_model(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served
    before = fast.stats()["calls"]
    wrong: list[int] = []

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in range(60):
            if not right(model, fast, torch.randn(1 + (seed + n) % 9, 24, generator=generator)):
                wrong.append(n)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
        assert not t.is_alive()
    assert not wrong and fast.stats()["calls"] - before == 12 * 60
    assert fast.wait(120)


def test_calls_are_noted_on_many_threads() -> None:
    """What goes wrong in noting a call would be taken for a fault of its plan."""
    samples, wrong = CallSamples(20_000), list[Exception]()
    calls = [[torch.zeros(n, 4)] for n in range(1, 120)]
    samples.note((1,), calls[0])  # a thread whose note is passed over asks what there is before any other's is kept

    def serve(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(150):
                call = chance.choice(calls)
                samples.note((len(call[0]),), call)
                assert len(samples.several(4)) <= 4 and samples.bytes >= 0 and samples.shares()
                kept = samples.inputs((len(call[0]),))
                assert kept is None or kept[0].shape == call[0].shape
        except Exception as e:
            wrong.append(e)

    often, threads = sys.getswitchinterval(), [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(200)
    finally:
        sys.setswitchinterval(often)
    assert not wrong and samples.taken > 1, wrong[:1]  # how many are passed over is up to the threads
    assert 0 < samples.bytes <= 20_000 and sum(samples.shares().values()) == pytest.approx(1)


def test_first_calls_from_many_threads_are_captured_once() -> None:
    model = mlp()
    fast = hotfuse.jit(model, settings=SETTINGS.with_(tiers=0))
    barrier = threading.Barrier(8)
    good: list[bool] = []

    def serve() -> None:
        barrier.wait()
        good.append(right(model, fast, torch.randn(3, 24)))

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert good == [True] * 8 and fast.wait(120)
    assert fast.stats()["captures"] == 1 and fast.stats()["plans"] == 1
    fast.close()


def test_an_event_loop_calls_directly_and_through_threads(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served

    async def main() -> list[bool]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:

            async def request(n: int) -> bool:
                x = torch.randn(1 + n % 6, 24)
                if n % 2:
                    return right(model, fast, x)
                return await loop.run_in_executor(pool, right, model, fast, x)

            return await asyncio.gather(*(request(n) for n in range(80)))

    assert asyncio.run(main()) == [True] * 80


def test_an_event_loop_is_not_held_up_by_a_capture() -> None:
    """A new model's first calls return while its capture runs beside."""
    model = mlp()
    fast = hotfuse.jit(model, settings=SETTINGS)

    async def main() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0.001)

        done = asyncio.Event()
        ticking = asyncio.create_task(tick())
        for _ in range(20):
            assert right(model, fast, torch.randn(4, 24))
            await asyncio.sleep(0.005)
        done.set()
        await ticking
        return ticks

    assert asyncio.run(main()) >= 20
    assert fast.wait(120)
    fast.close()


def in_child(body: Any, timeout: float = 200) -> bool:
    """Whether a function is true in a forked child, which must end by itself."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"n"
        try:
            answer = b"y" if body() else b"n"
        finally:
            os.write(w, answer)
            os._exit(0)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            os.close(w)
            with os.fdopen(r, "rb") as f:
                return f.read() == b"y"
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def asked(model: nn.Module, sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Calls and their answers, for a child: torch's generator has a lock, which another thread may hold when the process forks."""
    with torch.no_grad():
        return [(x := torch.randn(n, 24), model(x)) for n in sizes]


def answered(fast: Any, calls: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    with torch.no_grad():
        return all(torch.allclose(fast(x), y, rtol=1e-4, atol=1e-5) for x, y in calls)


def test_a_forked_child_serves_on(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served
    calls = asked(model, (1, 4, 9))
    assert in_child(lambda: answered(fast, calls))
    assert right(model, fast, torch.randn(3, 24))


def test_a_fork_while_other_threads_are_in_calls(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served
    stop, wrong, calls = threading.Event(), list[int](), asked(model, (2,))

    def serve() -> None:
        while not stop.is_set():
            if not right(model, fast, torch.randn(5, 24)):
                wrong.append(1)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for t in threads:
        t.start()
    try:
        for _ in range(4):
            assert in_child(lambda: answered(fast, calls))
    finally:
        stop.set()
        for t in threads:
            t.join(120)
    assert not wrong


def test_a_fork_in_the_middle_of_a_capture() -> None:
    """The child does not wait for the parent's worker: it has one of its own when it needs it."""
    model = mlp()
    fast = hotfuse.jit(model, settings=SETTINGS.with_(tiers=0))
    assert right(model, fast, torch.randn(3, 24))  # the capture begins

    calls = asked(model, (3,) * 5)
    assert in_child(lambda: answered(fast, calls) and fast.wait(180))
    assert fast.wait(120) and right(model, fast, torch.randn(3, 24))
    assert fast.stats()["graph_calls"] >= 1
    fast.close()


def _work(n: int) -> bool:
    assert _shared is not None
    return right(_shared[0], _shared[1], torch.randn(n, 24))


_shared: tuple[nn.Module, Jit] | None = None


def test_a_pool_of_forked_processes(served: tuple[nn.Module, Jit]) -> None:
    global _shared
    _shared = served
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_work, range(1, 7)).get(200) == [True] * 6
    _shared = None


def _given(fast: Jit, answers: Any) -> None:
    """In a spawned process: a served model begins anew, with a worker of its own."""
    model, good = fast._target, list[bool]()
    for n in range(4):
        good.append(right(model, fast, torch.randn(2 + n, 24)))
        good.append(fast.wait(180))
    answers.put((all(good), fast.stats()["calls_per_tier"], os.getpid()))


def test_a_spawned_process_is_given_a_served_model(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served
    before = fast.stats()["calls"]
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    child = spawn.Process(target=_given, args=(fast, answers), daemon=True)
    child.start()
    good, reached, pid = answers.get(timeout=240)
    child.join(60)
    assert good and child.exitcode == 0 and pid == child.pid
    assert reached["module"] > 0 and sum(reached.values()) == 4 and reached["module"] < 4, reached
    assert fast.stats()["calls"] == before and right(model, fast, torch.randn(3, 24))


def test_a_copy_is_served_by_itself(served: tuple[nn.Module, Jit]) -> None:
    model, fast = served
    with copy.deepcopy(fast) as other, torch.no_grad():
        other._target[0].weight.zero_()
        x = torch.randn(3, 24)
        assert other.stats()["calls"] == 0 and right(model, fast, x) and right(other._target, other, x)
        assert not torch.allclose(other(x), fast(x))
        assert other.wait(120)


@pytest.mark.parametrize("moment", ["at once", "in the capture", "in the compile"])
def test_the_process_may_end_at_any_time(moment: str) -> None:
    """The caller's own threads have ended: a daemon thread inside torch aborts any process that ends, without us too."""
    pause = {"at once": 0.0, "in the capture": 1.5, "in the compile": 0.0}[moment]
    compile_ = moment == "in the compile"
    script = textwrap.dedent(
        f"""
        import threading, time, torch, hotfuse
        from torch import nn
        from hotfuse import Settings
        model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)) for _ in range(6)]).eval()
        fast = hotfuse.jit(model, settings=Settings(hot_calls=1))
        stop = threading.Event()
        def serve():
            with torch.no_grad():
                while not stop.is_set():
                    fast(torch.randn(3, 24))
        caller = threading.Thread(target=serve)
        caller.start()
        with torch.no_grad():
            fast(torch.randn(2, 24))
            if {compile_}:
                while not fast.stats()["graph_calls"]:
                    time.sleep(0.01)
                for _ in range(8):
                    fast(torch.randn(2, 24))
            time.sleep({pause})
        stop.set()
        caller.join()
        print("done", flush=True)
        """
    )
    ran = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "done" and "Fatal" not in ran.stderr
