"""The thread that compares weights with their checksums where calls are too few to do it in time (`originals`).

One for the process, at the lowest priority, alive only while some model serves copies of its weights. It reads copies of a few
hundred kilobytes that the system makes, so it holds no lock for long and cannot fault on memory that somebody gives back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import Protocol

from hotfuse.base.faults import is_alive, is_begun, steady
from hotfuse.base.living import Living
from hotfuse.compile.workers.background_priority import patient
from hotfuse.machine.copied import Copied, unavailable
from hotfuse.runtime.weights.originals import Late, Originals

MIN_S = 0.02
"""Between two looks, however short the time allowed is."""
REST_S = 0.0005
"""After every slice: calls come first."""
STOP_S = 2.0


class Scrubbed(Protocol):
    """What has weights to be compared."""

    originals: Originals

    def written_unseen(self, late: Late) -> None:
        """A difference was found."""
        ...


class Scrubber:
    """The process's thread and those it works for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: Living[Scrubbed] = Living()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._ending = False

    def join(self, model: Scrubbed) -> None:
        """Look after a model for as long as it has anything to compare."""
        if unavailable():
            return  # calls compare everything themselves in time
        with self._lock:
            self._models.add(model)
            if not is_alive(self._thread) and not self._ending:
                thread = self._thread = steady(self._run, "hotfuse-weights")
                if not is_begun(thread):
                    self._thread = None
        self._wake.set()

    def _run(self) -> None:
        patient()
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with contextlib.closing(Copied()) as room:
            while (pause := self._pause()) is not None:
                self._wake.wait(pause)
                self._wake.clear()
                self._look(room)

    def _look(self, room: Copied) -> None:
        """In a function of its own: a thread that waits must not hold the model it looked at last."""
        for model in self._models:
            if not self._ending and model.originals.due() and (late := model.originals.scrub(room, self._rest)) is not None:
                model.written_unseen(late)

    def _pause(self) -> float | None:
        """Until the next look; None when there is nothing to look after."""
        with self._lock:
            for model in [m for m in self._models if not m.originals.bytes]:
                self._models.discard(model)
            limits = [m.originals.limit_ns * 1e-9 for m in self._models]
            if self._ending or not limits:
                self._thread = None
                return None
        return max(MIN_S, min(limits) / 8)

    def _rest(self) -> None:
        if self._ending:
            raise SystemExit  # of this thread alone
        time.sleep(REST_S)

    def stop(self, timeout: float = STOP_S) -> None:
        """At the end of the process: no thread may be inside native code when the interpreter goes."""
        with self._lock:
            self._ending = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def after_fork(self) -> None:
        """In a forked child: the thread is the parent's; whose weights a call has to compare is looked after again."""
        self.__init__()


scrubber = Scrubber()
"""The process's one."""
os.register_at_fork(after_in_child=scrubber.after_fork)
atexit.register(scrubber.stop)
