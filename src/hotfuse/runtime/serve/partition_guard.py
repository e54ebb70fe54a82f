"""A specialized partition behind a guard of its own: where its bet fails, that partition alone runs in its generic version.

The guard is asked before the partition runs, of the very values it gets, so nothing is computed twice and what ran before stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hotfuse.analysis.call_facts import Facts
from hotfuse.backends.protocol import Run
from hotfuse.base.errors import HotfuseError
from hotfuse.runtime.serve.dispatch import Case, DispatchTable, native_table, python_table


class Guarded:
    """Two versions of a partition and what tells which may run; call it like either."""

    def __init__(self, run: Run, facts: Facts, generic: Run, inputs: int) -> None:
        self.run, self.generic, self.facts, self.inputs = run, generic, facts, inputs
        self.table: DispatchTable[None] = python_table((Case(facts, None),), inputs)
        self.reason = ""
        """Why the guard stays in Python, if it does."""
        self._lock = threading.Lock()
        self._past: list[DispatchTable[None]] = []

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The partition's outputs."""
        return self.run(*inputs) if self.table.select(*inputs) >= 0 else self.generic(*inputs)

    def harden(self) -> None:
        """Compile the guard natively, for the background; where that cannot be, `reason` says why."""
        try:
            native = native_table(self.table, self.inputs)
        except HotfuseError as e:
            self.reason = f"{e.what}: {e.because}" if e.because else e.what
            return
        with self._lock:
            self._past.append(self.table)  # small, and calls may still be counting in it
            self.table = native

    @property
    def hits(self) -> int:
        """Calls in which the bet held."""
        with self._lock:
            return sum(n for t in (*self._past, self.table) for _, n in t.hits())

    @property
    def misses(self) -> dict[str, int]:
        """Calls in which it did not, by the fact that failed."""
        found: dict[str, int] = {}
        with self._lock:
            for table in (*self._past, self.table):
                for fact, n in table.misses().items():
                    found[fact] = found.get(fact, 0) + n
        return found


def guarded(
    run: Run, facts: Facts, generic: Run, inputs: int, submit: Callable[[Callable[[], None]], None] | None = None
) -> Guarded:
    """`run` where `facts` about its inputs hold, else `generic`; `submit` compiles the guard beside."""
    made = Guarded(run, facts, generic, inputs)
    if submit is not None:
        submit(made.harden)
    return made
