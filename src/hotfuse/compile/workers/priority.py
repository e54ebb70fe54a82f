"""The priority of a worker process, within what an unprivileged process may do.

Anybody may lower a priority; raising one again takes a privilege (CAP_SYS_NICE, or a limit that allows it). So a worker that needs
more than it has is reniced where that is allowed, and elsewhere replaced by one that begins with it: a child starts with its
parent's priority and lowers it by itself. Levels are steps below the server's own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from pathlib import Path

LOWEST = 19
"""Takes only what calls leave: beside a busy thread on the same core, one and a half per cent of it."""
RAISED = 1
"""Competes with calls; not 0, so that the system's accounts tell workers' time from that of calls."""
LEVEL = "HOTFUSE_WORKER_LEVEL"
"""How a worker in a fresh interpreter is told the level to begin with."""
_CAP_SYS_NICE = 23


def chosen_by_user() -> int | None:
    """The level that HOTFUSE_WORKER_NICE sets for good (a busy test machine); None where we choose."""
    text = os.environ.get("HOTFUSE_WORKER_NICE", "")
    return int(text) if text.lstrip("-").isdecimal() else None


def step_back(level: int = LOWEST) -> None:
    """Lower the calling process's priority by so many steps, or by those that the user chose."""
    chosen = chosen_by_user()
    if hasattr(os, "nice"):
        with contextlib.suppress(PermissionError):  # a number below the one inherited
            os.nice(level if chosen is None else chosen)


@functools.cache
def may_raise() -> bool:
    """Whether this process may raise a priority that was lowered."""
    if not hasattr(os, "setpriority"):
        return False
    if hasattr(resource, "RLIMIT_NICE") and resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - RAISED:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> _CAP_SYS_NICE & 1)


def steps_below(pid: int) -> int:
    """How many steps the priority of a process is below this one's, at most as many as there are."""
    here = _own()
    return LOWEST if (there := os.getpriority(os.PRIO_PROCESS, pid)) >= 19 else there - here


def is_niced() -> bool:
    """Whether this process itself runs below the ordinary priority: the system's accounts then do not tell workers from calls."""
    return hasattr(os, "getpriority") and _own() > 0


def _own() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def renice(pid: int, level: int) -> bool:
    """Put every thread of a process so many steps below this one; False where that is not allowed."""
    base = _own()
    try:
        tasks = [int(t) for t in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        tasks = [pid]
    try:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, task, min(19, base + level))
    except PermissionError:
        return False
    return True
