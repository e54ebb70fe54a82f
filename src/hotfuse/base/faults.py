"""Errors in threads of our own: counted with a reason, never printed on the user's terminal, never the end of a mechanism.

What belongs to one model is a decision in its log (`runtime.background`). What belongs to the whole process (the pool's watch,
the analyzer's listener, reclaiming code) has no log; it is counted here, and `stats()` and `explain()` of every model show it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable

from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.events import Why

MAX_KINDS = 64
"""Different errors that are told apart; more than that count as one."""
MAX_RESTARTS = 5
"""Times that a thread which raised begins anew."""
RESTART_S = 0.1
"""Pause before the first of them; each is twice as long as the one before."""
MAX_TEXT = 300
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EIO})
"""What the system says when it has no more of something: files, memory, processes, room on a disk."""
ENDED = (Why.WORKER_DIED, Why.TOO_MUCH_MEMORY)
NO_THREAD = "can't start new thread"


def error_text(error: BaseException) -> str:
    """An error in one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}"[:MAX_TEXT].removesuffix(": ")


def reason_text(error: BaseException) -> str:
    """What an error of ours says; any other error in one line."""
    return error.what if isinstance(error, HotfuseError) else error_text(error)


def is_passing(error: BaseException) -> bool:
    """Whether an error tells of the moment and not of what was tried: the system had too little of something, or ended a worker."""
    if isinstance(error, CaptureError):
        return error.why in ENDED
    if isinstance(error, OSError):
        return error.errno in SCARCE
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_THREAD in str(error))


class Faults:
    """Errors of a process's background threads, by what raised them and what they said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, where: str, error: BaseException) -> None:
        """Count an error."""
        text = f"{where}: {error_text(error)}"
        with self._lock:
            known = text in self._counts or len(self._counts) < MAX_KINDS
            self._counts[text if known else "others"] += 1

    def counts(self) -> dict[str, int]:
        """How often each error was raised."""
        with self._lock:
            return dict(self._counts)

    def clear(self) -> None:
        """Forget them; for tests."""
        with self._lock:
            self._counts.clear()

    def after_fork(self) -> None:
        """In a forked child: the thread that held the lock is in the parent."""
        self._lock = threading.Lock()


faults = Faults()
"""The process's one."""
os.register_at_fork(after_in_child=faults.after_fork)


def is_begun(thread: threading.Thread) -> bool:
    """Start a thread; False where the system has none left, which is counted. Threads are started inside of calls, whose user asked
    for none: he goes on without what the thread is for."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as e:
        faults.note(thread.name, e)
        return False
    return True


def is_alive(thread: threading.Thread | None) -> bool:
    """Whether there is a thread that was begun and has not ended: one that raised too often has."""
    return thread is not None and thread.is_alive()


def steady(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread whose work begins anew when it raises, a bounded number of times; not started yet."""

    def run() -> None:
        for restart in range(MAX_RESTARTS + 1):
            try:
                target()
                return
            except Exception as e:
                faults.note(name if restart < MAX_RESTARTS else f"{name}, which has ended", e)
                if restart < MAX_RESTARTS:
                    time.sleep(RESTART_S * 2**restart)

    return threading.Thread(target=run, name=name, daemon=True)
