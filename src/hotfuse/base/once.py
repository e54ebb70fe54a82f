"""What exists once in a process, however many threads ask for it first at the same time.

`functools.cache` may compute a value in two threads at once and then keep one of them. Of numbers nobody sees that. Of native code
one thread would link against the copy that is let go of, and call what has been freed.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_lock = threading.RLock()
"""One for all: what is made once needs other things that are, in whatever order."""


def once(make: Callable[[], T]) -> Callable[[], T]:
    """The function, computed by the first call alone; one that raises is asked again. Later calls take no lock."""
    made: list[T] = []

    @functools.wraps(make)
    def asked() -> T:
        if not made:
            with _lock:
                if not made:
                    made.append(make())
        return made[0]

    return asked


def _after_fork() -> None:
    """In a forked child nobody is making anything: those threads are in the parent."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
