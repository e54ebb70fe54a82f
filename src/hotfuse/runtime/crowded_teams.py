"""Whether the model's own code, and a plan on the library's kernels, has its team of threads or the calling thread alone.

A loop of the library ends with its last thread. Where other programs (or our own workers) occupy cores of a small team, one of its
threads waits in the scheduler's queue for a whole time slice, in every loop, and the others wait for it. On two cores beside one
busy program, an encoder took 115 ms on two threads and 24 ms on one. Native runs find that out by themselves
(`backends.llvm.threads.alone`); the library does not. So calls that are timed anyway tell how long they took with their team.
Where they take clearly longer than before, one call is tried on a single thread. The quicker side goes on, and the other is tried
again rarely. Sizes of calls make kinds, four to a power of two.

Nothing is done for short calls, whose loops are few, nor for teams of four threads and more: those leave cores in another way
(`machine.team_size`), and one thread is seldom quicker than the rest of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import log2
from typing import Any, TypeVar

import torch

from hotfuse.machine import team_size
from hotfuse.machine.cores import usable_cores

MIN_S = 1e-3
"""Calls that take less are left alone: setting threads and two looks at the clock are some ten microseconds."""
CROWDED = 1.25
"""A team that takes more than this times its least time, on average, shares its cores with somebody."""
WEIGHT = 0.25
"""Of the newest call in an average. It counts for at most twice the average: one call that was held up says nothing."""
COLD_CALLS = 2
"""Calls of a kind that say nothing: they find memory untouched and nothing prepared."""
SOONEST, LATEST = 4, 128
"""Calls on one thread before the team is tried again, since cores may be free by then: the sooner, the less that costs."""
STALE_S = 2.0
"""What is known of a team for longer says nothing: where calls of the own code are rare, as those of an audit, nobody would notice
that its cores are free."""
TRY_COSTS = 16
"""The part of the time, one in so many, that such a try may cost."""
SELDOM, RETRY = 48, 128
"""Calls with the team, where that is quicker, before one thread is tried again: as many as keep that below a hundredth."""
MAX_KINDS = 64
CONCERNED = 8
"""Calls behind a long one that are taken for long ones, too: finding their kind takes some microseconds."""
MAX_DEPTH = 4
"""Of lists and dicts in the arguments."""
T = TypeVar("T")


class TeamChoice:
    """One kind of calls. Threads that call at the same time may write over each other's times, which are averages."""

    __slots__ = ("_again", "_team_at", "alone_s", "calls", "least_s", "team_s")

    def __init__(self) -> None:
        self.least_s = self.team_s = self.alone_s = 0.0
        """The quickest call with the team; averages with it and on one thread. 0: not known."""
        self.calls = 0
        self._team_at = 0.0
        """When a call with the team ended."""
        self._again = 0
        """The call that tries what is slower again."""

    @property
    def prefers_one(self) -> bool:
        """Whether one thread is the quicker way."""
        return 0.0 < self.alone_s < self.team_s

    @property
    def crowded(self) -> bool:
        """Whether the team shares its cores with somebody."""
        return self.team_s > CROWDED * self.least_s

    def next_alone(self, threads: int, now: float = 0.0) -> bool:
        """Whether the next call, which begins `now`, is on one thread. That cannot take longer than the team's least time for each
        of its threads: it is tried only where this is at most twice what the team takes now.
        """
        self.calls += 1
        if self.team_s < MIN_S:  # also where nothing is known yet
            return False
        may = self.crowded and threads * self.least_s <= 2 * self.team_s
        if not self.alone_s:
            return may
        if self.prefers_one and now - self._team_at > STALE_S:
            self._again = 0
        if self.calls < self._again:
            return self.prefers_one
        self._again = self.calls + self._interval()
        return may and not self.prefers_one

    def _interval(self) -> int:
        """Calls until what is slower is tried again."""
        slow, quick = max(self.team_s, self.alone_s), min(self.team_s, self.alone_s)
        more = (slow - quick) / quick
        return min(max(int(TRY_COSTS * more), SOONEST), LATEST) if self.prefers_one else max(int(RETRY * more), SELDOM)

    def took(self, seconds: float, *, alone: bool, now: float = 0.0) -> None:
        """A call ended. A team that is quick again after a try is believed at once: its cores are free."""
        if alone:
            self.alone_s = _averaged(self.alone_s, seconds)
            self._again = self._again or self.calls + self._interval()
            return
        self._team_at = now
        if self.calls <= COLD_CALLS:
            return
        self.least_s = min(self.least_s or seconds, seconds)
        free = self.prefers_one and seconds < min(self.alone_s, CROWDED * self.least_s)
        self.team_s = seconds if free else _averaged(self.team_s, seconds)


