"""A race on live calls: while a contest is open, calls are answered by the old and by the new plan in turns, both proven.

The comparison costs nothing and sees what users see: their threads, their load, their sizes. Its rounds are those of
`runtime.tierup.race` and are judged by the same bet. A candidate that takes more than twice as long from the beginning is out
after two rounds, so that calls do not pay for it. Two rounds are no verdict: another program that had the core twice looks the
same, so it is tried again later (decision 406). A round in which the calling thread computed no more than twice as long was lost by
waiting, for a core most likely: it is lost like any other, and ends nothing (decision 432).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import log
from statistics import median
from typing import TYPE_CHECKING

import torch

from hotfuse.runtime.samples import Signature
from hotfuse.runtime.tierup.race import ALPHA, LIVE, MARGIN, Trial, by_far, growth
from hotfuse.runtime.tierup.turns import MAX_KEYS, NEW, OLD, Key, Turns

if TYPE_CHECKING:
    from hotfuse.runtime.plan import Plan

MAX_LIVE_ROUNDS = 400
"""What calls have not decided by then is refused."""
BADLY = 2.0
"""A round in which the new one takes so many times as long was lost badly."""
BAD_ROUNDS = 2
"""So many of them, and no more than as many others, end a contest."""

Meant = Callable[[Sequence[torch.Tensor]], bool]


class LiveContest:
    """Rounds on live calls between an old and a new plan that answer them."""

    def __init__(self, warm_ups: int = 0) -> None:
        """The first `warm_ups` rounds are not judged: on a device a plan's first calls record what later ones replay."""
        self._warm_ups = warm_ups
        self._turns = Turns(id(self) >> 4)
        self._rounds: list[tuple[float, float]] = []
        self._wins = self._bad = 0
        self._computed: dict[Key, list[float | None]] = {}
        """Processor seconds of the calling thread in a key's last call by either side."""
        self.answered_s = 0.0
        """What calls took so far."""
        self._judging = threading.Lock()
        self.over = threading.Event()
        self.trial: Trial | None = None
        """Set before `over` is."""

    def turn(self, key: Key) -> int:
        """Who answers a call."""
        return self._turns.next(key)

    def took(self, key: Key, side: int, seconds: float, computed: float | None = None) -> None:
        """A call was answered, for which the calling thread `computed` so long, where that is known. Rounds that end while another
        one is judged are passed over, so that no call waits.
        """
        self.answered_s += seconds
        if len(self._computed) >= MAX_KEYS and key not in self._computed:
            self._computed.clear()
        of_key = self._computed.setdefault(key, [None, None])
        of_key[side] = computed
        ended = self._turns.took(key, side, seconds)
        if ended is None or not self._judging.acquire(blocking=False):
            return
        try:
            if self.trial is None:
                self._judge(*ended, held_up=_no_more(*of_key))
        finally:
            self._judging.release()

    def _judge(self, old: float, new: float, *, held_up: bool) -> None:
        if self._warm_ups > 0:
            self._warm_ups -= 1
            return
        self._rounds.append((old, new))
        self._wins += new < MARGIN * old
        self._bad += new > BADLY * old and not held_up
        rounds, wins = len(self._rounds), self._wins
        if self._bad >= BAD_ROUNDS and 2 * self._bad > rounds:
            self._end(won=False, decided=False)
        elif rounds <= 16 or rounds % max(1, rounds >> 3) == 0:  # a look at any of them is allowed, and each takes its time
            won = growth(wins, rounds) >= 1 / ALPHA or by_far(self._rounds)
            lost = growth(rounds - wins, rounds) >= 1 / ALPHA
            if won or lost or rounds >= MAX_LIVE_ROUNDS:
                self._end(won=won, decided=won or lost)

    def _end(self, *, won: bool, decided: bool) -> None:
        self.trial = self._so_far(won=won, decided=decided)
        self.over.set()

    def failed(self) -> None:
        """The new plan raised."""
        self.trial = self._so_far(won=False, decided=True)
        self.over.set()

    @property
    def rounds(self) -> int:
        """Rounds that were judged."""
        return len(self._rounds)

    @property
    def ratio(self) -> float | None:
        """What the old one takes over what the new one takes: the middle of what single rounds showed, of two the nearer to one;
        None before the first. Load and sizes that change between rounds change both sides of one.
        """
        found = sorted(max(old, 1e-9) / max(new, 1e-9) for old, new in list(self._rounds))
        if not found:
            return None
        return min(found[(len(found) - 1) // 2], found[len(found) // 2], key=lambda r: abs(log(r)))

    def give_up(self) -> Trial:
        """Ended from outside: what was found, or that nothing was decided."""
        if self.trial is None:
            self._end(won=False, decided=False)
        assert self.trial is not None
        return self.trial

    def _so_far(self, *, won: bool, decided: bool) -> Trial:
        old, new = (median(r[side] for r in self._rounds) * 1e6 if self._rounds else 0.0 for side in (OLD, NEW))
        return Trial(old, new, len(self._rounds), won, decided, LIVE)


def _no_more(old: float | None, new: float | None) -> bool:
    """Whether what the new one computed does not explain that a round was lost badly."""
    return old is not None and new is not None and new <= BADLY * old


class PlanContest(LiveContest):
    """Two plans, one of which may be the model's own code."""

    def __init__(
        self, serving: Plan, new: Plan, *, own: bool = False, signature: Signature | None = None, meant: Meant | None = None,
        warm_ups: int = 0,
    ) -> None:
        super().__init__(warm_ups)
        self.serving = serving
        """What calls are routed to while it is open."""
        self.new = new
        self.own = own
        """The model's own code answers in the place of what calls are routed to."""
        self._signature = signature
        self._meant = meant

    def takes(self, plan: Plan, signature: Signature, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a call is one of those that the new plan is for."""
        if plan is not self.serving or self.trial is not None:
            return False
        return self._signature in (None, signature) and (self._meant is None or self._meant(leaves))

    def answers(self, side: int) -> Plan | None:
        """The plan of a side; None where it is the model's own code."""
        return self.new if side == NEW else None if self.own else self.serving
