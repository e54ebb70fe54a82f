"""The service that runs jobs beside inference: one background thread, and the pool of workers that jobs ask.

Jobs run one after another; what they ask for runs in worker processes (`compile.pool`). After a fork the child starts with a
service of its own. A process that ends kills its workers and waits for the job in hand, a bounded time.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.base.settings import Settings
from hotfuse.compile import wire
from hotfuse.compile.account import totals
from hotfuse.compile.pool import URGENT, Limits, Pool, Task
from hotfuse.compile.process import Worker

STOP_S = 10.0
"""Longest wait for the job in hand when the process ends."""
PAUSE_S = 0.01
"""Before a job: the call that submitted it returns first, instead of waiting for the interpreter lock."""
Job = Callable[[], None]


class Service:
    """A queue of jobs, a thread that runs them, and the pool of workers they use."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.pool = pool or Pool()
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Run a job in the background; jobs run one after another and handle their own errors."""
        self._queue.put(job)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="hotfuse-service", daemon=True)
                self._thread.start()

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes], timeout: float) -> wire.Message:
        """Have a worker answer, before anything that nobody waits for; a late or dead one raises CaptureError."""
        task = Task(f"a request of kind {header.get('kind')}", header, blobs, URGENT, timeout)
        return self.pool.submit(task).result()

    @property
    def started(self) -> int:
        """Workers started so far."""
        return int(self.pool.counts()["workers_started"])

    @property
    def worker(self) -> Worker | None:
        """One of the workers that run now."""
        return next(iter(self.pool.workers), None)

    def _serve(self) -> None:
        while True:
            job = self._queue.get()
            time.sleep(PAUSE_S)
            if self._stopping:
                return
            job()

    def stop(self, timeout: float) -> None:
        """End the workers and wait for the job in hand: a thread inside native code must not outlive the interpreter."""
        self._stopping = True
        self._queue.put(lambda: None)
        until = time.monotonic() + timeout
        self.pool.close(timeout)
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))


_service: Service | None = None
_making = threading.Lock()


def service() -> Service:
    """The process's one service."""
    global _service
    with _making:
        if _service is None:
            _service = Service()
        return _service


def ask(header: dict[str, Any], blobs: Sequence[bytes], settings: Settings) -> wire.Message:
    """Have a request done by the worker process, or here when captures are inline; a refusal raises CaptureError."""
    if settings.capture == "inline":
        from hotfuse.compile import requests  # the worker's business otherwise

        return wire.checked(requests.answer(header, list(blobs)))
    return wire.checked(sized(settings).ask(header, blobs, settings.capture_timeout_s))


def sized(settings: Settings) -> Service:
    """The service, its pool within these settings' limits; whoever asks last decides."""
    own = service()
    memory = settings.compile_memory_mb << 20
    own.pool.limit(Limits(settings.compile_workers, memory, settings.compile_share))
    return own


def counters() -> dict[str, float]:
    """The pool's counts and the totals of all graphs' units, for `stats()`."""
    return {**{f"units_{k}": v for k, v in totals().items()}, **(_service.pool.counts() if _service is not None else {})}


def _after_fork() -> None:
    """Threads and pipes belong to the parent: the child begins anew."""
    global _service, _making
    if _service is not None:
        _service.pool.abandon()
    _service = None
    _making = threading.Lock()


def _at_exit() -> None:
    if _service is not None:
        _service.stop(STOP_S)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
