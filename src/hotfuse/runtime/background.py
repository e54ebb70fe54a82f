"""Background work, counted, so that somebody may wait until none is pending.

A job that raises is told of (`failed`), and the next one runs. Jobs run without gradients: nothing they compute is differentiated,
and parameters that were made in inference mode could not even be looked at otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

Job = Callable[[], None]
Submit = Callable[[Job], None]
Failed = Callable[[Exception], None]


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


class Background:
    """The background work of one engine."""

    def __init__(
        self, submit: Submit, *, inline: bool, failed: Failed, captures: Submit | None = None, beside: Submit | None = None,
    ) -> None:
        self._submit = submit
        self._failed = failed
        self._captures = captures or submit
        """Calls that no plan takes are slow until one does: their capture need not wait until other plans are improved."""
        self._beside = beside or submit
        """What makes every call shorter and takes a moment does not wait behind what takes seconds."""
        self._inline = inline
        """Jobs run here and now, where a test or a user asked for that."""
        self._idle = threading.Condition()
        self._pending = 0

    def start(self, job: Job) -> None:
        """Run a job in the background; `wait` waits for it."""
        self.begin()
        self.go_on(job)

    def start_beside(self, job: Job) -> None:
        """Run a job that does nothing to plans, whatever other jobs of this engine are at work."""
        self.begin()
        self._go_on(job, self._beside)

    def begin(self) -> None:
        """Something is pending from here on: follow with `go_on` or `finished`."""
        with self._idle:
            self._pending += 1

    def go_on(self, job: Job, *, capture: bool = False) -> None:
        """The job of what was begun."""
        self._go_on(job, self._captures if capture else self._submit)

    def _go_on(self, job: Job, submit: Submit) -> None:
        def counted() -> None:
            try:
                with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                    job()  # where it runs inside of a call, the caller's hooks are not to see what it saves
            except Exception as e:
                self._failed(e)
            finally:
                self.finished()

        if self._inline:
            counted()
        else:
            submit(counted)

    def finished(self) -> None:
        """What was begun is over."""
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing is pending; True if drained in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending <= 0, timeout)

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._idle = threading.Condition()
        self._pending = 0
