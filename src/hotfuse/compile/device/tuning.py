"""Kernels chosen inside the whole plan: the one that is fastest by itself is often not, between its neighbours.

Alone a kernel finds its operands in other caches, and nobody waits for its first or its last program. So after the trials of single
kernels the plan as a whole is measured, with one kernel exchanged at a time: coordinate descent, the groups that take most first.
It goes on until no exchange helps, or the time for it is over. Every candidate has given the right results in its trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass

LIBRARY = -1
"""The choice of no kernel."""
ROUNDS = 6
"""Measurements of each of two plans, in turns; the least counts."""
GLANCE = 2
"""Rounds after which a plan that is clearly slower is given up."""
HOPELESS = 1.05
MIN_GAIN = 0.006
"""Part of the plan's time that an exchange must save: the least of several measurements repeats about as well."""
MAX_OVER_BEST = 1.3
"""Candidates that took more than so many times the best one's time alone are not tried in the plan."""
MAX_OTHERS = 3

Choice = Mapping[str, int]
"""By group, the number of its kernel among its candidates."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """What was found."""

    chosen: dict[str, int]
    before_us: float
    after_us: float
    exchanged: int
    complete: bool
    """Whether every exchange was tried."""


def alternatives(us: Sequence[float | None], chosen: int, library_us: float) -> list[int]:
    """Candidates that are worth a try instead of the chosen one, by what they took alone; None is one that was wrong."""
    best = min((t for t in us if t is not None), default=library_us)
    bound = MAX_OVER_BEST * min(best, library_us)
    near = sorted((t, i) for i, t in enumerate(us) if t is not None and i != chosen and t <= bound)
    return [i for _, i in near[:MAX_OTHERS]]


def descended(
    start: Choice, others: Mapping[str, Sequence[int]], measure: Callable[[Choice], float], over: Callable[[], bool]
) -> TunedChoice:
    """The best choice that is found from a first one; `measure` gives a plan's seconds once, `others` has the groups in order."""
    chosen, exchanged = dict(start), 0
    begin = now = min(measure(chosen) for _ in range(ROUNDS))
    tried: set[tuple[tuple[str, int], ...]] = {tuple(chosen.items())}
    helped = True
    while helped and not over():
        helped = False
        for group, choices in others.items():
            for other in (*choices, start[group]):
                candidate = {**chosen, group: other}
                if over():
                    break
                if tuple(candidate.items()) in tried:
                    continue
                tried.add(tuple(candidate.items()))
                held, new = _in_turns(chosen, candidate, measure)
                now = min(now, held)
                if new < (1 - MIN_GAIN) * held:
                    chosen, now, helped, exchanged = candidate, new, True, exchanged + 1
    complete = not over()
    if exchanged:
        begin, now = _in_turns(start, chosen, measure)
        if now >= begin:  # what was measured beside calls does not repeat
            return TunedChoice(dict(start), begin * 1e6, begin * 1e6, 0, complete=complete)
    return TunedChoice(chosen, begin * 1e6, now * 1e6, exchanged, complete=complete)


def _in_turns(one: Choice, other: Choice, measure: Callable[[Choice], float]) -> tuple[float, float]:
    least = [float("inf"), float("inf")]
    for number in range(ROUNDS):
        for i, choice in enumerate((one, other)):
            least[i] = min(least[i], measure(choice))
        if number + 1 == GLANCE and least[1] > HOPELESS * least[0]:
            break
    return least[0], least[1]
