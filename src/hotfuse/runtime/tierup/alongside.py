"""A job that runs while the one that began it goes on, and is over before that one measures anything."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from hotfuse.base.faults import faults
from hotfuse.compile.workers.background_priority import background_priority

Submit = Callable[[Callable[[], None]], None]


class JobAlongside:
    """Submitted at once. Threads are few, and each may wait for such a job: one that has not begun by then never does."""

    def __init__(self, submit: Submit, job: Callable[[], None]) -> None:
        self._job = job
        self._first = threading.Lock()
        self._over = threading.Event()
        submit(self._run)

    def _run(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        try:
            with torch.no_grad():
                self._job()
        except Exception as e:
            faults.note("a job alongside another", e)
        finally:
            self._over.set()

    def finish(self) -> None:
        """Wait until it is over; where it has not begun, see to it that it does not."""
        if not self._first.acquire(blocking=False):
            with background_priority.waiting():
                self._over.wait()
