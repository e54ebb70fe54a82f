"""The performance model where units are compiled: what a kernel and the library would take, before there is a kernel.

    foresight   the model of this machine, corrected by what was measured since it was trained; None where the store has none
    notes       where trials are written down: measurements and groups, for corrections, calibration and the next training

Both are of the store that the request names (`compile.request_context`). A correction needs no state of its own: it follows from
the newest measurements that serving left in the store, whichever process left them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile import request_context
from hotfuse.compile.host import Host, this_host
from hotfuse.compile.learn import measure
from hotfuse.compile.request_context import ARMS, RequestContext
from hotfuse.fusion.bandit import Bandit
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import fleet, model, nearby
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import CostPredictor
from hotfuse.hpm.nearby import Nearby
from hotfuse.hpm.online import WINDOW, Online
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.trust import Trust, judged
from hotfuse.hpm.work import NAMES, Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.machine.speed_drift import IN_A_ROW, THRESHOLD
from hotfuse.profile.rows import SOURCES, Measurement
from hotfuse.profile.store import Store

MIN_US = 20.0
"""Trials of shorter kernels say more about calling them than about them."""
TRIAL_NOISE = 0.1
"""A trial is a handful of runs beside others."""
FLUSH = 16
"""Measurements kept back before they go to the store together."""
MAX_TRIALS = 256
"""Trials kept back before they are counted."""
FRESH_S = 10.0
"""After so long, what others have learned meanwhile is read again when a graph is planned."""
STORES = 8
"""Stores that a process keeps open: workers serve models with different settings."""
SERVING = ("race", "serve")
"""Sources of what corrections are made from."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds, predicted."""

    kernel_s: float
    high_s: float
    """What the kernel hardly exceeds."""
    library_s: float


