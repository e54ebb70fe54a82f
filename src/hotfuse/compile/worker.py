"""The worker process: reads a request, does it, answers; ends when its parent does.

Started as `python -m hotfuse.compile.worker`. User code may print: standard output is moved out of its way first. It runs at
the lowest priority, so that it takes only what inference leaves; HOTFUSE_WORKER_NICE says otherwise (a busy test machine). Its
address space is bounded, so that a request that grows without end fails here and not in the server. Every answer says what the
process has used so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from hotfuse.compile import requests, wire

_PR_SET_PDEATHSIG = 1
REST_S = 0.05
"""Without a request for so long, a worker writes down what it measured."""


def serve(requests_in: BinaryIO, answers_out: BinaryIO) -> None:
    """Answer requests until the other side closes."""
    while True:
        try:
            header, blobs = wire.receive(requests_in)
        except EOFError:
            _keep()
            return
        answer, codes = requests.answer(header, blobs)
        wire.send(answers_out, {**answer, "usage": usage()}, codes)
        if not select.select([requests_in], [], [], REST_S)[0]:
            _keep()


def _keep() -> None:
    """Put what was measured into the profile store: this process may be ended any time."""
    learned = sys.modules.get("hotfuse.compile.learned")
    if learned is not None:
        learned.flush()


def usage() -> dict[str, float]:
    """CPU seconds and the most memory this process has used."""
    return {"cpu_s": time.process_time(), "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def bound_memory(extra: int) -> None:
    """Let the address space grow by so many bytes beyond what the libraries already map; 0 sets no bound."""
    if not extra:
        return
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the parent still watches the resident size
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + extra
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def end_with_parent() -> None:
    """Have the system kill this process with the thread that started it, even where it has been stopped."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # other systems: the closed pipe ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Claim the pipes, lower the priority, serve."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if hasattr(os, "nice"):
        os.nice(int(os.environ.get("HOTFUSE_WORKER_NICE", "19")))
    import torch

    torch.set_num_threads(1)
    bound_memory(int(os.environ.get("HOTFUSE_WORKER_MEMORY", "0")))
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
