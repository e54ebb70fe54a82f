"""A place for one worker of a pool: the worker is started when there is something to ask, asked, watched, and replaced.

A forked worker that crashes or stands still may do so because it was forked: a fresh one is asked the same before anybody hears.
What the slots of a pool share, its lock among it, are its `Books`.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import field
from typing import Any

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Workers
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.priority import LOWEST, chosen_by_user, may_raise
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.starting import Starter
from hotfuse.compile.workers.task import Task, Waiting
from hotfuse.machine.cores import allowed, keep_within

RECYCLE = 0.5
"""A worker that holds more than this part of its memory when it has answered is replaced by a fresh one."""
STALL_S = 5.0
"""A forked worker that slept so long over a request, without a moment of work, is taken to wait for a lock that nobody holds."""
GLANCE_S = 0.25
"""Most seconds that one look tells of: a server that was itself stopped for long has seen no worker sleep, nor run, meanwhile."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a pool may use."""

    workers: int = 0
    """Processes; 0 is half the cores."""
    memory: int = 4 << 30
    """Bytes of one worker beyond its libraries; 0 is no limit."""
    share: float = 0.1
    """The most of all cores that workers get, and may take, in the long run, while calls of one thread each use all."""
    threads: int = 1
    """Of a call: one that waits for several threads is held up by a worker beside any of them, so the share is divided by it."""
    kind: Workers = "auto"
    """Whether workers are forks of this process."""


