"""The worker process: reads a request, does it, answers; ends when its parent does.

Started as `python -m hotfuse.compile.workers.worker`, or as a fork of the serving process (`compile.workers.forked`), which
calls `serve` as well. User code may print: standard output is moved out of its way first. It begins at the priority it is told,
the lowest unless calls use the whole machine (`compile.workers.priority`). Its address space is bounded, so that a request that
grows without end fails here and not in the server. Every answer says what the process has used so far.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from hotfuse.compile import requests
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.priority import LEVEL, LOWEST, step_back
from hotfuse.frontends.dynamo_stand_in import install_stand_in
from hotfuse.machine.cores import unbind
from hotfuse.native.toolchain import compile_in_place

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
NAME = "hotfuse-worker"
"""What the system's tools call such a process."""
REST_S = 0.05
"""Without a request for so long, a worker writes down what it measured."""
COLLECT = (50_000, 20, 100)
"""Thresholds of the garbage collector."""
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def serve(requests_in: BinaryIO, answers_out: BinaryIO, inherited: int = 0) -> None:
    """Answer requests until the other side closes; `inherited` bytes of memory are not this process's doing."""
    compile_in_place()
    install_stand_in()
    while True:
        try:
            header, blobs = wire.receive(requests_in)
            unbind()  # an OpenMP runtime inherited from the server binds this thread when it is first used
            begun = time.process_time()
            answer, codes = requests.answer(header, blobs)
            took = {"took_s": time.process_time() - begun}
            wire.send(answers_out, {**answer, "usage": usage(inherited) | took}, codes)
        except (EOFError, BrokenPipeError):  # nobody asks, or waits for the answer, any more
            _keep()
            return
        if not select.select([requests_in], [], [], REST_S)[0]:
            _keep()


def import_common() -> None:
    """Before the first request: what most of them take (`compile.requests`)."""
    requests.import_common()


def _keep() -> None:
    """Put what was measured into the profile store: this process may be ended any time."""
    learned = sys.modules.get("hotfuse.compile.learn.learned")
    if learned is not None:
        learned.flush()


def usage(inherited: int = 0) -> dict[str, float]:
    """CPU seconds and the most memory this process has used."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": time.process_time(), "peak_rss": max(0, peak - inherited)}


def bound_memory(extra: int) -> None:
    """Let the address space grow by so many bytes beyond what is mapped already; 0 sets no bound."""
    if not extra:
        return
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the parent still watches the resident size
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + extra
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def end_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process with the thread that started it, even where it has been stopped."""
    parent = os.getppid() if parent is None else parent
    if _LIBC is not None:  # other systems: the closed pipe ends it
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def name_process() -> None:
    """Be told apart from the server in the system's lists of processes."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, NAME.encode())


def collect_rarely() -> None:
    """Requests make many objects that live until the answer, and what was there before stays: looking through all of it again and
    again takes time, and in a fork it copies memory.
    """
    gc.freeze()
    gc.set_threshold(*COLLECT)
    gc.enable()


def main() -> None:
    """Claim the pipes, lower the priority, serve."""
    end_with_parent()
    name_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb", buffering=0)  # what nobody reads any more must not be written once more at the end
    os.dup2(2, 1)
    step_back(int(os.environ.get(LEVEL, LOWEST)))
    import torch

    torch.set_num_threads(1)
    bound_memory(int(os.environ.get("HOTFUSE_WORKER_MEMORY", "0")))
    collect_rarely()
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
