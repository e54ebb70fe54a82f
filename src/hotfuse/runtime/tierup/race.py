"""Two plans measured against each other on real calls: interleaved, alternating who goes first, until one has won or lost.

A machine flips between speeds within milliseconds, so rounds are judged in pairs: did the new plan beat the old one by the margin?
The evidence is a bet that cannot be won by patience, against "it does so in at most half of all rounds". A stake is put on every
round. If the claim is true, the stake's expected growth is at most 1, so the chance that it ever grows 1/ALPHA-fold is at most
ALPHA, however often one looks. Half the stake is put on a plan that wins every round, which is through after five of them; the
other half on any chance above one half. One that keeps losing is out as soon. When the time is up, one that has won more rounds
than it lost goes on for a while: calls of a tenth of a second have had five rounds by then, and one that was disturbed must not
decide. What is not decided in the end is refused.

A second bet is on plans that halve the time: of two that are equally fast, one does so by chance in at most one round of four.
Three such rounds and no other are enough: (1/4)³ is less than ALPHA. Where calls take seconds, two rounds fewer are many.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from math import comb
from statistics import median
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.device_clock import clock_of

MARGIN = 0.97
"""What counts as faster: below this fraction of the other's time in the same round."""
ALPHA = 0.05
"""Chance of deploying a plan that is not faster in most rounds."""
MIN_RACE_ROUNDS, MAX_ROUNDS = 5, 200
"""However short the time, enough rounds that one that wins them all can pass; however long it is, an end."""
OVERTIME = 8.0
"""Times its budget that a race may take which the new one leads, and nobody has won."""


HALVED, ROUNDS_HALVED = 0.5, 3
"""A round in which the new one takes less than this part of the other's time was won by far; so many of them decide."""

LIVE = "live calls"
_one = threading.Lock()
"""Two races at the same time would measure each other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured."""

    old_us: float
    new_us: float
    rounds: int
    won: bool
    decided: bool = True
    """Whether the test decided before the time was up."""
    by: str = "rounds in a row"
    """What decided: live calls, rounds while nobody called, or rounds in a row in the call itself (`capture="inline"`)."""


def growth(wins: int, rounds: int) -> float:
    """How much the stake grew: the likelihood of the wins over that under a chance of 1/2, where the chance is 1 by one half, and
    drawn evenly from (1/2, 1) by the other.
    """
    losses = rounds - wins
    # The integral of p^wins (1-p)^losses over (1/2, 1) is a tail of a binomial with rounds + 1 throws at 1/2.
    tail = sum(comb(rounds + 1, k) for k in range(wins + 1)) / 2 ** (rounds + 1)
    evenly = 2 * 2**rounds * tail / ((rounds + 1) * comb(rounds, losses))
    return (evenly + (0 if losses else 2**rounds)) / 2


def by_far(rounds: Sequence[tuple[float, float]]) -> bool:
    """Whether the new one halved the time in every round of enough: seconds of the old and of the new one."""
    return len(rounds) >= ROUNDS_HALVED and all(new < HALVED * old for old, new in rounds)


def race(
    old: Callable[..., Any], new: Callable[..., Any], args: Sequence[Any], budget_s: float,
    clock: Callable[[], float] | None = None, pause: Callable[[float], None] | None = None,
    before: Sequence[tuple[float, float]] = (), undisturbed: Callable[[], bool] | None = None, handicap: float = 1.0,
) -> Trial:
    """Measure until it is decided, after one warm-up each; `pause` is told after a round how long it took, to let others work.

    `before` are rounds that both have just run, on calls that may have other sizes: seconds of the old and of the new one. They
    count like others, and nobody needs to be warmed up behind them. A round does not count that `undisturbed` says was not.
    Below 1, `handicap` is the part of the old one's time that something takes which the new one must beat in its place.
    """
    with _one:
        return _race(old, new, args, budget_s, clock or clock_of(args), pause, before, undisturbed, handicap)


def _race(
    old: Callable[..., Any], new: Callable[..., Any], args: Sequence[Any], budget_s: float, clock: Callable[[], float],
    pause: Callable[[float], None] | None, before: Sequence[tuple[float, float]], undisturbed: Callable[[], bool] | None,
    handicap: float,
) -> Trial:  # fmt: skip
    times: tuple[list[float], list[float]] = ([handicap * was for was, _ in before], [now for _, now in before])
    wins = sum(now < MARGIN * was for was, now in zip(*times, strict=True))
    turn = len(before)
    with torch.no_grad():
        if not before:
            old(*args)
            new(*args)
        start = clock()
        while True:
            took = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                run = (old, new)[side]
                begin = clock()
                run(*args)
                took[side] = clock() - begin
            turn += 1
            if undisturbed is None or undisturbed():
                times[0].append(handicap * took[0])
                times[1].append(took[1])
                wins += took[1] < MARGIN * handicap * took[0]
            rounds = len(times[0])
            late = clock() - start >= budget_s * (OVERTIME if 2 * wins > rounds else 1.0)
            won = growth(wins, rounds) >= 1 / ALPHA or by_far(list(zip(*times, strict=True)))
            lost = growth(rounds - wins, rounds) >= 1 / ALPHA
            # however short the time, rounds are enough for one that wins them all, unless others are in the way for long
            over = rounds >= MAX_ROUNDS or (late and (rounds >= MIN_RACE_ROUNDS or turn >= 2 * MIN_RACE_ROUNDS + len(before)))
            if won or lost or over:
                us = [median(t) * 1e6 if t else 0.0 for t in times]
                return Trial(us[0], us[1], rounds, won, won or lost)
            if pause is not None:
                pause(sum(took))


def _after_fork() -> None:
    global _one
    _one = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
