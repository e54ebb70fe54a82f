"""The team of threads that a call's parallel loops have: how many, and fewer while background work needs cores.

A parallel loop ends with its last thread. Where a team has every core, whatever else runs holds one of its threads up, and all of
it waits: on sixteen cores, calls of 22 ms took 430 beside one process of the lowest priority, and 24 with a team of fifteen.

Background work that computes in this process (a proof runs two plans) would have a team on every core, too. It has one of what
calls leave, which is more while it computes (`in_background`, decision 111).

Torch's own `set_num_threads` also decides for threads that begin later, which are none of ours; so OpenMP and MKL are told
directly, and for the calling thread alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from hotfuse.machine import openmp
from hotfuse.machine.cores import usable_cores

SPARE_FROM = 4
"""Threads of a team from which on one of them is worth less than an undisturbed team."""
T = TypeVar("T")


class _OwnTeam(threading.local):
    whole = 0
    """Threads that loops of this thread have otherwise, while they have fewer."""


_here = _OwnTeam()
_beside = 0
"""How many threads of this process compute beside calls."""
_counting = threading.Lock()


def threads() -> int:
    """How many threads the calling thread's calls have, whether or not they leave cores free just now."""
    return _here.whole or torch.get_num_threads()


def computes_in_background() -> bool:
    """Whether background work computes in this process, beside calls: what those take is not what they take otherwise."""
    return _beside > 0


def has_every_core() -> bool:
    """Whether the calling thread's team has all cores there are, and is large enough to leave one free."""
    count = torch.get_num_threads()
    return count >= SPARE_FROM and count >= usable_cores() and openmp.torchs() is not None


def leaving_cores(call: Callable[..., T], *args: Any, **how: Any) -> T:
    """Call with a team that leaves a core free, or a quarter of them while something computes beside; where the call itself chooses
    another number, that one stays.
    """
    left = usable_cores() // SPARE_FROM if _beside else 1
    with _fewer(max(1, usable_cores() - max(1, left))):
        return call(*args, **how)


@contextmanager
def in_background(in_flight: int, at_least: int = 1) -> Generator[None]:
    """Around computing of a background thread while calls are served, so many of them at a time. It has the cores that they do not
    use; where a call has every core, it has what calls leave, less one for workers; `at_least` so many threads.
    """
    global _beside
    whole, cores = threads(), usable_cores()
    free = cores - whole * max(1, in_flight) if whole < cores else cores // SPARE_FROM - 1
    count = whole if cores < SPARE_FROM else min(whole, max(at_least, free))  # on two cores one is in the way for as long
    with _counting:
        _beside += 1
    try:
        with _fewer(count):
            yield
    finally:
        with _counting:
            _beside -= 1


def alone() -> AbstractContextManager[None]:
    """Around a call whose loops have the calling thread alone."""
    return _fewer(1)


@contextmanager
def _fewer(count: int) -> Generator[None]:
    """Loops of the calling thread have so many threads, unless somebody inside chooses another number."""
    whole = torch.get_num_threads()
    if _here.whole or openmp.torchs() is None:  # it has fewer already, or its threads are none that we can choose
        yield
        return
    before = _set(count)
    _here.whole = whole
    try:
        yield
    finally:
        _here.whole = 0
        if torch.get_num_threads() == count:
            _set(whole, before)


def after_fork() -> None:
    """In a forked child nothing computes beside."""
    global _beside, _counting
    _beside, _counting = 0, threading.Lock()


os.register_at_fork(after_in_child=after_fork)


@functools.cache
def _library() -> Any:
    """What torch is made of, and all it is linked with."""
    return ctypes.PyDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage] - the one file that is sure to be linked with it all


def _set(count: int, mkl: int | None = None) -> int:
    """Have so many threads; gives what MKL had for this thread, where 0 is what all threads have."""
    if (runtime := openmp.torchs()) is not None:
        runtime.set_threads(count)
    own = getattr(_library(), "MKL_Set_Num_Threads_Local", None)  # C's; that in small letters is Fortran's. Others have no MKL
    return 0 if own is None else own(count if mkl is None else mkl)
