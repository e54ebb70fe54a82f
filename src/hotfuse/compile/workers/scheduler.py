"""The resource scheduler: how much of the machine background work gets while calls are served.

    share       what work that is expected to save calls' time may count on, and may not exceed, on a machine that is used wholly:
                in proportion to the saving and to how much of the machine this process's calls ask for; nothing where nothing is
                to be saved
    ahead       a minute's share may be taken at once, at three times the rate: what calls lose until a plan serves is the same at
                any rate, and the plan serves sooner. Behind that the share is the rate (decision 256)
    demand      cores that calls in flight ask for, whether they get them or not: beside other programs they get fewer
    priority    the lowest while idle cores give that much anyway; ordinary (less one step) once workers fall behind their share
    bound       the workers' CPU time comes out of a bucket that fills with what calls leave idle plus the share; while it is empty,
                workers are stopped where they are and no new request begins
    abreast     how many run at once beside calls that have teams: as many as a team leaves cores, and one where it leaves none

Priority alone gives no bound, and the lowest one no guarantee: beside two busy threads on two cores such a worker got 3% of a core.
All of it is a function of figures that are passed in, so tests need no clock. Decision 27 says what was weighed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.cores import allowed, usable_cores

BURST_S = 0.5
"""CPU seconds per core that may be saved up while workers run at the lowest priority."""
RAISED_BURST_S = 0.05
"""The same while they compete with calls: what they get must come evenly."""
RESUME_S = 0.02
"""CPU seconds per core that must be in the bucket before workers go on."""
AHEAD_S = 60.0
"""Seconds whose share may be taken at once."""
AHEAD_RATE = 3.0
"""Times the share that workers get while some of that is left."""
TAPER_S = 5.0
"""The last so many of those seconds are taken ever more slowly, so that rates do not jump to and fro."""
FULL_SHARE_GAIN = 0.2
"""Work that is expected to save this part of the machine's time gets the whole share; less gets proportionally less."""
WHOLE_CORE = 0.9
"""What a worker uses of a core that it has to itself, at least: it reads and writes files, too."""
BEHIND_S = 0.1
"""CPU seconds that workers may be behind what they can count on before their priority is raised."""
WINDOW_S = 1.0
"""Seconds over which idleness and traffic are averaged."""
TEAM_TRAFFIC = 0.5
"""Cores that calls keep busy, from which on workers beside their teams hold them up."""
MIN_SHARE = 0.01
"""Of all cores: the lowest priority gets about as much of a machine that others use wholly, and nobody is stopped there."""
NO_IDLE = 0.05
"""A machine with less than this part idle is saturated: what workers use, calls miss."""

Load = Callable[[], float]
"""The part of all cores' time, 0 to 1, that work of ordinary priority took since it was last asked."""


