"""What came true of promises, remembered over processes: kinds of fusions, and strategies against bottlenecks.

The server decides with a `Bandit` and a `Ledger`; workers have the store. So what is remembered comes with the answer to the first
plan, and what was learned since goes back with a request of its own. Counts add up, so many processes may learn at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import field

from hotfuse.base.errors import CaptureError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import Answered, Histories, LearnedAnswer, received
from hotfuse.compile.request_bodies import LearnedRequest, Request
from hotfuse.compile.request_context import ARMS, SPECIALIZATIONS, STRATEGIES, RequestContext, RequestSettings
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.task import Task
from hotfuse.fusion.bandit import Bandit
from hotfuse.hpm.bottleneck import Ledger
from hotfuse.specialize.outcomes import SpecializationOutcomes

Counts = Mapping[str, Sequence[float]]
KEPT = (ARMS, STRATEGIES, SPECIALIZATIONS)
"""What is remembered, by its name in the store."""


def states() -> Histories:
    """In a worker: everything that the store of the request remembers."""
    from hotfuse.compile.learn.learned import notes  # the server does without the database

    found = notes()
    if found is None:
        return {}
    kept = {name: found.store.remembered(name, found.host.machine) for name in KEPT}
    return {name: {k: tuple(v) for k, v in rows.items()} for name, rows in kept.items()}


def handle(request: LearnedRequest) -> Answered:
    """The request of kind `learned`: numbers to add to those that are remembered, which are the answer."""
    from hotfuse.compile.learn.learned import notes

    found = notes()
    if found is not None and found.place.record and request.more:
        for name in KEPT:
            more = {k: list(v) for k, v in request.more.get(name, {}).items()}
            found.store.remember(name, more, found.host.machine)
        found.read_at = 0.0
    return LearnedAnswer(states()), []


@dataclass(slots=True)
class StrategyHistory:
    """The server's side, one for each store."""

    trust: Bandit = field(default_factory=Bandit)
    """How much of what common kernels promised came true."""
    ledger: Ledger = field(default_factory=Ledger)
    """Against which bottlenecks strategies helped."""
    outcomes: SpecializationOutcomes = field(default_factory=SpecializationOutcomes)
    """Which specializations won their races."""
    begun: bool = False
    """Whether what earlier processes remembered is in it."""
    asked: bool = False
    """Whether somebody has asked for it apart from a plan."""
    trouble: str = ""
    """Why what the store remembered was left aside."""
    _kept: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, "dict[str, list[float]]"])
    """What the store has of it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, found: Mapping[str, Counts]) -> None:
        """Take over what is remembered, once; what was learned before that is on top of it."""
        with self._lock:
            if self.begun or not found:
                return
            self.begun = True
            own = self._state()
            try:
                self.trust.restore(_sum(found.get(ARMS, {}), own[ARMS]))
                self.ledger.restore(_sum(found.get(STRATEGIES, {}), own[STRATEGIES]))
                self.outcomes.restore(_sum(found.get(SPECIALIZATIONS, {}), own[SPECIALIZATIONS]))
            except ValueError as e:  # written by somebody else
                self.trouble = str(e)
                self.trust.restore(own[ARMS])
                self.ledger.restore(own[STRATEGIES])
                self.outcomes.restore(own[SPECIALIZATIONS])
                return
            self._kept = {name: {k: list(v) for k, v in rows.items()} for name, rows in found.items()}

    def more(self) -> dict[str, dict[str, list[float]]]:
        """What was learned since this was last asked: to be added to the store."""
        with self._lock:
            now = self._state()
            found = {name: _difference(rows, self._kept.get(name, {})) for name, rows in now.items()}
            self._kept = {name: {k: list(v) for k, v in rows.items()} for name, rows in now.items()}
            return {name: rows for name, rows in found.items() if rows}

    def _state(self) -> dict[str, dict[str, list[float]]]:
        return {ARMS: self.trust.state(), STRATEGIES: self.ledger.state(), SPECIALIZATIONS: self.outcomes.state()}


def _sum(one: Counts, two: Counts) -> dict[str, list[float]]:
    zero = (0.0, 0.0, 0.0)
    return {k: [a + b for a, b in zip(one.get(k, zero), two.get(k, zero), strict=True)] for k in {**one, **two}}


def _difference(now: Counts, before: Counts) -> dict[str, list[float]]:
    zero = (0.0, 0.0, 0.0)
    changed = {k: [a - b for a, b in zip(v, before.get(k, zero), strict=True)] for k, v in now.items()}
    return {k: v for k, v in changed.items() if any(v)}


def send(submit: Callable[[Task], object], asked: RequestSettings, place: RequestContext, own: StrategyHistory) -> None:
    """Have what was learned since the last time added to the store; nobody waits for it."""
    if place.record and (more := own.more()):
        told = {name: {k: tuple(v) for k, v in rows.items()} for name, rows in more.items()}
        header = Request(LearnedRequest(told), asked, place).header()
        submit(Task("remembering what promises were worth", header, priority=-math.inf))


def recall(
    submit: Callable[[Task], Future[wire.Message]], asked: RequestSettings, place: RequestContext, own: StrategyHistory
) -> bool:
    """Have what earlier processes learned brought, where no plan was asked for so far whose answer brings it: a process that begins
    with kept plans would bet as if nobody had raced before. True where the answer is still to come; asked for once.
    """
    if own.begun or own.asked:
        return False
    own.asked = True

    def answered(future: Future[wire.Message]) -> None:
        if not future.cancelled() and future.exception() is None:
            with suppress(CaptureError):  # counted where it does not fit; a plan's answer brings it as well
                own.begin(received(future.result(), LearnedAnswer)[0].history)

    header = Request(LearnedRequest({}), asked, place).header()
    submit(Task("what promises were worth", header)).add_done_callback(answered)
    return True


_histories: dict[str, StrategyHistory] = {}
_making = threading.Lock()


def history_of(path: str) -> StrategyHistory:
    """This process's for a store."""
    with _making:
        return _histories.setdefault(path, StrategyHistory())
