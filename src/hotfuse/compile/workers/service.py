"""The service that runs jobs beside inference: a background thread per model that has any, and the pool of workers that jobs ask.

The jobs of one model run one after another, those of another do not wait for them; what they ask for runs in worker processes
(`compile.workers.pool`). After a fork the child starts with a service of its own. A process that ends kills its workers and
waits for the jobs in hand, a bounded time.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hotfuse.base.faults import faults, steady
from hotfuse.base.settings import Settings
from hotfuse.compile.account import totals
from hotfuse.compile.request_bodies import Request, RequestBody, request_of
from hotfuse.compile.value import FIRST_PLAN_GAIN, LATER_PLAN_GAIN
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.background_priority import background_priority, patient
from hotfuse.compile.workers.pool import Pool
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import URGENT, Task
from hotfuse.machine.cores import unbind
from hotfuse.machine.heap import heap

STOP_S = 10.0
"""Longest wait for the jobs in hand when the process ends."""
GRACE_S, LEAVE_S = 1.0, 0.1
"""How long they may go on by themselves; then they are told to leave, so often."""
MOST_THREADS = 4
"""Models whose jobs run at the same time; those of others wait for one of these to be done with its own."""
PAUSE_S = 0.01
"""Before a job that a call submitted: that one returns first, instead of waiting for the interpreter lock."""
FIRST = ("ready", "torch", "onnx")
"""Requests that come before a model's first plan."""
Job = Callable[[], None]


_here = threading.local()


def in_background() -> bool:
    """Whether the calling thread runs jobs beside inference."""
    return getattr(_here, "background", False)


class Service:
    """Queues of jobs, threads that run them, and the pool of workers they use."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Hashable, deque[tuple[Job, float]]] = {}
        """By owner, with the pause before each; one that has a thread is not among `_unserved`."""
        self._unserved: deque[Hashable] = deque()
        self._threads: set[threading.Thread] = set()
        self.pool = pool or Pool()
        self.jobs_cpu_s = 0.0
        """CPU seconds of jobs in this process."""
        self._stopping = False

    def submit(self, job: Job, owner: Hashable = None) -> None:
        """Run a job in the background; an owner's jobs run one after another and handle their own errors."""
        queued = (job, 0.0 if in_background() else PAUSE_S)
        with self._lock:
            if owner in self._jobs:
                self._jobs[owner].append(queued)
                return
            self._jobs[owner] = deque([queued])
            self._unserved.append(owner)
            if len(self._threads) < MOST_THREADS and not self._stopping:
                thread = steady(self._serve, "hotfuse-service")
                self._threads.add(thread)
                thread.start()

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes], timeout: float, gain: float = LATER_PLAN_GAIN) -> wire.Message:
        """Have a worker answer, before anything that nobody waits for; a late or dead one raises CaptureError."""
        kind = str(header.get("kind"))
        saved = FIRST_PLAN_GAIN if kind in FIRST else gain
        task = Task(f"a request of kind {kind}", header, blobs, URGENT, timeout, gain=saved)
        answer = self.pool.submit(task)
        with background_priority.waiting():
            return answer.result()

    @property
    def stopping(self) -> bool:
        """Whether the process ends: nothing is begun any more."""
        return self._stopping

    @property
    def started(self) -> int:
        """Workers started so far."""
        return int(self.pool.counts()["workers_started"])

    @property
    def worker(self) -> Worker | None:
        """One of the workers that run now."""
        return next(iter(self.pool.workers), None)

    def _serve(self) -> None:
        """A thread: one owner's jobs until there are none, then the next owner's; it ends with the last."""
        patient()
        _here.background = True
        while (owner := self._next()) is not None:
            jobs = self._jobs[owner[0]]
            while self._more(owner[0], jobs):
                job, pause = jobs.popleft()
                time.sleep(pause)
                if self._stopping:
                    break
                unbind()  # an OpenMP runtime binds the threads that call it, and those that they start
                begun = time.thread_time()
                with background_priority():
                    _run(job)
                with self._lock:
                    self.jobs_cpu_s += time.thread_time() - begun
            heap.after_work()

    def _next(self) -> tuple[Hashable] | None:
        with self._lock:
            if self._unserved and not self._stopping:
                return (self._unserved.popleft(),)
            self._threads.discard(threading.current_thread())
            return None

    def _more(self, owner: Hashable, jobs: deque[tuple[Job, float]]) -> bool:
        """Whether an owner has jobs left; one without is forgotten."""
        with self._lock:
            if not jobs:
                del self._jobs[owner]
            return bool(jobs)

    def stop(self, timeout: float) -> None:
        """End the workers and wait for the jobs in hand: a thread inside native code must not outlive the interpreter."""
        until = time.monotonic() + timeout
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
        self.pool.close(timeout)
        grace = min(until, time.monotonic() + GRACE_S)
        for thread in threads:
            thread.join(max(0.0, grace - time.monotonic()))
        while (alive := [t for t in threads if t.is_alive()]) and time.monotonic() < until:
            for thread in alive:
                _leave(thread)
            alive[0].join(LEAVE_S)


