"""What holds a partition back, which strategies address that, and whether they did.

    profile      what one execution took and moved, level by level
    bottleneck   the resource it used most of; or latency, or imbalance, where it used little of everything
    ledger       outcomes of strategies against bottlenecks: what helped before is proposed first

Utilizations are derived: counted operations and bytes over measured time, against the machine's roofline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.roofline import Roofline
from hotfuse.machine.peaks import LEVELS

LATENCY_BOUND_BELOW = 0.25
"""The part of a peak from which on it is what limits."""
BALANCED = 0.75
"""The mean of the threads' busy times over the longest, from which on work is spread evenly."""
PRIOR = 2.0
"""Outcomes that not knowing counts as, half of them good."""


class Bottleneck(StrEnum):
    """What limits a partition."""

    COMPUTE = "compute"
    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    MEMORY = "memory"
    LATENCY = "latency"
    """The cost of calling it, or a chain of dependent steps."""
    IMBALANCE = "imbalance"
    """Some threads wait for others."""
    UNKNOWN = "unknown"


class Strategy(StrEnum):
    """What can be done; the names of the fusion engine's candidates, and what other engines offer."""

    VERTICAL = "vertical"
    EPILOGUE = "epilogue"
    HORIZONTAL = "horizontal"
    TILING = "tiling"
    RECOMPUTE = "recompute"
    SPLIT = "split"
    LIBRARY = "library"
    LAYOUT = "layout"
    SPECIALIZE = "specialize"
    """Sizes as numbers, constant inputs, skipped rows."""
    THREADS = "threads"
    """Another number of threads."""


