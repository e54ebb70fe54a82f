"""How Python enters a native run: with the tensors themselves, in one call that gives the results.

`enter(tensor...) -> (tensor, ...)` is a built-in function over one stub per process (`entry`), which calls the run's body
without the interpreter lock. Anything else than was expected, a branch without native code, and an index
that points outside its tensor are answered by the fallback, a Python function of the same tensors; that is counted.

Arenas are kept for the next call, at most `KEPT` per run: a call takes one by an atomic exchange and puts it back, so threads
never share one, and memory that is warm in the caches is used again. They are freed with the run, and when nobody has called for
a while (`give_back_arenas`): the largest call decides how large an arena is, and every plan has some.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hotfuse.backends.llvm.runs.run_entry import (
    AT_ALLOCATED,
    AT_APPENDED,
    AT_ARENAS,
    AT_BODY,
    AT_CONTROL,
    AT_FELL_BACK,
    AT_HOME,
    AT_LARGEST,
    AT_MOVED,
    AT_TABLE,
    ENTER,
    KEPT,
    LET_GO,
    WORDS,
    stub,
    unavailable,
)
from hotfuse.backends.llvm.runs.symbols import BODY, CONTROL_HEAD, LAYOUT, TEAM_TIMES, outcomes_at
from hotfuse.backends.llvm.threads import alone
from hotfuse.backends.protocol import TeamTimes, WatchedCall
from hotfuse.base.living import Living
from hotfuse.lower.run.description import CLOCK, COUNTS, Constant, RunCode
from hotfuse.machine.heap import heap
from hotfuse.native import tensors
from hotfuse.native.function import function_at
from hotfuse.native.jit import Loaded
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.tile.instrument import BLANK, WIDTH

_FREE = ctypes.CDLL(None).free
_FREE.argtypes, _FREE.restype = [ctypes.c_void_p], None
_ARENAS = range(AT_ARENAS, AT_ARENAS + KEPT)
_runs: Living[NativeRun] = Living()
"""Those there are in this process."""


@functools.cache
def _let_go() -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(stub().address(LET_GO))


def give_back_arenas() -> int:
    """Free the arenas that runs keep for their next calls; about how many bytes. Calls may go on meanwhile."""
    return sum(run.give_back() for run in _runs)


heap.spares(give_back_arenas)


class _Kept:
    """The words of a job; dropping them frees its arenas. Only when no call can be in the run any more."""

    def __init__(self, words: Sequence[int], keep: Sequence[Any]) -> None:
        self.words = (ctypes.c_int64 * len(words))(*words)
        self.words[AT_HOME] = self.words[AT_HOME] or ctypes.addressof(self.words)
        self.keep = keep

    def __del__(self, free: Any = _FREE, arenas: range = _ARENAS) -> None:
        # At exit a module's names are gone before what it made is; what arguments are unless given stays.
        for i in arenas:
            if at := self.words[i]:
                self.words[i] = 0
                free(at)


class _WatchedJob:
    """A job of a run's own for watched calls, with memory in which the driver tells what it is asked for.

    Such a call comes after thousands of others, and finds nothing of itself in the caches: what it touches is what it costs. So
    words are written and read as memory, not through the foreign-function interface.
    """

    def __init__(self, code: RunCode, run: _Kept) -> None:
        self.begin = outcomes_at(code.last - code.first)
        self.end = self.begin + len(code.branches)
        """Where outcomes of branches are."""
        places = sum(len(names) for _, names in code.made)
        memory = array("q", bytes(8 * (self.end + WIDTH * places)))
        self.control = memoryview(memory)
        self.zeros, self.blank = array("q", bytes(8 * self.end)), array("q", list(BLANK) * places)
        words = list(run.words[:AT_FELL_BACK]) + [0] * (WORDS - AT_FELL_BACK)  # arenas are the run's: warm pages
        words[AT_CONTROL] = memory.buffer_info()[0]
        self.kept = _Kept(words, (run, memory))
        self.enter = _function(self.kept)


class NativeRun:
    """A run that can be called: `enter(tensor...)` gives its results."""

    def __init__(
        self, code: RunCode, loaded: Loaded, table: Sequence[int], keep: Sequence[Any], fallback: Callable[..., Any]
    ) -> None:
        self.code = code
        self._team_times = loaded.address(TEAM_TIMES)
        inputs: list[int] = []
        held: list[Any] = [loaded, fallback, *keep]
        for spec in code.inputs:
            order = 0
            if spec.order is not None:
                array = (ctypes.c_int64 * max(1, len(spec.order)))(*spec.order)
                held.append(array)
                order = ctypes.addressof(array)
            inputs += [spec.rank, tensors.dtype_code(torch_dtype(spec.dtype)), order]
        sizes = [n for s in code.sizes for n in (s.input, int(s.stride), s.dim)]
        outputs = [n for o in code.outputs
                   for n in (len(o.shape), tensors.dtype_code(torch_dtype(o.dtype)), *(o.grows or (-1, 0)))]  # fmt: skip
        arrays = [(ctypes.c_int64 * max(1, len(a)))(*a) for a in (inputs, sizes, outputs, table)]
        held += arrays
        at = [ctypes.addressof(a) for a in arrays]
        words = [0] * WORDS
        words[: AT_CONTROL] = [
            loaded.address(BODY), loaded.address(LAYOUT), at[3], len(code.inputs), len(code.sizes), len(code.outputs),
            at[0], at[1], at[2], 1 + sum(2 * len(o.shape) for o in code.outputs), id(fallback),
        ]  # fmt: skip
        self._kept = _Kept(words, held)
        self._watching: list[_WatchedJob] = []
        """Jobs for watched calls that none is in."""
        self._words = arrays[3]
        self._counting: tuple[Any, frozenset[int], Sequence[Any]] | None = None
        """The table with counting kernels, and which of its words they are."""
        self.enter = _function(self._kept)
        """One call: tensors in the run's order in, a tuple of results out."""
        _runs.add(self)
        self.body, self.table = words[AT_BODY], words[AT_TABLE]
        """Where the driver's code and the run's table are."""
        self.symbol = BODY

    def timed(self, *args: torch.Tensor) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """A call with the nanoseconds of every partition; those of a call that fell back are all 0."""
        outs, inside = self.watched(CLOCK, *args)
        return outs, inside.ns or (0,) * (self.code.last - self.code.first)

    def watched(self, want: int, *args: torch.Tensor) -> tuple[tuple[Any, ...], WatchedCall]:
        """A call that tells what it is asked for: the driver's bits."""
        try:
            job = self._watching.pop()
        except IndexError:  # so many at the same time
            job = _WatchedJob(self.code, self._kept)
        begin, end, words, control = job.begin, job.end, job.kept.words, job.control
        counting = self._counting if want & COUNTS else None
        control[:end] = job.zeros
        if counting is not None:
            control[end:] = job.blank
        words[AT_TABLE] = self.table if counting is None else ctypes.addressof(counting[0])
        control[1] = want
        before = words[AT_FELL_BACK]
        outs = job.enter(*args)
        if fell_back := words[AT_FELL_BACK] - before:
            self._kept.words[AT_FELL_BACK] += fell_back
        told = control[:end].tolist()
        ns: tuple[int, ...] = ()
        if want & CLOCK and not fell_back:
            ns = tuple(max(0, b - a) for a, b in pairwise(told[CONTROL_HEAD:begin]))
        counted: dict[str, tuple[int, ...]] = {}
        if counting is not None and not fell_back:
            at = end
            for word, names in self.code.made:
                for name in names:
                    if name and word in counting[1]:
                        counted[name] = tuple(control[at : at + WIDTH])
                    at += WIDTH
        self._watching.append(job)
        return outs, WatchedCall(ns, tuple(told[begin:]), counted)

    def count_with(self, kernels: Mapping[int, int], keep: Sequence[Any]) -> None:
        """Where a call is asked for counts, enter these kernels instead: by number, where their code is."""
        table = (ctypes.c_int64 * max(1, len(self.code.words))).from_buffer_copy(self._words)
        replaced: set[int] = set()
        for i, word in enumerate(self.code.words):
            if word.kind is Constant.KERNEL and word.kernel in kernels:
                table[i] = kernels[word.kernel]
                replaced.add(i)
        self._counting = (table, frozenset(replaced), keep)

    @property
    def fell_back(self) -> int:
        """Calls that the fallback answered."""
        return int(self._kept.words[AT_FELL_BACK])

    @property
    def team_times(self) -> tuple[TeamTimes, ...]:
        """What was learned of calls with a team and on one thread, by size class."""
        return alone.read(self._team_times)

    def forget_team_times(self) -> None:
        """Have it learn that anew."""
        alone.forget(self._team_times)

    @property
    def grown(self) -> tuple[int, int]:
        """Caches that were appended to in place, and those that were copied into a block with room first."""
        return int(self._kept.words[AT_APPENDED]), int(self._kept.words[AT_MOVED])

    @property
    def allocated(self) -> int:
        """Arenas allocated so far: calls at the same time, and calls that needed more than those before."""
        return int(self._kept.words[AT_ALLOCATED])

    @property
    def arena_bytes(self) -> int:
        """Memory that is kept between calls now, at most."""
        kept = sum(self._kept.words[i] != 0 for i in _ARENAS)
        return kept * int(self._kept.words[AT_LARGEST])

    def give_back(self) -> int:
        """Free the kept arenas: the next call allocates anew. Calls may go on meanwhile."""
        held = self.arena_bytes
        if held:
            _let_go()(ctypes.addressof(self._kept.words))
        return held


def _function(kept: _Kept) -> Callable[..., tuple[Any, ...]]:
    return function_at(stub(), ENTER, ctypes.addressof(kept.words), kept)


__all__ = ["NativeRun", "WatchedCall", "give_back_arenas", "unavailable"]
