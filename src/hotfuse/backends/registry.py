"""One row per back end: the only place outside their folders that names them.

Another package adds a back end by an entry point of the group `hotfuse.backends`. The entry point's name is the back end's name;
its object is a function without arguments that returns the back end (`backends.protocol`). It is loaded on first use by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from hotfuse.backends.device_protocol import DeviceBackend, DeviceKernelBackend
from hotfuse.backends.protocol import Backend, HostBackend, KernelBackend
from hotfuse.base.errors import InputError

if TYPE_CHECKING:
    import torch

GROUP = "hotfuse.backends"
AUTO = "auto"
"""The back end for this machine's own cores."""


def _library() -> Backend:
    from hotfuse.backends.library import LibraryBackend

    return LibraryBackend()


def _llvm() -> Backend:
    from hotfuse.backends.llvm.backend import LlvmBackend  # LLVM is loaded where it is needed

    return LlvmBackend()


def _interp() -> Backend:
    from hotfuse.backends.interp.backend import InterpreterBackend

    return InterpreterBackend()


def _cuda() -> DeviceBackend:
    from hotfuse.backends.cuda.backend import CudaBackend

    return CudaBackend()


_ROWS: dict[str, Callable[[], Backend]] = {"library": _library, "llvm": _llvm, "interp": _interp}
_DEVICES: dict[str, Callable[[], DeviceBackend]] = {"cuda": _cuda}
"""By torch's name of a kind of device."""


def names() -> tuple[str, ...]:
    """Every back end there is, ours first."""
    return (*_ROWS, *(e.name for e in _others() if e.name not in _ROWS))


def backend(name: str = AUTO) -> Backend:
    """A back end by its name; there is one of each in a process."""
    return _made("llvm" if name == AUTO else name)


@functools.cache
def _made(name: str) -> Backend:
    if name in _ROWS:
        return _ROWS[name]()
    for e in _others():
        if e.name == name:
            return cast(Callable[[], Backend], e.load())()
    raise InputError(f"there is no back end {name!r}", because=f"neither hotfuse nor an entry point of {GROUP} has it",
                     hint=f"one of {', '.join(names())}")  # fmt: skip


def kernels(name: str = AUTO) -> KernelBackend:
    """A back end that makes code of tile kernels."""
    found: Any = backend(name)
    if not hasattr(found, "compile_kernel"):
        raise InputError(f"the back end {name!r} makes no kernels", hint="llvm, interp, or one that an installed package brings")
    return cast(KernelBackend, found)


def host() -> HostBackend:
    """The back end for the cores that Python runs on, whichever makes the kernels."""
    return cast(HostBackend, backend(AUTO))


@functools.cache
def device(kind: str) -> DeviceBackend | None:
    """The back end of a kind of device, such as `cuda`; None where there is none, and models there are served by tier 0.

    A package of somebody else's adds one under the name of the kind: an object with `recorded`.
    """
    if kind in _DEVICES:
        return _DEVICES[kind]()
    for e in _others():
        if e.name == kind:
            found: Any = cast(Callable[[], Any], e.load())()
            if hasattr(found, "recorded"):
                return cast(DeviceBackend, found)
    return None


@functools.cache
def device_kernels() -> DeviceKernelBackend:
    """The back end that makes kernels for accelerators."""
    from hotfuse.backends.triton.backend import TritonBackend  # Triton itself is loaded when a kernel is built

    return TritonBackend()


def _others() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda e: e.name)


def short_of_memory(devices: Collection[torch.device]) -> str:
    """Why nothing should be computed beside calls on one of these devices; empty where there is memory enough."""
    found = [(device(d.type), d) for d in devices if d.type != "cpu"]
    return next(filter(None, (b.short_of_memory(d) for b, d in found if hasattr(b, "short_of_memory") and b is not None)), "")