@dataclass(slots=True)
class Books:
    """What the slots of one pool share."""

    limits: PoolLimits
    starter: Starter
    start: Callable[[int], Worker] | None = None
    """Starts a worker of so much memory, in the starter's place."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter[str])
    cpu_s: float = 0.0
    peak_rss: int = 0
    level: int = LOWEST
    """The priority that workers need now to get their share."""
    needed: bool = False
    """Whether they needed a higher one a while ago: one that cannot be raised again keeps it so long."""

    def count(self, what: str) -> None:
        """One more of it; called without the lock."""
        with self.lock:
            self.counts[what] += 1


class WorkerSlot:
    """A worker, or room for one, and the request it is at. One thread asks; others look at it and end it, with the lock."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.worker: Worker | None = None
        self.running: Waiting | None = None
        self.thread: threading.Thread | None = None
        self._ran = 0.0
        """Seconds the request has run, pauses left out."""
        self._ended = ""
        """Why the worker was killed."""
        self._replaced = False
        """Whether a worker was ended over this request for its low priority."""
        self._suspect = ""
        """What a forked worker did that a fresh one may not do."""
        self._cpu = 0.0
        """The worker's CPU time when it was last looked at."""
        self._slept = 0.0
        """Seconds since it was last seen at work."""
        self._cores: frozenset[int] = frozenset()
        """That it may run on."""

    # --- asking ----------------------------------------------------------------------------------

    def begin(self, waiting: Waiting) -> None:
        """This request is next; called with the lock."""
        self.running, self._ran, self._ended, self._replaced = waiting, 0.0, "", False

    def done(self) -> None:
        """No request is running any more. A worker that answered while it was being killed is not asked the next one."""
        with self._books.lock:
            self.running = None
            killed = bool(self._ended)
        if killed:
            self.drop()

    def answer(self, task: Task) -> wire.Message:
        """What a worker says to a request; CaptureError where it died over it or was ended."""
        worker = self._alive()
        self.keep_within_cores()  # one that had nothing to do has not followed
        try:
            header, blobs = worker.ask(dict(task.header), task.blobs)
        except (EOFError, OSError) as e:
            if self._starved():
                return self.answer(task)
            if not self._fork_to_blame(worker):
                raise self._obituary(task, worker) from e
            return self._answer_afresh(task)
        return self._accounted(task, worker, header, blobs)

    def _starved(self) -> bool:
        """Whether the worker was ended for its low priority: the next one, which begins with a higher one, is asked the same."""
        with self._books.lock:
            if self._ended != "starved":
                return False
            self._ran, self._ended, self._replaced = 0.0, "", True
            self._books.counts["workers_starved"] += 1
        self.drop()
        return True

    def _fork_to_blame(self, worker: Worker) -> bool:
        """Whether a worker may be gone because it was a fork: it stood still, or crashed without anybody having killed it."""
        ended = self._ended
        if not worker.forked or ended not in ("", "stalled"):
            return False
        words = worker.where() or worker.last_words()
        self.drop()
        what = "stalled" if ended else "" if worker.status == -signal.SIGKILL else "crashed"
        if not what:
            return False
        with self._books.lock:
            if self._ended != ended:  # cancelled or closed meanwhile: nobody wants the answer
                return False
            self._books.counts[f"forks_{what}"] += 1
            self._ran, self._ended = 0.0, ""
        self._suspect = f"a forked worker {what}" + (f": {words}" if words else "")
        return True

    def _answer_afresh(self, task: Task) -> wire.Message:
        """Ask a fresh interpreter the same. If it can answer, this process is not forked again."""
        worker = self._alive("spawn")
        try:
            header, blobs = worker.ask(dict(task.header), task.blobs)
        except (EOFError, OSError) as e:
            raise self._obituary(task, worker) from e
        self._books.starter.distrust(self._suspect)
        return self._accounted(task, worker, header, blobs)

    def _accounted(self, task: Task, worker: Worker, header: dict[str, Any], blobs: list[bytes]) -> wire.Message:
        used, books = header.pop("usage", {}), self._books
        task.took(float(used.get("took_s", 0.0)))
        with books.lock:
            books.counts["answered"] += 1
            books.peak_rss = max(books.peak_rss, int(used.get("peak_rss", 0)))
            fat = bool(books.limits.memory) and worker.rss() > RECYCLE * books.limits.memory
            books.counts["workers_recycled"] += fat
        if fat:
            self.drop()
        return header, blobs

    def _alive(self, kind: Workers | None = None) -> Worker:
        """The worker, started where there is none that lives."""
        if self.worker is not None and not self.worker.alive:
            self.drop()
        if self.worker is None:
            self._cpu, self._slept, self._cores = 0.0, 0.0, allowed()
            books = self._books
            memory = books.limits.memory
            worker = (books.start(memory) if books.start is not None
                      else books.starter(memory, kind or books.limits.kind, books.level))  # fmt: skip
            with books.lock:
                self.worker = worker
                books.counts["workers_started"] += 1
                if self._ended:  # cancelled or closed while it started
                    worker.kill()
        elif self.worker.paused:
            self.worker.resume()
        return self.worker

    def _obituary(self, task: Task, worker: Worker) -> CaptureError:
        """Why there is no answer."""
        words, why = worker.last_words(), self._ended
        self.drop()
        if why == "late":
            return CaptureError(f"{task.name} took longer than {task.timeout:g} s", why=Why.TIMEOUT)
        if why in ("closed", "cancelled"):
            return CaptureError(f"{task.name} was {why}", why=Why.CANCELLED)
        self._books.count("workers_died")
        because = f"it held more than {self._books.limits.memory >> 20} MiB" if why == "memory" else words
        return CaptureError(f"the worker died with status {worker.status} over {task.name}", because=because, why=Why.WORKER_DIED)

    # --- ending ----------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Kill the worker; what runs in it hears why. Called with the lock."""
        if not self._ended or (self._ended in ("stalled", "starved") and why in ("cancelled", "closed")):  # those are asked again
            self._ended = why
        if self.worker is not None and self.worker.alive:
            self.worker.kill()

    def drop(self) -> None:
        """End the worker, having taken its last figures."""
        worker = self.worker
        if worker is None:
            return
        with self._books.lock:
            self._account(worker)
            self.worker = None
        worker.close()

    # --- watching, with the lock -----------------------------------------------------------------

    def look(self, passed: float) -> float:
        """Hold a running request to its time and memory, `passed` seconds after the last look; CPU time its worker used since."""
        worker, waiting, books = self.worker, self.running, self._books
        if worker is None or waiting is None:
            return 0.0
        worked, seen = self._account(worker), min(passed, GLANCE_S)
        self._ran += 0.0 if worker.paused else seen
        before, asleep = self._slept, worker.forked and not worked and worker.sleeps()
        self._slept = before + seen if asleep else 0.0
        held = worker.rss()
        books.peak_rss = max(books.peak_rss, held)
        if self._ran > waiting.task.timeout and not self._ended:
            books.counts["late"] += 1
            self.end("late")
        elif self._slept > STALL_S and not self._ended:
            self.end("stalled")
        elif self._slept > STALL_S / 2 >= before:
            worker.ask_where()
        elif books.limits.memory and held > books.limits.memory:
            self.end("memory")
        return worked

    def keep_within_cores(self) -> None:
        """Where the process may run on other cores by now than when the worker was started, so may the worker."""
        if self.worker is not None and self._cores != (now := allowed()):
            self._cores = now
            keep_within(self.worker.pid)

    def hold(self, *, paused: bool) -> None:
        """Stop the worker where it is, or let it go on."""
        if self.worker is not None and self.worker.paused is not paused:
            (self.worker.pause if paused else self.worker.resume)()

    def prioritize(self, *, waited_for: bool = False) -> None:
        """Give the worker the priority it needs, for its own request or for a valuable one that waits behind it.

        Where a priority may not be raised, a worker that begins with it is asked the same.
        """
        worker, waiting, books = self.worker, self.running, self._books
        if worker is None or waiting is None or chosen_by_user() is not None:
            return
        level, has = books.level if waiting.task.gain > 0 or waited_for else LOWEST, worker.level
        if level < has:
            if not worker.renice(level) and not self._replaced and not self._ended:
                self.end("starved")
        elif level > has and (may_raise() or not books.needed):
            worker.renice(level)

    def _account(self, worker: Worker) -> float:
        """CPU time a worker has used since it was last looked at."""
        now = worker.cpu_s()
        used = max(0.0, now - self._cpu)
        self._cpu = max(now, self._cpu)
        self._books.cpu_s += used
        return used
