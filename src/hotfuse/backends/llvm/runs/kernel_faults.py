"""Faults: what a call's data asked for does not exist. Native code counts them; its caller looks.

    before = faults.count()
    enter(...)
    if faults.count() != before: raise CallFault        the model's own code then answers, and raises in its own words

The count is one word per process that only grows, since a team's threads add to it for the calling thread. A call in another thread
may add to it at the same time: none is ever missed, but a call may be taken for one that faulted. Where a fault means that a call
takes another path, and calls of several threads do so, operators compute the call again and tell (`not_after_faults`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from hotfuse.backends.protocol import Run
from hotfuse.base.errors import CallFault
from hotfuse.ops.own.assume import OtherPath, made_up_calls
from hotfuse.tile.program import Kernel

SYMBOL = "hotfuse_faults"
_cell = ctypes.c_int64(0)
SYMBOLS = {SYMBOL: ctypes.addressof(_cell)}
"""To be bound when code is loaded."""


LATEST = 16
_latest: deque[int] = deque(maxlen=LATEST)
"""The threads whose calls took another path last."""


def count() -> int:
    """Faults of this process so far."""
    return _cell.value


def fail(name: str) -> None:
    """Raise what a kernel could only count."""
    what = "an index points outside its tensor, a number is not finite, or an integer is divided by zero"
    raise CallFault(what, where=f"kernel {name}")


def not_after_faults(fallback: Run) -> Run:
    """What answers calls that leave a run, where a fault means that the graph is not for the call: to compute it once more would
    show the same. Unless calls of other threads faulted of late: then the fault may be theirs, and operators check by themselves.
    Otherwise a few calls that take another path would have all that run beside them answered by the model's own code, and counted
    as calls of other paths, too.
    """
    seen = [count()]

    def answer(*args: Any) -> tuple[Any, ...]:
        now, here = count(), threading.get_ident()
        faulted, seen[0] = now != seen[0], now
        if faulted and all(thread == here for thread in list(_latest)):
            _latest.append(here)
            raise OtherPath("the call takes another path through the model's code")
        try:
            return fallback(*args)
        except OtherPath:
            _latest.append(here)
            raise

    return answer


def can_fault(kernel: Kernel) -> bool:
    """Whether a kernel checks anything."""
    return "require" in kernel.ops


def guarded(kernel: Kernel, enter: Callable[..., None]) -> Callable[..., None]:
    """A way into a kernel that raises CallFault; the same way where it has nothing to check."""
    if not can_fault(kernel):
        return enter
    name = kernel.name

    def checked(*args: int) -> None:
        before = _cell.value
        enter(*args)
        if _cell.value != before and not made_up_calls:
            fail(name)

    return checked
