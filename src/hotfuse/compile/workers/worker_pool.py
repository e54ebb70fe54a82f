"""A pool of worker processes: requests wait in order of their value, each runs in one worker under a deadline and a memory limit.

Each worker has a thread (`compile.workers.slot`), which starts with the first request and ends after a while without one. One
more thread watches deadlines and memory while requests wait or run, and lets the governor pause workers. A request that kills its
worker is retried as often as it allows; then it is refused, and so is every later request that is equal to it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.faults import is_alive, is_begun, steady
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.priority import LOWEST, RAISED, chosen_by_user, is_niced
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.scheduler import Governor, Load, LoadMeter, default_workers
from hotfuse.compile.workers.served_calls import served_calls
from hotfuse.compile.workers.shortage import Shortage
from hotfuse.compile.workers.slot import Books, PoolLimits, WorkerSlot
from hotfuse.compile.workers.starting import Starter
from hotfuse.compile.workers.task import Task, Waiting
from hotfuse.machine.cores import unbind, usable_cores

IDLE_S = 8.0
"""A worker without work for so long is ended."""
TICK_S = 0.05
LOWER_S = 5.0
"""A worker whose priority cannot be raised again keeps it for so long after it was needed."""
MAX_POISON = 256
"""Requests that killed workers, remembered by their key."""


class Pool:
    """Worker processes and what waits for them."""

    def __init__(
        self, limits: PoolLimits | None = None, start: Callable[[int], Worker] | None = None, load: Load | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self.starter = Starter()
        self._books = Books(limits or PoolLimits(), self.starter, start)
        self._load = load
        self._idle_s = idle_s
        self._lock = self._books.lock
        self._changed = threading.Condition(self._lock)
        self._queue: list[Waiting] = []
        self._slots: list[WorkerSlot] = []
        self._call_sampler: threading.Thread | None = None
        self._governor = Governor(self._books.limits.share)
        self._governor.threads = self._books.limits.threads
        self._shortage = Shortage(self._governor.cores)
        self._waiters = 0
        self._poison: OrderedDict[str, CaptureError] = OrderedDict()
        self._counts = self._books.counts
        self._raised_until = 0.0
        self._watched_until = time.monotonic()
        """When the governor last looked, while nothing is to be looked at."""
        self._sent_home = 0
        """How often workers without work were told to go."""
        self._closed = False

    # --- asking ----------------------------------------------------------------------------------

    def submit(self, task: Task) -> Future[wire.Message]:
        """Have a request done; the future gives the answer, raises CaptureError, or is cancelled when it was replaced."""
        future: Future[wire.Message] = Future()
        replaced: list[Waiting] = []
        with self._lock:
            self._counts["requests"] += 1
            refused = self._refusal(task)
            if refused is None:
                if task.key:
                    replaced = [w for w in self._queue if w.task.key == task.key]
                    self._queue = [w for w in self._queue if w.task.key != task.key]
                    self._counts["replaced"] += len(replaced)
                self._queue.append(Waiting(task, future))
                self._grow()
                self._changed.notify()
                if not self._slots:  # nobody would ever take it
                    self._queue.pop()
                    because = "the system has no further thread"
                    refused = CaptureError(f"nothing can ask for {task.name}", because=because, why=Why.WORKER_DIED)
        for old in replaced:
            old.drop()
        if refused is not None:
            future.set_exception(refused)
        return future

    def _refusal(self, task: Task) -> CaptureError | None:
        if self._closed:
            return CaptureError("the process is ending", why=Why.CANCELLED)
        if task.key in self._poison:
            self._counts["refused"] += 1
            return _anew(self._poison[task.key])
        return None

    def cancel(self, owner: str) -> int:
        """Drop what waits for an owner and end the workers that run for it; how many requests that were."""
        with self._lock:
            mine = [w for w in self._queue if w.task.owner == owner]
            self._queue = [w for w in self._queue if w.task.owner != owner]
            running = [s for s in self._slots if s.running is not None and s.running.task.owner == owner]
            for s in running:
                s.end("cancelled")
            self._counts["cancelled"] += len(mine) + len(running)
        for w in mine:
            w.drop()
        return len(mine) + len(running)

    def limit(self, limits: PoolLimits) -> None:
        """Other limits from now on; workers above the number end when they are idle."""
        with self._lock:
            if limits != self._books.limits:
                self._books.limits = limits
                self._governor.share, self._governor.threads = limits.share, self._threads()
                self._grow()
                self._changed.notify_all()

    @property
    def size(self) -> int:
        """Most workers at once."""
        return self._books.limits.workers or default_workers()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._queue) or any(s.running is not None for s in list(self._slots))

    @property
    def room(self) -> bool:
        """Whether a worker would begin with what is submitted now."""
        with self._lock:
            return len(self._queue) + self._running() < self.size

    @property
    def workers(self) -> list[Worker]:
        """Those that run now."""
        return [w for s in list(self._slots) if (w := s.worker) is not None and w.alive]

    @property
    def short_of_time(self) -> str:
        """Why what is asked for takes long, where other programs and calls have the cores; empty where they leave enough."""
        with self._lock:
            return self._shortage.text

    def counts(self) -> dict[str, float]:
        """What happened so far: requests, answers, refusals, restarts, CPU seconds, the largest worker's memory."""
        names = ("requests", "answered", "replaced", "cancelled", "refused", "late", "workers_started", "workers_died",
                 "workers_recycled", "workers_starved", "forks_crashed", "forks_stalled")
        with self._lock:
            books = self._books
            found: dict[str, float] = {n: self._counts[n] for n in names}
            found |= {n: self.starter.counts[n] for n in ("workers_forked", "workers_spawned", "forks_failed")}
            governor = self._governor
            found |= {"share_most": governor.share, "share_peak": governor.peak, "share_granted": round(governor.granted, 3),
                      "raised_s": round(governor.price.raised_s, 3), "taken_s": round(governor.price.taken_s, 3),
                      "throughput_lost": round(governor.price.lost, 3)}  # fmt: skip
            return {**found, "pauses": governor.pauses, "worker_cpu_s": round(books.cpu_s, 3), "worker_peak_bytes": books.peak_rss}

    # --- ending ----------------------------------------------------------------------------------

    def send_home(self) -> None:
        """End the workers that have nothing to do, before their time: there were no requests for long."""
        with self._lock:
            self._sent_home += 1
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """End every worker, refuse what waits, and wait for the threads; later requests are refused."""
        with self._lock:
            self._closed = True
            waiting, self._queue = self._queue, []
            threads = [s.thread for s in self._slots if s.thread is not None]
            for s in self._slots:
                s.end("closed")
            self._changed.notify_all()
        for w in waiting:
            if w.begin():  # else nobody waits for it any more
                w.future.set_exception(CaptureError("the process is ending", why=Why.CANCELLED))
        until = time.monotonic() + timeout
        for t in (*threads, *((self._call_sampler,) if self._call_sampler is not None else ())):
            if t is not threading.current_thread():
                t.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """In a forked child: threads and workers are the parent's; only the copies of the pipes are ours to close."""
        for s in self._slots:
            if s.worker is not None:
                s.worker.abandon()

    # --- a worker's thread -----------------------------------------------------------------------

    def _grow(self) -> None:
        """Another thread where all are busy and there may be more; called with the lock."""
        idle = sum(s.running is None for s in self._slots)
        if len(self._queue) > idle and len(self._slots) < self.size:
            slot = WorkerSlot(self._books)
            slot.thread = steady(lambda: self._serve(slot), "hotfuse-worker")
            self._slots.append(slot)  # it goes by itself when its thread ends
            if not is_begun(slot.thread):
                self._slots.remove(slot)
        if self._queue and not is_alive(self._call_sampler):
            watch = steady(self._watch, "hotfuse-watch")
            self._call_sampler = watch if is_begun(watch) else None

    def _serve(self, slot: WorkerSlot) -> None:
        while (waiting := self._next(slot)) is not None:
            try:
                unbind()  # workers inherit the cores of the thread that starts them
                answer = slot.answer(waiting.task)
            except CaptureError as e:
                slot.done()
                self._failed(waiting, e)
            except BaseException as e:  # the caller must hear of it, whatever it was
                slot.done()
                waiting.future.set_exception(e)
            else:
                slot.done()
                waiting.future.set_result(answer)
                del answer
            del waiting  # this thread waits for the next request for long, and must not hold what the last one was about
        slot.drop()

    def _next(self, slot: WorkerSlot) -> Waiting | None:
        """The most valuable request, once there is one; None when this thread is to end."""
        until = time.monotonic() + self._idle_s
        with self._lock:
            sent_home = self._sent_home
            while not self._closed and len(self._slots) <= self.size:
                self._governor.threads = self._threads()
                if self._queue and not self._governor.paused and self._running() < self._governor.abreast(self.size):
                    best = max(self._queue, key=lambda w: w.task.value)
                    self._queue.remove(best)
                    if best.begin():
                        slot.begin(best)
                        return best
                    continue
                left = until - time.monotonic()
                if (left <= 0 or sent_home != self._sent_home) and not self._queue:
                    break
                self._changed.wait(max(left, TICK_S))
            self._slots.remove(slot)
            return None

    @contextmanager
    def waited_for(self) -> Generator[None]:
        """Somebody waits until the work is done, and so it may claim what his calls would use."""
        with self._lock:
            self._waiters += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiters -= 1

    def _running(self) -> int:
        return sum(s.running is not None for s in self._slots)

    def _threads(self) -> int:
        """The largest thread count of the calls that run beside this work; called with the lock held."""
        usual = self._books.limits.threads
        tasks = [*(w.task for w in self._queue), *(s.running.task for s in self._slots if s.running is not None)]
        return max((t.threads or usual for t in tasks), default=usual)

    def _failed(self, waiting: Waiting, error: CaptureError) -> None:
        """Try again, or tell who waits, and remember a request that kills."""
        task = waiting.task
        if error.why is Why.WORKER_DIED:
            waiting.deaths += 1
            if waiting.deaths < task.tries:
                with self._lock:
                    if not self._closed:
                        self._queue.append(waiting)
                        self._grow()  # the watch may have ended, as nothing ran for a moment
                        self._changed.notify()
                        return
            elif task.key and task.tries > 1:
                with self._lock:
                    self._poison[task.key] = _anew(error)
                    self._counts["refused"] += 1
                    while len(self._poison) > MAX_POISON:
                        self._poison.popitem(last=False)
        waiting.future.set_exception(error)

    # --- the watch -------------------------------------------------------------------------------

    def _watch(self) -> None:
        meter = LoadMeter(niced=is_niced())
        last = time.monotonic()
        if last > self._raised_until:
            self._governor.forget()
        self._governor.rested(last - self._watched_until)
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            load = meter() if self._load is None else self._load()
            with self._lock:
                self._governor.cores = usable_cores()
                busy = [s for s in self._slots if s.running is not None]
                if self._closed or not (busy or self._queue):
                    self._call_sampler = None
                    self._watched_until = now
                    self._governor.rest()
                    self._shortage.rest()
                    return
                used = sum(s.look(now - last) for s in busy)
                if self._load is None and (meter.niced or chosen_by_user() == 0):  # accounts do not tell workers from calls
                    load = max(0.0, load - used / max(1e-9, (now - last) * self._governor.cores))
                behind = max((w.task.gain for w in self._queue), default=0.0)
                gain = max(behind, *(s.running.task.gain for s in busy if s.running is not None), 0.0)
                self._governor.threads = self._threads()
                was, abreast = self._governor.paused, self._governor.abreast(self.size)
                traffic, unused = (load, 1.0 - load) if self._load is not None else (meter.own, meter.unused)
                traffic = 1.0 if self._waiters else traffic  # a caller that waits for the work would call otherwise
                asked_for = 0.0 if self._load is not None else served_calls.in_flight() * self._governor.threads
                paused = self._governor.step(now - last, used, load, gain, traffic, unused, asked_for / self._governor.cores,
                                             max(1, len(busy)))  # fmt: skip
                self._shortage.step(now - last, used, unused, traffic, load)
                self._govern(now)
                for s in busy:
                    s.keep_within_cores()
                    s.prioritize(waited_for=behind > 0)
                    s.hold(paused=paused)
                if (was and not paused) or self._governor.abreast(self.size) > abreast:
                    self._changed.notify_all()
            last = now

    def _govern(self, now: float) -> None:
        """What the governor says of priorities, for workers that run and for those that start; called with the lock."""
        raised = self._governor.raised
        if raised:
            self._raised_until = now + LOWER_S
        self._books.level = RAISED if raised else LOWEST
        self._books.needed = now < self._raised_until


def _anew(error: CaptureError) -> CaptureError:
    """The same refusal as a new exception: one that is raised holds the frames it passed, and all that they knew."""
    return CaptureError(error.what, where=error.where, because=error.because, hint=error.hint, why=error.why)


@contextmanager
def machine_pool() -> Generator[Pool]:
    """A pool that may use the whole machine, for a tool that does nothing beside."""
    pool = Pool(PoolLimits(os.cpu_count() or 1, share=1.0), load=lambda: 0.0)
    try:
        yield pool
    finally:
        pool.close(1.0)