def default_workers() -> int:
    """How many worker processes a machine gets unless the settings say otherwise: half its cores."""
    return max(1, usable_cores() // 2)


def weight_of(gain: float, traffic: float) -> float:
    """The part of the share that work has a claim to: it is to save `gain` of calls' time, which is `traffic` of all cores'."""
    return min(1.0, max(0.0, gain * traffic) / FULL_SHARE_GAIN)


def granted_share(most: float, gain: float, traffic: float, threads: float = 1.0) -> float:
    """The part of all cores that work can count on.

    A call on several threads waits for the last of them, so a worker beside one holds all of them up: at the same price workers
    get so many times less.
    """
    return most / max(1.0, threads) * weight_of(gain, traffic)


@dataclass(frozen=True, slots=True)
class _CpuTimes:
    busy: float
    unused: float
    total: float
    own: float
    at: float


class LoadMeter:
    """The load, from the system's own accounts of the cores we may use and this process's: the larger of the two counts."""

    def __init__(
        self, stat: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic, cores: frozenset[int] | None = None,
        *, niced: bool = False,
    ) -> None:  # fmt: skip
        self._stat = stat
        self._clock = clock
        self._follows = cores is None
        self._mask = allowed() if cores is None else cores
        self._cores = usable_cores()
        self.niced = niced
        """Whether niced time counts: where the server itself is niced, so are its calls and those it shares the machine with.
        The load then has the workers' time in it.
        """
        self._last = self._read()
        self._load = 0.0
        self.own = 0.0
        """The part of the cores' time that this process took, when it was last asked."""
        self.unused = 1.0
        """The part that nobody took, when it was last asked. Others' niced work is no load, and yet leaves nothing."""

    def __call__(self) -> float:
        """The load since the last call; the one before where the cores have changed since."""
        if self._follows and self._mask != allowed():
            self._mask, self._cores = allowed(), usable_cores()
            self._last = self._read()
            return self._load
        was, now = self._last, self._read()
        passed, total = now.at - was.at, now.total - was.total
        self._last = now
        machine = (now.busy - was.busy) / total if total > 0 else 0.0
        self.unused = min(1.0, max(0.0, (now.unused - was.unused) / total)) if total > 0 else 1.0
        self.own = min(1.0, max(0.0, (now.own - was.own) / (passed * self._cores))) if passed > 0 else 0.0
        self._load = min(1.0, max(machine, self.own, 0.0))
        return self._load

    def _read(self) -> _CpuTimes:
        """Niced time, which is the workers' unless the server is niced too, is not busy; time stolen by the host is."""
        own, at = time.process_time(), self._clock()
        names = {f"cpu{n}" for n in self._mask}
        busy = unused = total = 0
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
            each = [fields for fields in lines if fields[0] in names] or lines[:1]
            for _, *fields in each:
                user, nice, system, idle, wait, irq, soft, steal = (*map(int, fields[:8]), *[0] * 8)[:8]
                took = user + system + irq + soft + steal
                busy, total = busy + took + (nice if self.niced else 0), total + took + nice + idle + wait
                unused += idle + wait
        except (OSError, ValueError):
            return _CpuTimes(0.0, 0.0, 0.0, own, at)
        return _CpuTimes(busy, unused, total, own, at)


@dataclass(slots=True)
class Price:
    """What background work has cost calls so far."""

    raised_s: float = 0.0
    """Seconds in which workers had more than the lowest priority."""
    taken_s: float = 0.0
    """CPU seconds that they used meanwhile while no core was idle."""
    lost_s: float = 0.0
    """Seconds of calls' work that this amounts to: so many times more where a call waits for several threads."""

    @property
    def lost(self) -> float:
        """The part of their throughput that calls missed meanwhile."""
        return min(1.0, self.lost_s / self.raised_s) if self.raised_s else 0.0


class Governor:
    """The share, the bucket and the priority, step by step."""

    def __init__(self, share: float, cores: int | None = None) -> None:
        self.share = share
        """The part of calls' throughput that workers may cost in the long run, however busy the machine is."""
        self.threads = 1
        """Of a call."""
        self.cores = cores or usable_cores()
        self.granted = 0.0
        """What they can count on now."""
        self.paused = False
        self.pauses = 0
        self.raised = False
        """Whether workers need more than the lowest priority to get their share."""
        self.price = Price()
        self._held = BURST_S * self.cores
        self._behind = 0.0
        self._idle = 1.0
        self._watched_s = 0.0
        """Seconds that idleness is an average of, until they are a window: before the first of them nothing is known of it."""
        self._traffic: float | None = None
        self._demand = 0.0
        self._others = 0.0
        """The part of the machine that other programs use."""
        self._ahead_s = AHEAD_S
        """Seconds whose share is not taken yet; below 0 where slices took more than that."""

    @property
    def most(self) -> float:
        """The part of calls' throughput that workers may cost now: more than the share while some may be taken ahead."""
        left = min(1.0, max(0.0, self._ahead_s / TAPER_S))
        return self.share + left * (self.peak - self.share)

    @property
    def held_up(self) -> float:
        """Threads that wait while a worker has the core of one. A team whose cores other programs share waits for those already,
        and a worker more is one competitor more.
        """
        team = min(self.threads, self.cores)
        shared = min(1.0, max(0.0, self._others * self.cores - (self.cores - team)))
        return 1.0 + (team - 1) * (1.0 - shared)

    @property
    def peak(self) -> float:
        """What they may cost at once."""
        return max(self.share, min(1.0, AHEAD_RATE * self.share))

    def step(
        self, passed: float, used: float, load: float, gain: float = 1.0, traffic: float = 1.0, unused: float = 1.0,
        demand: float = 0.0, workers: int = 1,
    ) -> bool:  # fmt: skip
        """Account for some seconds in which workers used so much CPU time; whether they must stand still now.

        `gain` is the part of calls' time that the work is expected to save, `traffic` the part of the machine that calls use,
        `demand` the part that they would use if they had it to themselves, `unused` the part that nobody used. So
        many `workers` have something to do.
        """
        whole = self.cores * passed
        if whole <= 0:
            return self.paused
        idle = min(unused, max(0.0, 1.0 - load - used / whole))
        weight = min(1.0, passed / WINDOW_S)
        self._watched_s = min(WINDOW_S, self._watched_s + passed)
        self._idle += passed / max(passed, self._watched_s) * (idle - self._idle)
        self._traffic = traffic if self._traffic is None else self._traffic + weight * (traffic - self._traffic)
        self._demand += weight * (min(1.0, demand) - self._demand)
        wanted = max(self._traffic, self._demand)
        self._others += weight * (min(1.0, max(0.0, load - traffic)) - self._others)
        self.granted = granted_share(self.most, gain, wanted, self.held_up)
        self._account(passed, used, idle, weight_of(gain, wanted))
        self._prioritize(whole, used, WHOLE_CORE * workers * passed)
        if self.raised:  # their own time was not idle
            most, income = RAISED_BURST_S, idle + self.granted
        else:  # the lowest priority takes little from calls, whatever is allowed
            most, income = BURST_S, max(0.0, 1.0 - load) + (self.share if gain > 0 else 0.0)
        self._held = min(most * self.cores, self._held + income * whole) - used
        if self.paused:
            self.paused = self._held < RESUME_S * self.cores
        elif self._held < 0:
            self.paused = True
            self.pauses += 1
        return self.paused

    def abreast(self, most: int) -> int:
        """How many of so many workers may run at once.

        A call on several threads waits for the last of them, so a core that a worker has is one that all of its loops wait for,
        however much of the machine looks idle between them: eight workers beside a team of sixteen on sixteen cores made
        calls two to four times as slow. A team on every core leaves one of them (`machine.team_size`).
        """
        beside_calls = self._traffic is not None and self._traffic * self.cores > TEAM_TRAFFIC
        return max(1, min(most, self.cores - self.threads)) if beside_calls and self.threads > 1 else most

    def rest(self) -> None:
        """Nothing waits or runs; what does so next begins with the priority that this had."""
        self.granted, self._behind, self._traffic, self._demand = 0.0, 0.0, None, 0.0

    def rested(self, seconds: float) -> None:
        """Nothing ran for so long, and nothing was taken."""
        self._ahead_s = min(AHEAD_S, self._ahead_s + seconds)

    def forget(self) -> None:
        """That was long ago."""
        self.raised, self._idle, self._watched_s = False, 1.0, 0.0

    def _prioritize(self, whole: float, used: float, useful: float) -> None:
        """Raise where workers that may run fall behind their share, or what they can use; lower where idle cores give as much."""
        if self.raised:
            self.raised = self.granted >= MIN_SHARE and self._idle < max(self.granted, NO_IDLE)
            self._behind = 0.0
        elif self.paused:
            self._behind = 0.0
        else:
            self._behind = max(0.0, self._behind + min(self.granted * whole, useful) - used)
            self.raised = self._behind > BEHIND_S and self.granted >= MIN_SHARE

    def _account(self, passed: float, used: float, idle: float, weight: float) -> None:
        """At the lowest priority workers take a hundredth of what calls want, which is not counted."""
        taken = used if self.raised and idle < NO_IDLE else 0.0
        lost, income = taken * self.held_up / self.cores, passed * (weight if self.raised else 1.0)
        self._ahead_s = min(AHEAD_S, max(-AHEAD_S, self._ahead_s + income - lost / max(1e-9, self.share)))
        if self.raised:
            self.price.raised_s += passed
            self.price.taken_s += taken
            self.price.lost_s += lost
