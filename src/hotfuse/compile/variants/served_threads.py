"""How a worker measures for calls that have several threads: with as many, where the machine has idle cores for them.

    apart     a request is answered on a thread of its own: a fork inherits its first thread's word of an OpenMP team whose threads
              stayed in the parent, and would wait for them for ever. A new thread begins without one
    as_served while something is measured, torch and kernels have the threads that calls will have; or one, where too few cores
              are idle. What was measured on one is a proposal: it says little of how work is divided, and the race decides

A server that is busy leaves no idle cores, and a team of sixteen between its calls would measure them, not the kernel.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from hotfuse.base.lazy_dataclass import dataclass

WINDOW_S = 0.06
"""How long cores are watched: six ticks of the system's accounts."""
FRESH_S = 0.5
"""How long an answer holds."""
IDLE = 0.7
"""Share of the window in which an idle core does nothing."""
T = TypeVar("T")


def apart(threads: int, body: Callable[[], T]) -> T:
    """Run something where a team can be had: on a new thread, in a worker that answers for calls of several threads."""
    if threads <= 1 or torch.get_num_threads() >= threads:
        return body()
    found: list[T] = []
    failed: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            torch.set_num_threads(1)
            found.append(context.run(body))
        except BaseException as e:  # raised again below, where somebody waits for it
            failed.append(e)

    thread = threading.Thread(target=run, name="hotfuse-request")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


@contextmanager
def as_served(threads: int) -> Generator[int]:
    """While something is measured: the number of threads that it is measured on, the given one or 1."""
    before = torch.get_num_threads()
    if threads <= 1 or before >= threads:
        yield min(threads, before)
        return
    if _watch.idle() + 1 < threads:  # one of those that are not is this process
        yield 1
        return
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True)
class IdleCores:
    """How many cores that this process may run on are idle, asked at most every so often."""

    ticks: Callable[[], Mapping[int, tuple[int, int]]]
    """Per core: (idle, all) ticks so far."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    at: float = float("-inf")
    found: int = 0

    def idle(self) -> int:
        """Cores that did nothing for most of a short while."""
        if self.clock() - self.at < FRESH_S:
            return self.found
        before = self.ticks()
        self.sleep(WINDOW_S)
        after = self.ticks()
        spent = [(after[c][0] - i, after[c][1] - n) for c, (i, n) in before.items() if c in after]
        self.found = sum(n > 0 and i >= IDLE * n for i, n in spent)
        self.at = self.clock()
        return self.found


def core_ticks() -> dict[int, tuple[int, int]]:
    """The system's accounts of the cores that this process may run on; nothing where it keeps none."""
    try:
        mine, lines = os.sched_getaffinity(0), Path("/proc/stat").read_text().splitlines()
    except (OSError, AttributeError):
        return {}
    found: dict[int, tuple[int, int]] = {}
    for line in lines:
        name, *rest = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in mine:
            ticks = [int(n) for n in rest[:8]]
            found[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return found


_watch = IdleCores(core_ticks)
