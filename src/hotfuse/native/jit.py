"""LLVM IR text to object bytes, and object bytes to addresses. The two may happen in different processes.

    text --compile_object--> bytes --load_object--> Loaded(addresses)

Generating and compiling holds the interpreter lock for milliseconds and takes LLVM, so it belongs in a worker; loading takes a
fraction of a millisecond, and no LLVM (`native.link`). The few pieces of code that a serving process needs for itself are
compiled in a process of their own (`native.toolchain`). Code lives as long as its `Loaded` handle.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.native import link
from hotfuse.native.target import CpuTarget


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Around a fork: no thread is inside LLVM, so that the child may use it."""
    inside = getattr(sys.modules.get("hotfuse.native.codegen"), "quiet", contextlib.nullcontext)
    with inside():
        yield


@dataclass(frozen=True, slots=True)
class Compiled:
    """Object code with what it took to make it."""

    code: bytes
    """An ELF object."""
    seconds: Mapping[str, float]
    """Time per phase: parse, passes, codegen."""


def compile_object(text: str, target: CpuTarget, *, passes: bool = False) -> Compiled:
    """Object code of a module's text, for any target LLVM knows. Loads LLVM into this process."""
    from hotfuse.native import codegen

    return Compiled(*codegen.compile_object(text, target, passes=passes))


def assembly(text: str, target: CpuTarget, *, passes: bool = False) -> str:
    """The machine code of a module as assembler text, for a reader."""
    from hotfuse.native import codegen

    return codegen.assembly(text, target, passes=passes)


class _Image(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...
    def close(self) -> None: ...


class Loaded:
    """Code in this process: addresses by name. Dropping the handle, or `release`, frees the code."""

    def __init__(self, tracker: _Image, names: Sequence[str]) -> None:
        self._tracker: _Image | None = tracker
        self._addresses = {n: int(tracker[n]) for n in names}

    def address(self, name: str) -> int:
        """Where a function starts."""
        if self._tracker is None:
            raise InternalError(f"the code of {name!r} has been released")
        return self._addresses[name]

    def release(self) -> None:
        """Free the code now; no call may be in it."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    @property
    def released(self) -> bool:
        """Whether the code is gone."""
        return self._tracker is None


def load_object(code: bytes, names: Sequence[str], symbols: Mapping[str, int] | None = None) -> Loaded:
    """Link object code into this process; `symbols` are addresses it may refer to, beside the C library's functions."""
    if link.machine_of(code) == link.X86_64:
        return Loaded(link.link(code, names, symbols or {}), names)
    from hotfuse.native import codegen

    return Loaded(codegen.link_object(code, names, symbols or {}), names)
