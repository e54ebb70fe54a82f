"""One process makes what several want: a lock file per entry, held while it is made.

The system lets go of a lock when its owner dies, so a dead owner is noticed at once; one that takes too long is waited for no
longer than the caller allows, and then two make the same thing, which is harmless. Locks belong to processes, so threads of one
process also take turns by a lock of their own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

POLL_S = 0.02
_mine: dict[str, threading.Lock] = {}
_making = threading.Lock()


def _own(path: str) -> threading.Lock:
    with _making:
        return _mine.setdefault(path, threading.Lock())


@contextlib.contextmanager
def flight(path: Path, patience_s: float, stop: Callable[[], bool] = lambda: False, mode: int = 0o600) -> Generator[bool]:
    """While it is open, nobody else makes what the lock is for; False where that could not be had in time, or at all.

    `stop` is asked while another process is waited for: whether nobody wants the thing any more. `mode`: who may hold it.
    """
    until = time.monotonic() + patience_s
    own = _own(str(path))
    with contextlib.ExitStack() as held:
        while not own.acquire(timeout=POLL_S):
            if stop() or time.monotonic() > until:
                yield False
                return
        held.callback(own.release)
        try:
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = _opened(path, mode)
        except (OSError, ImportError):  # a folder that cannot be written: nobody can be kept from making the same
            yield False
            return
        held.callback(os.close, file)
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if stop() or time.monotonic() > until:
                    yield False
                    return
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # for a person who looks why something waits
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield True


def _opened(path: Path, mode: int) -> int:
    """The file, made where there is none. One that another user made is not opened to be made: many systems refuse that in a
    directory that everybody may write."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if mode != 0o600:
        with contextlib.suppress(OSError):  # somebody else made it just now
            os.fchmod(file, mode)
    return file


def _after_fork() -> None:
    """A child holds none of its parent's locks."""
    global _making
    _making = threading.Lock()
    _mine.clear()


os.register_at_fork(after_in_child=_after_fork)
