"""A pool of worker processes: requests wait in order of their value, each runs in one worker under a deadline and a memory limit.

One thread per worker, started when there is something to ask and ended after a while without: a thread that waits for a pipe costs
nothing. One more thread, alive only while requests wait or run, watches deadlines and memory and lets the governor stop workers
where they are. A request that kills its worker is tried again as often as it allows and then refused, also when it comes again.
A forked worker that crashes or stands still may do so because it was forked: a fresh one is asked the same before anybody hears.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.settings import Workers
from hotfuse.compile import wire
from hotfuse.compile.process import Worker
from hotfuse.compile.scheduler import Governor, Load, Meter, default_workers
from hotfuse.compile.starting import Starter

IDLE_S = 60.0
"""A worker without work for so long is ended."""
TICK_S = 0.05
MAX_POISON = 256
"""Requests that killed workers, remembered by their key."""
RECYCLE = 0.5
"""A worker that holds more than this part of its memory when it has answered is replaced by a fresh one."""
STALL_S = 5.0
"""A forked worker that slept so long over a request, without a moment of work, is taken to wait for a lock that nobody holds."""
URGENT = float("inf")
"""The priority of what somebody waits for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pool may use."""

    workers: int = 0
    """Processes; 0 is half the cores."""
    memory: int = 4 << 30
    """Bytes of one worker beyond its libraries; 0 is no limit."""
    share: float = 0.25
    """The part of all cores that workers may take however busy the machine is."""
    kind: Workers = "auto"
    """Whether workers are forks of this process."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request, what it is worth, and what it may take."""

    name: str
    header: Mapping[str, Any]
    blobs: Sequence[bytes] = ()
    priority: float | Callable[[], float] = URGENT
    """Asked again whenever a worker becomes free, so that what became hot meanwhile goes first."""
    timeout: float = 300.0
    tries: int = 1
    """Workers it may kill before it is refused."""
    key: str = ""
    """A waiting request of the same key is replaced by a newer one."""
    owner: str = ""
    """Whose it is, to cancel all of it."""

    @property
    def value(self) -> float:
        """Its priority now."""
        return self.priority() if callable(self.priority) else self.priority


@dataclass(slots=True, eq=False)
class _Waiting:
    task: Task
    future: Future[wire.Message]
    deaths: int = 0
    begun: bool = False
    """Whether it has run before."""

    def begin(self) -> bool:
        """False where nobody waits for it any more."""
        if not self.begun:
            self.begun = self.future.set_running_or_notify_cancel()
        return self.begun

    def drop(self) -> None:
        """It will not be done."""
        if not self.future.cancel():
            self.future.set_exception(CaptureError(f"{self.task.name} was cancelled", why=Why.TURNED_OFF))


@dataclass(slots=True, eq=False)
class _Slot:
    """A thread and its worker."""

    worker: Worker | None = None
    running: _Waiting | None = None
    ran: float = 0.0
    """Seconds the request has run, pauses left out."""
    ended: str = ""
    """Why the watch killed the worker."""
    suspect: str = ""
    """What a forked worker did that a fresh one may not do."""
    cpu: float = 0.0
    """The worker's CPU time when it was last looked at."""
    slept: float = 0.0
    """Seconds since it was last seen at work."""
    thread: threading.Thread | None = field(default=None, repr=False)


