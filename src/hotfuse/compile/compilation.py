"""Working off a compilation graph: the most valuable unit goes to the next free worker, until none is left.

Values are asked for anew at every step, so a unit that became more valuable overtakes; new sizes replace what has not begun. The
executor is the pool, or this very process for tools and tests (`compile.requests.Here`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import field, replace
from typing import Any, Protocol

from hotfuse.analysis.resources import CorePeaks
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile import unit_pairs
from hotfuse.compile.answer_bodies import UNIT, PlanAnswer, UnitCut, UnitKernel, UnitMissing, received
from hotfuse.compile.compilation_graph import OVER, CompileGraph, Unit, UnitState, grouping_name
from hotfuse.compile.learn.strategy_history import StrategyHistory, send
from hotfuse.compile.request_bodies import PlanRequest, Request, RequestBody, UnitRequest
from hotfuse.compile.request_context import RequestContext, RequestSettings
from hotfuse.compile.value import CompileProgress, Demand, Estimator, Expected, Learned, RooflineEstimator, worth
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.task import Task
from hotfuse.fusion.bandit import Bandit, Budget, Option
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.hpm.bottleneck import Ledger, Strategy
from hotfuse.profile.traffic import NOTHING_SEEN, TrafficSeen

SPLIT_S = 10.0
"""Processor seconds of each worker after which a unit that fails is not cut into smaller ones any more. On a busy machine a worker
has a tenth of a core: by the clock, what was left in one piece would depend on who else computes."""
MAX_SPLIT_S = 180.0
"""The same by the clock, however little time workers had."""
MEASURING_S = 20.0
"""Seconds of workers for trying common kernels of units that have kernels already: a graph's share, spent on the best promises."""
MIN_HOPE = 0.25
"""What a strategy that addresses something else is thought to be good for."""
TRIES = 2
"""Workers that a unit may kill."""
TURNS = 2
"""Changes of the sizes that calls have which a compilation follows: traffic to and fro must not keep it from ending."""
Progress = Callable[[Callable[[], wire.Message], CompileProgress], None]
"""Told after each kernel: what there is so far, on demand, and how far that is."""
_serial = itertools.count(1)


class Executor(Protocol):
    """Who does the work."""

    @property
    def size(self) -> int:
        """How many requests run at once."""
        ...

    def submit(self, task: Task) -> Future[wire.Message]:
        """Have a request done."""
        ...

    def cancel(self, owner: str) -> int:
        """Drop an owner's requests."""
        ...


