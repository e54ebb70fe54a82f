"""The analyzer as the serving process sees it: a ring to publish to, and a snapshot to read.

The process behind it is started with the first batch of records, and started again when it dies (what it remembered is gone then;
the last snapshot stays). A thread listens to it and does next to nothing: it keeps the bytes of the latest snapshot, which are
read when somebody asks. After a fork the child watches nothing: ring, thread and process are the parent's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from hotfuse.base.environment import for_child
from hotfuse.base.faults import faults, is_begun, steady
from hotfuse.machine.cores import unbind
from hotfuse.profile.names import Names
from hotfuse.profile.records import Batch
from hotfuse.profile.ring import SLOTS, Publish, Ring
from hotfuse.profile.snapshot import EMPTY, NoticedDrift, Snapshot, drift_from, from_json

MAX_RESTARTS = 5
"""Deaths within a minute after which it is given up."""
OnDrift = Callable[[NoticedDrift], None]


class Analyzer:
    """Publishes to, and listens to, one analyzing process."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.names = Names()
        self._slots = slots
        self._ring: Ring | None = None
        self._publish: Publish | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._latest = b""
        self._read: tuple[bytes, Snapshot] = (b"", EMPTY)
        self._flushed = -1
        self._deaths: list[float] = []
        self._listeners: dict[OnDrift, None] = {}
        """Changed by single steps of the interpreter only: a garbage collection may do it at any time."""
        self._left: deque[int] = deque()
        """Graphs that are gone, and that nobody has been told of so far."""
        self._stopping = False
        self.started = 0
        """Processes started so far; all but the first were restarts."""
        self.given_up = ""
        """Why there is no analyzer any more."""

    # --- the call path ---------------------------------------------------------------------------

    def publish(self, batch: Batch) -> None:
        """Hand over a call's records; never waits."""
        ring = self._ring
        if ring is None:
            ring = self.start()
        if ring is not None:
            ring.publish(batch)

    # --- control ---------------------------------------------------------------------------------

    def start(self) -> Ring | None:
        """Make the ring and have the process started, in the background; None when it was stopped, and for now where the system has
        no file or thread for it: a sampled call asks, and is not to hear of that."""
        with self._lock:
            if self._stopping:
                return None
            if self._ring is None:
                try:
                    ring = Ring.create(self._slots)
                except OSError as e:
                    faults.note("watching calls", e)
                    return None
                if self._publish is not None:
                    ring.use(self._publish)
                self._ring = ring
                thread = self._thread = steady(self._listen, "hotfuse-analyzer")
                if not is_begun(thread):
                    self._ring = self._thread = None
                    ring.close()
            return self._ring

    def use(self, publish: Publish) -> None:
        """Publish natively from now on."""
        self._publish = publish
        if self._ring is not None:
            self._ring.use(publish)

    def on_drift(self, listener: OnDrift) -> None:
        """Be told of changes, in the listening thread: do little there."""
        self._listeners[listener] = None

    def forget(self, listener: OnDrift) -> None:
        """Be told no more."""
        self._listeners.pop(listener, None)

    def graph(self, name: str) -> int:
        """A new graph's number. Those that are gone leave room for it."""
        self._tidy()
        return self.names.graph(name)

    def leave(self, graphs: Iterable[int]) -> None:
        """Graphs are gone. Takes no lock, because a garbage collection may say so at any time: who next comes by tidies up."""
        self._left.extend(graphs)

    def _tidy(self) -> None:
        while self._left:
            try:
                gone = self._left.popleft()
            except IndexError:  # somebody else does the same
                return
            self.names.forget(gone)
            if (process := self._process) is not None:
                self._tell(process, b"forget %d\n" % gone)

    @property
    def snapshot(self) -> Snapshot:
        """The latest; decoded when it is first asked for."""
        latest = self._latest
        if self._read[0] is not latest:
            self._read = (latest, from_json(latest))
        return self._read[1]

    @property
    def pid(self) -> int | None:
        """The process, if one runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def flush(self, timeout: float = 10.0) -> bool:
        """Until everything published so far is in the snapshot; for tests and tools. False when that took too long."""
        ring, until = self._ring, time.monotonic() + timeout
        if ring is None:
            return True
        want = ring.published
        asked: object = None
        while time.monotonic() < until and not self.given_up:
            process = self._process
            if process is not None and process is not asked and self._tell(process, b"flush %d\n" % want):
                asked = process
            with self._news:
                if self._news.wait_for(lambda: self._flushed >= want, 0.1):
                    return True
        return False

    def stats(self) -> dict[str, int]:
        """Counters."""
        ring = self._ring
        return {
            "records": ring.published if ring else 0,
            "records_dropped": ring.dropped if ring else 0,
            "records_by_python": ring.by_python if ring else 0,
            "analyzer_restarts": max(0, self.started - 1),
            "signatures_over_limit": self.names.overflow,
        }

    def stop(self, timeout: float = 5.0) -> None:
        """End the process; nothing is published any more."""
        with self._lock:
            self._stopping = True
            ring, process = self._ring, self._process
        if ring is not None:
            ring.close()
        if process is not None:
            try:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(timeout)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def after_fork(self) -> None:
        """In a forked child: nothing is watched."""
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._stopping = True
        self._thread = None
        self._process = None
        self.given_up = "the process was forked"
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    # --- the listening thread --------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stopping:
            process = self._spawn()
            if process is None:
                return
            assert process.stdout is not None
            while (line := process.stdout.readline()).endswith(b"\n"):  # half a line is what it was killed over
                try:
                    self._heard(line)
                except Exception as e:  # one line that makes no sense, or one listener that raises, costs no other
                    faults.note("listening to the analyzer", e)
            process.wait()
            process.stdout.close()
            if self._stopping:
                return
            now = time.monotonic()
            self._deaths = [t for t in self._deaths if t > now - 60] + [now]
            if len(self._deaths) > MAX_RESTARTS:
                self.given_up = f"it died {len(self._deaths)} times within a minute, at last with status {process.returncode}"
                self._ring_closed()
                return

    def _ring_closed(self) -> None:
        with self._lock:
            if self._ring is not None:
                self._ring.close()

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        env = for_child(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        with self._lock:
            if self._stopping or self._ring is None:
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hotfuse.profile.daemon", str(self._ring.fd)], pass_fds=[self._ring.fd],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
            )  # fmt: skip
            unbind(self._process.pid)
            self.started += 1
            return self._process

    def _heard(self, line: bytes) -> None:
        kind, body = line[:1], line[1:]
        self._tidy()
        if kind == b"S":
            self._latest = body
        elif kind == b"D":
            drift = drift_from(json.loads(body))
            for listener in list(self._listeners):
                listener(drift)
        elif kind == b"F":
            with self._news:
                self._flushed = max(self._flushed, int(body))
                self._news.notify_all()

    def _tell(self, process: subprocess.Popen[bytes], line: bytes) -> bool:
        try:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        except (OSError, ValueError):  # it died; another one will be told
            return False
        return True