def _averaged(before: float, seconds: float) -> float:
    return before + WEIGHT * (min(seconds, 2 * before) - before) if before else seconds


class CrowdedTeams:
    """The choices of one engine."""

    def __init__(
        self, own_code: Callable[..., Any], exchange: Callable[[Callable[..., Any]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._plain, self._exchange, self._clock = own_code, exchange, clock
        """`exchange` is told what calls of the model's own code that nobody looks at go to: itself, while no kind of it prefers one
        thread, so that these pay for nothing.
        """
        self._choices: dict[tuple[int | None, int], TeamChoice] = {}
        self._watched = False
        self.concerned = 0
        """Calls for which it is asked who is quicker: without long ones among the last, nothing is."""
        self.on_one_thread = 0
        """Calls."""
        self.crowded: frozenset[int] = frozenset()
        """Entries whose calls on the library's kernels preferred one thread of late: all of them are to be looked at."""

    def seen(self, seconds: float) -> None:
        """A call was timed."""
        if seconds >= MIN_S:
            self.concerned = CONCERNED
        elif self.concerned:
            self.concerned -= 1
            if not self.concerned:
                self.crowded = frozenset()
                self._watch()

    def own_code(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call with the model's own code, on as many threads as are quicker."""
        if not self.concerned:
            begin = self._clock()
            result = self._plain(*args, **kwargs)
            self.seen(self._clock() - begin)
            return result
        threads = torch.get_num_threads()
        choice = self._choice((args, kwargs), None) if _concerns(threads) else None
        if choice is None:
            return self._plain(*args, **kwargs)
        result = self._run(choice, threads, lambda: self._plain(*args, **kwargs))
        self._watch()
        return result

    def library_plan(self, key: int, run: Callable[..., T], leaves: Sequence[torch.Tensor]) -> T:
        """Run an entry's plan on the library's kernels, with the team that was faster for such calls."""
        threads = torch.get_num_threads()
        choice = self._choice(leaves, key) if _concerns(threads) else None
        if choice is None:
            return run(*leaves)
        result = self._run(choice, threads, lambda: run(*leaves))
        if choice.prefers_one is not (key in self.crowded):
            self.crowded = self.crowded | {key} if choice.prefers_one else self.crowded - {key}
        return result

    def _run(self, choice: TeamChoice, threads: int, call: Callable[[], T]) -> T:
        begin = self._clock()
        alone = choice.next_alone(threads, begin)
        if alone:
            self.on_one_thread += 1
            with team_size.alone():
                result = call()
        else:
            result = call()
        ended = self._clock()
        choice.took(ended - begin, alone=alone, now=ended)
        self.seen(ended - begin)
        return result

    def _choice(self, values: object, key: int | None) -> TeamChoice | None:
        """The choice for calls with such values; None where they are on a device or have no size, and for kinds beyond so many."""
        size = _size(values, MAX_DEPTH)
        if size is None:
            return None
        kind = (key, round(4 * log2(1 + size)))
        found = self._choices.get(kind)
        if found is None and len(self._choices) < MAX_KINDS:
            found = self._choices.setdefault(kind, TeamChoice())
        return found

    def _watch(self) -> None:
        """Have calls that nobody looks at take part while some kind of them prefers one thread."""
        watched = self.concerned > 0 and any(c.prefers_one for (key, _), c in list(self._choices.items()) if key is None)
        if watched is not self._watched:
            self._watched = watched
            self._exchange(self.own_code if watched else self._plain)


def _size(value: object, depth: int) -> int | None:
    """Elements of the tensors in a call's arguments; None where that does not say what the call is like."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_cpu else None
    if value is None or isinstance(value, (bool, int, float, str)):
        return 0
    if not depth or not isinstance(value, (tuple, list, dict)):
        return None
    total = 0
    for part in value.values() if isinstance(value, dict) else value:
        if (size := _size(part, depth - 1)) is None:
            return None
        total += size
    return total


def _concerns(threads: int) -> bool:
    """Whether a team of so many may be crowded in the way that one thread is the answer to. Who trains is promised what the model's
    own code gives to the last bit (decision 41), which another number of threads may change.
    """
    small = 1 < threads < team_size.SPARE_FROM and usable_cores() < team_size.SPARE_FROM
    return small and not torch.is_grad_enabled()