def _leave(thread: threading.Thread) -> None:
    """Have a thread end where it next runs Python code: a long proof runs operator by operator. The process ends, so what it leaves
    undone is nobody's.
    """
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _run(job: Job) -> None:
    """Jobs of a model tell its log of their errors; what others raise is counted, and the next one runs."""
    try:
        job()
    except SystemExit:  # `_leave`, or a job of its own accord: its thread goes on to the next, if there is to be one
        return
    except Exception as e:
        faults.note("a background job", e)


_service: Service | None = None
_making = threading.Lock()


def service() -> Service:
    """The process's one service."""
    global _service
    with _making:
        if _service is None:
            _service = Service()
        return _service


def ask(
    body: RequestBody, blobs: Sequence[bytes], settings: Settings, gain: float = LATER_PLAN_GAIN,
    strategies: tuple[str, ...] = (), focus: str = "",
) -> wire.Message:  # fmt: skip
    """Have a request done by the worker process, or here when captures are inline; a refusal raises CaptureError.

    `gain` is the part of calls' time that it helps to save; captures have that of a first plan.
    """
    request = request_of(body, settings, strategies, focus)
    if settings.capture == "inline":
        return ask_here(request, blobs)
    return wire.checked(sized(settings).ask(request.header(), blobs, settings.capture_timeout_s, gain))


def ask_here(request: Request, blobs: Sequence[bytes] = ()) -> wire.Message:
    """Have a request done in this process; a refusal raises CaptureError."""
    from hotfuse.compile import requests  # the worker's business otherwise

    return wire.checked(requests.answer(request.header(), list(blobs)))


def sized(settings: Settings) -> Service:
    """The service, its pool within these settings' limits; whoever asks last decides."""
    own = service()
    memory = settings.compile_memory_mb << 20
    threads = settings.threads or torch.get_num_threads()
    own.pool.limit(PoolLimits(settings.compile_workers, memory, settings.compile_share, threads, settings.workers))
    return own


def counters() -> dict[str, Any]:
    """The pool's counts and the totals of all graphs' units, for `stats()`; and why the newest worker is no fork, if it is none."""
    found: dict[str, Any] = {f"units_{k}": v for k, v in totals().items()}
    if _service is not None:
        because = _service.pool.starter.because
        found |= {**_service.pool.counts(), "jobs_cpu_s": round(_service.jobs_cpu_s, 3)}
        found |= {"not_forked_because": because} if because else {}
    return found


def busy() -> bool:
    """Whether anybody waits for a worker."""
    return _service is not None and _service.pool.busy


def _when_idle() -> int:
    """A worker holds some hundred megabytes for the next request, which calls would bring."""
    if _service is not None:
        _service.pool.send_home()
    return 0


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


heap.spares(_when_idle)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
