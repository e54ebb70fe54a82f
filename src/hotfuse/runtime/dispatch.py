"""The inline cache of a call site: from a call's tensors to the first case whose facts hold, in one native call.

    empty -> monomorphic -> polymorphic (at most `limit` cases) -> generic

Cases are kept in one immutable table that is exchanged by a single reference store. A new table serves through generated Python
at once; a background job compiles the native decision over the same cases and exchanges it again. Hits per case and misses per
fact are counted, whoever counted them.

A more special case stands before a more general one. When there is no room, the case that was hit least of late goes. A site that
keeps throwing out cases it has just made becomes generic: special cases are dropped in favour of the general ones, and none is
taken until `reopen` (the traffic changed).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from hotfuse.analysis.call_facts import Facts, fact_text
from hotfuse.analysis.decision import Decision, decide
from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.runtime.check import python_select
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.guards import python_guard

T = TypeVar("T")
Job = Callable[[], None]
Retire = Callable[[object, Job], None]
THRASHING = 2
"""Times the limit that cases may be thrown out before a site is generic."""
PAID = 32
"""Hits per case, between two changes, after which what was thrown out before is forgotten."""


class State(StrEnum):
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

    def __init__(self, plans: int, facts: int) -> None:
        self._lock = threading.Lock()
        self._numbers = [0] * (plans + facts)
        self._plans = plans

    def count(self, answer: int) -> int:
        with self._lock:
            self._numbers[answer if answer >= 0 else self._plans - 1 - answer] += 1
        return answer

    def read(self) -> Sequence[int]:
        with self._lock:
            return list(self._numbers)


class Table(Generic[T]):
    """Cases and the function that tells them apart; nothing in it changes but its counters."""

    def __init__(
        self, cases: tuple[Case[T], ...], decision: Decision | None, select: Callable[..., int],
        numbers: Callable[[], Sequence[int]], native: bool,
    ) -> None:
        self.cases = cases
        self.targets = tuple(c.target for c in cases)
        self.decision = decision
        self.select = select
        """`select(*tensors)`: the number of a case, or below 0 the fact that failed."""
        self.native = native
        self._numbers = numbers

    def hits(self) -> list[int]:
        """Hits per case since the table was made."""
        return list(self._numbers()[: len(self.cases)])

    def misses(self) -> dict[str, int]:
        """Misses per fact since the table was made."""
        counted = self._numbers()[len(self.cases) :]
        if self.decision is None:
            return {f"no one of {len(self.cases)} cases fits": n for n in counted if n}
        return {fact_text(f): n for f, n in zip(self.decision.facts, counted, strict=True) if n}


def _nothing(*_leaves: Any) -> int:
    return -1


def python_table(cases: tuple[Case[T], ...], inputs: int) -> Table[T]:
    """A table that serves at once."""
    if not cases:
        return Table(cases, None, _nothing, tuple, False)
    try:
        decision = decide([c.facts for c in cases], inputs)
        walk, facts = python_select(decision), decision.facts
    except InternalError:  # too many differences for a tree; `native_table` says so
        decision, walk, facts = None, _nothing, ()
    shared = facts[: decision.common] if decision is not None else ()
    fits, _ = python_guard(shared, inputs)
    guards = [python_guard(tuple(f for f in c.facts if f not in shared), inputs)[0] for c in cases]
    tallies = _Tallies(len(cases), max(1, len(facts)))

    def select(*leaves: Any) -> int:
        if fits(*leaves):
            for n, guard in enumerate(guards):
                if guard(*leaves):
                    return tallies.count(n)
        return tallies.count(min(-1, walk(*leaves)))

    return Table(cases, decision, select, tallies.read, False)


def native_table(table: Table[T]) -> Table[T]:
    """The same cases with a native decision; raises InternalError where there cannot be one."""
    from hotfuse.backends.llvm.guard import native_select  # LLVM is loaded when a site first gets that far

    decision = table.decision or decide([c.facts for c in table.cases])
    native = native_select(decision)
    return Table(table.cases, decision, native.select, lambda: native.counters, True)


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
        self.table: Table[T] = python_table((), inputs)
        """Read once per call."""
        self._submit = submit
        self._retire = retire
        self._lock = threading.Lock()
        self._fading: list[Table[T]] = []
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

    # --- the call path ---------------------------------------------------------------------------

    def dispatch(self, leaves: Sequence[Any]) -> T | None:
        """The target of the first case whose facts hold."""
        table = self.table
        number = table.select(*leaves)
        return table.targets[number] if number >= 0 else None

    # --- changes ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """How many kinds of calls the site serves."""
        if self.generic:
            return State.GENERIC
        match len(self.table.cases):
            case 0:
                return State.EMPTY
            case 1:
                return State.MONOMORPHIC
            case _:
                return State.POLYMORPHIC

    def add(self, case: Case[T]) -> tuple[T, ...]:
        """Take a case in; returns the targets that had to go, which may be the new one itself."""
        gone = self._add(case)
        self._beside()
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
        """Drop the cases of some targets; returns how many."""
        with self._lock:
            left = tuple(c for c in self.table.cases if not any(c.target is t for t in targets))
            dropped = len(self.table.cases) - len(left)
            if dropped:
                self._exchange(left)
        self._beside()
        return dropped

    def clear(self) -> None:
        """Drop everything, and start over."""
        with self._lock:
            self.generic, self._evicted = False, 0
            self._exchange(())

    def reopen(self) -> None:
        """Take special cases again: the traffic changed."""
        with self._lock:
            self.generic, self._evicted = False, 0

    def _age(self, table: Table[T]) -> int:
        """Work out hits of late: those since the last change, which are returned, and half of what was before."""
        hits = {id(t): n for t, n in zip(table.targets, table.hits(), strict=True)}
        self._recent = {t: self._recent.get(t, 0.0) / 2 + n for t, n in hits.items()}
        return sum(hits.values())

    def _exchange(self, cases: tuple[Case[T], ...]) -> None:
        """One reference store."""
        self._replace(python_table(cases, self.inputs))

    def _beside(self) -> None:
        """Have the native decision compiled; outside the lock, because a job may run at once."""
        if self._submit is not None and self.table.cases and not self.table.native:
            self._submit(self._harden)

    def _harden(self) -> None:
        table = self.table
        if table.native or not table.cases:
            return  # done by a job that was submitted before
        try:
            native = native_table(table)
        except HotfuseError as e:
            with self._lock:
                self.fallbacks += 1
                self.reason = f"{e.what}: {e.because}" if e.because else e.what
            return
        with self._lock:
            if self.table is table:
                self._replace(native)

    def _replace(self, table: Table[T]) -> None:
        old, self.table = self.table, table
        self._hits = [(t, n) for t, n in self._hits if any(t is p for p in table.targets)]
        if old.cases:
            self._fading.append(old)
            self._retire(old, lambda: self._fold(old))

    def _fold(self, table: Table[T]) -> None:
        with self._lock:
            self._fading.remove(table)
            counted = [*self._hits, *zip(table.targets, table.hits(), strict=True)]
            self._hits = [(t, sum(n for s, n in counted if s is t)) for t in self.table.targets]
            self._misses.update(table.misses())

    # --- what was seen ---------------------------------------------------------------------------

    def hits(self) -> list[tuple[T, int]]:
        """Every present target with the calls that found it."""
        with self._lock:
            counted = list(self._hits)
            for table in (*self._fading, self.table):
                counted += zip(table.targets, table.hits(), strict=True)
            return [(t, sum(n for s, n in counted if s is t)) for t in self.table.targets]

    def misses(self) -> dict[str, int]:
        """Calls that fitted no case, by the fact that failed last."""
        with self._lock:
            found = Counter(self._misses)
            for table in (*self._fading, self.table):
                found.update(table.misses())
            return dict(found)
