"""Idle time of a machine that serves: used to measure kernels and to train the performance model, and given back at once.

    worker   a process of its own at the lowest priority (`compile.learn.idle`), asked for a few seconds of work at a time
    watch    looks many times a second whether a call, a compilation or anybody else wants the machine; then the worker is stopped
             where it stands, and goes on when it has been quiet for a while; where that does not come soon, the worker ends

One of them for each profile store of the process. It begins when a model has been tried, as only then there is something to learn
for, and ends with the last engine. Calls pay nothing for it: they are noticed by the counters they keep anyway.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

import torch

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import error_text, is_alive, is_begun, steady
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.living import Living
from hotfuse.compile.answer_bodies import IdleAnswer, received
from hotfuse.compile.request_bodies import IdleRequest, Request
from hotfuse.compile.request_context import RequestContext, RequestSettings
from hotfuse.compile.workers import service, wire
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.scheduler import Load, LoadMeter
from hotfuse.machine.cores import unbind
from hotfuse.machine.heap import heap
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.tally import calls_everywhere

GIVE_BACK_S = 5.0
"""Without a call for so long, memory that only makes the next calls faster is given back (`machine.heap`); once more when
background work has ended as long ago, since that may go on for minutes behind the last call."""
AFTER_S = 120.0
"""Quiet for so long before a worker is started: it takes 120 to 400 MB, which a pause between requests is not worth (decision
246)."""
QUIET_S = 0.25
"""Quiet for so long before it goes on after it was stopped."""
KEPT_STOPPED_S = 5.0
"""Stopped for so long, it ends: calls are back, and its memory is theirs. What it measured is in the store."""
TICK_S = 0.02
"""Between two looks while it works."""
REST_S = 0.5
"""Between two looks while it does not."""
SLICE_S = 5.0
"""What it is asked for at a time."""
DONE_S = 60.0
"""Where nothing is left to measure, it is asked again after so long."""
BUSY = 0.5
"""The part of all cores that others may use at most while it works."""
LOAD_S = 1.0
"""Seconds over which that is taken."""
MAX_FAILURES = 3


class IdleState(StrEnum):
    """What it is doing."""

    WAITING = "waiting until the machine is idle"
    WORKING = "measuring kernels"
    STOPPED = "stopped while others use the machine"
    DONE = "everything there is has been measured"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class IdleReport:
    """What came of it so far."""

    state: IdleState = IdleState.WAITING
    measured: int = 0
    version: int | None = None
    """Of the model trained last."""
    mape: float | None = None
    """Of that model, on problems it had not seen."""
    slices: int = 0
    stops: int = 0
    failures: int = 0
    because: str = ""
    """Of the last failure."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {n: getattr(self, n) for n in self.__slots__} | {"state": self.state.value}


class Process(Protocol):
    """The worker, as far as it is used here: `compile.workers.process.Worker`."""

    paused: bool

    def ask(self, header: dict[str, Any], blobs: list[bytes], /) -> wire.Message: ...  # noqa: D102
    def pause(self) -> None: ...  # noqa: D102
    def resume(self) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


def wanted() -> tuple[int, bool]:
    """Calls so far, and whether somebody is in one, or waits for a worker."""
    return calls_everywhere(), epochs.inside() or service.busy()


