"""A request to a worker: what it asks, what it is worth, what it may take; and what is known of one that waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.workers import wire

URGENT = float("inf")
"""The priority of what somebody waits for."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request, what it is worth, and what it may take."""

    name: str
    header: Mapping[str, Any]
    blobs: Sequence[bytes] = ()
    priority: float | Callable[[], float] = URGENT
    """Asked again whenever a worker becomes free, so that what became hot meanwhile goes first."""
    timeout: float = 300.0
    tries: int = 1
    """Workers it may kill before it is refused."""
    key: str = ""
    """A waiting request of the same key is replaced by a newer one."""
    owner: str = ""
    """Whose it is, to cancel all of it."""
    gain: float = 0.0
    """The part of calls' time that it is expected to save, with what it is a part of; without any it gets idle time alone."""
    threads: int = 0
    """Of the calls that it runs beside; 0: what the pool's limits say. Calls on a device keep one thread of the host busy."""
    took: Callable[[float], None] = lambda _: None
    """Told how many processor seconds answering it took, before the answer is there."""

    @property
    def value(self) -> float:
        """Its priority now."""
        return self.priority() if callable(self.priority) else self.priority


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits or runs, and who is to hear of it."""

    task: Task
    future: Future[wire.Message]
    deaths: int = 0
    begun: bool = False
    """Whether it has run before."""

    def begin(self) -> bool:
        """False where nobody waits for it any more."""
        if not self.begun:
            self.begun = self.future.set_running_or_notify_cancel()
        return self.begun

    def drop(self) -> None:
        """It will not be done."""
        if self.future.cancel():
            self.begin()  # a thread that waits for one of several is not woken by a cancel alone
        else:
            self.future.set_exception(CaptureError(f"{self.task.name} was cancelled", why=Why.CANCELLED))
