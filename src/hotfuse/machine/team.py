"""The team of threads that a call's parallel loops have: how many, and one fewer while background work needs a core.

A parallel loop ends with its last thread. Where a team has every core, whatever else runs holds one of its threads up, and all of
it waits: on sixteen cores, calls of 22 ms took 430 beside one process of the lowest priority, and 24 with a team of fifteen.

Torch's own `set_num_threads` also decides for threads that begin later, which are none of ours; so OpenMP and MKL are told
directly, and for the calling thread alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hotfuse.machine import openmp
from hotfuse.machine.cores import usable_cores

SPARE_FROM = 4
"""Threads of a team from which on one of them is worth less than an undisturbed team."""
T = TypeVar("T")


class _OwnTeam(threading.local):
    whole = 0
    """Threads that calls of this thread have otherwise, while they leave a core free."""


_here = _OwnTeam()


def threads() -> int:
    """How many threads the calling thread's calls have, whether or not they leave a core free just now."""
    return _here.whole or torch.get_num_threads()


def has_every_core() -> bool:
    """Whether the calling thread's team has all cores there are, and is large enough to leave one free."""
    return torch.get_num_threads() >= max(SPARE_FROM, usable_cores()) and openmp.torchs() is not None


def leaving_a_core(call: Callable[..., T], *args: Any, **how: Any) -> T:
    """Call with a team that leaves one core free; where the call itself chooses another number, that one stays."""
    whole, fewer = torch.get_num_threads(), usable_cores() - 1
    before = _set(fewer)
    _here.whole = whole
    try:
        return call(*args, **how)
    finally:
        _here.whole = 0
        if torch.get_num_threads() == fewer:
            _set(whole, before)


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