@dataclass(slots=True)
class Compilation:
    """One graph on its way to kernels. `run` works it off; the other methods may be called from other threads meanwhile."""

    executor: Executor
    text: str
    """The graph."""
    sizes: Mapping[str, int]
    """Of a real call."""
    demand: Demand = Demand()
    seen: TrafficSeen = NOTHING_SEEN
    """What it is planned by."""
    latest: Callable[[], Mapping[str, int] | None] | None = None
    """Asked between units: the sizes that most calls have by then; None where there are none such."""
    estimate: Estimator = field(default_factory=Learned)
    timeout: float = 60.0
    asked: RequestSettings = RequestSettings()
    """What its kernels have to be."""
    trust: Bandit = field(default_factory=Bandit)
    """How much of what common kernels promised came true."""
    ledger: Ledger = field(default_factory=Ledger)
    """Against which bottlenecks they helped."""
    measuring: Budget = field(default_factory=lambda: Budget(MEASURING_S))
    """For common kernels of units that have one each."""
    place: RequestContext | None = None
    """The profile store that workers read and write."""
    history: StrategyHistory | None = None
    """Where trust and ledger are remembered from."""
    variants: bool = True
    """Whether units get several kernels where none is best for all sizes that calls may bring."""
    peaks: CorePeaks = CorePeaks()
    clock: Callable[[], float] = time.monotonic
    graph: CompileGraph = field(default_factory=CompileGraph)
    owner: str = field(default_factory=lambda: f"compilation {next(_serial)}")
    grouping: str = ""
    """A name for the groups that planning came to."""
    _flying: dict[Future[wire.Message], Unit] = field(default_factory=dict[Future[wire.Message], Unit])
    _seen: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _version: int = 0
    _until: float = 0.0
    _worked_s: float = 0.0
    """Processor seconds that its units took so far."""
    _cancelled: bool = False
    _left: bool = False

    def run(self, on_progress: Progress | None = None) -> None:
        """Plan, then compile units until none is left; raises CaptureError where there is no plan, or nobody wants it any more."""
        header = self._request(PlanRequest(self.text, dict(self.sizes), self.seen))
        task = Task("grouping a graph", header, timeout=4 * self.timeout, owner=self.owner, gain=self.demand.gain)
        asked = self.executor.submit(task)
        with background_priority.waiting():
            answer, _ = received(asked.result(), PlanAnswer)
        self.grouping = grouping_name(answer.bodies)
        if self.demand.serving == self.grouping:
            raise CaptureError("the graph is grouped as it is", because="measured weights change no choice", why=Why.SAME_PLAN)
        with self._lock:
            self.peaks = answer.peaks
            if self.history is not None:
                self.history.begin(answer.history)
            self.graph.begin(answer.bodies, self.demand.library_us, self.demand.outcomes(), self.sizes)
        self._until, self._worked_s = self.clock() + MAX_SPLIT_S, 0.0
        while not self._cancelled:
            with self._lock:
                if self._left:
                    return
                if self.latest is not None and self._version < TURNS and (sizes := self.latest()) is not None:
                    self.reprofile(sizes)
                if len(self.graph.levels) > 1:
                    self.graph.weigh(self.demand.outcomes(), self.sizes)
                self._dispatch()
                flying = list(self._flying)
            if not flying:
                return
            with background_priority.waiting():
                done, _ = wait(flying, return_when=FIRST_COMPLETED)
            with self._lock:
                before = len(self.graph.codes)
                for future in done:
                    if (unit := self._flying.pop(future, None)) is not None:
                        self._absorb(unit, future)
                more, progress = len(self.graph.codes) > before, self.progress
            if on_progress is not None and more and progress.worked < 1.0:
                on_progress(self.message, progress)
        raise CaptureError("the compilation was cancelled", why=Why.CANCELLED)

    def _request(self, body: RequestBody) -> dict[str, Any]:
        asked = replace(self.asked, strategies=tuple(self.demand.strategies), focus=self.demand.focus)
        return Request(body, asked, self.place).header()

    def remember(self) -> None:
        """Have what was learned of promises added to the store; nobody waits for it."""
        if self.history is not None and self.place is not None:
            send(self.executor.submit, self.asked, self.place, self.history)

    def leave(self) -> int:
        """Begin nothing more, and end nothing that a worker is at; how many kernels there are."""
        with self._lock:
            self._left = True
            return len(self.graph.codes)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._cancelled = True
        self.executor.cancel(self.owner)

    def reprofile(self, sizes: Mapping[str, int], demand: Demand | None = None) -> None:
        """Calls have become different: what no worker has begun is compiled for the new sizes, in a new order."""
        with self._lock:
            self.demand = demand or self.demand
            sizes = self.seen.with_data_sizes(sizes)
            if sizes == dict(self.sizes):
                return
            self.sizes = sizes
            self._version += 1
            for future in [f for f in self._flying if f.cancel()]:
                self._flying.pop(future).state = UnitState.WAITING
            self.graph.counts["replaced"] += sum(u.state is UnitState.WAITING for u in self.graph.units.values())

    def message(self) -> wire.Message:
        """What there is so far, in the form of an answer."""
        with self._lock:
            return self.graph.message()

    def describe(self) -> list[str]:
        """Every unit with where it stands, and the pairs that stay apart."""
        with self._lock:
            return self.graph.describe()

    @property
    def progress(self) -> CompileProgress:
        """The parts of the expected saving and of the work that are behind it."""
        with self._lock:
            alive = [u for u in self.graph.units.values() if u.state not in OVER and u.of is None]
            left = [u for u in alive if u.state not in (UnitState.DONE, UnitState.LIBRARY)]
            saving, work = sum(map(self._saving, alive)), sum(map(self._work, alive))
            return CompileProgress(1.0 - sum(map(self._saving, left)) / saving if saving else 1.0,
                           1.0 - sum(map(self._work, left)) / work if work else 1.0)  # fmt: skip

    def _saving(self, unit: Unit) -> float:
        return max(self.estimate(unit.facts).saving_s, 1e-9) * self.graph.runs_of(unit)

    def _work(self, unit: Unit) -> float:
        return max(self.estimate(unit.facts).compile_s, 1e-3)

    def _value(self, unit: Unit) -> float:
        expected = self.estimate(unit.facts)
        if unit.promised_us:
            expected = Expected(unit.promised_us * 1e-6 * self.trust.trust(unit_pairs.arm(unit)), expected.compile_s)
        return worth(expected, self.graph.runs_of(unit))

    def waiting(self) -> list[Unit]:
        """What has not begun, the most valuable first."""
        found = [u for u in self.graph.units.values() if u.state is UnitState.WAITING]
        return sorted(found, key=self._value, reverse=True)

    # --- asking ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give the workers what they can take, and one more to go on with while this thread is busy."""
        for unit in self.waiting():
            if len(self._flying) > self.executor.size:
                return
            if unit.promised_us and not self._chosen(unit):
                self.graph.counts["not_measured"] += 1
                why = f"{unit.ops} stay two kernels: no time is left for measuring what they would be as one"
                self.graph.leave_to_library(unit, why)
            elif unit.state is UnitState.WAITING:
                self._send(unit)

    def _chosen(self, unit: Unit) -> bool:
        """Whether a common kernel is worth a part of the time for measuring, as far as such promises came true."""
        cost = self.estimate(unit.facts).compile_s
        helps = self.ledger.promise(unit_pairs.held_back(unit, self.peaks), Strategy(unit_pairs.arm(unit)))
        option = Option(unit, unit_pairs.arm(unit), max(helps, MIN_HOPE) * unit.promised_us * self.graph.runs_of(unit), cost)
        if not self.trust.choose([option], self.measuring):
            return False
        self.measuring.spend(cost)
        return True

    def _learn(self, unit: Unit, us: float | None) -> None:
        """A promise was measured: a common kernel takes so long, None for one that did not win."""
        if not unit.promised_us or unit.apart_us is None:
            return
        taken = unit.apart_us if us is None else us
        self.trust.learn(unit_pairs.arm(unit), unit.promised_us, unit.apart_us - taken)
        self.ledger.learn(unit_pairs.held_back(unit, self.peaks), Strategy(unit_pairs.arm(unit)), unit.apart_us, taken)

    def _send(self, unit: Unit, texts: Sequence[str] = ()) -> None:
        known = {level.ident: level.text for level in self.graph.levels}
        if unit.of is not None:  # the neighbours may have changed since
            unit.uses = [p for p in unit.uses if unit_pairs.partner(self.graph, unit, p) >= 0]
            if not unit.uses:
                unit.state = UnitState.FUSED
                return
        alike = tuple((self.graph.levels[p[0]].ident, tuple(unit_pairs.nodes_of(self.graph, unit, p))) for p in unit.uses)
        header = self._request(UnitRequest(
            unit.kind, dict(self.sizes), alike, tuple(texts), split=unit.of is None and self._may_split(),
            joined=unit.of is not None, beat=unit.apart_us, variants=self.variants,
        ))  # fmt: skip
        unit.state, unit.version = UnitState.RUNNING, self._version
        task = Task(f"unit {unit.ops}", header, [known[t].encode() for t in texts], self._value(unit), self.timeout, TRIES,
                    f"{unit.key} {self._version}", self.owner, self.demand.gain, took=self._took)
        self._flying[self.executor.submit(task)] = unit

    def _may_split(self) -> bool:
        """Whether there is time for cutting what fails into smaller units."""
        return self._worked_s < SPLIT_S * max(1, self.executor.size) and self.clock() < self._until

    def _took(self, seconds: float) -> None:
        self._worked_s += seconds  # two workers at once may lose one

    # --- answers ---------------------------------------------------------------------------------

    def _absorb(self, unit: Unit, future: Future[wire.Message]) -> None:
        if future.cancelled():
            unit.state = UnitState.WAITING
            return
        try:
            answer, codes = received(future.result(), *UNIT)
        except CaptureError as e:
            self._cancelled = self._cancelled or e.why is Why.CANCELLED
            self.graph.counts["failed"] += 1
            because = f": {e.because}" if e.because else ""
            self.graph.leave_to_library(unit, f"{unit.ops} stays with the library: {e.what}{because}")
            return
        if isinstance(answer, UnitMissing):
            self._send(unit, answer.missing)
        elif isinstance(answer, UnitKernel):
            self.graph.add_kernel(unit, answer, codes)
            if isinstance(self.estimate, RooflineEstimator):
                self.estimate.learn(unit.kind, answer.kernel.compile_s)
            if unit.of is not None:
                self._learn(unit, unit.use.us if unit.use is not None else None)
                unit_pairs.joined(self.graph, unit, answer.keys)
            unit_pairs.judged(self.graph, unit, self.sizes, self.asked.threads, self.peaks, self._seen, SeenCosts(self.seen))
        elif unit.version != self._version and unit.of is None:
            unit.state = UnitState.WAITING  # what lost at sizes of yesterday may win today
        elif isinstance(answer, UnitCut):
            pieces = self.graph.cut(unit, answer.split, answer.why, answer.pieces)
            self._seen.update((a.key, b.key) for a, b in itertools.pairwise(pieces))  # they have just been one
            for piece in pieces:
                if piece.state is UnitState.WAITING:
                    unit_pairs.requeued(self.graph, piece, self._seen)
        else:
            self._learn(unit, None)
            self.graph.leave_to_library(unit, answer.refused)
