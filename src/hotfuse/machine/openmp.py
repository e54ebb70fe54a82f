"""The OpenMP runtime whose threads torch's own loops have.

A process may hold several: scikit-learn and others bring one each, and every one has threads of its own, as many as there are
cores. Where two of them work in turns, there are two teams on one machine. The threads of each team go on looking for work for
milliseconds after their last loop, and keep the other team's threads from their cores. A ViT of 45 ms took 370 ms on sixteen cores
so, because native code had mistaken scikit-learn's runtime for torch's by a name in its path (decision 109). So nothing is
concluded from names. Torch says how many threads its loops have, and that number follows the runtime which it asks.

A thread that computed once keeps its team for as long as it lives, and GNU's runtime counts them all: while there are more than
cores, everybody's threads sleep between loops at once instead of looking for the next one. A background thread that had proven a
plan and only waited made eager 1.2 times as slow on two cores. So what waits gives its team up (`give_up_team`, decision 110).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once

SET_THREADS, MAX_THREADS = "omp_set_num_threads", "omp_get_max_threads"
PAUSE, HOST = "omp_pause_resource", "omp_get_initial_device"
LLVMS = "__kmpc_fork_call"
"""What only LLVM's runtime has: it does not count as GNU's does, and would pause the teams of all threads."""
_SOFTLY = 1


@dataclass(frozen=True, slots=True)
class OpenMP:
    """A runtime, and where it was found."""

    library: ctypes.PyDLL
    where: str

    def addresses(self, names: Sequence[str]) -> dict[str, int] | None:
        """The addresses of functions; None where the library lacks one."""
        try:
            return {n: ctypes.cast(getattr(self.library, n), ctypes.c_void_p).value or 0 for n in names}
        except AttributeError:
            return None

    def set_threads(self, count: int) -> None:
        """How many threads loops of the calling thread have."""
        getattr(self.library, SET_THREADS)(count)


@once
def torchs() -> OpenMP | None:
    """The runtime that torch asks; None where torch's loops have threads of another kind."""
    return next((found for found in _runtimes() if _followed(found)), None)


@once
def _pausing() -> Callable[[], object] | None:
    """Ends the threads of the calling thread's team; None where the runtime cannot, or need not."""
    own = torchs()
    if own is None or own.addresses((PAUSE, HOST)) is None or own.addresses((LLVMS,)) is not None:
        return None
    host = getattr(own.library, HOST)()
    return functools.partial(getattr(own.library, PAUSE), _SOFTLY, host)


def give_up_team() -> None:
    """The calling thread waits from here on: its next loop makes new threads, a third of a millisecond for two."""
    pause = _pausing()
    if pause is not None:
        pause()


def _followed(runtime: OpenMP) -> bool:
    """Whether torch has as many threads as a runtime is told; nobody else notices."""
    if runtime.addresses((SET_THREADS, MAX_THREADS)) is None:
        return False
    own, before = getattr(runtime.library, MAX_THREADS)(), torch.get_num_threads()
    runtime.set_threads(before + 1)
    try:
        return torch.get_num_threads() == before + 1
    finally:
        runtime.set_threads(own)


def _runtimes() -> Iterator[OpenMP]:
    """Where torch's calls may end: what the whole process sees (what was preloaded comes first there), what torch itself is linked
    with, whatever else was loaded.
    """
    yield OpenMP(ctypes.PyDLL(None), "the process")
    own = torch._C.__file__  # pyright: ignore[reportPrivateUsage] - the one file that is sure to be linked with it all
    for path in dict.fromkeys((own, *_mapped())):
        try:
            yield OpenMP(ctypes.PyDLL(path), path)
        except OSError:  # it was replaced or deleted since
            continue


def _mapped() -> list[str]:
    """OpenMP libraries of this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    names = ("libgomp", "libomp", "libiomp")
    lines = [line for line in maps.read_text().splitlines() if any(n in line for n in names)]  # few of thousands, at every start
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return [p for p in paths if p.startswith("/") and any(name in Path(p).name for name in names)]