@dataclass(slots=True)
class Foresight:
    """A model on this machine."""

    host: Host
    predictor: CostPredictor
    online: Online
    """What has changed since the model was trained."""
    nearby: Nearby | None = None
    """What the fleet's model is off by here (`hpm.nearby`); None where the machine has a model of its own."""
    believed: bool = True
    """Whether forecasts decide; else what they propose is measured first (`hpm.trust`)."""
    own: bool = True
    """Whether it was trained for this machine; else it is the fleet's, for machines that have none (`hpm.fleet`)."""
    unknown: int = 0
    """Groups whose work depends on data."""

    @classmethod
    def of(cls, store: Store, host: Host | None = None) -> Foresight | None:
        """What a store holds for this machine; None where that is nothing, or knows less than rooflines."""
        host = host or this_host(store, measure_peaks=False)
        found = model.load(store, host.machine, threads=host.at.threads)
        own = found is not None
        if found is None and host.at.measured:  # ratios against peaks that nobody measured would say nothing
            found = fleet.load(store)
        if found is None:
            return None
        believed = judged(found.facts)
        if believed.trust is Trust.ASIDE:
            store.notes.append(f"a stored model was left aside: {believed.because}")
            return None
        online = Online()
        near = None if own else Nearby(online)
        predictor = CostPredictor(found, host.at, RowCache(measure.tile_of), near or online)
        made = cls(host, predictor, online, near, believed.trust is Trust.BELIEVED, own)
        made.replay(store)
        return made

    def replay(self, store: Store) -> None:
        """Correct by what serving measured since the training, oldest first; by the machine's own probe where that is little."""
        version, trained, who = self.predictor.model.version, 0.0, self.host
        if self.own:
            trained, _ = store.model_dates(model.named(who.at.threads), who.machine).get(version, (0.0, {}))
        sources = SERVING if self.own else SOURCES  # to the fleet's model, all that was measured here is news
        newest = WINDOW if self.own else nearby.WINDOW
        found = store.measurements(machine=who.machine, threads=who.at.threads, source=sources, since=trained, limit=newest)
        self.observe(found[::-1])
        looks = store.drift(machine=self.host.machine, probe="fma", limit=IN_A_ROW)
        ratios = sorted(d.ratio for d in looks)
        if len(looks) == IN_A_ROW and (ratios[0] > THRESHOLD or ratios[-1] < 1 / THRESHOLD):
            self.online.note_slowdown(ratios[IN_A_ROW // 2], sum(m.at > looks[-1].at for m in found))

    def observe(self, measured: Sequence[Measurement]) -> None:
        """Measurements next to what the uncorrected model says of them."""
        usable = [m for m in measured if m.time_ns > MIN_US * 1e3 and all(n in m.features for n in NAMES)]
        if not usable:
            return
        table = np.array([[m.features[n] for n in NAMES] for m in usable])
        found = derive(table, self.host.at)
        off = np.log(np.array([m.time_ns for m in usable]) * 1e-9 / self.predictor.model.seconds(found))
        problems = [rows.problem_of(m.kernel) for m in usable]
        self.online.observe_all(zip(found.family.tolist(), model.binding(found).tolist(), off.tolist(), strict=True), problems)
        if self.nearby is not None:
            self.nearby.observe(found, off, problems)

    def of_group(self, graph: Graph, sizes: Mapping[str, int]) -> Foreseen | None:
        """What a group would take as a kernel and by the library; None where that depends on data."""
        try:
            found = self.predictor.predict([Candidate(graph, sizes, c, self.host.at.threads) for c in (self.host.core, None)])
        except (HotfuseError, KeyError, IndexError):  # a size that nobody knows
            self.unknown += 1
            return None
        return Foreseen(float(found.seconds[0]), float(found.high_s[0]), float(found.seconds[1]))


@dataclass(frozen=True, slots=True)
class _Trial:
    """A kernel that was tried against the library."""

    key: str
    graph: Graph
    sizes: Mapping[str, int]
    kernel_us: float
    library_us: float
    threads: int
    at: float


@dataclass(slots=True)
class Notes:
    """What a process knows and writes down of one store."""

    place: RequestContext
    store: Store
    host: Host
    row_cache: RowCache
    ahead: Foresight | None
    trust: Bandit
    """How far predictions of the fusion engine came true, in all processes so far."""
    pending: list[Measurement] = field(default_factory=list[Measurement])
    trials: list[_Trial] = field(default_factory=list[_Trial])
    """Trials whose work is not counted yet: a plan waits for the worker, and nobody for that."""
    problems: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict[str, "tuple[str, dict[str, int]]"])
    """Groups that were tried, for calibration."""
    unknown: int = 0
    """Groups whose work depends on data."""
    read_at: float = 0.0

    @classmethod
    def of(cls, place: RequestContext, threads: int = 1) -> Notes | None:
        """A store as it is now, for calls of so many threads; one that is not there is begun only to be written."""
        if place.path == ":memory:" or not (
            place.record or Path(place.path.removeprefix("sqlite:///")).expanduser().exists()
        ):
            return None
        try:
            store = Store.open(place.path)
        except HotfuseError:  # the server opens the same place, and says what is wrong with it
            return None
        if store.path is None and store.database.copied is None:
            return None
        host = this_host(store, threads, measure_peaks=False)
        made = cls(place, store, host, RowCache(measure.tile_of), None, Bandit())
        made.read()
        return made

    def read(self) -> None:
        """Take over what others have learned."""
        self.read_at = time.monotonic()
        self.host = this_host(self.store, self.host.at.threads, measure_peaks=False)
        self.ahead = Foresight.of(self.store, self.host)
        self.trust.restore(_sound(self.store.remembered(ARMS, self.host.machine)))

    def tried(
        self, key: str, graph: Graph, sizes: Mapping[str, int], kernel_us: float, library_us: float, threads: int = 1
    ) -> None:
        """A trial's outcome: it corrects the model of as many threads as it had, and is kept for the next one.

        Without a model there is nothing to correct now: it is counted when the worker rests, or many wait.
        """
        if not self.place.record:
            return
        self.trials.append(_Trial(key, graph, sizes, kernel_us, library_us, threads, time.time()))
        if self.ahead is not None or len(self.trials) >= MAX_TRIALS:
            self._count()

    def _count(self) -> None:
        """What trials computed and moved, beside what they took."""
        trials, self.trials = self.trials, []
        for t in trials:
            try:
                table = self.row_cache.rows([Candidate(t.graph, t.sizes, c, t.threads) for c in (self.host.core, None)])
            except (HotfuseError, KeyError, IndexError):
                self.unknown += 1
                continue
            made: list[Measurement] = []
            for i, us in enumerate((t.kernel_us, t.library_us)):
                if us > MIN_US:
                    name = rows.kernel_name(t.key, {}, self.host.core if i == 0 else None, t.threads)
                    found = rows.measurements([name], table[i : i + 1], [us * 1e-6], [TRIAL_NOISE], t.threads, "race")
                    made += [replace(m, at=t.at) for m in found]
            self.problems[t.key] = (show(t.graph), dict(t.sizes))
            self.wrote(made)

    def wrote(self, made: Sequence[Measurement]) -> None:
        """Keep measurements of serving."""
        if self.ahead is not None:
            self.ahead.observe([m for m in made if m.threads == self.host.at.threads])
        self.pending += made
        if len(self.pending) >= FLUSH:
            self.flush()

    def flush(self) -> None:
        """Put what was measured into the store."""
        self._count()
        if self.pending:
            self.store.record_measurements(self.pending, self.host.machine)
            self.pending = []
        for key, (text, sizes) in self.problems.items():
            self.store.record_problem(key, text, sizes)
        self.problems = {}


def _sound(found: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Memories of three numbers that begin with a count: what else is in a store was written by somebody else."""
    return {k: n for k, n in found.items() if len(n) == 3 and n[0] >= 0}


_known: dict[tuple[RequestContext, int], Notes | None] = {}


def notes() -> Notes | None:
    """This process's for the store and the threads of the request in hand, opened once; None where nothing is kept."""
    place = (request_context.current(), request_context.threads())
    if place not in _known:
        while len(_known) >= STORES:
            gone = _known.pop(next(iter(_known)))
            if gone is not None:
                gone.flush()
                gone.store.close()
        _known[place] = Notes.of(*place)
    return _known[place]


def foresight() -> Foresight | None:
    """The model in the store of the request in hand, if there is one for this machine."""
    found = notes()
    return None if found is None else found.ahead


def left_aside() -> list[str]:
    """Why a model that the store of the request in hand holds is not used."""
    found = notes()
    if found is None or found.ahead is not None:
        return []
    return list(dict.fromkeys(n for n in found.store.notes if "left aside" in n))


def refresh() -> None:
    """Before a graph is planned: read again what others may have learned meanwhile."""
    found = notes()
    if found is not None and time.monotonic() - found.read_at > FRESH_S:
        found.flush()
        found.read()


def trust() -> Bandit:
    """How far predictions came true, as the store of the request in hand remembers it."""
    found = notes()
    return Bandit() if found is None else found.trust


def flush() -> None:
    """Put everything that was measured into its store: nobody knows when a worker ends."""
    for found in list(_known.values()):
        if found is not None:
            found.flush()


def forget() -> None:
    """In a forked worker: what the server has measured is the server's to write down."""
    _known.clear()
