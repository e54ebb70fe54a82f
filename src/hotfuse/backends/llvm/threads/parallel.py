"""Parallel loops: an outlined body, run by the OpenMP runtime that torch's own loops have (`machine.openmp`).

Using torch's own thread pool means that our threads and torch's never compete, and that `torch.set_num_threads` holds for
both. A kernel refers to a fork by name, and a run to what opens and closes a team (`gather`); their addresses are bound when the
code is loaded. Where there is no such runtime, they are bound to functions that run everything on the calling thread, and
`runtime().kind` says so.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from hotfuse.backends.llvm.threads import fork_join
from hotfuse.backends.llvm.threads.fork_join import ForkJoin, fork_join_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.machine import openmp
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

SYMBOLS = fork_join.NAMES


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where parallel loops run."""

    kind: str
    """`gomp`, or `serial` where torch's loops have no OpenMP runtime with GNU's interface."""
    symbols: Mapping[str, int]
    detail: str
    keep: Loaded | openmp.OpenMP | None = None
    team: ForkJoin | None = None
    """How threads come together; None where there is only one."""


@once
def runtime() -> Runtime:
    """The runtime of this process, looked up once; import torch before."""
    own = openmp.torchs()
    addresses = own.addresses(fork_join.OPENMP) if own is not None else None
    if own is not None and addresses is not None:
        team = fork_join_of(addresses)
        return Runtime("gomp", team.symbols, own.where, own, team)
    loaded = load_object(helper_object(fork_join.SERIAL_TEXT), SYMBOLS)
    why = "torch's loops have no OpenMP runtime" if own is None else f"{own.where} has not GNU's interface"
    return Runtime("serial", {n: loaded.address(n) for n in SYMBOLS}, why, loaded)


@contextmanager
def awake(threads: int) -> Generator[None]:
    """While a kernel is timed by itself: a team around it as in a native run, where that would have one."""
    team = runtime().team
    if threads < 2 or team is None:
        yield
        return
    with team.awake(threads):
        yield
