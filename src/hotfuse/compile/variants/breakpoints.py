"""How far measured breakpoints of kernels lay from predicted ones, remembered over processes: the next prediction begins there.

    "few rows | any size"   [breakpoints seen, sum of log(measured / predicted), 0]

Counts add up in the store, so many processes may learn at once; without one, a process remembers for itself.
"""

from __future__ import annotations

import math

from hotfuse.compile.learn.learned import notes
from hotfuse.fusion.crossover import Shifts

NAME = "breakpoints"
_BETWEEN = " | "


def remembered(own: Shifts) -> Shifts:
    """What the store of the request in hand remembers; this process's own where nothing is kept."""
    kept = notes()
    if kept is None or not kept.place.record:
        return own
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for name, numbers in kept.store.remembered(NAME, kept.host.machine).items():
        left, between, right = name.partition(_BETWEEN)
        if between and len(numbers) == 3 and numbers[0] >= 1:
            found[left, right] = (numbers[1], int(numbers[0]))
    return Shifts(found)


def learn(own: Shifts, variants: tuple[str, str], predicted: int, measured: int) -> None:
    """A breakpoint was measured."""
    own.learn(variants, predicted, measured)
    kept = notes()
    if kept is not None and kept.place.record:
        off = math.log(max(measured, 1) / max(predicted, 1))
        kept.store.remember(NAME, {_BETWEEN.join(variants): [1.0, off, 0.0]}, kept.host.machine)