class Pool:
    """Worker processes and what waits for them."""

    def __init__(
        self, limits: Limits | None = None, start: Callable[[int], Worker] | None = None, load: Load | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._limits = limits = limits or Limits()
        self.starter = Starter()
        self._start = start
        self._load = load
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[_Waiting] = []
        self._slots: list[_Slot] = []
        self._watcher: threading.Thread | None = None
        self._governor = Governor(limits.share)
        self._poison: OrderedDict[str, CaptureError] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._cpu_s = 0.0
        self._peak_rss = 0
        self._closed = False

    # --- asking ----------------------------------------------------------------------------------

    def submit(self, task: Task) -> Future[wire.Message]:
        """Have a request done; the future gives the answer, raises CaptureError, or is cancelled when it was replaced."""
        future: Future[wire.Message] = Future()
        replaced: list[_Waiting] = []
        with self._lock:
            self._counts["requests"] += 1
            refused = self._refusal(task)
            if refused is None:
                if task.key:
                    replaced = [w for w in self._queue if w.task.key == task.key]
                    self._queue = [w for w in self._queue if w.task.key != task.key]
                    self._counts["replaced"] += len(replaced)
                self._queue.append(_Waiting(task, future))
                self._grow()
                self._changed.notify()
        for old in replaced:
            old.drop()
        if refused is not None:
            future.set_exception(refused)
        return future

    def _refusal(self, task: Task) -> CaptureError | None:
        if self._closed:
            return CaptureError("the process is ending", why=Why.TURNED_OFF)
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
                self._end(s, "cancelled")
            self._counts["cancelled"] += len(mine) + len(running)
        for w in mine:
            w.drop()
        return len(mine) + len(running)

    def limit(self, limits: Limits) -> None:
        """Other limits from now on; workers above the number end when they are idle."""
        with self._lock:
            if limits != self._limits:
                self._limits = limits
                self._governor.share = limits.share
                self._grow()
                self._changed.notify_all()

    @property
    def size(self) -> int:
        """Most workers at once."""
        return self._limits.workers or default_workers()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._queue) or any(s.running is not None for s in list(self._slots))

    @property
    def workers(self) -> list[Worker]:
        """Those that run now."""
        return [w for s in list(self._slots) if (w := s.worker) is not None and w.alive]

    def counts(self) -> dict[str, float]:
        """What happened so far: requests, answers, refusals, restarts, CPU seconds, the largest worker's memory."""
        names = ("requests", "answered", "replaced", "cancelled", "refused", "late", "workers_started", "workers_died",
                 "workers_recycled", "forks_crashed", "forks_stalled")
        with self._lock:
            found: dict[str, float] = {n: self._counts[n] for n in names}
            found |= {n: self.starter.counts[n] for n in ("workers_forked", "workers_spawned", "forks_failed")}
            return {**found, "pauses": self._governor.pauses, "worker_cpu_s": round(self._cpu_s, 3),
                    "worker_peak_bytes": self._peak_rss}

    # --- ending ----------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """End every worker, refuse what waits, and wait for the threads; later requests are refused."""
        with self._lock:
            self._closed = True
            waiting, self._queue = self._queue, []
            threads = [s.thread for s in self._slots if s.thread is not None]
            for s in self._slots:
                self._end(s, "closed")
            self._changed.notify_all()
        for w in waiting:
            w.future.set_exception(CaptureError("the process is ending", why=Why.TURNED_OFF))
        until = time.monotonic() + timeout
        for t in (*threads, *((self._watcher,) if self._watcher is not None else ())):
            if t is not threading.current_thread():
                t.join(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """In a forked child: threads and workers are the parent's; only the copies of the pipes are ours to close."""
        for s in self._slots:
            if s.worker is not None:
                s.worker.abandon()

    def _end(self, slot: _Slot, why: str) -> None:
        slot.ended = slot.ended or why
        if slot.worker is not None and slot.worker.alive:
            slot.worker.kill()

    # --- a worker's thread -----------------------------------------------------------------------

    def _grow(self) -> None:
        """Another thread where all are busy and there may be more; called with the lock."""
        idle = sum(s.running is None for s in self._slots)
        if len(self._queue) > idle and len(self._slots) < self.size:
            slot = _Slot()
            slot.thread = threading.Thread(target=self._serve, args=(slot,), name="hotfuse-worker", daemon=True)
            self._slots.append(slot)
            slot.thread.start()
        if self._watcher is None and self._queue:
            self._watcher = threading.Thread(target=self._watch, name="hotfuse-watch", daemon=True)
            self._watcher.start()

    def _serve(self, slot: _Slot) -> None:
        while (waiting := self._next(slot)) is not None:
            try:
                answer = self._answer(slot, waiting.task)
            except CaptureError as e:
                self._failed(slot, waiting, e)
            except BaseException as e:  # the caller must hear of it, whatever it was
                self._idle_again(slot)
                waiting.future.set_exception(e)
            else:
                self._idle_again(slot)
                waiting.future.set_result(answer)
                del answer
            del waiting  # this thread waits for the next request for long, and must not hold what the last one was about
        self._drop(slot)

    def _next(self, slot: _Slot) -> _Waiting | None:
        """The most valuable request, once there is one; None when this thread is to end."""
        until = time.monotonic() + self._idle_s
        with self._lock:
            while not self._closed and len(self._slots) <= self.size:
                if self._queue and not self._governor.paused:
                    best = max(self._queue, key=lambda w: w.task.value)
                    self._queue.remove(best)
                    if best.begin():
                        slot.running, slot.ran, slot.ended = best, 0.0, ""
                        return best
                    continue
                left = until - time.monotonic()
                if left <= 0 and not self._queue:
                    break
                self._changed.wait(max(left, TICK_S))
            self._slots.remove(slot)
            return None

    def _answer(self, slot: _Slot, task: Task) -> wire.Message:
        worker = self._worker(slot)
        try:
            header, blobs = worker.ask(dict(task.header), task.blobs)
        except (EOFError, OSError) as e:
            if not self._fork_to_blame(slot, worker):
                raise self._obituary(slot, task, worker) from e
            return self._answer_afresh(slot, task)
        return self._accounted(slot, worker, header, blobs)

    def _fork_to_blame(self, slot: _Slot, worker: Worker) -> bool:
        """Whether a worker may be gone because it was a fork: it stood still, or crashed without anybody having killed it."""
        if not worker.forked or slot.ended not in ("", "stalled"):
            return False
        words = worker.where() or worker.last_words()
        self._drop(slot)
        what = "stalled" if slot.ended else "" if worker.status == -signal.SIGKILL else "crashed"
        if what:
            with self._lock:
                self._counts[f"forks_{what}"] += 1
                slot.ran, slot.ended = 0.0, ""
            slot.suspect = f"a forked worker {what}" + (f": {words}" if words else "")
        return bool(what)

    def _answer_afresh(self, slot: _Slot, task: Task) -> wire.Message:
        """The same of a fresh interpreter. Where that can answer, this process is not forked again."""
        worker = self._worker(slot, "spawn")
        try:
            header, blobs = worker.ask(dict(task.header), task.blobs)
        except (EOFError, OSError) as e:
            raise self._obituary(slot, task, worker) from e
        self.starter.distrust(slot.suspect)
        return self._accounted(slot, worker, header, blobs)

    def _accounted(self, slot: _Slot, worker: Worker, header: dict[str, Any], blobs: list[bytes]) -> wire.Message:
        used = header.pop("usage", {})
        with self._lock:
            self._counts["answered"] += 1
            self._peak_rss = max(self._peak_rss, int(used.get("peak_rss", 0)))
            fat = bool(self._limits.memory) and worker.rss() > RECYCLE * self._limits.memory
            self._counts["workers_recycled"] += fat
        if fat:
            self._drop(slot)
        return header, blobs

    def _worker(self, slot: _Slot, kind: Workers | None = None) -> Worker:
        if slot.worker is not None and not slot.worker.alive:
            self._drop(slot)
        if slot.worker is None:
            slot.cpu = slot.slept = 0.0
            memory = self._limits.memory
            worker = self._start(memory) if self._start is not None else self.starter(memory, kind or self._limits.kind)
            with self._lock:
                slot.worker = worker
                self._counts["workers_started"] += 1
                if slot.ended:  # cancelled or closed while it started
                    worker.kill()
        elif slot.worker.paused:
            slot.worker.resume()
        return slot.worker

    def _obituary(self, slot: _Slot, task: Task, worker: Worker) -> CaptureError:
        """Why there is no answer."""
        words, why = worker.last_words(), slot.ended
        self._drop(slot)
        if why == "late":
            return CaptureError(f"{task.name} took longer than {task.timeout:g} s", why=Why.TIMEOUT)
        if why in ("closed", "cancelled"):
            return CaptureError(f"{task.name} was {why}", why=Why.TURNED_OFF)
        with self._lock:
            self._counts["workers_died"] += 1
        because = f"it held more than {self._limits.memory >> 20} MiB" if why == "memory" else words
        return CaptureError(f"the worker died with status {worker.status} over {task.name}", because=because, why=Why.WORKER_DIED)

    def _failed(self, slot: _Slot, waiting: _Waiting, error: CaptureError) -> None:
        self._idle_again(slot)
        task = waiting.task
        if error.why is Why.WORKER_DIED:
            waiting.deaths += 1
            if waiting.deaths < task.tries:
                with self._lock:
                    if not self._closed:
                        self._queue.append(waiting)
                        self._changed.notify()
                        return
            elif task.key and task.tries > 1:
                with self._lock:
                    self._poison[task.key] = _anew(error)
                    self._counts["refused"] += 1
                    while len(self._poison) > MAX_POISON:
                        self._poison.popitem(last=False)
        waiting.future.set_exception(error)

    def _idle_again(self, slot: _Slot) -> None:
        with self._lock:
            slot.running = None

    def _drop(self, slot: _Slot) -> None:
        """End a slot's worker, having taken its last figures."""
        worker = slot.worker
        if worker is None:
            return
        with self._lock:
            self._account(slot, worker)
            slot.worker = None
        worker.close()

    # --- the watch -------------------------------------------------------------------------------

    def _account(self, slot: _Slot, worker: Worker) -> float:
        """CPU time a worker has used since it was last looked at; called with the lock."""
        now = worker.cpu_s()
        used = max(0.0, now - slot.cpu)
        slot.cpu = max(now, slot.cpu)
        self._cpu_s += used
        return used

    def _watch(self) -> None:
        load = self._load or Meter()
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            with self._lock:
                busy = [s for s in self._slots if s.running is not None]
                if self._closed or not (busy or self._queue):
                    self._watcher = None
                    return
                self._tick(now - last, busy, load())
            last = now

    def _tick(self, passed: float, busy: Sequence[_Slot], load: float) -> None:
        used = 0.0
        for s in busy:
            worker, waiting = s.worker, s.running
            if worker is None or waiting is None:
                continue
            worked = self._account(s, worker)
            used += worked
            s.ran += 0.0 if worker.paused else passed
            s.slept = s.slept + passed if worker.forked and not worked and worker.sleeps() else 0.0
            held = worker.rss()
            self._peak_rss = max(self._peak_rss, held)
            if s.ran > waiting.task.timeout and not s.ended:
                self._counts["late"] += 1
                self._end(s, "late")
            elif s.slept > STALL_S and not s.ended:
                self._end(s, "stalled")
            elif s.slept > STALL_S / 2 >= s.slept - passed:
                worker.ask_where()
            elif self._limits.memory and held > self._limits.memory:
                self._end(s, "memory")
        was = self._governor.paused
        paused = self._governor.step(passed, used, load)
        for s in busy:
            if s.worker is not None and s.worker.paused is not paused:
                (s.worker.pause if paused else s.worker.resume)()
        if was and not paused:
            self._changed.notify_all()


def _anew(error: CaptureError) -> CaptureError:
    """The same refusal as a new exception: one that is raised holds the frames it passed, and all that they knew."""
    return CaptureError(error.what, where=error.where, because=error.because, hint=error.hint, why=error.why)
