"""Two plans measured against each other on one real call: interleaved, alternating who goes first.

A machine flips between speeds within milliseconds, so rounds are judged in pairs: the new plan wins if it is faster in most
of them, and by a margin on the median. Inference goes on beside, so both sides see the same disturbance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

MARGIN = 0.97
"""The new median must be below this fraction of the old one."""
MOST = 0.65
"""Fraction of rounds the new plan must win."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured."""

    old_us: float
    new_us: float
    rounds: int
    won: bool


def race(
    old: Callable[..., Any], new: Callable[..., Any], args: Sequence[Any], budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Measure until the budget is spent, at least 5 and at most 200 rounds, after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        old(*args)
        new(*args)
        start = clock()
        while len(times[0]) < 5 or (len(times[0]) < 200 and clock() - start < budget_s):
            order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
            for side in order:
                run = (old, new)[side]
                begin = clock()
                run(*args)
                times[side].append(clock() - begin)
    before, after = median(times[0]), median(times[1])
    wins = sum(b < a for a, b in zip(*times, strict=True)) / len(times[0])
    return Trial(before * 1e6, after * 1e6, len(times[0]), after < MARGIN * before and wins >= MOST)
