"""The worker process: it answers, dies, is late, prints, and nothing of that reaches a caller."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import CaptureError, Settings
from hotfuse.base.events import Why
from hotfuse.compile.workers.service import Service, service

LIBC = ctypes.CDLL(None)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        text = b"native code writes to standard output\n"  # what Python writes is seen, and keeps a model from being captured
        LIBC.write(1, text, len(text))
        return x + 1


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch._subclasses.FakeTensor) or type(x) is not torch.Tensor:
            time.sleep(60)
        return x + 1


class Suicidal(nn.Module):
    """Kills the process that captures it, and only that one."""

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            ctypes.CDLL(None)["raise"](signal.SIGKILL)  # what Python asks of the system would be stopped
        return x + 1


def jobs_done(of: Service) -> None:
    done = threading.Event()
    of.submit(done.set)
    assert done.wait(60)


def asked_worker(of: Service) -> Any:
    """A worker that has just answered: one that had nothing to do may have gone, on a machine that others keep busy."""
    found: list[Any] = []

    def job() -> None:
        of.ask({"kind": "nonsense"}, [], 60)
        found.append(of.worker)

    of.submit(job)
    jobs_done(of)
    assert found and found[0] is not None
    return found[0]


def test_user_prints_do_not_break_the_protocol() -> None:
    fast = hotfuse.jit(Noisy(), settings=Settings())
    x = torch.ones(2)
    fast(x)
    assert fast.wait(120)
    assert torch.equal(fast(x), x + 1)
    assert fast.stats()["graph_calls"] == 1, str(fast.explain(full=True))


def test_a_late_worker_is_killed() -> None:
    fast = hotfuse.jit(Slow(), settings=Settings(capture_timeout_s=2.0))
    assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    assert fast.wait(120)
    assert fast.stats()["events"]["refuse.timeout"] == 1


def test_a_dead_worker_is_counted_and_replaced() -> None:
    fast = hotfuse.jit(Suicidal(), settings=Settings())
    x = torch.ones(2)
    assert torch.equal(fast(x), x + 1)
    assert fast.wait(120)
    assert fast.stats()["events"]["refuse.worker_died"] == 1
    assert torch.equal(fast(x), x + 1)
    other = hotfuse.jit(nn.Linear(2, 2).eval(), settings=Settings())
    with torch.no_grad():
        other(x)
        assert other.wait(120)
        other(x)
    assert other.stats()["graph_calls"] == 1, str(other.explain(full=True))


def test_a_worker_killed_between_jobs_is_replaced() -> None:
    own = service()
    model = nn.Linear(2, 2).eval()
    for _ in range(2):
        fast = hotfuse.jit(model, settings=Settings(cache="off"))
        with torch.no_grad():
            fast(torch.ones(3, 2))
            assert fast.wait(120)
        assert fast.stats()["swaps"] == 1
        worker = asked_worker(own)
        os.kill(worker.pid, signal.SIGKILL)
        while worker.alive:
            time.sleep(0.01)


def test_an_unknown_request_is_refused_not_fatal() -> None:
    own = Service()
    said: list[Any] = []

    def job() -> None:
        said.append(own.ask({"kind": "nonsense"}, [], 60))
        said.append(own.ask({"kind": "torch", "call": {}}, [b"not a pickle"], 60))

    own.submit(job)
    jobs_done(own)
    own.stop(10)
    assert [header["answer"] for header, _ in said] == ["refusal", "refusal"]
    assert own.started == 1


def test_capture_errors_keep_their_reason() -> None:
    from hotfuse.compile.answer_bodies import checked, refusal

    e = CaptureError("what", where="a.py:1", because="b", hint="h", why=Why.STATEFUL)
    with pytest.raises(CaptureError) as caught:
        checked(refusal(e))
    assert caught.value.why is Why.STATEFUL and caught.value.where == "a.py:1" and str(caught.value) == str(e)


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=270)


def test_a_script_without_an_import_guard_and_a_local_class() -> None:
    done = run_script(
        """
        import torch, hotfuse
        class Here(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(4, 4)
            def forward(self, x):
                return self.fc(x)
        m = Here().eval()
        fast = hotfuse.jit(m)
        with torch.no_grad():
            x = torch.ones(2, 4)
            fast(x); assert fast.wait(120)
            assert torch.equal(fast(x), m(x))
        assert fast.stats()["graph_calls"] == 1, str(fast.explain(full=True))
        print("fine")
        """
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_forked_child_serves_on() -> None:
    done = run_script(
        """
        import os, torch, hotfuse
        torch.set_num_threads(1)
        m = torch.nn.Linear(4, 4).eval()
        fast = hotfuse.jit(m)
        x = torch.ones(2, 4)
        with torch.no_grad():
            fast(x)                      # its capture is under way while the process forks
            pid = os.fork()
            ok = torch.equal(fast(x), m(x)) and fast.wait(150)
            if pid == 0:
                os._exit(0 if ok else 1)
            assert ok and os.waitpid(pid, 0)[1] == 0
            assert fast.wait(120) and torch.equal(fast(x), m(x))
        print("fine")
        """
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_process_ends_while_a_capture_runs() -> None:
    done = run_script(
        """
        import torch, hotfuse
        fast = hotfuse.jit(torch.nn.Linear(4, 4).eval())
        fast(torch.ones(2, 4))
        print("fine")
        """
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_process_ends_while_kernels_are_compiled() -> None:
    """The job in hand is told at once, so that nobody waits for the compile, and no thread dies inside native code."""
    done = run_script(
        """
        import time, torch, hotfuse
        from hotfuse.compile.workers.service import service
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64 + i), torch.nn.GELU(), torch.nn.Linear(64 + i, 64))
                  for i in range(24)]
        fast = hotfuse.jit(torch.nn.Sequential(*layers).eval(), settings=hotfuse.Settings(hot_calls=1))
        with torch.no_grad():
            x = torch.ones(2, 64)
            fast(x); assert fast.wait(120)
            before = service().pool.counts()["requests"]
            fast(x)                                     # hot now: kernels are asked for
            while service().pool.counts()["requests"] == before:
                time.sleep(0.001)
            time.sleep(0.05)
        print(service().worker.pid)
        """
    )
    assert done.returncode == 0, done.stderr
    stat = Path(f"/proc/{int(done.stdout)}/stat")

    def dead() -> bool:
        try:
            return " Z " in stat.read_text()  # it may not be buried at once
        except OSError:
            return True

    until = time.monotonic() + 60
    while not dead() and time.monotonic() < until:
        time.sleep(0.02)
    assert dead()


@pytest.mark.parametrize("workers", ["auto", "spawn"])
def test_explain_says_how_workers_began(workers: str) -> None:
    done = run_script(
        f"""
        import torch, hotfuse
        fast = hotfuse.jit(torch.nn.Linear(4, 4).eval(), settings=hotfuse.Settings(workers={workers!r}))
        fast(torch.ones(2, 4)); assert fast.wait(200)
        print(next(line for line in str(fast.explain(full=True)).splitlines() if line.startswith("workers:")))
        """
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    assert ("1 spawned; the newest is no fork: the settings say so" in said) == (workers == "spawn"), said
