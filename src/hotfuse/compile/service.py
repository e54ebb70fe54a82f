"""The service that runs jobs beside inference: one background thread, one worker process, started when needed.

A job runs in the thread and may ask the worker. The worker is niced, ends after a while without work, is killed when it
takes too long, and is started again when it died. After a fork the child starts with a service of its own.
"""

from __future__ import annotations

import atexit
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from hotfuse.compile import wire

IDLE_S = 60.0
STOP_S = 10.0
"""Longest wait for the job in hand when the process ends."""
PAUSE_S = 0.01
"""Before a job: the call that submitted it returns first, instead of waiting for the interpreter lock."""
Job = Callable[[], None]


class Worker:
    """A worker process and the pipes to it."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1",
               "HOTFUSE_CAPTURE": "off"}
        self._log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotfuse.compile.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env=env,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes], timeout: float) -> wire.Message:
        """Send a request and wait for its answer; a late or dead worker raises CaptureError."""
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(timeout, kill)
        timer.daemon = True
        timer.start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            wire.send(self._process.stdin, header, blobs)  # type: ignore[arg-type]
            return wire.receive(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError) as e:
            self.close()
            if late.is_set():
                raise CaptureError(f"the capture took longer than {timeout:g} s", why=Why.TIMEOUT) from e
            raise CaptureError(
                f"the capture worker died with status {self._process.returncode}", because=self._last_words(),
                why=Why.WORKER_DIED,
            ) from e
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the process, at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent bytes of a dead worker's request
                    continue


class Service:
    """A queue of jobs, a thread that runs them, and the worker they use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None
        self.started = 0
        """Workers started so far."""
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Run a job in the background; jobs run one after another and handle their own errors."""
        self._queue.put(job)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="hotfuse-service", daemon=True)
                self._thread.start()

    def ask(self, header: dict[str, Any], blobs: Sequence[bytes], timeout: float) -> wire.Message:
        """Ask the worker, from inside a job; a worker found dead is replaced once."""
        if self._stopping:
            raise CaptureError("the process is ending", why=Why.TURNED_OFF)
        if self._worker is None or not self._worker.alive:
            self._worker = Worker()
            self.started += 1
        return self._worker.ask(header, blobs, timeout)

    @property
    def worker(self) -> Worker | None:
        """The worker, if one runs now."""
        return self._worker if self._worker is not None and self._worker.alive else None

    def _serve(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                self.close()
                continue
            time.sleep(PAUSE_S)
            if self._stopping:
                return
            job()

    def close(self) -> None:
        """End the worker; the next job starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


    def stop(self, timeout: float) -> None:
        """End the worker and wait for the job in hand: a thread inside native code must not outlive the interpreter."""
        self._stopping = True
        self._queue.put(lambda: None)
        self.close()
        if self._thread is not None:
            self._thread.join(timeout)


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
    return wire.checked(service().ask(header, blobs, settings.capture_timeout_s))


def _after_fork() -> None:
    """Threads and pipes belong to the parent: the child begins anew."""
    global _service, _making
    _service = None
    _making = threading.Lock()


def _at_exit() -> None:
    if _service is not None:
        _service.stop(STOP_S)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
