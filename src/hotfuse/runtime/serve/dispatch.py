"""The inline cache of a call site: from a call's tensors to the first case whose facts hold, in one native call.

    empty -> monomorphic -> polymorphic (at most `limit` cases) -> generic

Cases are kept in one immutable table that is exchanged by a single reference store. A new table serves through generated Python
at once; a background job compiles the native decision over the same cases and exchanges it again. Hits per case and misses per
fact are counted, in Python and in native code.

A more special case stands before a more general one. When there is no room, the case that was hit least of late goes. A site that
keeps throwing out cases it has just made becomes generic: special cases are dropped in favour of the general ones, and none is
taken until `reopen` (the traffic changed).
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

from hotfuse.analysis.call_facts import Facts, fact_text
from hotfuse.analysis.decision import DecisionDag, decide
from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.serve.fact_checks import python_select
from hotfuse.runtime.serve.guards import python_guard

T = TypeVar("T")
Job = Callable[[], None]
Retire = Callable[[object, Job], None]
THRASHING = 2
"""Times the limit that cases may be thrown out before a site is generic."""
MAX_MISSES = 64
"""Facts that misses are counted by; those of further ones are counted together. Facts hold sizes, which random shapes never end."""
OTHERS = "other facts"
PAID = 32
"""Hits per case, between two changes, after which what was thrown out before is forgotten."""


class SiteState(StrEnum):
    """How many kinds of calls a site serves."""

    EMPTY = "empty"
    MONOMORPHIC = "monomorphic"
    POLYMORPHIC = "polymorphic"
    GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class Case(Generic[T]):
    """What a call must bring, and what it then gets."""

    facts: Facts
    target: T

    def covers(self, other: Case[T]) -> bool:
        """Whether every call that fits the other fits this one."""
        return set(self.facts) <= set(other.facts)


class _Tallies:
    """Hits and misses counted by Python code, under a lock."""

    def __init__(self, plans: int) -> None:
        self._lock = threading.Lock()
        self._hits = [0] * plans
        self.missed: Counter[int] = Counter()

    def count(self, answer: int) -> int:
        with self._lock:
            if answer >= 0:
                self._hits[answer] += 1
            else:
                self.missed[-1 - answer] += 1
        return answer

    def read(self, facts: int) -> Sequence[int]:
        with self._lock:
            return [*self._hits, *(self.missed[n] for n in range(facts))]

    def after_fork(self) -> None:
        self._lock = threading.Lock()


class DispatchTable(Generic[T]):
    """Cases and the function that tells them apart.

    Cases can only be struck out: calls that fit one then get the next case that covers it, or nothing, at the cost of a look-up
    that they make anyway. So nothing has to be compiled where a call path finds that plans must go.
    """

    def __init__(
        self, cases: tuple[Case[T], ...], decision: Callable[[], DecisionDag | None], select: Callable[..., int],
        numbers: Callable[[], Sequence[int]], *, native: bool, after_fork: Job = lambda: None,
    ) -> None:
        self.cases = cases
        """Those that are left."""
        self.routes: tuple[T | None, ...] = tuple(c.target for c in cases)
        """The target of a call, by the number that `select` gives."""
        self.select = select
        """`select(*tensors)`: the number of a case, or below 0 the fact that failed."""
        self.decision = decision
        """What `select` goes by; None where plans differ in too many ways for one."""
        self.native = native
        self.after_fork = after_fork
        """In a forked child: lets go of a lock that a thread of the parent may have held."""
        self._numbers = numbers
        self._owners: list[Case[T] | None] = list(cases)

    def strike(self, gone: Sequence[Case[T]]) -> None:
        """Send the calls of some cases elsewhere, by one reference store."""
        left = tuple(c for c in self.cases if not any(c is g for g in gone))
        routes = list(self.routes)
        for n, case in enumerate(self._owners):
            if case is not None and any(case is g for g in gone):
                self._owners[n] = None
                cover = next((c for c in left if c.covers(case)), None)
                routes[n] = cover.target if cover is not None else None
                for m, owner in enumerate(self._owners):  # what was sent to it before goes on with it
                    if owner is None and self.routes[m] is case.target:
                        routes[m] = routes[n]
        self.cases, self.routes = left, tuple(routes)

    @property
    def targets(self) -> tuple[T, ...]:
        """The targets of the cases that are left."""
        return tuple(c.target for c in self.cases)

    def hits(self) -> list[tuple[T, int]]:
        """Calls that each case that is left has had since the table was made."""
        return [(c.target, n) for c, n in zip(self._owners, self._numbers()[: len(self._owners)], strict=True) if c is not None]

    def misses(self) -> dict[str, int]:
        """Misses per fact since the table was made."""
        counted = list(self._numbers()[len(self._owners) :])
        if not any(counted):
            return {}
        decision = self.decision()
        if decision is None:
            return {f"no one of {len(self._owners)} cases fits": sum(counted)}
        return {fact_text(f): n for f, n in zip(decision.facts, counted, strict=True) if n}


def _nothing(*_leaves: Any) -> int:
    return -1


@functools.lru_cache(256)
def _guard(facts: Facts, inputs: int) -> Callable[..., bool]:
    """Generating a predicate takes milliseconds, and most cases of a table were in the one before."""
    return python_guard(facts, inputs)[0]


def python_table(cases: tuple[Case[T], ...], inputs: int) -> DispatchTable[T]:
    """A table that serves at once: cases asked one after another; which fact failed is worked out only after a miss."""
    facts = [c.facts for c in cases]  # what follows must not hold the targets of cases that were struck out
    guards = [_guard(f, inputs) for f in facts]

    @functools.cache
    def decision() -> DecisionDag | None:
        try:
            return decide(facts, inputs) if facts else None
        except InternalError:  # too many differences for a tree; `native_table` says so
            return None

    tallies = _Tallies(len(cases))

    def select(*leaves: Any) -> int:
        for n, guard in enumerate(guards):
            if guard(*leaves):
                return tallies.count(n)
        tree = decision()
        return tallies.count(min(-1, python_select(tree)(*leaves)) if tree is not None else -1)

    def numbers() -> Sequence[int]:
        tree = decision() if tallies.missed else None
        return tallies.read(len(tree.facts) if tree is not None else 1)

    return DispatchTable(cases, decision, select if cases else _nothing, numbers, native=False, after_fork=tallies.after_fork)


def native_table(table: DispatchTable[T], inputs: int) -> DispatchTable[T]:
    """The cases that are left with a native decision; raises InternalError where there cannot be one."""
    from hotfuse.native.guard import native_select  # LLVM is loaded when a site first gets that far

    cases = table.cases
    decision = decide([c.facts for c in cases], inputs)
    native = native_select(decision)
    return DispatchTable(cases, lambda: decision, native.select, lambda: native.counters, native=True)


class InlineCache(Generic[T]):
    """The cases of one site.

    `submit` runs the compilation of a native decision in the background; without it the site stays on Python. `retire` holds a
    table that no new call can find until no call is in it.
    """

    def __init__(
        self, inputs: int, limit: int, submit: Callable[[Job], None] | None = None, retire: Retire = epochs.retire
    ) -> None:
        self.inputs = inputs
        self.limit = limit
        self.table: DispatchTable[T] = python_table((), inputs)
        """Read once per call."""
        self._submit = submit
        self._retire = retire
        self._lock = threading.Lock()
        self._fading: list[DispatchTable[T]] = []
        """Tables that calls may still be in; what they counted is added up when they go."""
        self._hits: list[tuple[T, int]] = []
        """What tables that are gone counted of present targets."""
        self._misses: Counter[str] = Counter()
        self._recent: dict[int, float] = {}
        self._evicted = 0
        self.generic = False
        self.refused = 0
        """Cases turned away because the site is generic."""
        self.fallbacks = 0
        """Tables that stay on Python."""
        self.reason = ""
        """Why, of the last of them."""

    # --- changes ---------------------------------------------------------------------------------

    @property
    def state(self) -> SiteState:
        """How many kinds of calls the site serves."""
        if self.generic:
            return SiteState.GENERIC
        match len(self.table.cases):
            case 0:
                return SiteState.EMPTY
            case 1:
                return SiteState.MONOMORPHIC
            case _:
                return SiteState.POLYMORPHIC

    def add(self, case: Case[T]) -> tuple[T, ...]:
        """Take a case in; returns the targets that had to go, which may be the new one itself."""
        gone = self._add(case)
        self._in_background()
        return gone

    def _add(self, case: Case[T]) -> tuple[T, ...]:
        with self._lock:
            old = self.table
            if self.generic and any(c.covers(case) for c in old.cases):
                self.refused += 1
                return (case.target,)
            gone = [c for c in old.cases if set(c.facts) == set(case.facts)]
            kept = [c for c in old.cases if c not in gone]
            paid = self._age(old) >= PAID * self.limit
            if len(kept) >= self.limit:
                coldest = min(kept, key=lambda c: self._recent.get(id(c.target), 0.0))
                kept.remove(coldest)
                gone.append(coldest)
                self._evicted = 1 if paid else self._evicted + 1
                self.generic = self._evicted >= THRASHING * self.limit
            if self.generic:
                every = [*kept, case]
                special = [c for c in every if any(o is not c and o.covers(c) for o in every)]
                gone += special
                left = [c for c in every if c not in special]
            else:
                special, general = ([c for c in kept if case.covers(c) is yes] for yes in (True, False))
                left = [*special, case, *general]
            self._exchange(tuple(left))
            return tuple(c.target for c in gone)

    def remove(self, *targets: T) -> int:
        """Drop the cases of some targets; returns how many. Cheap enough for a call path: nothing is compiled."""
        with self._lock:
            gone = [c for c in self.table.cases if any(c.target is t for t in targets)]
            if gone:
                self.table.strike(gone)
                self._hits = self._present(self._hits)
        return len(gone)

    def clear(self) -> None:
        """Drop everything, and start over."""
        with self._lock:
            self.generic, self._evicted = False, 0
            self._exchange(())

    def reopen(self) -> None:
        """Take special cases again: the traffic changed."""
        with self._lock:
            self.generic, self._evicted = False, 0

    def _age(self, table: DispatchTable[T]) -> int:
        """Work out hits of late: those since the last change, which are returned, and half of what was before."""
        hits = {id(t): n for t, n in table.hits()}
        self._recent = {t: self._recent.get(t, 0.0) / 2 + n for t, n in hits.items()}
        return sum(hits.values())

    def _exchange(self, cases: tuple[Case[T], ...]) -> None:
        """One reference store."""
        self._replace(python_table(cases, self.inputs))

    def _in_background(self) -> None:
        """Have the native decision compiled; outside the lock, because a job may run at once."""
        if self._submit is not None and self.table.cases and not self.table.native:
            self._submit(self._harden)

    def _harden(self) -> None:
        table = self.table
        if table.native or not table.cases:
            return  # done by a job that was submitted before
        try:
            native = native_table(table, self.inputs)
        except HotfuseError as e:
            with self._lock:
                self.fallbacks += 1
                self.reason = f"{e.what}: {e.because}" if e.because else e.what
            return
        with self._lock:
            if self.table is table:
                native.strike([c for c in native.cases if not any(c is left for left in table.cases)])
                self._replace(native)

    def _replace(self, table: DispatchTable[T]) -> None:
        old, self.table = self.table, table
        self._hits = self._present(self._hits)
        if old.routes:
            self._fading.append(old)
            self._retire(old, lambda: self._fold(old))

    def _fold(self, table: DispatchTable[T]) -> None:
        with self._lock:
            self._fading.remove(table)
            self._hits = self._counted([*self._hits, *table.hits()])
            self._misses.update(table.misses())
            self._misses = _commonest(self._misses)

    # --- what was seen ---------------------------------------------------------------------------

    def hits(self) -> list[tuple[T, int]]:
        """Every present target with the calls that found it."""
        with self._lock:
            counted = list(self._hits)
            for table in (*self._fading, self.table):
                counted += table.hits()
            return self._counted(counted)

    def _present(self, hits: Sequence[tuple[T, int]]) -> list[tuple[T, int]]:
        return [(t, n) for t, n in hits if any(t is c.target for c in self.table.cases)]

    def _counted(self, hits: Sequence[tuple[T, int]]) -> list[tuple[T, int]]:
        return [(c.target, sum(n for t, n in hits if t is c.target)) for c in self.table.cases]

    def misses(self) -> dict[str, int]:
        """Calls that fitted no case, by the fact that failed last."""
        with self._lock:
            found = Counter(self._misses)
            for table in (*self._fading, self.table):
                found.update(table.misses())
            return dict(_commonest(found))

    def after_fork(self) -> None:
        """In a forked child: the thread that held a lock is in the parent."""
        self._lock = threading.Lock()
        for table in (*self._fading, self.table):
            table.after_fork()


def _commonest(misses: Counter[str]) -> Counter[str]:
    """The same number of misses by fewer facts."""
    if len(misses) <= MAX_MISSES:
        return misses
    own = [(fact, n) for fact, n in misses.most_common() if fact != OTHERS]
    kept = Counter(dict(own[: MAX_MISSES - 1]))
    kept[OTHERS] = misses[OTHERS] + sum(n for _, n in own[MAX_MISSES - 1 :])
    return kept
