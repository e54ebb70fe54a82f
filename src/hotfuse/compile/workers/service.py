"""The service that runs jobs beside inference: a background thread per model that has any, and the pool of workers that jobs ask.

The jobs of one model run one after another; jobs of different models run side by side. A job that waits long for calls lets the
next job of its model go first (`others_meanwhile`), and continues when none of them is running. Jobs send requests to worker
processes (`compile.workers.worker_pool`). A forked child starts with a service of its own. A process that ends kills its workers
and waits for running jobs for a bounded time.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch

from hotfuse.base.faults import faults, is_begun, steady
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.compile.account import totals
from hotfuse.compile.answer_bodies import checked
from hotfuse.compile.request_bodies import Request, RequestBody, request_of
from hotfuse.compile.value import FIRST_PLAN_GAIN, LATER_PLAN_GAIN
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.background_priority import background_priority, patient
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import URGENT, Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.machine.cores import unbind
from hotfuse.machine.heap import heap

STOP_S = 10.0
"""Longest wait for the jobs in hand when the process ends."""
GRACE_S, LEAVE_S = 1.0, 0.1
"""How long they may go on by themselves; then they are told to leave, so often."""
MAX_THREADS = 4
"""Models whose jobs run at the same time; those of others wait for one of these to be done with its own."""
MAX_WAITING = 8
"""Jobs that wait while others of their models run: each of them has a thread."""
PAUSE_S = 0.01
"""Before a job that a call submitted: that one returns first, instead of waiting for the interpreter lock."""
FIRST = ("ready", "torch", "onnx")
"""Requests that come before a model's first plan."""
Job = Callable[[], None]


_here = threading.local()


def in_background() -> bool:
    """Whether the calling thread runs jobs beside inference."""
    return getattr(_here, "background", False)


@dataclass(slots=True)
class JobQueue:
    """The jobs of one owner."""

    owner: Hashable
    jobs: deque[tuple[Job, float]]
    """With the pause before each."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the job that is at work: they run one after another, whatever thread they are on."""
    threads: int = 0
    """Threads that serve it, with those whose job waits."""
    waiting: int = 0
    unserved: bool = True
    """Whether it is to have a thread, or one more, as soon as there is one."""


class Service:
    """Queues of jobs, threads that run them, and the pool of workers they use."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Hashable, JobQueue] = {}
        self._unserved: deque[JobQueue] = deque()
        self._waiting = 0
        """Jobs that let others go first."""
        self._threads: set[threading.Thread] = set()
        self.pool = pool or Pool()
        self.jobs_cpu_s = 0.0
        """CPU seconds of jobs in this process."""
        self._stopping = False

    def submit(self, job: Job, owner: Hashable = None) -> None:
        """Run a job in the background; an owner's jobs run one after another and handle their own errors."""
        queued = (job, 0.0 if in_background() else PAUSE_S)
        with self._lock:
            queue = self._queues.get(owner)
            if queue is None:
                queue = self._queues[owner] = JobQueue(owner, deque([queued]))
                self._serve_soon(queue)
                return
            queue.jobs.append(queued)
            self._also_served(queue)
            if self._unserved and not self._threads:
                self._one_more_thread()

    def _serve_soon(self, queue: JobQueue) -> None:
        """With the lock: a thread for a queue, when there is one."""
        queue.unserved = True
        self._unserved.append(queue)
        self._one_more_thread()

    def _one_more_thread(self) -> None:
        """With the lock: a thread where there may be another one. Where the system has none left, jobs wait until it is asked again
        (`look_again`)."""
        if len(self._threads) < MAX_THREADS + self._waiting and not self._stopping:
            thread = steady(self._serve, "hotfuse-service")
            self._threads.add(thread)  # it leaves by itself when it ends
            if not is_begun(thread):
                self._threads.discard(thread)

    def look_again(self) -> None:
        """Jobs wait and no thread is there for them, since the system had none: maybe it has one now."""
        if self._unserved and not self._threads:
            with self._lock:
                if self._unserved and not self._threads:
                    self._one_more_thread()

    def _also_served(self, queue: JobQueue) -> None:
        """With the lock: one more thread for a queue whose jobs on threads all wait."""
        if queue.jobs and not queue.unserved and queue.waiting == queue.threads:
            self._serve_soon(queue)

    @contextmanager
    def others_meanwhile(self) -> Generator[None]:
        """Around a long wait of a job: the next ones of its owner run meanwhile. Behind it none of them is at work. Outside of
        jobs, and where too many wait so, it does nothing."""
        queue: JobQueue | None = getattr(_here, "queue", None)
        with self._lock:
            lets = queue is not None and self._waiting < MAX_WAITING
            if queue is not None and lets:
                self._waiting += 1
                queue.waiting += 1
                self._also_served(queue)
        if queue is None or not lets:
            yield
            return
        queue.turn.release()
        try:
            yield
        finally:
            with self._lock:  # before it has its turn: the job that has it now takes no further one
                self._waiting -= 1
                queue.waiting -= 1
            with background_priority.waiting():
                queue.turn.acquire()

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
        while (queue := self._next()) is not None:
            while (found := self._more(queue)) is not None:
                job, pause = found
                time.sleep(pause)
                with queue.turn:
                    if self._stopping:
                        break
                    unbind()  # an OpenMP runtime binds the threads that call it, and those that they start
                    begun = time.thread_time()
                    _here.queue = queue
                    with background_priority():
                        _run(job)
                    _here.queue = None
                with self._lock:
                    self.jobs_cpu_s += time.thread_time() - begun
            heap.after_work()

    def _next(self) -> JobQueue | None:
        with self._lock:
            if self._unserved and not self._stopping:
                queue = self._unserved.popleft()
                queue.unserved = False
                queue.threads += 1
                return queue
            self._threads.discard(threading.current_thread())
            return None

    def _more(self, queue: JobQueue) -> tuple[Job, float] | None:
        """An owner's next job; one without is forgotten, or left to the threads whose jobs wait. A second thread goes where the
        first one's job has come back: that one goes on."""
        with self._lock:
            if queue.jobs and queue.threads - queue.waiting <= 1:
                return queue.jobs.popleft()
            queue.threads -= 1
            if not queue.threads and not queue.unserved:
                del self._queues[queue.owner]
            return None

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
_answering = threading.RLock()
"""Held while a request is done in this process. Tracing changes what all threads see and restores what it found (that a compile is
under way, the filters of warnings): two that overlap leave the first one's values behind for good."""


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
    return checked(sized(settings).ask(request.header(), blobs, settings.capture_timeout_s, gain))


def ask_here(request: Request, blobs: Sequence[bytes] = ()) -> wire.Message:
    """Have a request done in this process; a refusal raises CaptureError."""
    from hotfuse.compile import requests  # the worker's business otherwise

    with _answering:
        return checked(requests.answer(request.header(), list(blobs)))


def sized(settings: Settings) -> Service:
    """The service, its pool within these settings' limits; the last call decides."""
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


def short_of_time() -> str:
    """Why workers take long, where others have the cores; empty where they do not."""
    return _service.pool.short_of_time if _service is not None else ""


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
    global _service, _making, _answering
    if _service is not None:
        _service.pool.abandon()
    _service = None
    _making, _answering = threading.Lock(), threading.RLock()


def _at_exit() -> None:
    if _service is not None:
        _service.stop(STOP_S)


heap.spares(_when_idle)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
