"""What workers are told of the calls they run beside.

The runtime, which is above this package, counts calls, and registers here how to ask for the count. In a worker or a tool there
are no calls.
"""

from __future__ import annotations

from collections.abc import Callable

from hotfuse.base.lazy_dataclass import dataclass


def _none() -> int:
    return 0


@dataclass(slots=True)
class ServedCalls:
    """How calls are counted."""

    in_flight: Callable[[], int] = _none
    """Threads inside a call now: they ask for cores, whether they get any or wait behind other programs."""


served_calls = ServedCalls()
"""The process's one."""
