"""One request to a fork that is made for it: the only worker that has a model which cannot be sent.

Workers of the pool began before the model was there, or in a fresh interpreter. This one begins now, answers, and ends. It is
watched as those are: it has a deadline, and one that sleeps over its request for long waits for a lock that nobody holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from hotfuse.compile.request_bodies import Request
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.forked import ForkedWorker, ForkFailed
from hotfuse.compile.workers.service import service
from hotfuse.compile.workers.slot import STALL_S
from hotfuse.compile.workers.starting import unsafe

LOOK_S = 0.25


def ask_fork(request: Request, settings: Settings) -> wire.Message:
    """Have a fork of the process as it is now answer; raises ForkFailed where there is none, or where it ends without an answer."""
    if why := service().pool.starter.because_of_forks or unsafe(settings.workers):
        raise ForkFailed("this process is not forked", because=why)
    worker = ForkedWorker(settings.compile_memory_mb << 20, whole=False)
    try:
        with _watched(worker, settings.capture_timeout_s) as ended:
            try:
                header, blobs = worker.ask(request.header(), [])
            except (EOFError, OSError) as e:
                because = ended[0] if ended else worker.last_words()
                raise ForkFailed("a fork ended over its request", because=because, why=Why.WORKER_DIED) from e
        header.pop("usage", None)
        return header, blobs
    finally:
        worker.close()


@contextmanager
def _watched(worker: ForkedWorker, timeout: float) -> Generator[list[str]]:
    """End a worker that is late or stands still; why, if it was."""
    ended: list[str] = []
    done = threading.Event()

    def watch() -> None:
        until, slept, used = time.monotonic() + timeout, 0.0, 0.0
        while not done.wait(LOOK_S):
            now = worker.cpu_s()
            slept, used = (slept + LOOK_S if now == used and worker.sleeps() else 0.0), now
            late = f"it took longer than {timeout:g} s" if time.monotonic() > until else ""
            if why := "the process ends" if service().stopping else "it stood still" if slept > STALL_S else late:
                ended.append(why)
                worker.kill()
                return

    thread = threading.Thread(target=watch, name="hotfuse-watch", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        done.set()
        thread.join()
