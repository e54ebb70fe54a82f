"""Faults: what a call's data asked for does not exist. Native code counts them; its caller looks.

    before = faults.count()
    enter(...)
    if faults.count() != before: raise CallFault        the model's own code then answers, and raises in its own words

The count is one word per process that only grows. A call in another thread may add to it at the same time: then this one is
answered by the model's own code without need, but none is ever missed.
"""

from __future__ import annotations

import ctypes
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


def count() -> int:
    """Faults of this process so far."""
    return _cell.value


def fail(name: str) -> None:
    """Raise what a kernel could only count."""
    raise CallFault("an index points outside its tensor, or a number is not finite", where=f"kernel {name}")


def not_after_faults(fallback: Run) -> Run:
    """What answers calls that leave a run, where a fault means that the graph is not for the call: to compute it once more would
    show the same."""
    seen = [count()]

    def answer(*args: Any) -> tuple[Any, ...]:
        if (now := count()) != seen[0]:
            seen[0] = now
            raise OtherPath("the call takes another way through the model's code")
        return fallback(*args)

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
