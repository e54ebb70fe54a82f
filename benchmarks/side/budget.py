"""How cases share the time of a run: nobody can use up what belongs to those after it.

When a case begins, what is left is divided among it and all that follow, by what each is known to need. So a case that ends early
leaves something to all the others, one that is late takes from all of them a little, and every case has its part. Inside a case
the same holds for contenders: however long one takes to get ready, each behind it keeps a minimum, and so does the measuring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.side.cases import Case

Clock = Callable[[], float]

LOAD_S, MIN_LOAD_S, PREPARING_S = 150.0, 8.0, 45.0
"""The longest and the shortest time that a contender is given to get ready; what all processes together have to start, at least."""
PATIENCE = 1.5
"""Nobody is late before so many times what it is known to take."""
MIN_ROUNDS, MIN_TRAFFIC_S = 5, 10.0

PREPARE_S, TURN_S, TAIL_S = 1.0, 0.05, 2.0
"""Per contender: importing torch and building the model (two at a time), one turn; per case: export, comparing, asking."""
READY_S = {"hotfuse": 4.0, "hotfuse-tier0": 2.5, "eager": 0.2, "inductor": 10.5, "inductor-freezing": 17.5,
           "inductor-autotune": 3.5, "inductor-dynamic": 12.0, "ort": 0.3, "openvino": 1.3, "jax": 0.8, "iree": 1.3, "tvm": 1.8,
           "tinygrad": 0.5}  # fmt: skip
"""Seconds until a contender can be timed on a small model, imports included; two processors, nothing in its caches."""


def starts(rounds: int) -> int:
    """Samples of a start, each of a fresh process."""
    return max(1, min(3, rounds // 5))


def need_s(case: Case, names: Sequence[str], rounds: int, seconds: float) -> float:
    """Roughly what a case takes."""
    ready = sum(READY_S[n] + PREPARE_S for n in names)
    if case.suite in ("startup", "compile"):
        waits = sum(READY_S[n] for n in names if case.suite == "compile" or n.startswith("inductor"))
        return TAIL_S + starts(rounds) * (PREPARE_S * len(names) + waits + case.heavy_s)
    return TAIL_S + ready + case.heavy_s + len(names) * (seconds if case.trace else (rounds + 1) * TURN_S)


class Purse:
    """The time of a whole run, handed out case by case."""

    def __init__(self, needs: Sequence[float], seconds: float, clock: Clock = time.monotonic) -> None:
        self.needs, self.clock = list(needs), clock
        self.ends = clock() + seconds

    def next(self) -> float:
        """Seconds for the case that begins now: its part of what is left."""
        need, all_left = self.needs[0], sum(self.needs)
        del self.needs[0]
        return max(0.0, self.ends - self.clock()) * need / all_left


@dataclass(slots=True)
class Allowance:
    """One case's time, and who in it may take how much."""

    seconds: float
    reserve_s: float
    """Kept for measuring once everybody is ready."""
    own_s: float = 0.0
    """What of that is each contender's own stream of traffic: there, getting ready is part of serving."""
    clock: Clock = time.monotonic
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def left(self) -> float:
        """Seconds until the case should end; negative when it is late."""
        return self.begun + self.seconds - self.clock()

    def to_prepare(self, names: Sequence[str]) -> float:
        """For all processes together, side by side, before these get ready one by one; no merit of theirs, so there is patience."""
        return min(LOAD_S, max(PREPARING_S, self.left() - self.reserve_s - _ready(names)))

    def to_load(self, name: str, behind: Sequence[str]) -> float:
        """For one contender to get ready: all but what those behind it are known to take."""
        free = self.left() - self.reserve_s + self.own_s - _ready(behind)
        return min(LOAD_S, max(MIN_LOAD_S, PATIENCE * READY_S.get(name, 0.0), free))

    def another(self, done: int, least: int, last_s: float) -> bool:
        """Whether one more round, which takes about as long as the last one, still fits."""
        return done < least or self.left() >= last_s


def _ready(names: Sequence[str]) -> float:
    return sum(READY_S.get(n, 0.0) for n in names)


def traffic_s(seconds: float, allowed: float, fixed: float, contenders: int) -> float:
    """How long each stream of traffic may be: as asked, or as long as fits, but never too short to tell its parts apart."""
    return min(seconds, max(MIN_TRAFFIC_S, (allowed - fixed) / max(1, contenders)))


def allowance(
    case: Case, names: Sequence[str], allowed: float, rounds: int, seconds: float, clock: Clock = time.monotonic
) -> Allowance:
    """A case's time with its reserve: the streams in full, or the least number of rounds."""
    if case.suite in ("startup", "compile"):
        return Allowance(allowed, 0.0, clock=clock)
    if case.trace:
        return Allowance(allowed, len(names) * seconds, seconds, clock)
    reserve = min(allowed / 3, len(names) * (min(rounds, MIN_ROUNDS) + 1) * TURN_S + case.heavy_s / 10)
    return Allowance(allowed, reserve, clock=clock)