class Idle:
    """Idle work for one store."""

    def __init__(
        self,
        place: RequestContext,
        memory: int = 0,
        start: Callable[[int], Process] = Worker,
        load: Load | None = None,
        used: Callable[[], tuple[int, bool]] = wanted,
        clock: Callable[[], float] = time.monotonic,
        give_back: Callable[[], object] = heap.when_idle,
    ) -> None:
        self.place, self.told = place, IdleReport()
        self._memory, self._start, self._used, self._clock = memory, start, used, clock
        self._load, self._give_back = load, give_back
        self._logs: Living[EventLog] = Living()
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None
        self._asker: threading.Thread | None = None
        self._worker: Process | None = None
        self._ending = threading.Event()
        self._again_at = self._stopped_at = 0.0

    # --- who it is for ---------------------------------------------------------------------------

    def join(self, log: EventLog) -> None:
        """A model is served: its log hears of what is learned."""
        with self._lock:
            self._logs.add(log)
            if not is_alive(self._watch) and not self._ending.is_set():
                watch = self._watch = steady(self._run, "hotfuse-idle")
                if not is_begun(watch):
                    self._watch = None

    def leave(self, log: EventLog) -> None:
        """A model is closed; with the last one the worker ends."""
        with self._lock:
            self._logs.discard(log)

    def end(self, timeout: float = 2.0) -> None:
        """End the worker and the threads."""
        self._ending.set()
        self._close()
        for thread in (self._watch, self._asker):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout)
        self._change(state=IdleState.ENDED)

    def _decide(self, why: Why, **evidence: Any) -> None:
        for log in self._logs:
            log.decide(Action.NOTICE, why, "performance model", **evidence)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self.told = replace(self.told, **changes)

    # --- the watch -------------------------------------------------------------------------------

    def _run(self) -> None:
        load = self._load or LoadMeter()
        calls, last, looked, busy = -1, self._clock(), self._clock(), 0.0
        called = active = given = last
        while not self._ending.wait(TICK_S if self._worker is not None else REST_S):
            with self._lock:
                if not self._logs:
                    self._watch = None
                    break
            now = self._clock()
            count, inside = self._used()
            if now - looked >= LOAD_S:
                busy, looked = load(), now
            called = now if count != calls else called
            active = now if count != calls or inside else active
            if any(given < since and now - since >= GIVE_BACK_S for since in (called, active)):
                self._give_back()
                given = now
            if count != calls or inside or busy > BUSY:
                calls, last = count, now
            self._step(now, now - last)
        self._close()

    def _step(self, now: float, quiet: float) -> None:
        """Stop, go on or begin."""
        worker = self._worker
        if worker is None:
            if quiet >= AFTER_S and now >= self._again_at and self.told.failures < MAX_FAILURES:
                self._begin()
        elif quiet < QUIET_S and not worker.paused:
            worker.pause()
            self._stopped_at = now
            self._change(state=IdleState.STOPPED, stops=self.told.stops + 1)
        elif quiet >= QUIET_S and worker.paused:
            worker.resume()
            self._change(state=IdleState.WORKING)
        elif worker.paused and now - self._stopped_at >= KEPT_STOPPED_S:
            self._close()
            self._change(state=IdleState.WAITING)

    def _begin(self) -> None:
        if self._asker is not None and self._asker.is_alive():
            return
        asker = steady(self._ask, "hotfuse-idle-ask")
        if is_begun(asker):
            self._asker = asker
            self._change(state=IdleState.WORKING)

    # --- asking ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask a worker of its own for slices until nothing is left; it lives no longer than this thread."""
        unbind()  # the worker inherits the cores of this thread
        worker = self._start(self._memory)
        with self._lock:
            self._worker = worker
        try:
            while not self._ending.is_set():
                asked = RequestSettings(threads=torch.get_num_threads())
                header = Request(IdleRequest(SLICE_S), asked, self.place).header()
                answer, _ = received(worker.ask(header, []), IdleAnswer)
                self._learned(answer)
                if not answer.left:
                    self._again_at = self._clock() + DONE_S
                    self._change(state=IdleState.DONE)
                    return
        except Exception as e:  # serving does not depend on it; it is counted, and given up when it happens again and again
            if not self._ending.is_set() and self._has(worker):
                self._change(state=IdleState.WAITING, failures=self.told.failures + 1, because=error_text(e))
                self._again_at = self._clock() + DONE_S
        finally:
            self._close()

    def _learned(self, answer: IdleAnswer) -> None:
        measured = answer.measured
        self._change(measured=self.told.measured + measured, slices=self.told.slices + 1)
        if measured:
            self._decide(Why.IDLE, measured=measured, so_far=self.told.measured, stops=self.told.stops)
        if answer.model is not None and answer.facts is not None:
            self._change(version=answer.model, mape=answer.facts.mape)
            self._decide(Why.RETRAINED, version=self.told.version, samples=answer.facts.samples, mape=self.told.mape)

    def _has(self, worker: Process) -> bool:
        """Whether nobody has closed it meanwhile."""
        with self._lock:
            return self._worker is worker

    def _close(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.close()