_B, _S = Bottleneck, Strategy
ADDRESSES: Mapping[Bottleneck, tuple[Strategy, ...]] = {
    _B.COMPUTE: (_S.SPECIALIZE, _S.LIBRARY, _S.SPLIT, _S.THREADS),
    _B.L1: (_S.EPILOGUE, _S.VERTICAL, _S.SPLIT, _S.LAYOUT),
    _B.L2: (_S.EPILOGUE, _S.VERTICAL, _S.TILING, _S.SPLIT),
    _B.L3: (_S.TILING, _S.VERTICAL, _S.RECOMPUTE, _S.LAYOUT),
    _B.MEMORY: (_S.VERTICAL, _S.TILING, _S.RECOMPUTE, _S.HORIZONTAL, _S.SPECIALIZE),
    _B.LATENCY: (_S.VERTICAL, _S.HORIZONTAL, _S.EPILOGUE, _S.SPECIALIZE, _S.THREADS),
    _B.IMBALANCE: (_S.SPLIT, _S.THREADS, _S.HORIZONTAL),
    _B.UNKNOWN: (),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """One execution."""

    seconds: float
    flops: float
    traffic: float
    """Bytes that enter and leave."""
    footprint: float
    """Bytes in use at once: they decide which level the traffic comes from."""
    moved: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes per level (`L1`, `L2`, `L3`, `memory`) where counters or a cache model tell; else all of them come from one."""
    busy_s: Sequence[float] = ()
    """Per thread, where it was measured."""
    calls: int = 1
    """Kernels or operators that it takes."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A bottleneck with its evidence."""

    bottleneck: Bottleneck
    utilization: Mapping[str, float]
    """Of compute and of each level."""
    overhead: float
    """The part of the time that calling takes."""
    balance: float
    """Mean over longest busy time of the threads; 1 where nobody measured it."""
    source: str = "derived"
    measured: bool = True
    """Whether the peaks were; else they are guesses."""

    @property
    def because(self) -> str:
        """For a reader."""
        most = max(self.utilization, key=lambda n: self.utilization[n], default="")
        used = _share(self.utilization[most], most, measured=self.measured) if most else "nothing is known of its work"
        match self.bottleneck:
            case Bottleneck.IMBALANCE:
                return f"threads are busy {self.balance:.0%} of the longest one's time; {used}"
            case Bottleneck.LATENCY:
                return f"calling takes {self.overhead:.0%}; at most {used}"
            case _:
                return used


def _share(part: float, of: str, *, measured: bool) -> str:
    """Nothing uses more than all of a peak: then the peak lies too low, and the reader is told so."""
    if part <= 1.0:
        return f"{part:.0%} of {of}"
    why = "it moves or computes less than its operators say" if measured else "that roofline is a guess, and too low"
    return f"all of {of}, {part:.2f} times the roofline: {why}"


def diagnose(of: Profile, at: Roofline) -> Diagnosis:
    """What limits an execution on a machine."""
    if not (of.seconds > 0 and all(map(math.isfinite, (of.seconds, of.flops, of.traffic, of.footprint)))):
        return Diagnosis(Bottleneck.UNKNOWN, {}, 0.0, 1.0)
    moved = dict(of.moved) or {LEVELS[int(at.level(np.array([max(of.footprint, 1.0)]))[0])]: of.traffic}
    used = {"compute": of.flops / at.flops / of.seconds}
    used |= {n: moved[n] / at.speeds[LEVELS.index(n)] / of.seconds for n in LEVELS if n in moved}
    overhead = min(1.0, (of.calls * at.call_s + at.fork_s) / of.seconds)
    balance = sum(of.busy_s) / len(of.busy_s) / max(of.busy_s) if of.busy_s and max(of.busy_s) > 0 else 1.0
    most = max(used, key=lambda n: used[n])
    if balance < BALANCED:
        found = Bottleneck.IMBALANCE
    elif used[most] < LATENCY_BOUND_BELOW or overhead > 0.5:
        found = Bottleneck.LATENCY
    else:
        found = Bottleneck(most)
    return Diagnosis(found, used, overhead, balance, measured=at.measured)


@dataclass(slots=True)
class Tried:
    """Outcomes of one strategy against one bottleneck."""

    count: int = 0
    helped: int = 0
    gain: float = 0.0
    """Sum of log(before / after)."""

    @property
    def promise(self) -> float:
        """How likely it helps, with a doubt that shrinks as outcomes come in."""
        return (PRIOR / 2 + self.helped) / (PRIOR + self.count)


@dataclass(slots=True)
class Ledger:
    """Whether strategies did what they were chosen for."""

    rows: dict[tuple[Bottleneck, Strategy], Tried] = field(default_factory=dict[tuple[Bottleneck, Strategy], Tried])

    def propose(self, for_: Diagnosis) -> list[tuple[Strategy, float]]:
        """Strategies with their promise, the most promising first; equal ones in the order of the table."""
        known = [(s, self.rows.get((for_.bottleneck, s), Tried()).promise) for s in ADDRESSES[for_.bottleneck]]
        return sorted(known, key=lambda k: -k[1])

    def learn(
        self, bottleneck: Bottleneck, strategy: Strategy, before_s: float, after_s: float, noise: float = 0.03
    ) -> bool:
        """A strategy was tried: whether it helped by more than the noise of measuring."""
        helped = after_s < before_s * (1 - noise)
        row = self.rows.setdefault((bottleneck, strategy), Tried())
        row.count, row.helped = row.count + 1, row.helped + helped
        row.gain += math.log(before_s / after_s) if before_s > 0 and after_s > 0 else 0.0
        return helped

    def promise(self, bottleneck: Bottleneck, strategy: Strategy) -> float:
        """How likely a strategy helps; 0 for one that does not address the bottleneck."""
        if strategy not in ADDRESSES[bottleneck]:
            return 0.0
        return self.rows.get((bottleneck, strategy), Tried()).promise

    def state(self) -> dict[str, list[float]]:
        """Plain numbers, for a store."""
        return {f"{b.value} {s.value}": [float(t.count), float(t.helped), t.gain] for (b, s), t in self.rows.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """The reverse of `state`; raises ValueError for what no ledger wrote."""
        found: dict[tuple[Bottleneck, Strategy], Tried] = {}
        for name, (count, helped, gain) in state.items():
            b, _, s = name.partition(" ")
            if not (0 <= helped <= count and math.isfinite(gain)):
                raise ValueError(f"{helped} of {count} outcomes of {name!r} were good")
            found[Bottleneck(b), Strategy(s)] = Tried(int(count), int(helped), float(gain))
        self.rows = found
