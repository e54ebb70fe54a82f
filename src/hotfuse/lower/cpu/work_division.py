"""How work is divided among threads: how many tasks, so that every thread has about as much to do as the others.

    24 tasks on 16 threads      two rounds of which the second is half empty: a quarter of the time is lost
    48 half as large            three full rounds

A loop's iterations are shared out in parts that differ by one at most, so only their number and sizes matter. These are hints that
lowering takes from `Core.threads`: a kernel is right on any number of threads, and evenly divided for the one it was cut for.
"""

from __future__ import annotations

from itertools import pairwise

from hotfuse.ir.dims import Dim, expr

MIN_TASKS = 16
"""Iterations of a parallel loop to aim at, where only few threads are known of."""
EVEN = 0.95
"""Mean over longest part, from which on work is divided evenly."""


def rounds(tasks: int, threads: int) -> int:
    """Tasks of the thread that has most."""
    return -(-tasks // max(1, threads))


def balance(tasks: int, threads: int) -> float:
    """Mean over longest part, of tasks that are alike."""
    return 1.0 if tasks < 1 else tasks / (max(1, threads) * rounds(tasks, threads))


def groups(panels: Dim, threads: int) -> Dim:
    """Into how many groups rows are cut at least, where each meets so many panels: the fewest that threads can share evenly."""
    if not isinstance(panels, int):
        return expr("max", 1, expr("ceildiv", max(MIN_TASKS, threads), expr("max", 1, panels)))
    panels = max(1, panels)
    least = -(-max(MIN_TASKS, threads) // panels)
    if threads <= 2:
        return least
    return next((g for g in range(least, least + threads) if balance(g * panels, threads) >= EVEN), least)


def parts(rows: Dim, panels: int, threads: int, least: Dim = 1) -> Dim:
    """Into how many parts rows are cut, where each meets so many panels, and not into fewer than `least`: where rows are known,
    so that the thread with most of them has as few as can be.
    """
    aim = expr("max", least, groups(panels, threads))
    if not isinstance(rows, int) or not isinstance(aim, int) or threads <= 2:
        return expr("min", rows, aim)
    panels = max(1, panels)

    def longest(count: int) -> int:
        return rounds(count * panels, threads) * -(-rows // count)

    first = max(1, min(rows, least if isinstance(least, int) else 1))
    few = range(first, max(first, min(rows, 2 * max(aim, threads))) + 1)
    best = min(map(longest, few))
    return min(rows, next(n for n in few if longest(n) * EVEN <= best))


def largest_share(tasks: int, threads: int, work: list[int]) -> float:
    """The longest thread's work over the mean, where tasks of different sizes are shared out in order."""
    if tasks < 1 or not any(work):
        return 1.0
    bounds = [t * tasks // threads for t in range(threads + 1)]
    longest = max(sum(work[a:b]) for a, b in pairwise(bounds))
    return longest * threads / sum(work)
