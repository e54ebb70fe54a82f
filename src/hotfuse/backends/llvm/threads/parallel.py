"""Parallel loops: an outlined body, run by the OpenMP runtime that torch has loaded.

Using torch's own thread pool means that our threads and torch's never compete, and that `torch.set_num_threads` holds for
both. A kernel refers to a fork by name, and a run to what opens and closes a team (`gather`); their addresses are bound when the
code is loaded. Where there is no such runtime, they are bound to functions that run everything on the calling thread, and
`runtime().kind` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hotfuse.backends.llvm.threads import fork_join
from hotfuse.backends.llvm.threads.fork_join import ForkJoin, fork_join_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

SYMBOLS = fork_join.NAMES


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where parallel loops run."""

    kind: str
    """`gomp`, or `serial` where torch has not loaded an OpenMP runtime with GNU's interface."""
    symbols: Mapping[str, int]
    detail: str
    keep: Loaded | ctypes.CDLL | None = None
    team: ForkJoin | None = None
    """How threads come together; None where there is only one."""


@once
def runtime() -> Runtime:
    """The runtime of this process, looked up once; import torch before."""
    tried: list[str] = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            found = {n: ctypes.cast(getattr(library, n), ctypes.c_void_p).value or 0 for n in fork_join.OPENMP}
        except (OSError, AttributeError) as e:
            tried.append(f"{path}: {e}")
            continue
        team = fork_join_of(found)
        return Runtime("gomp", team.symbols, path, library, team)
    loaded = load_object(helper_object(fork_join.SERIAL_TEXT), SYMBOLS)
    return Runtime(
        "serial", {n: loaded.address(n) for n in SYMBOLS}, "; ".join(tried) or "no OpenMP library is loaded", loaded
    )


@contextmanager
def awake(threads: int) -> Generator[None]:
    """While a kernel is timed by itself: a team around it as in a native run, where that would have one."""
    team = runtime().team
    if threads < 2 or team is None:
        yield
        return
    with team.awake(threads):
        yield


def _candidates() -> list[str]:
    """OpenMP libraries mapped into this process: torch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    found: list[str] = []
    for line in maps.read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and ("libgomp" in Path(path).name or "libomp" in Path(path).name) and path not in found:
            found.append(path)
    return sorted(found, key=lambda p: "torch" not in p)
