"""How workers are started: as forks where that is safe, in fresh interpreters elsewhere; why, and how often which.

A fork that does not come up is tried once more, as what stood in its way may be gone; after a second failure, and after a request
that only a fresh interpreter could answer, this process forks no more.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter

from hotfuse.base.settings import Workers
from hotfuse.compile.workers.priority import LOWEST
from hotfuse.compile.workers.process import Worker

MAX_BYTES = 2 << 30
"""Of a process that is forked unasked: every thread of it stands still for some 20 ms a GiB."""
TRIES = 2


def unsafe(kind: Workers) -> str:
    """Why this process is not forked now; empty if it may be."""
    if kind == "spawn":
        return "the settings say so"
    if not sys.platform.startswith("linux"):
        return f"forks are not safe on {sys.platform}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "the interpreter runs without its lock"
    import torch

    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            return f"{name} is in use, which does not survive a fork"
    from hotfuse.compile.workers.forked import importing, resident  # a process that never forks needs nothing of it

    if kind == "auto" and (held := resident()) > MAX_BYTES:
        return f"the process holds {held >> 20} MiB, which a fork would make calls wait for"
    if name := importing():
        return f"module {name} is being imported"
    return ""


class Starter:
    """Starts the workers of one pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.because = ""
        """Why the worker started last is no fork; empty if it is one."""
        self.because_of_forks = ""
        """What forks did that made this process give them up."""

    def __call__(self, memory: int, kind: Workers = "auto", level: int = LOWEST) -> Worker:
        """A worker that answers, so many steps of priority below this process."""
        why = self.because_of_forks or unsafe(kind)
        for _ in range(0 if why else TRIES):
            from hotfuse.compile.workers.forked import ForkedWorker, ForkFailed

            try:
                made = ForkedWorker(memory, level=level)
            except ForkFailed as e:
                why = f"{e.what}: {e.because}" if e.because else e.what
                self._count("forks_failed")
                continue
            self._count("workers_forked")
            self.because = ""
            return made
        else:
            if self.counts["forks_failed"] >= TRIES:
                self.distrust(why)
        self.because = why
        self._count("workers_spawned")
        return Worker(memory, level=level)

    def distrust(self, why: str) -> None:
        """Fork no more."""
        self.because_of_forks = self.because_of_forks or why

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1
